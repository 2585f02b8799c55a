"""Does the artifact serve as it was trained? Replays the reference traces that training shipped with it.

Every prompt runs twice. Free: greedy generation must give the reference's ids. Forced: each step gets the
reference's token, so that rows can be compared one by one: routed experts as sets, the argmax, and the
reference's largest logits. torch and MLX round differently; where the K-th and the next expert, or the last
group and the next, are nearly equally likely, another set is no error. The experts' outputs then differ for
good, so a prompt's rows are judged up to its first difference, and that one must be a near-tie.

Where heads see what their owners' own gates choose (`feature_topk: teacher`), these choices are compared as well: one that
goes the other way in a near-tie gives the heads another input, and what they predict of it lies anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.traces import PromptTrace, ReferenceTrace
from edge0_runtime.engine import Engine
from edge0_runtime.routing import choice_gap
from edge0_runtime.step import Step

# float32 on MLX CPU against torch: 5e-6 was measured on models of this kind (docs/parity.md 3).
LOGITS_TOLERANCE = 1e-3
NEAR_TIE = 1e-4
Choices = Mapping[int, np.ndarray]
"""Layer -> experts."""


@dataclass(frozen=True)
class RoutingDifference:
    """One input that was routed to other experts than in the reference, or that an owner's own gate would route to others.

    Attributes:
        row: of the trace; -1 is the prompt's last position but one. layer: index among the MoE layers.
        expected, actual: the experts that only one side has.
        gap: how far the router's scores here are from choosing the reference's experts, or the ones that were
            executed, whichever is more (`routing.choice_gap`).
        own: it is a choice that a head sees, and not what ran.
    """

    row: int
    layer: int
    expected: tuple[int, ...]
    actual: tuple[int, ...]
    gap: float
    own: bool = False

    @property
    def reaches(self) -> tuple[int, int]:
        """(row, layer) from which on it has changed something. In the prompt an own choice is what ran."""
        return (self.row + 1, -1) if self.own and self.row >= 0 else (self.row, self.layer)

    def __str__(self) -> str:
        """A sentence without its verdict."""
        what = "a head sees the own choice" if self.own else "routed to"
        return (
            f"row {self.row}, MoE layer {self.layer}: {what} {list(self.actual)} instead of {list(self.expected)},"
            f" probability gap {self.gap:.2g}"
        )


@dataclass(frozen=True)
class PromptReport:
    """One prompt against its reference.

    Attributes:
        rows: of the trace; judged_rows: those before a routing difference has changed something.
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

    @property
    def judged(self) -> tuple[RoutingDifference, ...]:
        """The differences that no other one can have led to."""
        first = min((d.reaches for d in self.differences), default=(0, 0))
        return tuple(d for d in self.differences if (d.row, d.layer) <= first)

    def problems(self, tolerance: float, near_tie: float) -> list[str]:
        """Sentences; empty if the prompt passes."""
        found = []
        for what, row in (("free run", self.free_mismatch), ("forced run", self.forced_mismatch)):
            if row is not None and row < self.judged_rows:
                found.append(f"{what}: token {row} differs")
        found += [f"{difference} > {near_tie:g}" for difference in self.judged if difference.gap > near_tie]
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
        own_unknown: heads see own choices, and the trace, of an older export, doesn't hold them.
    """

    prompts: tuple[PromptReport, ...]
    dropped: int
    isolated: bool
    tolerance: float
    near_tie: float
    own_unknown: bool = False

    def notes(self) -> list[str]:
        """From where on prompts aren't judged, and why, one sentence each."""
        return [
            f"prompt {i}: judged up to row {prompt.judged_rows}, since of a near-tie: {prompt.judged[0]}"
            for i, prompt in enumerate(self.prompts)
            if prompt.judged and all(difference.gap <= self.near_tie for difference in prompt.judged)
        ]

    def problems(self) -> list[str]:
        """Everything that fails, one sentence each."""
        found = [
            f"prompt {i}: {problem}"
            for i, prompt in enumerate(self.prompts)
            for problem in prompt.problems(self.tolerance, self.near_tie)
        ]
        if self.own_unknown and any(d.gap > self.near_tie for prompt in self.prompts for d in prompt.judged):
            found.append(
                "the trace doesn't hold what the owners' own gates chose: a near-tie there, which is no fault, looks like one;"
                " export again (phase=export) with this version"
            )
        found += [f"{self.dropped} routed experts were dropped"] * (self.dropped > 0)
        found += ["the first prompt gave other tokens when run again: requests aren't isolated"] * (not self.isolated)
        return found

    @property
    def ok(self) -> bool:
        """Whether nothing fails."""
        return not self.problems()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dataclasses.asdict(self) | {"ok": self.ok, "problems": self.problems(), "notes": self.notes()}


def verify(
    engine: Engine, trace: ReferenceTrace, *, tolerance: float = LOGITS_TOLERANCE, near_tie: float = NEAR_TIE
) -> VerifyReport:
    """Replay `trace` on `engine`.

    Args:
        tolerance: of the logits' relative L2.
        near_tie: a first routing difference with at most this gap is no failure.

    Raises:
        Edge0Error: the trace belongs to another base or to other adapter files than the engine serves; or one of both
            doesn't compute in float32, where what is judged would drown in rounding.
    """
    _check_same(engine, trace)
    dropped_before = engine.stats()["dropped_experts"]
    free_ids = [_greedy(engine, prompt) for prompt in trace.prompts]
    reports = tuple(_forced(engine, prompt, free) for prompt, free in zip(trace.prompts, free_ids, strict=True))
    isolated = not trace.prompts or _greedy(engine, trace.prompts[0]) == free_ids[0]
    dropped = engine.stats()["dropped_experts"] - dropped_before
    own_unknown = engine.model.tier.feature_topk == "teacher" and any(p.own_SOK is None for p in trace.prompts)
    return VerifyReport(reports, dropped, isolated, tolerance, near_tie, own_unknown)


