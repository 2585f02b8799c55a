"""What the public project's runtime would do with a base and its adapters (docs/artifacts.md "The public project's runtime").

It reads no metadata. It has an engine for the family of each of its two tiers, and what is compiled into them is what our
built-in tiers of the same names say; numbers of layers and widths it takes from config.json and the tensors.
Source: github.com/Edge0-AI/Edge0 of September 2026, `python/src/edge0`: `models/`, `engine/`, `prerouter/`, `streaming/layer.py`,
`adapters/lora.py`.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

from edge0_runtime.contract.artifacts import Adapter
from edge0_runtime.contract.base_config import mathematical_fields
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.family import PROJECTIONS, QUANTISED_PARTS
from edge0_runtime.contract.fields import runs
from edge0_runtime.contract.files import shown
from edge0_runtime.contract.heads import upstream_head_problems
from edge0_runtime.contract.links import ABSORBED, ABSORBED_HALVES
from edge0_runtime.contract.tier import Tier, builtin_tier

UPSTREAM_TIERS = ("35b", "8b")
UPSTREAM_R, UPSTREAM_ALPHA = 16, 32
ONE_FILE = "model.safetensors"
_SCALES, _BITS, _GROUP = "BF16", 4, 64  # of the experts


def upstream_problems(adapter: Adapter) -> list[str]:
    """Why the public runtime would not serve this file as trained, on a base that it can read; [] if it would."""
    problems = []
    dtypes = sorted({str(array.dtype) for array in adapter.tensors.values()} - {"float16"})
    if dtypes:
        problems.append(f"tensors are {', '.join(dtypes)}; it serves F16 and cannot read BF16")
    tier = adapter.tier
    if adapter.kind == "lora" and tier.lora.alpha / tier.lora.r != UPSTREAM_ALPHA / UPSTREAM_R:
        problems.append(
            f"r = {tier.lora.r} and alpha = {tier.lora.alpha:g}; "
            f"it scales by {UPSTREAM_ALPHA} / {UPSTREAM_R} whatever the file says"
        )
    if tier.router.mass_k:
        problems.append(
            f"router.mass_k is {tier.router.mass_k}: weights are divided by a wider mass; it divides by that of the K chosen"
        )
    if tier.router.sticky:
        problems.append(
            f"router.sticky is bias {tier.router.sticky.bias:g}, window {tier.router.sticky.window}: experts that ran a moment"
            " ago are preferred; it chooses by the prediction alone"
        )
    problems += upstream_head_problems(tier.head, tier.head_inputs)
    own = _engine(tier)
    if own is None:
        return [*problems, _no_engine(tier)]
    name = own.file_name(adapter.kind)
    if adapter.path.name != name:
        problems.append(f"the file is {adapter.path.name}; it opens {name} and no other")
    mine, its = _compiled_in(tier), _compiled_in(own)
    problems += [f"{field} is {mine[field]}; it has {its[field]}" for field in mine if mine[field] != its[field]]
    return problems + (_layer_problems(tier, own) if adapter.kind == "prerouter" else [])


def upstream_base_problems(checkpoint: Checkpoint, tier: Tier) -> list[str]:
    """Why the public runtime would not read this base of the tier's family, or would misread it; [] if it would."""
    own = _engine(tier)
    if own is None:
        return [_no_engine(tier)]
    layout, names = tier.layout, checkpoint.entries.keys()
    problems = []
    if checkpoint.text_config().get("tie_word_embeddings") or not any(
        name.endswith("lm_head.weight") for name in names
    ):
        problems.append("the output head is the embedding (tie_word_embeddings); it needs an lm_head.weight of its own")
    keys = product(layout.moe_layers(tier.architecture), PROJECTIONS, QUANTISED_PARTS)
    experts = [f"{layout.layer_path(n)}.{layout.published_experts}.{name}.{part}" for n, name, part in keys]
    missing = next((name for name in experts if name not in names), None)
    if missing:
        problems.append(
            f"{missing} is missing, where it stops; phase=quantize writes its names with base.names=published"
        )
    halves = sorted({half for half in ABSORBED_HALVES for name in names if name.endswith(f".{half}.weight")})
    if halves:
        problems.append(
            f"{ABSORBED} is absorbed into {' and '.join(halves)}, which it leaves out without a word, computing with random"
            " numbers; phase=quantize writes it whole with base.names=published"
        )
    files = sorted({header.path.name for header, _ in checkpoint.entries.values()})
    if layout.one_file and files != [ONE_FILE]:
        problems.append(
            f"the base lies in {', '.join(files[:3])}{', ...' * (len(files) > 3)}; it reads {ONE_FILE} alone"
        )
    scales = {checkpoint.entries[name][1].dtype for name in experts if name in names and not name.endswith(".weight")}
    if scales - {_SCALES}:
        problems.append(f"scales of the experts are {', '.join(sorted(scales))}; it takes the bytes for {_SCALES}")
    fields = mathematical_fields(checkpoint.config)
    bits, group = (fields.get(f"quantization.{name}") for name in ("bits", "group_size"))
    if (bits, group) != (_BITS, _GROUP):
        problems.append(f"quantization is {shown(bits)} bits in groups of {shown(group)}; it has {_BITS} and {_GROUP}")
    return problems


def _engine(tier: Tier) -> Tier | None:
    """The public tier whose engine is of the tier's family."""
    return next((own for own in map(builtin_tier, UPSTREAM_TIERS) if own.family == tier.family), None)


def _compiled_in(tier: Tier) -> dict[str, Any]:
    """What an engine has of its tier, whatever the files say; the layers aside."""
    return {
        "k": tier.k,
        tier.layout.num_experts: tier.num_experts,
        **{f"router.{name}": value for name, value in dataclasses.asdict(tier.router.plain).items()},
        "feature_topk": tier.feature_topk,
        "first_token": tier.first_token,
    }


def _no_engine(tier: Tier) -> str:
    families = [builtin_tier(name).family for name in UPSTREAM_TIERS]
    return f"family is {tier.family}; it has engines for {' and '.join(families)} alone"


def _layer_problems(tier: Tier, own: Tier) -> list[str]:
    """What differs in the layers that are predicted; the softmax engine's go with the model's depth, the other's are fixed."""
    problems = []
    mine, needed, consumers = tier.consumers, own.owners, own.consumers
    if own.router.kind == "softmax_topk":
        last = tier.num_layers - 1
        needed, consumers = tuple(range(own.owners[0], last)), tuple(range(own.start_layer, last))
        if last in mine:
            problems.append(f"layer {last} is predicted; it never predicts the last layer")
            mine = tuple(layer for layer in mine if layer != last)
    if mine != consumers:
        problems.append(f"predicted layers are {runs(mine)}; it predicts {runs(consumers)}")
    headless = [layer for layer in needed if layer not in tier.owners]
    if headless:
        problems.append(f"layers without a head: {runs(headless)}; it stops where one is missing")
    return problems
