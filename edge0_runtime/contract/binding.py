"""Which adapters may be served together, and on which base."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from edge0_runtime.contract.artifacts import Adapter, Kind
from edge0_runtime.contract.base_config import config_differences, flat
from edge0_runtime.contract.checkpoint import BaseIdentity
from edge0_runtime.contract.files import raise_problems
from edge0_runtime.contract.tier import Tier

SERVE_TOGETHER = "serve the files that were made together, or pass --allow-mismatch to serve these all the same"
TRAIN_TOGETHER = (
    "set inputs.prerouter and inputs.lora to files of one training, and base.directory to the base that it had"
)


def check_binding(
    base: BaseIdentity, prerouter: Adapter | None, lora: Adapter | None, allow_mismatch: bool | None = None
) -> list[str]:
    """Check that base, prerouter and LoRA were made for each other.

    Args:
        base: `Checkpoint.identity()` of the base to serve.
        prerouter, lora: the adapters to serve; None for one that is switched off.
        allow_mismatch: the `--allow-mismatch` flag; None where there is no such flag, in training.

    Returns:
        Sentences to show the user: mismatches that the flag let pass, and what cannot be checked of files that carry no
        contract, or one from before config.json was recorded.

    Raises Edge0Error naming both values and the flag if the base is another one, a field of its config.json that decides
    what it computes has changed, or the LoRA was trained with another prerouter, or without one. Two adapters whose tiers
    differ are refused even with the flag, since no one contract serves both; the LoRA's own layout may differ, for it does
    not concern the heads.
    """
    adapters = [adapter for adapter in (prerouter, lora) if adapter is not None]
    if prerouter is not None and lora is not None:
        raise_problems(
            f"{prerouter.path} and {lora.path} belong to different tiers",
            [f"{name}: {one} and {two}" for name, one, two in tier_differences("prerouter", prerouter.tier, lora.tier)],
            "serve two adapters of one tier",
        )
    mismatches = [mismatch for adapter in adapters for mismatch in _base_mismatches(adapter, base)]
    mismatches += _prerouter_mismatch(prerouter, lora)
    if not allow_mismatch:
        raise_problems(
            "base, prerouter and LoRA do not belong together",
            mismatches,
            SERVE_TOGETHER if allow_mismatch is not None else TRAIN_TOGETHER,
        )
    return _unchecked(adapters) + [f"--allow-mismatch: {mismatch}" for mismatch in mismatches]


def _base_mismatches(adapter: Adapter, base: BaseIdentity) -> list[str]:
    trained = adapter.provenance
    if trained is None:
        return []
    mismatches = []
    if trained.base_fingerprint != base.fingerprint:
        mismatches.append(
            f"{adapter.path} was trained for base {trained.base_fingerprint}, the base served is {base.fingerprint}"
        )
    changed = [] if trained.base_config is None else config_differences(trained.base_config, base.config)
    return mismatches + [f"{adapter.path} was trained on another base: {change}" for change in changed]


def _prerouter_mismatch(prerouter: Adapter | None, lora: Adapter | None) -> list[str]:
    if prerouter is None or lora is None or lora.provenance is None:
        return []
    trained_with = lora.provenance.prerouter_sha256
    if trained_with == prerouter.sha256:
        return []
    with_what = f"prerouter {trained_with}" if trained_with else "no prerouter"
    return [f"{lora.path} was trained with {with_what}, the prerouter served is {prerouter.sha256}"]


def _unchecked(adapters: Sequence[Adapter]) -> list[str]:
    """What nobody can check, a sentence each."""
    notes = [
        f"{adapter.path}: carries no contract, so its binding to the base cannot be checked"
        for adapter in adapters
        if adapter.provenance is None
    ]
    older = [str(a.path) for a in adapters if a.provenance is not None and a.provenance.base_config is None]
    if older:
        notes.append(
            f"{' and '.join(older)}: from before adapters recorded the base's config.json, so a changed field of it"
            " (rope_theta, ...) cannot be told"
        )
    return notes


def tier_differences(kind: Kind, one: Tier, two: Tier) -> list[tuple[str, Any, Any]]:
    """(field, its value in either) of everything that differs between two tiers and that a file of `kind` depends on.

    Heads depend on all of a tier but the LoRA's layout. A LoRA depends on all of it: on the heads, whose bytes its
    provenance names, through the routing that it was trained under. Nested fields are named by dots (`lora.r`).
    """
    if kind == "prerouter":
        two = dataclasses.replace(two, lora=one.lora)
    first, second = flat(one.to_dict()), flat(two.to_dict())
    names = dict.fromkeys([*first, *second])
    return [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]