def _check_same(engine: Engine, trace: ReferenceTrace) -> None:
    model = engine.model
    if trace.compute_dtype != "float32":
        raise Edge0Error(
            f"verify: the trace was computed in {trace.compute_dtype}, where rounding alone routes otherwise; export again with"
            " this version (phase=export), which computes it in float32"
        )
    if not model.fixed.float32:
        raise Edge0Error("verify: this engine computes in the dtype of its files; load it with float32=True")
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
    seen_before: Choices = {}
    for step in engine.replay(prompt.prompt_ids_P.tolist(), generated_T):
        assert step.experts is not None and step.logits is not None  # replay traces
        # The pass that led to this token is still the sequence's last one, so its router scores are at hand.
        differences += _differences_at(engine, prompt, step.index, step.experts)
        if step.index == 0 and _last(engine).own:
            seen_before = _seen(engine, _last(engine).features.previous)
        argmax_T.append(int(step.logits.argmax()))
        wanted_N = prompt.logits_values_TN[step.index]
        got_N = step.logits[prompt.logits_ids_TN[step.index]]
        error_T.append(float(np.linalg.norm(got_N - wanted_N) / np.linalg.norm(wanted_N)))
    differences = _differences_before(engine, prompt, seen_before) + differences
    judged = max(0, min((difference.reaches[0] for difference in differences), default=len(generated_T)))
    return PromptReport(
        rows=len(generated_T),
        judged_rows=judged,
        free_mismatch=_first_difference(free_ids, generated_T),
        forced_mismatch=_first_difference(argmax_T, generated_T),
        differences=tuple(differences),
        logits_error=max(error_T[:judged], default=0.0),
        logits_error_all=max(error_T, default=0.0),
    )


def _differences_at(engine: Engine, prompt: PromptTrace, row: int, ran_LK: np.ndarray) -> list[RoutingDifference]:
    """Of a row: what ran, and of the other layers what the heads see of the owners' own gates."""
    last, layers = _last(engine), _moe_layers(engine)
    expected, ran = (dict(zip(layers, experts_LK, strict=True)) for experts_LK in (prompt.experts_TLK[row], ran_LK))
    found = _differences(engine, row, expected, ran, last.scores)
    if prompt.own_SOK is not None and last.own:
        seen = _seen(engine, last.features.routing)
        own = _differences(engine, row, _own(engine, prompt, row), seen, last.own_scores, own=True)
        found += [one for one in own if one.layer not in {other.layer for other in found}]
    return sorted(found, key=lambda difference: difference.layer)


def _differences_before(engine: Engine, prompt: PromptTrace, seen: Choices) -> list[RoutingDifference]:
    """What the first prediction's heads see of the prompt's last position but one."""
    if prompt.own_SOK is None or len(prompt.prompt_ids_P) < 2 or not seen:
        return []

    def scores() -> dict[int, np.ndarray]:
        """Of that position's pass when it ends a prompt, since it then goes alone."""
        *before, end = prompt.prompt_ids_P[:-1].tolist()
        for _ in engine.replay([*before, end], prompt.prompt_ids_P[-1:].tolist()):
            return _last(engine).scores()
        raise AssertionError("a replay of one token gives one")

    return _differences(engine, -1, _own(engine, prompt, -1), seen, scores, own=True)


def _differences(
    engine: Engine,
    row: int,
    expected: Choices,
    actual: Choices,
    scores: Callable[[], Mapping[int, np.ndarray]],
    *,
    own: bool = False,
) -> list[RoutingDifference]:
    sets = {layer: (set(expected[layer].tolist()), set(actual[layer].tolist())) for layer in sorted(expected)}
    differing = {layer: (one, other) for layer, (one, other) in sets.items() if one != other}
    by = scores() if differing else {}
    found, router = [], engine.model.tier.router
    for layer, (wanted, got) in differing.items():
        same_size = len(wanted) == len(got)  # else no scores choose so
        gap = max(choice_gap(router, by[layer], chosen) for chosen in (wanted, got)) if same_size else float("inf")
        only_wanted, only_got = tuple(sorted(wanted - got)), tuple(sorted(got - wanted))
        found.append(RoutingDifference(row, _moe_layers(engine).index(layer), only_wanted, only_got, gap, own))
    return found


def _last(engine: Engine) -> Step:
    assert engine.sequence is not None and engine.sequence.last is not None
    return engine.sequence.last


def _moe_layers(engine: Engine) -> tuple[int, ...]:
    return tuple(engine.model.tier.layout.moe_layers(engine.model.tier.architecture))


def _own(engine: Engine, prompt: PromptTrace, row: int) -> Choices:
    """By owner, what its own gate chose in the reference."""
    assert prompt.own_SOK is not None
    first = len(prompt.generated_ids_T) - len(prompt.own_SOK)  # its first row: -1, or 0 after a prompt of one token
    return dict(zip(engine.model.tier.owners, prompt.own_SOK[row - first], strict=True))


def _seen(engine: Engine, multi_hot_OE: mx.array) -> Choices:
    """By owner, the experts that its head sees."""
    assert engine.model.heads is not None
    return dict(
        zip(engine.model.heads.owners, (np.flatnonzero(hot_E) for hot_E in np.array(multi_hot_OE)), strict=True)
    )


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
    found = [f"  {sentence}" for sentence in (*report.notes(), *report.problems())]
    return "\n".join([*lines, *found, "PASS" if report.ok else "FAIL"])
