"""recipes/sticky: arms compose and run once, bends change what they say and are gone afterwards, differences carry errors."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from edge0_runtime.contract.tier import Sticky
from edge0_train.config import Config
from edge0_train.data.rows import collate
from edge0_train.student import StudentPath
from recipes import runs
from recipes.sticky import run as recipe
from recipes.sticky.arms import BENT, CURVE, Arm
from recipes.sticky.bends import READ, bent
from recipes.sticky.report import kl_difference, match_difference, report
from tests.reference_path import TIER, Models, make, text_rows
from tests.train.conftest import adapted, base, bases

__all__ = ["adapted", "base", "bases"]

STAGES = ("head_refine", "student_sft", "on_policy")
STICKY = dataclasses.replace(TIER, router=dataclasses.replace(TIER.router, sticky=Sticky(2.0, 2)))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """The configurations of all phases that ran; none does anything but say that it is done. Measuring gives a constant."""
    configs: list[Config] = []

    def run_phase(config: Config) -> None:
        configs.append(config)
        Path(config.run_dir).mkdir(parents=True)
        (Path(config.run_dir) / "done.json").write_text("{}")

    def measure(seed: recipe.Seed, arm: Arm) -> None:
        (seed.root / f"{arm.name}.json").write_text(json.dumps({"seed": seed.seed, **vars(arm), "stages": {}}))

    monkeypatch.setattr(runs, "run_phase", run_phase)
    monkeypatch.setattr(recipe.Seed, "measure", measure)
    monkeypatch.setattr(recipe, "report", lambda out: "")
    monkeypatch.setattr(sys, "argv", ["x", "--arms", "4", "8:2,3", "4:2,2+grow", "--out", str(tmp_path)])
    return configs


def test_arms_share_base_text_and_first_heads(ran: list[Config], tmp_path: Path) -> None:
    recipe.main()
    seed = tmp_path / "seed0"
    assert [(c.phase, Path(c.run_dir).relative_to(tmp_path).as_posix()) for c in ran] == [
        ("quantize", "quantize"),
        ("teacher_text", "seed0/teacher_text"),
        ("head_distill", "seed0/k4/head_distill"),
        *((phase, f"seed0/k4/{phase}") for phase in STAGES),
        ("head_distill", "seed0/k8/head_distill"),
        *((phase, f"seed0/k8-b2w3/{phase}") for phase in STAGES),
        ("head_refine", "seed0/k4-b2w2/head_refine"),
        ("student_sft", "seed0/k4-b2w2+grow/half"),
        ("student_sft", "seed0/k4-b2w2+grow/student_sft"),
        ("on_policy", "seed0/k4-b2w2+grow/on_policy"),
    ]
    rules = {Path(c.run_dir).parent.name: c.tier.router.sticky for c in ran if c.phase == "on_policy"}
    assert rules == {"k4": Sticky(), "k8-b2w3": Sticky(2.0, 3), "k4-b2w2+grow": Sticky(2.0, 2)}
    half, whole = ran[-3], ran[-2]
    assert half.tier.router.sticky == Sticky(1.0, 2) and half.optim.steps == whole.optim.steps == 180
    assert whole.inputs.lora == whole.inputs.prerouter == str(seed / "k4-b2w2+grow" / "half")
    assert {c.base.directory for c in ran} == {str(tmp_path / "base")}
    assert {c.inputs.prerouter for c in ran if c.phase == "head_refine"} == {
        str(seed / "k4" / "head_distill"), str(seed / "k8" / "head_distill")
    }  # fmt: skip
    before = len(ran)
    recipe.main()
    assert len(ran) == before, "what is done is not done again"


@pytest.mark.parametrize("text", [*CURVE, *BENT])
def test_an_arms_name_tells_it(text: str) -> None:
    arm = Arm.parse(text)
    assert len({Arm.parse(other).name for other in (*CURVE, *BENT)}) == len({*CURVE, *BENT})
    assert (arm.k, arm.bias, arm.window) == (arm.k, *((0.0, 0) if ":" not in text else (arm.bias, arm.window)))
    assert dataclasses.replace(arm, bend="", bias=0.0, window=0) == Arm(arm.k)
    assert arm.plain.sft == [setting for setting in arm.sft if "change_penalty" not in setting]


def test_training_otherwise_is_said_to_sft_alone(ran: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv[:2], "4:2,2+long-joint", *sys.argv[-2:]])
    recipe.main()
    assert [(c.phase, c.optim.steps, c.heads.joint_lr) for c in ran[-3:]] == [
        ("head_refine", 600, 0.3), ("student_sft", 720, 1.0), ("on_policy", 24, 0.3)
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [*sys.argv[:2], "4+penalty.005", *sys.argv[-2:]])
    recipe.main()
    assert [c.heads.change_penalty for c in ran[-2:]] == [0.005, 0.0]
    assert Path(ran[-2].inputs.prerouter).parent.name == "k4", (
        "what SFT alone makes another begins with the plain arm's heads"
    )


def sequence(path: StudentPath) -> Any:
    """A predicted pass over a batch, and the final hidden states."""
    batch = collate(text_rows([(3, 12), (5, 9)]), pad_id=0)
    routing = path.predicted(batch.decoded_BT, batch.start_BT)
    return routing, path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state


def test_a_dropped_tail_weighs_nothing_and_reads_nothing(adapted: Models) -> None:
    with bent("tail.4"):
        path, _ = make(adapted, STICKY)
    weights: dict[int, torch.Tensor] = {}
    for layer in STICKY.consumers:
        path.router(layer).register_forward_hook(lambda m, a, out, n=layer: weights.__setitem__(n, out[1]))
    with torch.no_grad():
        routing, _ = sequence(path)
    read = getattr(path, READ)
    for layer in STICKY.consumers:
        weights_BTK = weights[layer].unflatten(0, routing.predicted_BT.shape)
        at_NK = weights_BTK[routing.predicted_BT]
        assert torch.allclose(at_NK.sum(-1), torch.ones(len(at_NK)))
        assert bool((at_NK == 0).any()) and bool(
            ((at_NK == 0) | (at_NK >= 0.4 * at_NK.max(-1, keepdim=True).values)).all()
        )
        distinct = torch.tensor([len(set(ids)) for ids in read[layer][routing.predicted_BT].tolist()])
        assert torch.equal(distinct, (at_NK > 0).sum(-1))
        assert bool((weights_BTK[~routing.predicted_BT] > 0).all()), "own gates keep their tail"


def test_a_bias_of_its_own_for_each_layer(adapted: Models) -> None:
    seen: dict[str, list[float]] = {}
    for bend in ("", "rise", "fall"):
        path, _ = make(adapted, STICKY)
        with bent(bend), torch.no_grad():
            routing, _ = sequence(path)
        kept = []
        for layer in STICKY.consumers:
            ran = routing.executed[layer][0].tolist()
            kept.append(sum(len(set(a) & set(b)) for a, b in pairwise(ran[4:])))
        seen[bend] = kept
    assert seen["rise"] != seen["fall"] and len({tuple(kept) for kept in seen.values()}) == 3
    assert path.tier.router.sticky == Sticky(2.0, 2), "the tier is put back"


def test_chains_have_the_settings_of_their_recipe(ran: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv[:2], "4:2,2", "--chain", *sys.argv[-2:]])
    recipe.main()
    found = {c.phase: c for c in ran}
    assert found["teacher_text"].sample.prompts == 1024 and found["teacher_text"].sample.eval_prompts == 256
    assert {(c.text.prompts, c.text.max_length) for c in ran} == {("tasks:chain", 256)}
    assert (found["student_sft"].optim.steps, found["student_sft"].optim.rows) == (240, 8)
    assert (found["on_policy"].optim.steps, found["on_policy"].optim.rows) == (24, 16)


def test_chains_and_short_tasks_share_no_folder(
    ran: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for more, folder in (([], "sticky"), (["--chain"], "sticky-chain")):
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["x", "--arms", "4", *more])
        recipe.main()
        assert len(ran) == 6, "nothing of the other is taken for done"
        assert all(Path(config.run_dir).is_relative_to(tmp_path / "runs" / folder) for config in ran)


# -- the table


def measured(kl: list[float], right: str, misses: float) -> dict[str, Any]:
    mean = {"kl": sum(kl) / (10 * len(kl)), "exact_match": right.count("1") / len(right), "experts": 4.0}
    return {
        "kl": kl,
        "tokens": [10] * len(kl),
        "right": right,
        "mean": mean | {f"misses {n}": misses for n in (4, 8, 12, 16)},
    }


def test_differences_are_paired_and_carry_the_larger_error() -> None:
    one = {seed: measured([0.5, 0.1, 0.9], "111", 1.0) for seed in (0, 1)}
    other = {seed: measured([0.4, 0.0, 0.8 - seed], "110", 2.0) for seed in (0, 1)}
    more = kl_difference(one, other)
    assert more.mean == pytest.approx((0.01 + (0.1 + 0.1 + 1.1) / 30) / 2)
    assert more.seeds == pytest.approx(((0.1 + 0.1 + 1.1) / 30 - 0.01) / 2)
    assert more.error == max(more.seeds, more.rows)
    right = match_difference(one, other)
    assert right.mean == pytest.approx(1 / 3) and right.seeds == 0
    assert right.rows == pytest.approx(math.sqrt(1 / 3 / 3) / math.sqrt(2))


def test_the_report_compares_with_the_plain_arm(tmp_path: Path) -> None:
    for arm, misses in ((Arm(4), 2.4), (Arm(4, 2.0, 2), 0.9)):
        for seed in (0, 1):
            (tmp_path / f"seed{seed}").mkdir(exist_ok=True)
            data = {"seed": seed, **vars(arm), "stages": {"on_policy": measured([0.1, 0.2], "10", misses)}}
            (tmp_path / f"seed{seed}" / f"{arm.name}.json").write_text(json.dumps(data))
    text = report(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert [(line["K"], line["bias, window"], line["seeds"], line["LRU 8"]) for line in lines] == [
        (4, "none", 2, 2.4), (4, "2, 2", 2, 0.9)
    ]  # fmt: skip
    assert lines[1]["fewer at 2K"] == "62%" and lines[1]["KL more than plain same K"] == "+0.0000 +- 0.0000"
    assert "62%" in text and (tmp_path / "curve.png").stat().st_size > 5000
