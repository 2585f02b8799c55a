"""The recipe recipes/paper_claims: its plan composes, its claims compute, and a few arms run from end to end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from edge0_train.build import warm_heads
from edge0_train.measure.bench import Bench, Stage, running
from edge0_train.measure.drift import feature_drift
from edge0_train.measure.overlap import adjacent_overlap
from edge0_train.measure.quality import token_scores
from edge0_train.measure.recall import head_recall
from edge0_train.measure.survival import survival
from recipes.paper_claims import run as recipe
from recipes.paper_claims.arms import ARMS, FULL, QUICK, needed, nodes
from recipes.paper_claims.claims import CLAIMS, Claim, judge

TINY = QUICK.__class__(text_rows=48, head_steps=2, sft_steps=2, policy_steps=2, policy_rounds=1, rows=16)
METRICS = (
    "loss",
    "kl",
    "reverse_kl",
    "exact_match",
    "recall",
    "repetition",
    "recall_native",
    "recall_own",
    "trained_recall",
    "best_baseline",
    "overlap k4",
    "overlap k4 by frequency",
    *(f"survival {group}" for group in ("attention", "linear attention", "shared expert", "logits")),
)


@pytest.mark.parametrize("budget", [FULL, QUICK])
def test_every_run_composes_and_starts_from_runs_before_it(budget, tmp_path):
    place = recipe.Place(tmp_path, 3, budget)
    done: set[str] = set()
    for name, node in nodes(budget).items():
        config = place.configure(name, node.phase, *node.overrides)
        assert config.seed == 3 and Path(config.run_dir) == tmp_path / "seed3" / name
        assert {node.heads, node.lora} - {""} <= done
        done.add(name)


def test_settings_are_every_runs(tmp_path):
    place = recipe.Place(tmp_path, 0, FULL, ["tier.consumers.last=7"])
    assert {place.configure(name, node.phase).tier.consumers[-1] for name, node in nodes(FULL).items()} == {7}


def test_every_arm_rests_on_known_runs():
    for arm in ARMS.values():
        assert {arm.heads, arm.lora} - {""} <= set(needed(arm, QUICK))
        assert bool(arm.heads) != bool(arm.native_k)
    used = set(itertools.chain.from_iterable(needed(arm, QUICK) for arm in ARMS.values()))
    assert used == set(nodes(QUICK))


def test_every_claim_computes_from_the_arms():
    """Names of arms and metrics in the claims are those of the table."""
    row = {metric: float(number) for number, metric in enumerate(METRICS, 1)}
    for claim in CLAIMS:
        assert (claim.above is None) != (claim.below is None) or claim.value is None
        verdict = judge(claim, [dict.fromkeys(ARMS, row)])
        assert len(verdict.values) == (claim.value is not None)
        assert verdict.line().startswith(verdict.verdict) and "\n" not in verdict.line()


@pytest.mark.parametrize(
    ("values", "above", "word"),
    [
        ([1.2, 1.3], 1.0, "holds"),
        ([1.2], 1.0, "holds"),
        ([0.8, 0.7], 1.0, "does not hold"),
        ([0.9, 1.3], 1.0, "undecided"),  # mean 1.1, spread .28
        ([], 1.0, "not measured"),
    ],
)
def test_verdicts(values, above, word):
    """Beyond the threshold by more than the spread over seeds; the mirror image for `below`."""
    claim = Claim("text", "number", lambda rows: rows["arm"]["kl"], above=above)
    assert judge(claim, [{"arm": {"kl": value}} for value in values] or [{}]).verdict == word
    mirrored = Claim("text", "number", lambda rows: -rows["arm"]["kl"], below=-above)
    assert judge(mirrored, [{"arm": {"kl": value}} for value in values] or [{}]).verdict == word
    assert judge(Claim("text", "number"), []).verdict == "not measurable here"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms without a trained phase, through the command."""
    directory = tmp_path_factory.mktemp("claims")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "QUICK", TINY)
        patch.setattr(sys, "argv", command(directory, "--only", "teacher", "int4_k4", "untrained"))
        recipe.main()
    return directory


