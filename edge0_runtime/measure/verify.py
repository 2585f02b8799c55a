"""Does the artifact serve as it was trained? Replays the reference traces that training shipped with it.

Every prompt runs twice. Free: greedy generation must give the reference's ids. Forced: each step gets the
reference's token, so that rows can be compared one by one: routed experts as sets, the argmax, and the
reference's largest logits. torch and MLX round differently; where the K-th and the next expert, or the last
group and the next, are nearly equally likely, another set is no error. The experts' outputs then differ for
good, so a prompt's rows are judged up to its first difference, and that one must be a near-tie.

What is routed before the first row, in the prompt, is compared as well; and where heads see what their owners' own gates choose
(`feature_topk: teacher`), so are these choices: one that goes the other way in a near-tie gives the heads another input, and
what they predict of it lies anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.traces import PromptTrace, ReferenceTrace
from edge0_runtime.engine import Engine
from edge0_runtime.routing import choice_gap
from edge0_runtime.sequence import Sequence
from edge0_runtime.step import Step

# float32 on MLX CPU against torch: 5e-6 was measured on models of this kind (docs/parity.md 3).
LOGITS_TOLERANCE = 1e-3
NEAR_TIE = 1e-4
EXPORT_AGAIN = "repeat phase=export with this version of edge0_train and another run_dir"
Choices = Mapping[int, np.ndarray]
"""Layer -> experts."""


@dataclass(frozen=True)
class RoutingDifference:
    """One input that was routed to other experts than in the reference, or that an owner's own gate would route to others.

    Attributes:
        row: of the trace; -1 is the prompt's last position but one, and so on. layer: index among the MoE layers.
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
        """(row, layer) from which on it has changed something."""
        return (self.row + 1, -1) if self.own else (self.row, self.layer)

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
        differences: all routing differences of the forced run's rows and the first of the prompt's, in order of row and layer.
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
        incomplete: the trace, of an older export, holds neither the prompt's routing nor own choices.
    """

    prompts: tuple[PromptReport, ...]
    dropped: int
    isolated: bool
    tolerance: float
    near_tie: float
    incomplete: bool = False

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
        if self.incomplete and any(d.gap > self.near_tie for prompt in self.prompts for d in prompt.judged):
            found.append(
                "the trace holds neither the prompt's routing nor what the heads see of own gates: a near-tie there, which is no"
                f" fault, looks like one; {EXPORT_AGAIN}"
            )
        if self.prompts and not any(prompt.judged_rows for prompt in self.prompts):
            found.append(f"no row was judged; {EXPORT_AGAIN} and more export.trace_prompts")
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
            doesn't compute in float32, where what is judged would drown in rounding; or keys and values are quantised.
    """
    _check_same(engine, trace)
    dropped_before = engine.stats()["dropped_experts"]
    free_ids = [_greedy(engine, prompt) for prompt in trace.prompts]
    reports = tuple(_forced(engine, prompt, free) for prompt, free in zip(trace.prompts, free_ids, strict=True))
    isolated = not trace.prompts or _greedy(engine, trace.prompts[0]) == free_ids[0]
    dropped = engine.stats()["dropped_experts"] - dropped_before
    incomplete = any(prompt.prompt_experts_PLK is None for prompt in trace.prompts)
    return VerifyReport(reports, dropped, isolated, tolerance, near_tie, incomplete)


def _check_same(engine: Engine, trace: ReferenceTrace) -> None:
    model = engine.model
    if trace.compute_dtype != "float32":
        raise Edge0Error(
            f"verify: the trace was computed in {trace.compute_dtype}, where rounding alone routes otherwise; {EXPORT_AGAIN}"
        )
    if not model.fixed.float32:
        raise Edge0Error("verify: this engine computes in the dtype of its files; load it with float32=True")
    if model.keeping.kv_bits is not None:
        raise Edge0Error(
            f"verify: keys and values of {model.keeping.kv_bits} bits are not what was trained with; leave --kv-bits out"
        )
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
    differences = _prompt_differences(engine, prompt)
    argmax_T, error_T = [], []
    for step in engine.replay(prompt.prompt_ids_P.tolist(), generated_T):
        assert step.experts is not None and step.logits is not None  # replay traces
        # The pass that led to this token is still the sequence's last one, so its router scores are at hand.
        differences += _row_differences(engine, prompt, step.index, step.experts)
        argmax_T.append(int(step.logits.argmax()))
        wanted_N = prompt.logits_values_TN[step.index]
        got_N = step.logits[prompt.logits_ids_TN[step.index]]
        error_T.append(float(np.linalg.norm(got_N - wanted_N) / np.linalg.norm(wanted_N)))
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


def _prompt_differences(engine: Engine, prompt: PromptTrace) -> list[RoutingDifference]:
    """Of the first position before the prompt's last one that ran other experts; what comes later may be its doing."""
    ids, experts_PLK = prompt.prompt_ids_P.tolist(), prompt.prompt_experts_PLK
    if experts_PLK is None or len(ids) == 1:
        return []
    ran_PLK = np.sort(_prompt_experts(engine, ids), axis=-1)
    differing = (ran_PLK != experts_PLK[:-1]).any(axis=(1, 2))
    if not differing.any():
        return []
    at = int(differing.argmax())
    # Cut there, the prompt ends with that position, which then goes alone: only so are there scores to look at.
    for _ in engine.replay(ids[: at + 1], ids[at + 1 : at + 2]):
        expected, ran = (_by_layer(engine, experts_LK) for experts_LK in (experts_PLK[at], ran_PLK[at]))
        return _differences(engine, at + 1 - len(ids), expected, ran, _last(engine).scores)
    raise AssertionError("a replay of one token gives one")


def _prompt_experts(engine: Engine, ids: list[int]) -> np.ndarray:
    """[P, L, K], what the positions of a prompt before its last ran, in the passes that it is always cut into."""
    sequence, chunks = Sequence(engine.model), []
    try:
        for passed in engine.cut(ids).passes():
            sequence.prefill(passed, last=False)
            assert sequence.last is not None
            chunks.append(np.stack([np.array(sequence.last.ran[layer]) for layer in _moe_layers(engine)], axis=1))
    finally:
        sequence.close()
    return np.concatenate(chunks).astype(np.int64)


def _row_differences(engine: Engine, prompt: PromptTrace, row: int, ran_LK: np.ndarray) -> list[RoutingDifference]:
    """Of a row: what ran, and of the other layers what the heads see of the owners' own gates."""
    last, heads = _last(engine), engine.model.heads
    expected, ran = _by_layer(engine, prompt.experts_TLK[row]), _by_layer(engine, ran_LK)
    found = _differences(engine, row, expected, ran, last.scores)
    if prompt.own_TOK is not None and last.own and heads is not None:
        own = dict(zip(engine.model.tier.owners, prompt.own_TOK[row], strict=True))
        seen = dict(zip(heads.owners, map(np.flatnonzero, np.array(last.features.routing)), strict=True))
        others = _differences(engine, row, own, seen, last.own_scores, own=True)
        found += [other for other in others if other.layer not in {one.layer for one in found}]
    return sorted(found, key=lambda difference: difference.layer)


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


def _by_layer(engine: Engine, experts_LK: np.ndarray) -> Choices:
    return dict(zip(_moe_layers(engine), experts_LK, strict=True))


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
