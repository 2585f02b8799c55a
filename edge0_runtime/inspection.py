"""What can be said of a tier or a model directory without loading weights: plain data, and text for people.

Reads headers, adapters and a few MiB of the base (its fingerprint); no MLX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from edge0_runtime.activations import token_bytes
from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind, find_adapter
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.checkpoint import BaseIdentity, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import PROJECTIONS, QUANTISED_PARTS, family
from edge0_runtime.contract.fields import runs
from edge0_runtime.contract.public_runtime import upstream_base_problems, upstream_problems
from edge0_runtime.contract.strict_safetensors import read_header
from edge0_runtime.contract.tier import Tier

F16_BYTES = 2


def describe_tier(tier: Tier) -> dict[str, Any]:
    """A tier's fields, and every tensor of its two files with its shape; payload bytes are those of F16."""
    heads, lora = tier.head_tensors(), tier.lora_tensors()
    return tier.to_dict() | {
        "heads": {"count": len(tier.owners), "payload_bytes": _payload(heads), "tensors": _shapes(heads)},
        "lora_file": {
            "pairs": len(tier.lora_modules()),
            "payload_bytes": _payload(lora),
            "tensors": _shapes(lora),
        },
    }


def tier_text(data: Mapping[str, Any]) -> str:
    """`describe_tier` for people."""
    heads, lora = data["heads"], data["lora_file"]
    lines = [
        tier_line(data),
        f"router {_fields(data['router'])}",
        f"one-hots {data['feature_topk']}, first token {data['first_token']}" + ", token-aware" * data["token_aware"],
        f"owners {runs(data['owners'])}",
        f"consumers {runs(data['consumers'])}",
        "",
        f"heads {heads['count']}, {heads['payload_bytes']} B",
        *_tensor_lines(heads["tensors"]),
        "",
        f"LoRA {lora['pairs']} pairs, {lora['payload_bytes']} B",
        f"r {data['lora']['r']}, alpha {data['lora']['alpha']:g}",
        *_tensor_lines(lora["tensors"]),
    ]
    return "\n".join(lines)


def tier_line(data: Mapping[str, Any]) -> str:
    """One line of the list of tiers."""
    arch = data["architecture"]
    experts = f"K {arch['num_experts_per_tok']} -> {data['k']} of {arch[family(data['family']).num_experts]} experts"
    return f"{data['name']}: {data['model']} ({data['family']}), {arch['num_hidden_layers']} layers, {experts}"


def inspect(model_dir: Path, tier_name: str | None = None, adapters_dir: Path | None = None) -> dict[str, Any]:
    """Base, adapters, whether they belong together, and what the public project's runtime would not load.

    The adapter files lie beside the base, or in `adapters_dir`.

    Raises Edge0Error where the base or an adapter file is damaged; whole files that do not belong together
    are reported.
    """
    checkpoint = Checkpoint.open(model_dir)
    identity = checkpoint.identity()
    adapters = {kind: find_adapter(adapters_dir or model_dir, kind, tier_name) for kind in KINDS}
    tiers = [adapter.tier for adapter in adapters.values() if adapter is not None]
    problems, unchecked = _binding(checkpoint, identity, adapters)
    return {
        "model_dir": str(model_dir),
        "adapters_dir": str(adapters_dir or model_dir),
        "base": _base(checkpoint, identity, tiers[0] if tiers else None),
        **{kind: None if adapter is None else _adapter(adapter) for kind, adapter in adapters.items()},
        "problems": problems,
        "unchecked": unchecked,
    }


def inspection_text(data: Mapping[str, Any]) -> str:
    """`inspect` for people."""
    base = data["base"]
    lines = [f"base {data['model_dir']}"]
    beside = data["adapters_dir"] == data["model_dir"]
    lines += [f"  {key}: {_value(value)}" for key, value in base.items() if key != "upstream_problems"]
    lines += _upstream_lines(base.get("upstream_problems"))
    for kind in KINDS:
        adapter = data[kind]
        if adapter is None:
            lines += ["", f"{kind}: no file"]
            continue
        where = "" if beside else f" in {data['adapters_dir']}"
        lines += ["", f"{kind} {adapter['file']}{where}"]
        plain = {k: v for k, v in adapter.items() if k not in ("file", "provenance", "upstream_problems")}
        lines += [f"  {key}: {_value(value)}" for key, value in plain.items()]
        lines += _provenance_lines(adapter["provenance"])
        lines += _upstream_lines(adapter["upstream_problems"])
    verdict = "no" if data["problems"] else "unknown" if data["unchecked"] else "yes"
    lines += ["", f"belong together: {verdict}"]
    return "\n".join(lines + [f"  {reason}" for reason in (*data["problems"], *data["unchecked"])])


# -- parts of the data -------------------------------------------------------------------------------------


