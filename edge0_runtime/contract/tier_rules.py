"""What must hold in a tier as a whole: its fields fit each other and the family's architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.fields import choice, count
from edge0_runtime.contract.heads import HEAD_KINDS
from edge0_runtime.contract.timeline import FEATURE_TOPK_KINDS, FIRST_TOKEN_RULES

if TYPE_CHECKING:
    from edge0_runtime.contract.tier import Tier

MAX_LAYERS = 1024
"""Bound on what a stranger's file may ask us to build."""
MAX_WINDOW = 64
"""Bound on `Sticky.window`: as many sets are carried from token to token."""
ROUTER_KINDS = ("softmax_topk", "sigmoid_group")


def validate(tier: Tier) -> None:
    """Raise Edge0Error that names the first field that does not fit, its value and the fix."""
    _check_known(tier)
    _check_architecture(tier)
    _check_router(tier)
    _check_layers(tier)
    _check_targets(tier)


def _check_known(tier: Tier) -> None:
    layout = tier.layout
    missing = [name for name in (*layout.required, *layout.from_zero) if name not in tier.architecture]
    if missing:
        raise Edge0Error(
            f"tier.architecture: {', '.join(missing)} missing for family {tier.family}; copy from the base's config.json"
        )
    choice("router.kind", tier.router.kind, ROUTER_KINDS)
    choice("feature_topk", tier.feature_topk, FEATURE_TOPK_KINDS)
    choice("first_token", tier.first_token, FIRST_TOKEN_RULES)
    choice("head", tier.head, tuple(HEAD_KINDS))


def _check_architecture(tier: Tier) -> None:
    layout = tier.layout
    for name in layout.required:
        count(f"architecture.{name}", tier.architecture[name])
    for name in layout.from_zero:
        count(f"architecture.{name}", tier.architecture[name], least=0)
    for name in layout.optional:
        if tier.architecture.get(name) is not None:
            count(f"architecture.{name}", tier.architecture[name])
    if tier.num_layers > MAX_LAYERS:
        raise Edge0Error(f"tier.architecture.num_hidden_layers: {tier.num_layers} is more than {MAX_LAYERS}")
    if tier.k > tier.num_experts:
        raise Edge0Error(
            f"tier.k: {tier.k} is larger than the {tier.num_experts} experts of {tier.model}; lower tier.k"
        )


def _check_router(tier: Tier) -> None:
    router = tier.router
    if not router.renormalise and tier.layout.renormalises is None:
        raise Edge0Error(f"tier.router.renormalise: {tier.family} always renormalises; it must be true")
    if router.mass_k and (router.kind != "softmax_topk" or not tier.k <= router.mass_k <= tier.num_experts):
        raise Edge0Error(
            f"tier.router.mass_k: {router.mass_k} must be 0, or with softmax_topk from k = {tier.k} to the"
            f" {tier.num_experts} experts"
        )
    _check_sticky(tier)
    if router.kind == "sigmoid_group" and tier.num_experts % router.n_group:
        raise Edge0Error(f"tier.router.n_group: {router.n_group} does not divide {tier.num_experts} experts")
    if not 1 <= router.topk_group <= router.n_group:
        raise Edge0Error(f"tier.router.topk_group: {router.topk_group} must lie in 1..n_group = {router.n_group}")
    group_room = router.topk_group * (tier.num_experts // router.n_group)
    if tier.k > group_room:
        raise Edge0Error(
            f"tier.k: {tier.k} does not fit the {group_room} experts of topk_group = {router.topk_group} groups"
        )


def _check_sticky(tier: Tier) -> None:
    router, sticky = tier.router, tier.router.sticky
    if bool(sticky.bias) != bool(sticky.window) or sticky.window > MAX_WINDOW:
        raise Edge0Error(
            f"tier.router.sticky: bias {sticky.bias:g} and window {sticky.window} must both be 0, or a bias above 0 and a"
            f" window in 1..{MAX_WINDOW}"
        )
    if sticky and router.mass_k:
        raise Edge0Error(
            f"tier.router.sticky: a chosen expert may lie outside router.mass_k = {router.mass_k}; set one of both to 0"
        )
    if sticky and router.kind == "softmax_topk" and not router.renormalise:
        raise Edge0Error(
            "tier.router.sticky: mlx-lm's block takes weights that aren't renormalised from the logits that choose;"
            " it needs router.renormalise = true"
        )


def _check_layers(tier: Tier) -> None:
    moe = set(tier.layout.moe_layers(tier.architecture))
    if not moe:
        raise Edge0Error(
            f"tier.architecture: none of its {tier.num_layers} layers has routed experts; choose a MoE base"
        )
    if not tier.owners or list(tier.owners) != sorted(set(tier.owners)):
        raise Edge0Error(f"tier.owners: {list(tier.owners)} must be layer indices, rising and each once")
    outside = [n for n in tier.owners if n not in moe or n + 1 not in moe]
    if outside:
        raise Edge0Error(
            f"tier.owners: {outside} of a model with {tier.num_layers} layers; an owner and the layer after it must both"
            f" have routed experts: choose owners from {min(moe)}..{max(moe) - 1}"
        )
    if not tier.consumers or list(tier.consumers) != sorted(set(tier.consumers)):
        raise Edge0Error(f"tier.consumers: {list(tier.consumers)} must be layer indices, rising and each once")
    orphans = [n for n in tier.consumers if n - 1 not in tier.owners]
    if orphans:
        raise Edge0Error(f"tier.consumers: {orphans} have no head; the layer before a consumer must be in tier.owners")


def _check_targets(tier: Tier) -> None:
    layout = tier.layout
    known = {path.split(".layers.", 1)[1].split(".", 1)[1] for path in layout.linear_modules(tier.architecture)}
    strangers = [target for target in tier.lora.targets if target not in known]
    if strangers or not tier.lora.targets:
        raise Edge0Error(
            f"tier.lora.targets: {strangers} match no module of {tier.family}; choose from {', '.join(sorted(known))}"
        )
