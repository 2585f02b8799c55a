"""evaluate and export as they run: which rows and adapters each stage of the table has, and what a model directory holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.traces import read_trace
from edge0_train.data.rows import TextRow
from edge0_train.measure import quality
from edge0_train.student import PrerouterHeads
from tests.train.conftest import Make
from tests.train.wiring import Chain, Plain, PlainTeacher, Ran, lora_in, lora_of, wrote

ROWS = 2
"""sample.eval_prompts: fewer than there are held-out rows."""


@pytest.fixture(scope="module")
def chain(make_config: Make, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(make_config, tmp_path_factory.mktemp("wiring"))


@pytest.fixture(scope="module")
def stages(chain: Chain) -> dict[str, Plain]:
    """Every stage but the teacher, from the files of the phases."""
    config = chain.run("on_policy").config
    first, second, third = (chain.run(p).adapter("prerouter") for p in ("head_distill", "head_refine", "student_sft"))
    sft, on_policy = (lora_of(chain.run(p).adapter("lora")) for p in ("student_sft", "on_policy"))
    return {
        "int4, K=8": Plain(config, k=8),
        "int4, K=4": Plain(config),
        "untrained heads": Plain(config, warm_start(config)),
        "heads only": Plain(config, first.tensors),
        "+ refinement": Plain(config, second.tensors),
        "+ SFT": Plain(config, third.tensors, sft),
        "+ on-policy": Plain(config, third.tensors, on_policy),
    }


def warm_start(config: Any) -> dict[str, np.ndarray]:
    """The next layer's router on the hidden state."""
    gates, heads = Plain(config).model.model.layers, PrerouterHeads(config.tier).tensors()
    for owner in config.tier.owners:
        gate = gates[owner + 1].mlp.gate.weight.detach().numpy()
        heads[f"layers.{owner}.linear_init.weight"] = np.pad(
            gate, ((0, 0), (0, config.tier.head_input - gate.shape[1]))
        )
        heads[f"layers.{owner}.fc2.weight"][:] = 0
    return heads


@pytest.fixture(scope="module")
def evaluated(chain: Chain) -> tuple[Ran, dict[str, list[TextRow]]]:
    """The phase, and what each stage wrote: {stage: rows with its own completions}."""
    for phase in ("head_distill", "head_refine", "student_sft", "on_policy"):
        chain.run(phase)
    written: dict[str, list[TextRow]] = {}
    answers = quality.greedy_answers

    def watched(path: Any, stage: Any, bench: Any, rows: Sequence[TextRow]) -> Any:
        done = list(answers(path, stage, bench, rows))
        written[stage.name] = [TextRow(r.prompt_ids, d.ids, d.finish_reason) for r, d in zip(rows, done, strict=True)]
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "greedy_answers", watched)
        return chain.run("evaluate"), written


def test_every_stage_is_measured_with_its_own_adapters_on_the_held_out_rows(chain, stages, evaluated) -> None:
    """Loss, and KL to the teacher as published, over the completions of the first `sample.eval_prompts` rows."""
    ran, rows = evaluated[0], chain.held_out[:ROWS]
    teacher, tokens = PlainTeacher(ran.config), sum(len(row.completion_ids) for row in chain.held_out[:ROWS])
    table = {row["stage"]: row for row in ran.summary["table"]}
    assert ran.summary["rows"] == ROWS and [*table] == ["teacher, K=8", *stages]
    assert table["teacher, K=8"]["kl"] == pytest.approx(0, abs=1e-6)
    for name, plain in stages.items():
        assert table[name]["loss"] == pytest.approx(plain.mean_loss(rows), rel=1e-4, abs=1e-6), name
        kl = 0.0
        for row in rows:
            logq_CV, logp_CV = (
                logits.double().log_softmax(-1) for logits in (teacher.logits_CV(row), plain.read(row).logits_CV)
            )
            kl += float((logq_CV.exp() * (logq_CV - logp_CV)).sum())
        assert table[name]["kl"] == pytest.approx(kl / tokens, rel=1e-3, abs=1e-6), name
    assert len({round(row["loss"], 5) for row in table.values()}) == len(table)


def test_answers_are_written_as_the_stage_routes(stages, evaluated) -> None:
    ran, written = evaluated
    teacher = PlainTeacher(ran.config)
    assert all(teacher.wrote(row) for row in written["teacher, K=8"])
    for name in ("int4, K=8", "+ SFT"):
        assert all(wrote(row, stages[name].read(row).logits_CV) for row in written[name]), name
    assert not all(wrote(row, stages["int4, K=4"].read(row).logits_CV) for row in written["+ SFT"])


def test_recall_is_of_the_stages_heads_under_native_routing(chain, evaluated) -> None:
    ran, rows = evaluated[0], chain.held_out[:ROWS]
    for name, phase in (("heads only", "head_distill"), ("+ refinement", "head_refine")):
        plain = Plain(ran.config, chain.run(phase).adapter("prerouter").tensors, watch=True)
        (found,) = (row["recall"] for row in ran.summary["table"] if row["stage"] == name)
        assert found == pytest.approx(plain.recall(rows), abs=1e-6), name


def test_an_export_is_the_newest_heads_and_lora_and_what_they_do(chain: Chain, stages: dict[str, Plain]) -> None:
    """The trace: held-out prompts, greedy tokens, routed sets and largest logits of the values in the files (F16)."""
    ran = chain.run("export")
    model, tier, newest = Path(ran.config.export.directory), ran.config.tier, stages["+ on-policy"]
    for kind, phase in (("prerouter", "student_sft"), ("lora", "on_policy")):
        assert read_adapter(model / tier.file_name(kind), kind).sha256 == chain.run(phase).adapter(kind).sha256
    trace = read_trace(model / tier.file_name("verify"))
    assert [tuple(p.prompt_ids_P.tolist()) for p in trace.prompts] == [row.prompt_ids for row in chain.held_out[:2]]
    for prompt in trace.prompts:
        row = TextRow(tuple(prompt.prompt_ids_P.tolist()), tuple(prompt.generated_ids_T.tolist()), "length")
        reading = newest.read(row)
        assert wrote(row, reading.logits_CV) and len(row.completion_ids) == 6
        top = reading.logits_CV.topk(ran.config.export.trace_top).values.numpy()
        np.testing.assert_allclose(prompt.logits_values_TN, top, atol=2e-3)
        for step, sets in enumerate(reading.experts):
            assert [set(ids) for ids in prompt.experts_TLK[step].tolist()] == [sets[n] for n in sorted(sets)]


def test_the_trace_tells_the_files_from_the_values_that_they_round(chain: Chain, stages: dict[str, Plain]) -> None:
    """What the tolerance above is for: the float32 values that training ended with give other logits."""
    ran, row = chain.run("on_policy"), chain.held_out[0]
    exact = Plain(ran.config, chain.run("student_sft").adapter("prerouter").tensors, lora_in(ran.values(2)))
    difference = exact.read(row).logits_CV - stages["+ on-policy"].read(row).logits_CV
    assert float(difference.abs().max()) > 1e-2
