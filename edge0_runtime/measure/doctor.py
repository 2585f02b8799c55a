"""What this machine gives the engine: platform, versions, memory, and the disk at the engine's own reads."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.machine import memory_limit_bytes
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.host.disk import depth_sweep
from edge0_runtime.host.memory import page_cache_bytes
from edge0_runtime.loading import find_adapters
from edge0_runtime.units import figures, size

PACKAGES = ("mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "numpy", "transformers")
DEPTHS = (1, 2, 4, 8)


def doctor(model_dir: Path, tier_name: str | None, max_bytes: int) -> dict[str, Any]:
    """Reads up to `max_bytes` of experts at every depth, past the page cache; loads nothing."""
    checkpoint = Checkpoint.open(model_dir)
    tier = find_adapters(model_dir, prerouter=False, lora=False, tier_name=tier_name).tier
    checkpoint.check_architecture(tier)
    store = ExpertStore.open(checkpoint, tier)
    try:
        layer = next(iter(store.tensors))
        speeds = depth_sweep(store, DEPTHS, max_bytes)
        files = {tensor.path for tensors in store.tensors.values() for tensor in tensors}
        return {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "device": str(mx.default_device()),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": memory_limit_bytes(),
            "memory_available_bytes": psutil.virtual_memory().available,
            "versions": {name: found for name in PACKAGES if (found := _version(name))},
            "tier": tier.name,
            "experts": store.num_experts * len(store.tensors),
            "expert_bytes": store.expert_nbytes(layer),
            "expert_ranges": [tensor.nbytes for tensor in store.tensors[layer]],
            "expert_file_bytes": sum(path.stat().st_size for path in files),
            "page_cache_bytes": page_cache_bytes(sorted(files)),
            "step_bytes": tier.k * sum(map(store.expert_nbytes, store.tensors)),
            "disk": [
                {
                    "threads": speed.threads,
                    "experts": speed.experts,
                    "bytes_per_second": speed.bytes_per_second,
                    "ms_per_expert": speed.ms_per_expert,
                }
                for speed in speeds
            ],
        }
    finally:
        store.close()


def doctor_text(data: dict[str, Any]) -> str:
    """`doctor` for people."""
    expert, step = size(data["expert_bytes"]), size(data["step_bytes"])
    lines = [
        f"{data['platform']}, Python {data['python']}, {data['cpus']} CPUs, device {data['device']}",
        ", ".join(f"{name} {number}" for name, number in data["versions"].items()),
        f"memory {size(data['memory_bytes'])}, {size(data['memory_available_bytes'])} available",
        f"tier {data['tier']}: {data['experts']} experts of {expert} in {len(data['expert_ranges'])} ranges;"
        f" {step} a token if nothing repeats",
        f"files {size(data['expert_file_bytes'])}, {size(data['page_cache_bytes'])} of them in the page cache",
    ]
    if not data["disk"]:
        return "\n".join([*lines, "disk: this file system has no reads past the page cache; not measured"])
    for speed in data["disk"]:
        floor = 1e3 * data["step_bytes"] / speed["bytes_per_second"]
        lines.append(
            f"disk, {speed['threads']} threads: {size(speed['bytes_per_second'])}/s,"
            f" {figures(speed['ms_per_expert'], ' ms')} an expert, {figures(floor, ' ms')} a token"
        )
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
