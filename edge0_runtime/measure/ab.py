"""Arms against each other: one session, the same tokens, alternated there and back (A B C, C B A).

Drift of the machine then falls on all arms alike, and a ratio is taken between neighbours in time. Every arm
processes the same continuation, so that it needs the same number of experts; exact arms must also agree on every greedy
token. Each has processed it once before, unmeasured: what a first run pays falls on none, and an arm that learns from what
it has seen (oracle) knows it then. One engine serves them all, but for resident: that holds all experts and is a second one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edge0_runtime.arms import arm_class
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine
from edge0_runtime.measure.bench import PageCache, environment, run
from edge0_runtime.units import MISSING, figures, share, size


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    arms: Sequence[str],
    max_tokens: int,
    rounds: int,
    page_cache: PageCache,
    resident: Engine | None = None,
    before_measuring: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """A row for every run. The first arm's greedy answers are what all arms replay; every run begins without experts.

    `resident` runs the arm of that name; while it is loaded, the process's memory is not that of the other arms.
    `before_measuring` is called once every arm has had its unmeasured run.
    Raises Edge0Error if arms that claim to be exact choose different tokens, or an expert is dropped.
    """

    def serving(arm: str) -> Engine:
        if resident is not None and not arm_class(arm).streams:
            return resident
        engine.set_arm(arm)
        return engine

    first = serving(arms[0])
    answers = [
        [step.token for step in first.generate(prompt_ids, max_tokens=max_tokens, ignore_eos=True)]
        for prompt_ids in prompts
    ]
    for arm in arms:
        _replay_all(serving(arm), prompts, answers)
    before_measuring()
    greedy: dict[int, list[int]] = {}
    for number in range(rounds):
        for half, order in enumerate((arms, arms[::-1])):
            for arm in order:
                serves = serving(arm)
                for index, (prompt_ids, answer) in enumerate(zip(prompts, answers, strict=True)):
                    row = _measured(serves, prompt_ids, answer, max_tokens, page_cache)
                    if arm_class(arm).exact and greedy.setdefault(index, row["greedy"]) != row["greedy"]:
                        raise Edge0Error(f"arm {arm}: other greedy tokens than another exact arm; this is a bug")
                    yield environment(serves) | {"round": number, "half": half, "prompt": index} | row


def _replay_all(engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """Process every answer once, unmeasured."""
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        for _ in engine.replay(prompt_ids, answer):
            pass


def _measured(
    engine: Engine, prompt_ids: Sequence[int], answer: Sequence[int], max_tokens: int, page_cache: PageCache
) -> dict[str, Any]:
    """The row of one run that begins without experts. Raises Edge0Error if an expert was dropped in it."""
    engine.forget_experts()
    row = run(engine, prompt_ids, max_tokens=max_tokens, continuation=answer, page_cache=page_cache)
    if row["dropped_experts"]:
        raise Edge0Error(f"arm {engine.model.arm_name}: {row['dropped_experts']} experts were dropped; this is a bug")
    return row


def ratios(rows: Sequence[Mapping[str, Any]], arm: str, against: str) -> list[float]:
    """Decode speed of `arm` over that of `against`, for each pair of runs of one prompt in one half of a round."""
    speed = {(row["arm"], row["round"], row["half"], row["prompt"]): row["decode_tokens_per_second"] for row in rows}
    return [
        value / speed[against, *key[1:]]
        for key, value in speed.items()
        if key[0] == arm and value and speed.get((against, *key[1:]))
    ]


def table(rows: Sequence[Mapping[str, Any]], against: str) -> str:
    """Medians by arm, and the paired ratio to `against` with its spread."""
    head = (
        f"{'arm':<11} {'K':>2} {'tok/s':>7} {'step ms':>8} {'blocked':>8} {'share':>6} {'loads':>6} {'bytes':>8}"
        f" {'device':>8} {'hits':>5} {'late':>5} {'MLX':>8} {'process':>8}  tok/s over {against} (median, range)"
    )
    lines = [head]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]

        def middle(name: str, rows: Sequence[Mapping[str, Any]] = own) -> float | None:
            values = [row[name] for row in rows if row[name] is not None]
            return statistics.median(values) if values else None

        paired = sorted(ratios(rows, arm, against))
        spread = f"{statistics.median(paired):.2f}  {paired[0]:.2f}..{paired[-1]:.2f}" if paired else MISSING
        lines.append(
            f"{arm:<11} {own[0]['k']:>2} {figures(middle('decode_tokens_per_second')):>7}"
            f" {figures(middle('decode_step_ms_p50')):>8} {figures(middle('decode_blocked_ms_p50')):>8}"
            f" {share(middle('decode_blocked_share')):>6} {figures(middle('decode_expert_loads_per_step')):>6}"
            f" {size(middle('decode_expert_bytes_per_step')):>8} {size(middle('decode_device_bytes_per_step')):>8}"
            f" {share(middle('decode_expert_hit_rate')):>5} {figures(middle('decode_expert_late_per_step')):>5}"
            f" {size(middle('mlx_peak_bytes')):>8} {size(middle('process_peak_rss_bytes')):>8}  {spread}"
        )
    plan = next((row["plan"] for row in rows if row["plan"]), None)
    if plan and plan["disk_bytes_per_second"]:
        lines.append(
            f"disk {size(plan['disk_bytes_per_second'])}/s at the engine's read size;"
            f" page cache {rows[0]['page_cache']}:"
            f" {size(rows[0]['page_cache_bytes_before'])} before the first run,"
            f" {size(rows[-1]['page_cache_bytes_after'])} after the last"
        )
    return "\n".join(lines)
