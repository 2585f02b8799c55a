"""Which adapters may be served together, on which base, and whether the public project's runtime would serve them."""

from __future__ import annotations

import dataclasses

from edge0_runtime.contract.artifacts import Adapter
from edge0_runtime.contract.files import raise_problems
from edge0_runtime.contract.heads import upstream_head_problems
from edge0_runtime.contract.tier import Tier, builtin_tier, builtin_tier_names

UPSTREAM_TIERS = ("35b", "8b")
UPSTREAM_R, UPSTREAM_ALPHA = 16, 32  # compiled into the public runtime, which reads no metadata


SERVE_THEM = "serve the files that were made together, or pass --allow-mismatch to serve these all the same"


def check_binding(
    base_fingerprint: str,
    prerouter: Adapter | None,
    lora: Adapter | None,
    allow_mismatch: bool = False,
    fix: str = SERVE_THEM,
) -> list[str]:
    """Check that base, prerouter and LoRA were made for each other.

    Args:
        base_fingerprint: `Checkpoint.fingerprint()` of the base to serve.
        prerouter, lora: the adapters to serve; None for one that is switched off.
        allow_mismatch: the `--allow-mismatch` flag.
        fix: what a refusal advises: the caller's command may have no such flag.

    Returns:
        Sentences to show the user: mismatches that the flag let pass, and files whose binding cannot be
        checked since they carry no contract.

    Raises Edge0Error naming both values and the flag if the base is another one, or the LoRA was trained with
    another prerouter, or without one. Two adapters whose tiers differ are refused even with the flag, since
    no one contract serves both; the LoRA's own layout may differ, for it does not concern the heads.
    """
    if prerouter is not None and lora is not None:
        one, two = (dataclasses.replace(adapter.tier, lora=lora.tier.lora) for adapter in (prerouter, lora))
        differing = [f.name for f in dataclasses.fields(Tier) if getattr(one, f.name) != getattr(two, f.name)]
        raise_problems(
            f"{prerouter.path} and {lora.path} belong to different tiers",
            [f"{name}: {getattr(one, name)} and {getattr(two, name)}" for name in differing],
            "serve two adapters of one tier",
        )
    notes = []
    mismatches = []
    for adapter in (prerouter, lora):
        if adapter is None:
            continue
        if adapter.provenance is None:
            notes.append(f"{adapter.path}: carries no contract, so its binding to the base cannot be checked")
        elif adapter.provenance.base_fingerprint != base_fingerprint:
            trained = adapter.provenance.base_fingerprint
            mismatches.append(f"{adapter.path} was trained for base {trained}, the base served is {base_fingerprint}")
    if prerouter is not None and lora is not None and lora.provenance is not None:
        trained_with = lora.provenance.prerouter_sha256
        if trained_with != prerouter.sha256:
            with_what = f"prerouter {trained_with}" if trained_with else "no prerouter"
            mismatches.append(f"{lora.path} was trained with {with_what}, the prerouter served is {prerouter.sha256}")
    if not allow_mismatch:
        raise_problems(
            "base, prerouter and LoRA do not belong together",
            mismatches,
            fix,
        )
    return notes + [f"--allow-mismatch: {mismatch}" for mismatch in mismatches]


def upstream_problems(adapter: Adapter) -> list[str]:
    """Why the public project's runtime would not serve this file as trained; [] if it would.

    That runtime reads no metadata: tier, K, router, layers and alpha / r are compiled in, and our built-in
    tiers of the same names hold the same values (source: github.com/Edge0-AI/Edge0, `adapters/lora.py`,
    `prerouter/install.py`).
    """
    problems = []
    dtypes = sorted({str(array.dtype) for array in adapter.tensors.values()} - {"float16"})
    if dtypes:
        problems.append(f"tensors are {', '.join(dtypes)}; it serves F16 and cannot read BF16")
    tier = adapter.tier
    if adapter.kind == "lora" and (tier.lora.r, tier.lora.alpha) != (UPSTREAM_R, UPSTREAM_ALPHA):
        problems.append(
            f"r = {tier.lora.r} and alpha = {tier.lora.alpha:g}; "
            f"it scales by {UPSTREAM_ALPHA} / {UPSTREAM_R} whatever the file says"
        )
    if tier.router.mass_k:
        problems.append(
            f"router.mass_k is {tier.router.mass_k}: weights are divided by a wider mass; it divides by that of the K chosen"
        )
    problems += upstream_head_problems(tier.head, tier.head_inputs)
    if tier.name not in UPSTREAM_TIERS or tier.name not in builtin_tier_names():
        return [*problems, f"tier {tier.name} is not one of its own ({', '.join(UPSTREAM_TIERS)})"]
    own, tier = builtin_tier(tier.name), dataclasses.replace(tier, router=tier.router.plain)
    for field in ("architecture", "k", "router", "feature_topk", "first_token", "owners", "consumers"):
        if getattr(tier, field) != getattr(own, field):
            problems.append(f"{field} is {getattr(tier, field)}; it has {getattr(own, field)}")
    return problems
