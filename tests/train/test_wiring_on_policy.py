"""on_policy as it runs: who writes, who scores, on which prompts, and what the LoRA then learns from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edge0_train.data.complete import PathWriter
from edge0_train.data.rows import TextRow, read_rows, shuffled
from tests.train.conftest import Make
from tests.train.wiring import (
    ON_POLICY_RATE,
    ROWS,
    SEED,
    WARMUP,
    Chain,
    Plain,
    PlainTeacher,
    Ran,
    lora_in,
    lora_of,
    wrote,
)

TOP_K = 8


@pytest.fixture(scope="module")
def chain(make_config: Make, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """At RATE, two steps of SFT change no word that is written."""
    return Chain(make_config, tmp_path_factory.mktemp("wiring"), student_sft=0.2)


@pytest.fixture(scope="module")
def ran(chain: Chain) -> Ran:
    return chain.run("on_policy")


@pytest.fixture(scope="module")
def student(chain: Chain, ran: Ran) -> Plain:
    """As it is before the first step: the newest heads and LoRA, from their files."""
    sft = chain.run("student_sft")
    return Plain(ran.config, sft.adapter("prerouter").tensors, lora_of(sft.adapter("lora")))


@pytest.fixture(scope="module")
def teacher(ran: Ran) -> PlainTeacher:
    return PlainTeacher(ran.config)


def rollout(ran: Ran, number: int) -> list[TextRow]:
    return [row for file in sorted(ran.directory.glob(f"round-{number:03d}/rollout*")) for row in read_rows(file)]


def reverse_kl(logits_CV: torch.Tensor, teacher_CV: torch.Tensor) -> float:
    """On the teacher's top-k and one bucket for the rest, summed over tokens."""
    total = 0.0
    for p, q in zip(logits_CV.double().softmax(-1), teacher_CV.double().softmax(-1), strict=True):
        top = q.topk(TOP_K).indices
        pairs = [*zip(p[top].tolist(), q[top].tolist(), strict=True)]
        pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
        total += sum(a * math.log(a / b) for a, b in pairs)
    return total


def test_the_first_round_is_written_by_heads_and_lora_together(chain: Chain, ran: Ran, student: Plain) -> None:
    """Greedy: every token is the largest logit of the student path, and not always of any part of it alone."""
    rows, sft = rollout(ran, 0), chain.run("student_sft")
    assert len(rows) == ROWS and all(wrote(row, student.read(row).logits_CV) for row in rows)
    lora = lora_of(sft.adapter("lora"))
    alone = {
        "no LoRA": Plain(ran.config, sft.adapter("prerouter").tensors),
        "own gates": Plain(ran.config, None, lora),
        "the heads before": Plain(ran.config, chain.run("head_refine").adapter("prerouter").tensors, lora),
    }
    for name, other in alone.items():
        assert not all(wrote(row, other.read(row).logits_CV) for row in rows), name


def test_the_second_round_is_written_by_what_the_first_one_has_trained(ran: Ran, chain: Chain, student: Plain) -> None:
    now = Plain(ran.config, chain.run("student_sft").adapter("prerouter").tensors, lora_in(ran.values(1)))
    rows = rollout(ran, 1)
    assert all(wrote(row, now.read(row).logits_CV) for row in rows)
    assert not all(wrote(row, student.read(row).logits_CV) for row in rows)


def test_rounds_have_prompts_of_their_own_from_the_train_side(chain: Chain, ran: Ran) -> None:
    """And not those that the teacher has completed already."""
    first, second = ([row.prompt_ids for row in rollout(ran, n)] for n in (0, 1))
    text = chain.run("teacher_text", "sample.prompts=6", f"run_dir={chain.root / 'written'}").directory
    written = [row.prompt_ids for row in read_rows(text / "train.jsonl")]
    assert first != second and {*first, *second} != {*written}
    assert not {*first, *second} & {row.prompt_ids for row in read_rows(text / "held_out.jsonl")}


def test_scores_are_the_teachers_as_published(ran: Ran, teacher: PlainTeacher) -> None:
    """Its log-probability of every token that the student wrote, and its top-k, at its own K."""
    files = sorted(ran.directory.glob("round-*/scores-*.safetensors"))
    rows = rollout(ran, 0) + rollout(ran, 1)
    logp_NV = torch.cat([teacher.logits_CV(row) for row in rows]).log_softmax(-1)
    written = torch.tensor([token for row in rows for token in row.completion_ids])
    stored = {name: torch.cat([load_file(str(file))[name] for file in files]) for name in load_file(str(files[0]))}
    assert torch.equal(stored["sampled_C"], written)
    torch.testing.assert_close(stored["sampled_logp_C"], logp_NV.gather(1, written[:, None])[:, 0], atol=1e-4, rtol=0)
    torch.testing.assert_close(stored["logp_CS"], logp_NV.topk(TOP_K).values, atol=1e-4, rtol=0)
    served = PlainTeacher(ran.config, k=ran.config.tier.k).logits_CV(rows[0]).log_softmax(-1)
    assert float((served - logp_NV[: len(served)]).abs().max()) > 1e-2


