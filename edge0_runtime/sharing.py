"""Several models of one base: its tensors, the experts and equal adapter files are in memory once.

Each has a network of its own, wrapped for its own adapters and arm as if it were alone; what they have in common are the arrays
that the modules hold, and the slots. So each computes what it would compute alone, and nothing is switched between requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn

from edge0_runtime.model import Model
from edge0_runtime.network import share_base

FACTORS = ("lora_a", "lora_b")


def lead(leader: Model, followers: Sequence[Model]) -> None:
    """Have the leader plan for all, before anything is read: their adapters are in its memory too."""
    leader.shared = bool(followers)
    here = {sha256 for sha256, *_ in _adapters(leader)}
    for follower in followers:
        follower.shared = True
        for sha256, nbytes, grown in _adapters(follower):
            if sha256 not in here:
                here.add(sha256)
                fixed = leader.fixed
                leader.fixed = dataclasses.replace(
                    fixed,
                    adapter_bytes=fixed.adapter_bytes + nbytes,
                    widened_bytes=fixed.widened_bytes + grown,
                )


def follow(leader: Model, followers: Sequence[Model]) -> None:
    """Have the followers compute from what the leader has in memory by now."""
    for number, follower in enumerate(followers):
        if leader.widened:
            follower.widen()
        share_base(follower.base, leader.base)
        _share_lora(follower, [leader, *followers[:number]])
        if leader.memory is not None and leader.plan is not None:
            follower.compute_from(leader.memory, leader.plan)


def _adapters(model: Model) -> Iterator[tuple[str | None, int, int]]:
    """(sha256, bytes in memory, what it takes more when it is widened) of each adapter file that is served."""
    if model.heads is not None:
        yield model.identity.prerouter_sha256, model.heads.nbytes, model.heads.nbytes * model.heads.packed
    if factors := [module[name] for module in _with_lora(model).values() for name in FACTORS]:
        nbytes = sum(factor.nbytes for factor in factors)
        wide = sum(factor.size * mx.float32.size for factor in factors)
        yield model.identity.lora_sha256, nbytes, (wide - nbytes) * model.fixed.float32


def _share_lora(model: Model, others: Sequence[Model]) -> None:
    """Take the factors of the first other model that serves the same LoRA file."""
    same = next((other for other in others if other.identity.lora_sha256 == model.identity.lora_sha256), None)
    if same is not None:
        theirs = _with_lora(same)
        for path, module in _with_lora(model).items():
            for name in FACTORS:
                module[name] = theirs[path][name]


def _with_lora(model: Model) -> dict[str, nn.Module]:
    return {path: module for path, module in model.network.named_modules() if FACTORS[0] in module}
