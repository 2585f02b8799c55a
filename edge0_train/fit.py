"""Whether a phase fits a machine by its plan's estimate, and with which settings it would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from edge0_train.config import PHASES, Config
from edge0_train.data.counts import Rows
from edge0_train.machine import SHARE, Limits, limits
from edge0_train.memory import GIB, Need, Sketches, phase_need


def shortfalls(config: Config, need: Need, at_hand: Limits) -> list[str]:
    """Where a phase needs more than there is, a sentence each; empty if it fits."""
    device, host = sum(need.device.values()), sum(need.host.values())
    on_cpu = config.base.device == "cpu"
    processes = 1 if PHASES[config.phase].alone else at_hand.processes
    pools = {"of host memory": (processes * (host + device * on_cpu), at_hand.host)}
    if not on_cpu and at_hand.device:
        pools = {"on a device": (device, at_hand.device), **pools}
    short = [
        f"{wanted / GIB:.1f} GiB {where}, {at_hand.name} has {there / GIB:.1f}"
        for where, (wanted, there) in pools.items()
        if wanted > SHARE * there
    ]
    if device and not on_cpu and not at_hand.device:
        short.append(f"{device / GIB:.1f} GiB on a GPU, {at_hand.name} has none")
    elif not short and not on_cpu and at_hand.free is not None and device > at_hand.free:
        short.append(f"{device / GIB:.1f} GiB on the device, of which only {at_hand.free / GIB:.1f} are free now")
    return short


def describe_fit(config: Config, rows: Rows, need: Need) -> str:
    """The verdict for a plan; where the phase does not fit, the settings that would."""
    at_hand = limits(config)
    short = shortfalls(config, need, at_hand)
    if not short:
        sizes = f"{at_hand.device / GIB:.1f} GiB a device, " * (config.base.device != "cpu")
        return f"{at_hand.name} ({sizes}{at_hand.host / GIB:.1f} GiB of host memory): fits, by this estimate"
    verdict = (
        f"does not fit, by this estimate: needs {'; '.join(short)} ({1 - SHARE:.0%} is kept for what it leaves out)"
    )
    if not at_hand.device and config.base.device != "cpu":
        return f"{verdict}\nname the machine that it is for: hardware=1x80gb, or compute here: base.device=cpu base.dtype=float32"
    settings = would_fit(config, rows)
    if settings:
        return f"{verdict}\nwould fit with {' '.join(settings)}"
    return f"{verdict}\nno settings of memory make it fit: {config.hardware.note or 'take a larger machine'}"


def would_fit(config: Config, rows: Rows) -> list[str] | None:
    """The fewest changes of memory settings with which the phase fits, as on the command line; None: there are none."""
    at_hand, sketches = limits(config), Sketches()

    def fits(changes: Mapping[str, Any]) -> bool:
        changed = with_settings(config, changes)
        return not shortfalls(changed, phase_need(changed, rows, sketches), at_hand)

    chosen: dict[str, Any] = {}
    for name, value in _savings(config):
        chosen[name] = value
        if fits(chosen):
            break
    else:
        return None
    for name in [*chosen]:
        without = {other: value for other, value in chosen.items() if other != name}
        if fits(without) and not (name == "base.storage" and "base.residency" in without):
            chosen = without
    for name, value in _savings(config):  # batches came down to the last step tried: as large as fits
        if name in chosen and isinstance(value, int) and fits(chosen | {name: value}):
            chosen[name] = max(value, chosen[name])
    return [f"{name}={str(value).lower()}" for name, value in chosen.items()]


def _savings(config: Config) -> Iterator[tuple[str, Any]]:
    """(setting, value) of what saves memory, from what costs nothing to what costs most time."""
    base = config.base
    if base.storage != "packed":
        yield "base.storage", "packed"
    if config.phase == "on_policy" and config.teacher.resident:
        yield "teacher.resident", False
    for setting, value in (("sample.batch", config.sample.batch), ("optim.micro_rows", config.optim.micro_rows)):
        while value > 1:
            value //= 2
            yield setting, value
        if (
            setting == "sample.batch"
            and config.phase in ("student_sft", "on_policy")
            and not base.gradient_checkpointing
        ):
            yield "base.gradient_checkpointing", True
    if base.residency == "device":
        yield "base.residency", "disk" if base.device == "cpu" else "host"


def with_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with other values of settings, by their names on the command line."""
    for name, value in changes.items():
        group, _, field = name.rpartition(".")
        new = dataclasses.replace(getattr(config, group), **{field: value}) if group else value
        config = dataclasses.replace(config, **{group or field: new})
    return config
