"""`verify` accepts what serves as trained and says precisely what doesn't; `bench` gives its numbers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_runtime import loading
from edge0_runtime.cli import main
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.traces import PromptTrace, ReferenceTrace, read_trace, write_trace
from edge0_runtime.engine import Engine
from edge0_runtime.measure.bench import bench
from edge0_runtime.measure.verify import verify

TOP = 16


@pytest.fixture(scope="module")
def engine(tiny_dir: Path) -> Iterator[Engine]:
    with Engine.load(tiny_dir) as loaded:
        yield loaded


@pytest.fixture
def trace(engine: Engine, prompts: list[list[int]], tmp_path: Path) -> ReferenceTrace:
    """What the engine itself does, through the file format."""
    reference = record(engine, prompts[1:])
    path = tmp_path / "verify_edge0_tiny.safetensors"
    write_trace(path, reference, engine.model.tier)
    return read_trace(path, engine.model.tier)


def record(engine: Engine, prompts: list[list[int]]) -> ReferenceTrace:
    """What the engine does, as an export would say it; all in passes of one token."""
    recorded = []
    assert engine.model.heads is not None
    for prompt in prompts:
        steps, own, before = [], [], []
        for end in range(1, len(prompt) + 1):
            before += [step.experts for step in engine.generate(prompt[:end], max_tokens=1, trace=True)]
        for step in engine.generate(prompt, max_tokens=6, ignore_eos=True, trace=True):
            steps.append(step)
            features: Any = engine.sequence.last.features  # type: ignore[union-attr]
            if features is not None:
                seen = dict(zip(engine.model.heads.owners, np.array(features.routing), strict=True))
                own.append(np.stack([np.flatnonzero(seen[owner]) for owner in engine.model.tier.owners]))
        logits_TV = np.stack([step.logits for step in steps])
        order_TN = np.argsort(-logits_TV, axis=-1, kind="stable")[:, :TOP].astype(np.int32)
        recorded.append(
            PromptTrace(
                prompt_ids_P=np.array(prompt, np.int32),
                generated_ids_T=np.array([step.token for step in steps], np.int32),
                experts_TLK=np.stack([step.experts for step in steps]).astype(np.int32),
                logits_ids_TN=order_TN,
                logits_values_TN=np.take_along_axis(logits_TV, order_TN, axis=-1),
                prompt_experts_PLK=np.stack(before),
                own_TOK=np.stack(own) if engine.model.tier.feature_topk == "teacher" else None,
            )
        )
    model = engine.model
    return ReferenceTrace(
        tier=model.tier.name,
        base_fingerprint=model.identity.fingerprint,
        prerouter_sha256=model.identity.prerouter_sha256,
        lora_sha256=model.identity.lora_sha256,
        compute_dtype="float32",
        prompts=tuple(recorded),
    )


def change(trace: ReferenceTrace, **fields: np.ndarray) -> ReferenceTrace:
    """`trace` with fields of its second prompt replaced."""
    prompts = list(trace.prompts)
    prompts[1] = dataclasses.replace(prompts[1], **fields)
    return dataclasses.replace(trace, prompts=tuple(prompts))


def test_what_serves_as_trained_passes(engine: Engine, trace: ReferenceTrace) -> None:
    report = verify(engine, trace)
    assert report.ok and report.problems() == []
    assert report.dropped == 0 and report.isolated
    for prompt in report.prompts:
        assert prompt.rows == prompt.judged_rows == 6
        assert prompt.free_mismatch is prompt.forced_mismatch is None
        assert prompt.logits_error == 0
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_another_token_is_reported_by_both_runs(engine: Engine, trace: ReferenceTrace) -> None:
    generated_T = trace.prompts[1].generated_ids_T.copy()
    generated_T[-1] = (generated_T[-1] + 1) % 384
    report = verify(engine, change(trace, generated_ids_T=generated_T))
    assert report.problems() == ["prompt 1: free run: token 5 differs", "prompt 1: forced run: token 5 differs"]


def test_other_experts_are_reported_with_their_gap(engine: Engine, trace: ReferenceTrace) -> None:
    experts_TLK = trace.prompts[1].experts_TLK.copy()
    row_K = experts_TLK[3, 1]
    replaced, stranger = int(row_K[0]), next(e for e in range(8) if e not in row_K)
    experts_TLK[3, 1] = np.sort([stranger, row_K[1]])
    changed = change(trace, experts_TLK=experts_TLK)
    report = verify(engine, changed)
    (difference,) = report.prompts[1].differences
    assert (difference.row, difference.layer) == (3, 1)
    assert (difference.expected, difference.actual) == ((stranger,), (replaced,))
    assert difference.gap > 0
    assert report.prompts[1].judged_rows == 3
    assert not report.ok and "probability gap" in report.problems()[0]
    # a difference no larger than the near-tie allowance is reported but no failure
    assert verify(engine, changed, near_tie=difference.gap).ok


def test_logits_beyond_the_tolerance_fail(engine: Engine, trace: ReferenceTrace) -> None:
    values_TN = trace.prompts[1].logits_values_TN * np.float32(1.01)
    report = verify(engine, change(trace, logits_values_TN=values_TN))
    assert not report.ok and "relative L2 0.0099" in report.problems()[0]
    assert verify(engine, change(trace, logits_values_TN=values_TN), tolerance=0.02).ok


def test_a_trace_of_other_files_is_refused(tiny_dir: Path, engine: Engine, trace: ReferenceTrace) -> None:
    with pytest.raises(Edge0Error, match="base_fingerprint"):
        verify(engine, dataclasses.replace(trace, base_fingerprint="0" * 64))
    with Engine.load(tiny_dir, lora=False) as other, pytest.raises(Edge0Error, match=r"lora_sha256: trace .*None"):
        verify(other, trace)


def test_what_is_not_computed_in_float32_is_no_reference_and_cannot_be_judged(
    tiny_dir: Path,
    engine: Engine,
    trace: ReferenceTrace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else every difference could be rounding. The engine's own dtype gives way: `float32=True` on any device."""
    with pytest.raises(Edge0Error, match=r"the trace was computed in bfloat16.*repeat phase=export"):
        verify(engine, dataclasses.replace(trace, compute_dtype="bfloat16"))
    monkeypatch.setattr(loading, "needs_float32", lambda: False)  # as on Metal
    with Engine.load(tiny_dir) as rounding, pytest.raises(Edge0Error, match="load it with float32=True"):
        verify(rounding, trace)
    with Engine.load(tiny_dir, float32=True) as same:
        report = verify(same, trace)
    assert report.ok and all(prompt.logits_error == 0 for prompt in report.prompts)
    shutil.copytree(tiny_dir, tmp_path / "model")
    write_trace(tmp_path / "model" / "verify_edge0_tiny.safetensors", trace)
    assert main(["verify", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.endswith("PASS\n")


def test_requests_that_are_not_isolated_are_noticed(
    engine: Engine, trace: ReferenceTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable = Engine.generate
    calls = []

    def leaking(self: Engine, prompt_ids: list[int], **options: object):
        calls.append(prompt_ids)
        shift = int(len(calls) > len(trace.prompts))
        for step in original(self, prompt_ids, **options):
            yield dataclasses.replace(step, token=step.token + shift)

    monkeypatch.setattr(Engine, "generate", leaking)
    assert verify(engine, trace).problems() == [
        "the first prompt gave other tokens when run again: requests aren't isolated"
    ]


def test_bench_counts_what_the_engine_did(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]]
) -> None:
    one_expert = 13_824
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 1)) as engine:
        rows = list(bench(engine, prompts[2:], max_tokens=5))
    assert json.loads(json.dumps(rows)) == rows
    for row, prompt in zip(rows, prompts[2:], strict=True):
        assert row["prompt_tokens"] == len(prompt) and row["generated_tokens"] == 5
        # one expert fits: 4 layers x K = 2 are loaded in every step, except where a layer's last one is still
        # there
        assert row["decode_expert_loads_per_step"] == pytest.approx(8, abs=0.01)
        assert row["decode_expert_bytes_per_step"] == pytest.approx(8 * one_expert, rel=0.01)
        assert row["decode_expert_hit_rate"] == 0
        assert row["decode_tokens_per_second"] > 0 and row["ttft_seconds"] > 0
        assert 0 < row["decode_blocked_ms_p50"] <= row["decode_blocked_ms_p95"]
        assert row["process_peak_rss_bytes"] > row["mlx_peak_bytes"] > 0
        assert row["dropped_experts"] == 0


def test_bench_of_a_single_token_has_no_decode_rate(engine: Engine, prompts: list[list[int]]) -> None:
    (row,) = bench(engine, prompts[1:2], max_tokens=1)
    assert row["generated_tokens"] == 1 and row["decode_tokens_per_second"] is None
