"""Will a model run here, and how fast: this machine, its disk at the engine's own reads, and what memory budgets would give.

Of a model that isn't there only names and shapes are needed: the planner is asked, a file of the same reads is timed, and the
computing is measured on a few layers of its shapes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.machine import cpu_count, memory_limit_bytes
from edge0_runtime.contract.tier import Sticky
from edge0_runtime.experts.reader import IO_THREADS
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.host.disk import depth_sweep
from edge0_runtime.host.memory import page_cache_bytes
from edge0_runtime.measure.advice import Asked, advice, gib_at_least
from edge0_runtime.measure.compute import step_seconds
from edge0_runtime.measure.forecast import MIB, MOST, forecast, most_context, smallest_budget
from edge0_runtime.measure.locality import locality
from edge0_runtime.measure.subject import Subject, open_subject
from edge0_runtime.model import Model
from edge0_runtime.plan import Plan

PACKAGES = ("mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "numpy", "transformers")
DEPTHS = (1, 2, 4, 8)
WRITTEN = 2**24  # bytes of a probe file at a time
MOST_PROBED = 1024  # experts; small ones would take long


def doctor(
    what: str,
    *,
    tier_name: str | None = None,
    k: int | None = None,
    sticky: Sticky | None = None,
    adapters: str | None = None,
    memory_bytes: int | None = None,
    budget_bytes: int | None = None,
    context: int | None = None,
    disk_bytes_per_second: float | None = None,
    probe_dir: Path = Path(),
    read_bytes: int = 256 * 2**20,
) -> dict[str, Any]:
    """All that is said, as plain data.

    Args:
        what, tier_name, k, sticky, adapters: as `open_subject` takes them.
        memory_bytes: of the machine that is asked about; None: this one's.
        budget_bytes: the memory budget that is asked about; None: the planner's default, and others.
        context: tokens of prompt and answer that memory is reserved for; None: the engine's default.
        disk_bytes_per_second: of its disk; None: measured here, on the model's own files where they are.
        probe_dir: where a file of `read_bytes` is written and read for that, if the model isn't here.
        read_bytes: at most, at every depth.
    """
    given = None if disk_bytes_per_second is None else f"{disk_bytes_per_second / MIB:.6g}"
    with (
        open_subject(what, tier_name, k, sticky, adapters) as subject,
        contextlib.closing(subject.model(context)) as model,
    ):
        disk = [] if disk_bytes_per_second is not None else _disk(subject, model.store, probe_dir, read_bytes)
        if disk:
            disk_bytes_per_second = next(at["bytes_per_second"] for at in disk if at["threads"] == IO_THREADS)
        load = os.getloadavg()[0]
        with _quiet():
            seconds = step_seconds(subject.checkpoint, subject.tier)
        memory = memory_limit_bytes() if memory_bytes is None else memory_bytes
        smallest = smallest_budget(model.plan_for)
        data = _machine() | _model(subject, model.store) | {
            "memory_bytes": memory,
            "disk": disk,
            "disk_bytes_per_second": disk_bytes_per_second,
            "step_compute_seconds": seconds,
            "load_average": load,
            "smallest_budget_bytes": smallest,
        }  # fmt: skip
        if smallest > memory:
            return data | {"budget": None, "budgets": [], "advice": []}
        chosen = model.plan_for(budget_bytes, memory)
        everything = model.plan_for(None, MOST).budget_bytes
        others = (smallest, min(memory // 2, everything), min(memory * 3 // 4, everything))
        plans = {plan.slots: plan for plan in _plans(model, others, memory)}
        plans[chosen.slots] = chosen
        rows = [forecast(plans[slots], subject.tier, seconds, disk_bytes_per_second) for slots in sorted(plans)]
        own = next(row for row in rows if row.plan is chosen)
        longest = most_context(lambda tokens: model.plan_for(chosen.budget_bytes, memory, tokens), model.context_length)
        options = {
            "adapters": adapters,
            "tier": tier_name,
            "k": k,
            "sticky": None if sticky is None else f"{sticky.bias:g},{sticky.window}",
            "memory": None if memory_bytes is None else gib_at_least(memory_bytes, 6),
            "memory-budget": None if budget_bytes is None else gib_at_least(budget_bytes, 6),
            "context": context,
            "disk-mib-s": given,
        }
        return data | {
            "budget": own.to_dict() | {"most_context": longest},
            "budgets": [row.to_dict() for row in rows],
            "advice": [one.to_dict() for one in advice(Asked(what, options), subject, own, rows)],
        }


def _plans(model: Model, budgets: Iterable[int], memory_bytes: int) -> Iterator[Plan]:
    """Those of them that the planner takes."""
    for budget in budgets:
        with contextlib.suppress(Edge0Error):
            yield model.plan_for(budget, memory_bytes)


# -- this machine --------------------------------------------------------------------------------------------------------


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "device": str(mx.default_device()),
        "cpus": cpu_count(),
        "memory_available_bytes": psutil.virtual_memory().available,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _disk(subject: Subject, store: ExpertStore, probe_dir: Path, read_bytes: int) -> list[dict[str, Any]]:
    """What the disk gives at several depths; nothing where it has no reads past the page cache."""
    with (
        contextlib.nullcontext(store)
        if subject.source == "directory"
        else _probe_file(store, probe_dir, read_bytes) as real
    ):
        return [
            {
                "threads": speed.threads,
                "experts": speed.experts,
                "bytes_per_second": speed.bytes_per_second,
                "ms_per_expert": speed.ms_per_expert,
            }
            for speed in depth_sweep(real, DEPTHS, read_bytes)
        ]


@contextlib.contextmanager
def _probe_file(store: ExpertStore, directory: Path, nbytes: int) -> Iterator[ExpertStore]:
    """Experts of the same ranges in a file of random bytes, which goes again."""
    layer, tensors = next(iter(store.tensors.items()))
    experts = min(MOST_PROBED, max(1, nbytes // store.expert_nbytes(layer)))
    with tempfile.NamedTemporaryFile(dir=directory, prefix="edge0-doctor-") as file:
        stacked, end = [], 0
        for tensor in tensors:
            stacked.append(replace(tensor, path=Path(file.name), start=end))
            end += experts * tensor.nbytes
        random = np.random.default_rng(0)
        for start in range(0, end, WRITTEN):
            file.write(random.bytes(min(WRITTEN, end - start)))
        file.flush()
        os.fsync(file.fileno())
        probe = ExpertStore({layer: tuple(stacked)}, experts)
        with contextlib.closing(probe):
            yield probe


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What loading says of models that nobody asked about."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


# -- the model -----------------------------------------------------------------------------------------------------------


def _model(subject: Subject, store: ExpertStore) -> dict[str, Any]:
    tier, record = subject.tier, locality(subject.tier)
    layer = next(iter(store.tensors))
    data = {
        "source": subject.source,
        "tier": tier.name,
        "model": tier.model,
        "k": tier.k,
        "sticky": asdict(tier.router.sticky),
        "experts": store.num_experts * len(store.tensors),
        "expert_bytes": store.expert_nbytes(layer),
        "expert_ranges": [tensor.nbytes for tensor in store.tensors[layer]],
        "step_bytes": tier.k * sum(map(store.expert_nbytes, store.tensors)),
        "base_bytes": sum(entry.end - entry.start for _, entry in subject.checkpoint.entries.values()),
        "locality": {"tier": record.tier, "k": record.k, "sticky": asdict(record.sticky)},
    }
    if subject.source == "directory":
        files = sorted({tensor.path for tensors in store.tensors.values() for tensor in tensors})
        data |= {
            "expert_file_bytes": sum(path.stat().st_size for path in files),
            "page_cache_bytes": page_cache_bytes(files),
        }
    return data