def command(out: Path, *more: str) -> list[str]:
    return ["run", "--quick", "--seeds", "0", "--out", str(out), *more]


def test_arms_run_from_end_to_end(out):
    rows = [json.loads(line) for line in (out / "table.jsonl").read_text().splitlines()]
    by_arm = {row["arm"]: row for row in rows}
    assert set(by_arm) == {"teacher", "int4_k4", "untrained"}
    assert by_arm["teacher"]["kl"] == pytest.approx(0, abs=1e-6)
    assert by_arm["teacher"]["kl"] < by_arm["int4_k4"]["kl"] < by_arm["untrained"]["kl"]
    assert 0 < by_arm["untrained"]["recall"] < 1
    assert by_arm["int4_k4"]["overlap k8"] == pytest.approx(by_arm["int4_k4"]["overlap k8 by frequency"], abs=0.2)
    assert (out / "claims.png").stat().st_size > 10_000
    assert "not measured" in (out / "claims.txt").read_text()


def test_what_is_finished_is_not_done_again(out, monkeypatch, capsys):
    files = [out / "seed0" / "arms" / "teacher.json", out / "seed0" / "teacher_text" / "done.json"]
    before = [file.stat().st_mtime_ns for file in files]
    monkeypatch.setattr(recipe, "QUICK", TINY)
    monkeypatch.setattr(sys, "argv", command(out, "--only", "teacher"))
    recipe.main()
    assert "int4 base, own gates, K=4" in capsys.readouterr().out
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.fixture(scope="module")
def bench(out: Path) -> Bench:
    return recipe.Place(out, 0, TINY).bench


def random_lora(bench: Bench, scale: float) -> Stage:
    """Untrained heads with a LoRA of normal factors."""
    source = np.random.default_rng(0)
    shapes = bench.config.tier.lora_tensors()
    lora = {name: source.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()}
    return Stage("random", heads=warm_heads(bench.student.path), lora=lora)


def test_merging_a_large_lora_loses_less_than_merging_a_small_one(bench):
    """int4's rounding error does not shrink with the LoRA; with one far above it nearly all survives."""
    small, large = (survival(bench, random_lora(bench, scale)) for scale in (0.01, 0.3))
    assert set(small) == {"attention", "linear attention", "shared expert", "logits"}
    for group in ("attention", "linear attention", "shared expert"):
        assert small[group] < 0.2 and 0.8 < large[group] < 1


def test_a_stage_leaves_no_trace_in_the_base(bench):
    """After a merged stage, the bare base computes bit for bit what it did before; the LoRA and K are off again."""
    bare, stage = Stage("bare", native_k=4), random_lora(bench, 0.3)
    with running(bench, bare) as path:
        before = token_scores(path, bare, bench)
    for changed in (stage, dataclasses.replace(stage, merged=True, k=2)):
        with running(bench, changed) as path:
            assert path.tier.k == (changed.k or 4)
            assert token_scores(path, changed, bench)["kl"] > before["kl"]
    with running(bench, bare) as path:
        assert path.tier == bench.config.tier and token_scores(path, bare, bench) == before


def test_overlap_of_all_experts_is_whole(bench):
    with running(bench, Stage("bare", native_k=4)) as path:
        found = adjacent_overlap(path, bench.batches, bench.config.tier.num_experts)
    assert found == {"overlap": 1.0, "chance": 1.0, "frequency": 1.0}


def test_wrong_predictions_move_the_features(bench):
    """Untrained heads route badly, so decoding leaves native routing's features; recall is the one of `head_recall`."""
    stage = Stage("untrained", heads=warm_heads(bench.student.path))
    with running(bench, stage) as path:
        found = feature_drift(path, bench.batches)
        assert found["recall_native"] == head_recall(path, bench.batches, own=False)["mean"]
    assert 0 < found["cosine"] < 1 and found["relative_l2"] > 0
    assert 0 < found["recall_own"] < 1 and 0 < found["recall_native"] < 1
