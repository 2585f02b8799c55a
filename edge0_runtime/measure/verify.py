"""Does the artifact serve as it was trained? Replays the reference traces that training shipped with it.

Every prompt runs twice. Free: greedy generation must give the reference's ids. Forced: each step gets the
reference's token, so that rows can be compared one by one: routed experts as sets, the argmax, and the
reference's largest logits. torch and MLX round differently; where the K-th and the next expert, or the last
group and the next, are nearly equally likely, another set is no error. The experts' outputs then differ for
good, so a prompt's rows are judged up to its first difference, and that one must be a near-tie.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.traces import PromptTrace, ReferenceTrace
from edge0_runtime.engine import Engine
from edge0_runtime.routing import choice_gap

# float32 on MLX CPU against torch: 5e-6 was measured on models of this kind (docs/parity.md 3).
LOGITS_TOLERANCE = 1e-3
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class RoutingDifference:
    """One input that was routed to other experts than in the reference.

    Attributes:
        row: of the trace. layer: index among the MoE layers.
        expected, actual: the experts that only one side has.
        gap: how far the router's scores here are from choosing the reference's experts, or the ones that were
            executed, whichever is more (`routing.choice_gap`).
    """

    row: int
    layer: int
    expected: tuple[int, ...]
    actual: tuple[int, ...]
    gap: float


@dataclass(frozen=True)
class PromptReport:
    """One prompt against its reference.

    Attributes:
        rows: of the trace; judged_rows: those before the first routing difference.
        free_mismatch, forced_mismatch: first row whose token differs (free run, forced run); None if none
            does.
        differences: all routing differences of the forced run, in order of row and layer.
        logits_error: largest relative L2 over the judged rows, of the logits of the reference's top ids.
        logits_error_all: the same over all rows.
    """

    rows: int
    judged_rows: int
    free_mismatch: int | None
    forced_mismatch: int | None
    differences: tuple[RoutingDifference, ...]
    logits_error: float
    logits_error_all: float

    def problems(self, tolerance: float, near_tie: float) -> list[str]:
        """Sentences; empty if the prompt passes."""
        found = []
        for what, row in (("free run", self.free_mismatch), ("forced run", self.forced_mismatch)):
            if row is not None and row < self.judged_rows:
                found.append(f"{what}: token {row} differs")
        if self.differences and self.differences[0].gap > near_tie:
            first = self.differences[0]
            found.append(
                f"row {first.row}, MoE layer {first.layer}: routed to {list(first.actual)} instead of"
                f" {list(first.expected)}, probability gap {first.gap:.2g} > {near_tie:g}"
            )
        if self.logits_error > tolerance:
            found.append(f"logits: relative L2 {self.logits_error:.2g} > {tolerance:g}")
        return found


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of `verify`.

    Attributes:
        prompts: one report for each prompt of the trace.
        dropped: routed experts that weren't computed; 0 unless there is a bug.
        isolated: the first prompt, run again at the end, gave the same ids as at the start.
        tolerance, near_tie: what was judged by.
    """

    prompts: tuple[PromptReport, ...]
    dropped: int
    isolated: bool
    tolerance: float
    near_tie: float

    def problems(self) -> list[str]:
        """Everything that fails, one sentence each."""
        found = [
            f"prompt {i}: {problem}"
            for i, prompt in enumerate(self.prompts)
            for problem in prompt.problems(self.tolerance, self.near_tie)
        ]
        found += [f"{self.dropped} routed experts were dropped"] * (self.dropped > 0)
        found += ["the first prompt gave other tokens when run again: requests aren't isolated"] * (not self.isolated)
        return found

    @property
    def ok(self) -> bool:
        """Whether nothing fails."""
        return not self.problems()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dataclasses.asdict(self) | {"ok": self.ok, "problems": self.problems()}


def verify(
    engine: Engine, trace: ReferenceTrace, *, tolerance: float = LOGITS_TOLERANCE, near_tie: float = NEAR_TIE
) -> VerifyReport:
    """Replay `trace` on `engine`.

    Args:
        tolerance: of the logits' relative L2. The default is for float32 on both sides.
        near_tie: a first routing difference with at most this gap is no failure.

    Raises:
        Edge0Error: the trace belongs to another base or to other adapter files than the engine serves.
    """
    _check_same(engine, trace)
    dropped_before = engine.stats()["dropped_experts"]
    free_ids = [_greedy(engine, prompt) for prompt in trace.prompts]
    reports = tuple(_forced(engine, prompt, free) for prompt, free in zip(trace.prompts, free_ids, strict=True))
    isolated = not trace.prompts or _greedy(engine, trace.prompts[0]) == free_ids[0]
    dropped = engine.stats()["dropped_experts"] - dropped_before
    return VerifyReport(reports, dropped, isolated, tolerance, near_tie)