def test_the_loss_is_the_student_paths_divergence_from_the_teacher(
    chain: Chain, ran: Ran, student: Plain, teacher: PlainTeacher
) -> None:
    """Mean over the tokens of the round's rows; the second step's by the LoRA after the first, beside the same heads."""
    heads = chain.run("student_sft").adapter("prerouter").tensors
    students = (student, Plain(ran.config, heads, lora_in(ran.values(1))))
    for number, now in enumerate(students):
        rows = rollout(ran, number)
        total = sum(reverse_kl(now.read(row).logits_CV, teacher.logits_CV(row)) for row in rows)
        want = total / sum(len(row.completion_ids) for row in rows)
        assert ran.metrics()[number]["loss"] == pytest.approx(want, rel=1e-3)


def test_rows_and_their_scores_stay_together_when_shuffled(chain: Chain, teacher: PlainTeacher) -> None:
    """More rows a round than one step takes: the first window is not the rollout's order."""
    both = chain.run("on_policy", "on_policy.rounds=1", f"run_dir={chain.root / 'shuffled'}")
    sft = chain.run("student_sft")
    student = Plain(both.config, sft.adapter("prerouter").tensors, lora_of(sft.adapter("lora")))
    rows = rollout(both, 0)
    order = shuffled(len(rows), ROWS, SEED)(0).tolist()
    assert len(rows) == 2 * ROWS and order != [*range(ROWS)]
    total = sum(reverse_kl(student.read(rows[i]).logits_CV, teacher.logits_CV(rows[i])) for i in order)
    want = total / sum(len(rows[i].completion_ids) for i in order)
    assert both.metrics()[0]["loss"] == pytest.approx(want, rel=1e-3)


def test_only_the_lora_trains_and_it_goes_on_from_the_given_one(chain: Chain, ran: Ran) -> None:
    given, values = lora_of(chain.run("student_sft").adapter("lora")), ran.values(1)
    assert all("lora_" in name for name in values)
    for module, pair in lora_in(values).items():
        for before, after in zip(given[module], pair, strict=True):
            assert 0 < float((after - before).abs().max()) <= 1.01 * ON_POLICY_RATE / WARMUP


def test_the_file_is_the_last_steps_and_says_what_it_was_made_of(chain: Chain, ran: Ran) -> None:
    lora, sft = ran.adapter("lora"), chain.run("student_sft")
    found = lora_of(lora)
    for module, pair in lora_in(ran.values(2)).items():
        assert all(torch.equal(file, value.half().float()) for file, value in zip(found[module], pair, strict=True))
    assert not list(ran.directory.glob("prerouter*")) and lora.provenance
    heads = sft.adapter("prerouter").sha256
    assert lora.provenance.prerouter_sha256 == heads
    assert lora.provenance.phases[-1].parents == {"prerouter": heads, "lora": sft.adapter("lora").sha256}
    assert lora.provenance.data.rows == 2 * ROWS


@pytest.mark.parametrize("phase", ["teacher_text", "on_policy"])
def test_temperature_and_top_p_shape_what_is_written(chain: Chain, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """A hot text of a tiny top_p is the greedy one again, of all mass it is not; no two calls share a seed."""
    seeds: list[int] = []
    write = PathWriter.__call__

    def watched(writer: PathWriter, prompts: Any, seed: int) -> Any:
        seeds.append(seed)
        return write(writer, prompts, seed)

    def written(name: str, *overrides: str) -> list[list[TextRow]]:
        seeds.clear()
        made = chain.run(phase, f"run_dir={chain.root / f'{phase}-{name}'}", "sample.batch=2", *overrides)
        assert len(seeds) == len(set(seeds)) > 2
        if phase == "on_policy":  # later rounds depend on how the first one was cut into batches
            return [rollout(made, 0)]
        return [read_rows(made.directory / f"{side}.jsonl") for side in ("held_out", "train")]

    monkeypatch.setattr(PathWriter, "__call__", watched)
    greedy = written("greedy")
    assert written("narrow", "sample.temperature=5", "sample.top_p=1e-9") == greedy
    assert written("cold", "sample.temperature=1e-2") == greedy
    assert written("wide", "sample.temperature=5") != greedy
