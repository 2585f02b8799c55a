"""The student path three ways: parallel over a sequence, token by token in torch, and served by the MLX runtime."""

from __future__ import annotations

import dataclasses
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.tier import Sticky, Tier
from edge0_runtime.contract.traces import PromptTrace, ReferenceTrace
from edge0_runtime.engine import Engine
from edge0_runtime.measure.verify import verify
from edge0_train.base import load_base, quantize_checkpoint
from edge0_train.phases.export import prompt_traces
from edge0_train.student import PrerouterHeads, StudentPath, add_lora, load_lora
from tests.random_adapters import write_adapters
from tests.tiny_ling import publish
from tests.twins import TWINS

LENGTHS = (1, 2, 7, 23, 40)
STEPS = 32
TOP = 8
RULES = [(first, kind) for first in ("gate", "predicted") for kind in ("executed", "teacher")]
CASES = [("qwen3_5_moe", *rule, token_aware) for rule in RULES for token_aware in (False, True)]
CASES += [("bailing_moe_v3", *rule, False) for rule in RULES] + [("bailing_moe_v3", "predicted", "teacher", True)]
STICKY = [
    (*case, rule) for case, rule in zip(CASES, cycle([Sticky(2.0, 2), Sticky(1.0, 1), Sticky(3.0, 4)]), strict=False)
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: the int4 directory of a random model with 8 experts, K=4; Ling's in its published layout."""
    made = {}
    for name, twin in TWINS.items():
        root = tmp_path_factory.mktemp(name)
        twin.write(root / "source", num_experts_per_tok=4)
        quantize_checkpoint(root / "source", root / "int4", variant(name, "gate", "executed"))
        made[name] = root / "int4"
        if name == "bailing_moe_v3":
            made[name] = publish(root / "int4", root / "source", root / "published")
    return made


def variant(family: str, first_token: str, feature_topk: str, **others: Any) -> Tier:
    return TWINS[family].tier(
        first_token=first_token, feature_topk=feature_topk, num_experts_per_tok=4, k=2,
        lora={"r": 4, "alpha": 8, "targets": list(TWINS[family].targets)}, **others,
    )  # fmt: skip


def student(directory: Path, tier: Tier) -> StudentPath:
    model, _ = load_base(directory, tier)
    add_lora(model, tier)
    load_lora(model, tier, read_adapter(directory / tier.file_name("lora"), "lora").tensors)
    heads = PrerouterHeads(tier)
    heads.load(read_adapter(directory / tier.file_name("prerouter"), "prerouter").tensors)
    return StudentPath(model, tier, heads)


@pytest.mark.parametrize(("family", "first_token", "feature_topk", "token_aware"), CASES)
def test_parallel_equals_incremental_equals_served(
    bases: dict[str, Path], family: str, first_token: str, feature_topk: str, token_aware: bool
) -> None:
    assert_equal(bases[family], variant(family, first_token, feature_topk, token_aware=token_aware))


@pytest.mark.parametrize("feature_topk", ["executed", "teacher"])
def test_the_same_with_weights_of_a_wider_mass(bases: dict[str, Path], feature_topk: str) -> None:
    """Divided by the mass of 5 of the 8 experts, where K is 2: the model says something else, and both say it."""
    base, rule = bases["qwen3_5_moe"], ("qwen3_5_moe", "gate", feature_topk)
    traces = assert_equal(base, variant(*rule, router={"kind": "softmax_topk", "mass_k": 5}))
    plain = assert_equal(base, variant(*rule))
    assert any(not np.array_equal(a.generated_ids_T, b.generated_ids_T) for a, b in zip(traces, plain, strict=True))


@pytest.mark.parametrize(("family", "first_token", "feature_topk", "token_aware", "sticky"), STICKY)
def test_the_same_with_sticky_prerouting(
    bases: dict[str, Path], family: str, first_token: str, feature_topk: str, token_aware: bool, sticky: Sticky
) -> None:
    """And more of a predicted layer's experts stay from one input to the next than without."""
    plain = variant(family, first_token, feature_topk, token_aware=token_aware)
    tier = dataclasses.replace(plain, router=dataclasses.replace(plain.router, sticky=sticky))
    write_adapters(bases[family], plain)
    kept_plain = kept_experts(plain, traced(student(bases[family], plain)))
    assert kept_experts(tier, assert_equal(bases[family], tier)) > 1.15 * kept_plain


def kept_experts(tier: Tier, traces: list[PromptTrace]) -> int:
    """Experts that a predicted layer ran at two inputs in a row, over all."""
    layers = [tier.layout.moe_layers(tier.architecture).index(layer) for layer in tier.consumers]
    rows = [(one, other) for trace in traces for one, other in pairwise(trace.experts_TLK[:, layers])]
    return sum(len({*one_K} & {*other_K}) for pair in rows for one_K, other_K in zip(*pair, strict=True))


def traced(path: StudentPath) -> list[PromptTrace]:
    """Of random prompts; batched and ragged."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 384, size=n).tolist() for n in LENGTHS]
    return prompt_traces(path, prompts, tokens=STEPS, top=TOP, pad_id=0)


def assert_equal(base: Path, tier: Tier) -> list[PromptTrace]:
    for other in base.glob("*_edge0_*"):  # a sticky tier's files have names of their own
        other.unlink()
    write_adapters(base, tier)
    path = student(base, tier)
    traces = traced(path)
    for trace in traces:
        prompt = trace.prompt_ids_P.tolist()
        ids = torch.tensor([[*prompt, *trace.generated_ids_T[:-1].tolist()]])
        decoded = torch.arange(ids.shape[1])[None] >= len(prompt)
        routing = path.predicted(decoded)
        with torch.no_grad():
            hidden = path.hidden(ids, routing, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
            logits_TV = path.model.lm_head(hidden)
        executed = torch.stack([routing.executed[n][0].sort(-1).values for n in sorted(routing.executed)], 1)
        assert np.array_equal(executed.numpy()[len(prompt) - 1 :], trace.experts_TLK)
        assert np.array_equal(executed.numpy()[: len(prompt)], trace.prompt_experts_PLK)
        assert (trace.own_TOK is None) == (tier.feature_topk == "executed")
        if trace.own_TOK is not None:
            own = torch.stack([routing.own[n][0].sort(-1).values for n in tier.owners], 1)
            assert np.array_equal(own[len(prompt) - 1 :].numpy(), trace.own_TOK)
        assert logits_TV.argmax(-1).tolist() == trace.generated_ids_T.tolist()
        top = logits_TV.gather(-1, torch.from_numpy(trace.logits_ids_TN).long()).numpy()
        np.testing.assert_allclose(top, trace.logits_values_TN, rtol=0, atol=2e-4)

    def sha(kind: Any) -> str:
        return read_adapter(base / tier.file_name(kind), kind).sha256

    fingerprint = Checkpoint.open(base).fingerprint()
    reference = ReferenceTrace(tier.name, fingerprint, sha("prerouter"), sha("lora"), "float32", tuple(traces))
    with Engine.load(base) as engine:
        report = verify(engine, reference)
    assert report.ok, report.problems()
    assert all(prompt.judged_rows == STEPS and not prompt.differences for prompt in report.prompts)
    return traces