def _base(checkpoint: Checkpoint, identity: BaseIdentity, tier: Tier | None) -> dict[str, Any]:
    sizes = {name: entry.end - entry.start for name, (_, entry) in checkpoint.entries.items()}
    stated = checkpoint.config.get("quantization")
    quantization = stated if isinstance(stated, dict) else {}
    overrides = [name for name, value in quantization.items() if isinstance(value, Mapping)]
    data = {
        "model_type": checkpoint.config.get("model_type"),
        "fingerprint": identity.fingerprint,
        "quantization": {k: v for k, v in quantization.items() if k not in overrides} or None,
        "quantization_overrides": len(overrides),
        "shards": sorted({header.path.name for header, _ in checkpoint.entries.values()}),
        "tensors": len(sizes),
        "payload_bytes": sum(sizes.values()),
        "template_hash": checkpoint.template_hash(),
    }
    if tier is not None:
        layers = tier.layout.moe_layers(tier.architecture)
        names = {
            name for key in product(layers, PROJECTIONS, QUANTISED_PARTS) for name in tier.layout.expert_tensors(*key)
        }
        data["expert_bytes"] = expert_bytes = sum(size for name, size in sizes.items() if name in names)
        # In 16 bits; where the network computes in float32, twice as much.
        context_bytes = token_bytes(tier, 1000, float32=False)
        one_expert = expert_bytes / len(layers) / tier.num_experts
        data["context_bytes_per_1000_tokens"] = context_bytes
        data["experts_per_1000_tokens"] = round(context_bytes / one_expert, 2) if one_expert else None
        data["names"] = " and ".join(tier.layout.names_of(checkpoint.entries)) or None
        data["upstream_problems"] = upstream_base_problems(checkpoint, tier)
    return data


def _adapter(adapter: Adapter) -> dict[str, Any]:
    tier, header = adapter.tier, read_header(adapter.path)
    data = {
        "file": adapter.path.name,
        "sha256": adapter.sha256,
        "contract": "in the file" if adapter.has_contract else f"none; built-in tier {tier.name}",
        "tier": tier.name,
        "model": tier.model,
        "k": tier.k,
        "tensors": len(header.entries),
        "dtypes": sorted({entry.dtype for entry in header.entries.values()}),
        "payload_bytes": sum(entry.end - entry.start for entry in header.entries.values()),
    }
    if adapter.kind == "prerouter":
        data |= {
            "router": _fields(tier.to_dict()["router"]),
            "feature_topk": tier.feature_topk,
            "first_token": tier.first_token,
            "token_aware": tier.token_aware,
            "owners": list(tier.owners),
            "consumers": list(tier.consumers),
        }
    else:
        data |= {"r": tier.lora.r, "alpha": tier.lora.alpha, "targets": list(tier.lora.targets)}
    provenance = None if adapter.provenance is None else adapter.provenance.to_dict()
    return data | {"provenance": provenance, "upstream_problems": upstream_problems(adapter)}


def _binding(
    checkpoint: Checkpoint, identity: BaseIdentity, adapters: Mapping[Kind, Adapter | None]
) -> tuple[list[str], list[str]]:
    """Why the engine would refuse the directory, and what nobody can check: the binding of files without a contract."""
    problems = [f"{kind}: no file" for kind, adapter in adapters.items() if adapter is None]
    checks: list[Callable[[], list[str] | None]] = [
        partial(checkpoint.check_architecture, adapter.tier) for adapter in adapters.values() if adapter
    ]
    checks.append(partial(check_binding, identity, adapters["prerouter"], adapters["lora"], allow_mismatch=False))
    unchecked: list[str] = []
    for check in checks:
        try:
            unchecked += check() or []
        except Edge0Error as problem:
            problems.append(str(problem))
    return list(dict.fromkeys(problems)), unchecked  # both tiers may differ from the base in the same way


# -- text --------------------------------------------------------------------------------------------------


def _payload(tensors: Mapping[str, tuple[int, int]]) -> int:
    return F16_BYTES * sum(math.prod(shape) for shape in tensors.values())


def _shapes(tensors: Mapping[str, tuple[int, int]]) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in tensors.items()}


def _tensor_lines(tensors: Mapping[str, list[int]]) -> list[str]:
    return [f"  {name} {shape}" for name, shape in tensors.items()]


def _upstream_lines(problems: list[str] | None) -> list[str]:
    """What the public runtime would do with a part; nothing where no tier says which model it is."""
    if problems is None:
        return []
    return [f"  not loadable upstream: {problem}" for problem in problems] or ["  loads upstream: yes"]


def _provenance_lines(provenance: Mapping[str, Any] | None) -> list[str]:
    if provenance is None:
        return ["  provenance: none"]
    lines = [f"  {key}: {_value(value)}" for key, value in provenance.items() if key not in ("phases", "base_config")]
    for phase in provenance["phases"]:
        lines.append(f"  phase {phase['phase']} ({phase['run_id']}, {phase['time']})")
        lines.append(f"    {_fields({k: phase[k] for k in ('seed', 'steps', 'tokens', 'rows')})}")
        lines.append(f"    metrics: {_fields(phase['metrics'])}")
        lines += [f"    parent {name}: {value}" for name, value in phase["parents"].items()]
    return lines


def _fields(values: Mapping[str, Any]) -> str:
    shown = {key: f"({_fields(value)})" if isinstance(value, Mapping) else value for key, value in values.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return _fields(value)
    if isinstance(value, list):
        numbers = all(type(item) is int for item in value)
        return runs(value) if numbers else ", ".join(map(str, value))
    return "none" if value is None else str(value)
