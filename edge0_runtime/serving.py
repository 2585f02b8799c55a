"""How a base is served: by which arm, and with which adapter files, which are checked to belong to it and together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from edge0_runtime.arms import DEFAULT, arm_class
from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind, find_adapter
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.checkpoint import BaseIdentity, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier, builtin_tier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """How a base is served: with which adapter files, and by which arm.

    Attributes:
        prerouter, lora: False serves without that file: own gates, no recovery.
        arm: how experts are routed and read, a name of `edge0_runtime.arms`; None: by the prerouter, or on demand without it.
        adapters: where the adapter files lie; None: beside the base.
        tier_name: which of them, where several tiers' lie there or none.
    """

    prerouter: bool = True
    lora: bool = True
    arm: str | None = None
    adapters: Path | None = None
    tier_name: str | None = None

    @property
    def arm_name(self) -> str:
        """The arm that serves. Raises Edge0Error where it is unknown, or would need the file that isn't served."""
        arm = self.arm or (DEFAULT if self.prerouter else "on_demand")
        if arm_class(arm).needs_heads and not self.prerouter:
            raise Edge0Error(f"arm: {arm} needs the prerouter file; leave out one of --arm and --no-prerouter")
        return arm


@dataclass(frozen=True)
class Adapters:
    """The tier of a model directory, and those of its two adapter files that are served.

    Either file's tier serves both: `check_binding` refuses two that differ (the LoRA's own layout aside).
    """

    tier: Tier
    prerouter: Adapter | None
    lora: Adapter | None


def find_adapters(directory: Path, *, prerouter: bool, lora: bool, tier_name: str | None) -> Adapters:
    """Read the wanted adapter files of `directory` and find out the tier.

    The tier is the one in the files' contract; for files without one, and for serving without any, the
    built-in tier `tier_name` (or the one in the file's name). Raises Edge0Error naming the missing file and
    the flag that does without.
    """
    found = {kind: find_adapter(directory, kind, tier_name) for kind in KINDS}
    wanted: dict[Kind, bool] = {"prerouter": prerouter, "lora": lora}
    for kind in KINDS:
        if wanted[kind] and found[kind] is None:
            name = f"{kind}_edge0_{tier_name or '<tier>'}.safetensors"
            raise Edge0Error(
                f"{directory / name}: file not found; put the exported file there, or serve without it: --no-{kind}"
            )
    known = found["prerouter"] or found["lora"]  # a file that is not served still says the K it was made for
    if known is None and tier_name is None:
        raise Edge0Error(f"{directory}: no adapter file there names a tier; choose one with --tier")
    tier = known.tier if known else builtin_tier(str(tier_name))
    return Adapters(tier, found["prerouter"] if prerouter else None, found["lora"] if lora else None)


def find_checked_adapters(
    checkpoint: Checkpoint, base: BaseIdentity, serving: Serving, arm: str, allow_mismatch: bool
) -> Adapters:
    """The adapters that are served, which belong to this base and together."""
    directory = serving.adapters or checkpoint.directory
    needs_heads = arm_class(arm).needs_heads
    adapters = find_adapters(directory, prerouter=needs_heads, lora=serving.lora, tier_name=serving.tier_name)
    _check_supported(adapters.tier)
    checkpoint.check_architecture(adapters.tier)
    for note in check_binding(base, adapters.prerouter, adapters.lora, allow_mismatch):
        log.warning("%s", note)
    return adapters


def _check_supported(tier: Tier) -> None:
    if tier.router.kind == "softmax_topk" and tier.router.scaling != 1.0:
        raise Edge0Error(f"tier.router.scaling: {tier.router.scaling} isn't served for softmax_topk; it must be 1")