def _check_same(engine: Engine, trace: ReferenceTrace) -> None:
    model = engine.model
    served = {
        "tier": model.tier.name,
        "base_fingerprint": model.identity.fingerprint,
        "prerouter_sha256": model.identity.prerouter_sha256,
        "lora_sha256": model.identity.lora_sha256,
    }
    differing = [
        f"{name}: trace {getattr(trace, name)}, served {value}"
        for name, value in served.items()
        if getattr(trace, name) != value
    ]
    if differing:
        raise Edge0Error(f"verify: the trace belongs to other files: {'; '.join(differing)}; export them together")


def _greedy(engine: Engine, prompt: PromptTrace) -> list[int]:
    count = len(prompt.generated_ids_T)
    steps = engine.generate(prompt.prompt_ids_P.tolist(), max_tokens=count, ignore_eos=True)
    return [step.token for step in steps]


def _forced(engine: Engine, prompt: PromptTrace, free_ids: list[int]) -> PromptReport:
    generated_T = prompt.generated_ids_T.tolist()
    differences: list[RoutingDifference] = []
    argmax_T, error_T = [], []
    for step in engine.replay(prompt.prompt_ids_P.tolist(), generated_T):
        assert step.experts is not None and step.logits is not None  # replay traces
        # The pass that led to this token is still the sequence's last one, so its router scores are at hand.
        differences += _routing_differences(engine, step.index, prompt.experts_TLK[step.index], step.experts)
        argmax_T.append(int(step.logits.argmax()))
        wanted_N = prompt.logits_values_TN[step.index]
        got_N = step.logits[prompt.logits_ids_TN[step.index]]
        error_T.append(float(np.linalg.norm(got_N - wanted_N) / np.linalg.norm(wanted_N)))
    judged = differences[0].row if differences else len(generated_T)
    return PromptReport(
        rows=len(generated_T),
        judged_rows=judged,
        free_mismatch=_first_difference(free_ids, generated_T),
        forced_mismatch=_first_difference(argmax_T, generated_T),
        differences=tuple(differences),
        logits_error=max(error_T[:judged], default=0.0),
        logits_error_all=max(error_T, default=0.0),
    )


def _routing_differences(
    engine: Engine, row: int, expected_LK: np.ndarray, actual_LK: np.ndarray
) -> list[RoutingDifference]:
    found = []
    assert engine.sequence is not None and engine.sequence.last is not None
    router, scores = engine.model.tier.router, engine.sequence.last.scores()
    for index, layer in enumerate(sorted(scores)):
        expected, actual = set(expected_LK[index].tolist()), set(actual_LK[index].tolist())
        if expected == actual:
            continue
        only_expected, only_actual = sorted(expected - actual), sorted(actual - expected)
        gap = max(choice_gap(router, scores[layer], chosen) for chosen in (expected, actual))
        found.append(RoutingDifference(row, index, tuple(only_expected), tuple(only_actual), gap))
    return found


def _first_difference(actual: list[int], expected: list[int]) -> int | None:
    return next((row for row, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1]), None)


def report_text(report: VerifyReport) -> str:
    """For people: a line for every prompt, then what fails."""
    lines = [f"{'prompt':>6} {'rows':>5} {'judged':>6} {'ids':>5} {'routing':>7} {'logits rel L2':>13}"]
    for index, prompt in enumerate(report.prompts):
        equal = prompt.free_mismatch is None and prompt.forced_mismatch is None
        lines.append(
            f"{index:>6} {prompt.rows:>5} {prompt.judged_rows:>6} {'same' if equal else 'other':>5}"
            f" {len(prompt.differences) or 'same':>7} {prompt.logits_error:>13.2e}"
        )
    lines.append(f"dropped experts {report.dropped}, requests isolated: {'yes' if report.isolated else 'no'}")
    return "\n".join([*lines, *(f"  {problem}" for problem in report.problems()), "PASS" if report.ok else "FAIL"])
