"""`inspect`: from a model's config.json to a tier that trains and serves it.

What is proposed is a start, by the rules and in the proportions of the family's public tier (`Family.public_tier`), meant to be
edited.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import CONFIG_MAPPING

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Family, families
from edge0_runtime.contract.files import raise_problems, read_json
from edge0_runtime.contract.tier import Tier, builtin_tier
from edge0_train.base.layout import checkpoint_layout, expert_nbytes, nbytes
from edge0_train.base.load import describe, empty_model
from edge0_train.base.names import mlx_config

USAGE = """\
usage: python -m edge0_train inspect base=DIR [out=DIR] [k=N] [name=NAME]

Proposes a tier for a model of a supported family. Only its config.json is read; no weights.

  base=DIR   the model's directory
  out=DIR    writes DIR/tier/<name>.yaml, to be edited; without it the tier is printed
  k=N        experts served per token; without it, the share of the model's own that the public tier of its family serves
  name=NAME  the tier's name; without it, made of the directory's

  python -m edge0_train inspect base=models/OLMoE-1B-7B out=mine k=4 name=own
  python -m edge0_train --config-dir mine phase=all tier=own teacher.directory=models/OLMoE-1B-7B text.prompts=prompts.jsonl

What was measured to be good for the tier goes into a section `settings` of its file, as in configs/tier/nano.yaml."""
SETTINGS = ("base", "out", "k", "name")
GIB = 2**30


@dataclass(frozen=True)
class Proposal:
    """A tier for a model.

    Attributes:
        tier: the tier. facts: {what: how much}, sizes of base, experts and adapters for people.
    """

    tier: Tier
    facts: Mapping[str, str]

    def yaml(self) -> str:
        """The tier's file: the facts as comments, then the fields."""
        data = self.tier.to_dict()
        plain = {
            "kind": "softmax_topk",
            "n_group": 1,
            "topk_group": 1,
            "scaling": 1.0,
            "renormalise": True,
            "mass_k": 0,
            "sticky": {"bias": 0.0, "window": 0},
        }
        data["router"] = {key: value for key, value in data["router"].items() if key == "kind" or value != plain[key]}
        data |= {name: {"first": data[name][0], "last": data[name][-1]} for name in ("owners", "consumers")}
        order = [*(name for name in data if name not in ("lora", "architecture")), "lora", "architecture"]
        comments = [f"# {what}: {how}" for what, how in self.facts.items()]
        text = yaml.safe_dump({name: data[name] for name in order}, sort_keys=False, width=120)
        return "\n".join([*comments, text])


def inspect_command(arguments: Sequence[str]) -> None:
    """`inspect base=DIR [out=DIR] [k=N] [name=NAME]`, or the same after `phase=inspect`. Raises Edge0Error for anything else."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE)
        return
    called = "phase=inspect" if "phase=inspect" in arguments else "inspect"
    settings = dict(argument.partition("=")[::2] for argument in arguments if argument != called)
    unknown = sorted(settings.keys() - set(SETTINGS))
    if unknown or not settings.get("base"):
        raise Edge0Error(
            f"{called}: {', '.join(unknown) or 'base is missing'}; it takes base=DIR and, if wanted,"
            " out=DIR (writes DIR/tier/<name>.yaml), k=N, name=NAME"
        )
    if not re.fullmatch(r"[1-9]\d{0,6}|", settings.get("k", "")):
        raise Edge0Error(f"k: {settings['k']!r} is not a number of experts")
    proposal = propose(Path(settings["base"]), k=int(settings.get("k") or 0), name=settings.get("name", ""))
    if "out" not in settings:
        print(proposal.yaml())
        return
    path = Path(settings["out"]) / "tier" / f"{proposal.tier.name}.yaml"
    if path.exists():
        raise Edge0Error(f"out: {path} exists; delete it, or choose another name=")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(proposal.yaml(), encoding="utf-8")
    print(f"{path}\n  python -m edge0_train --config-dir {settings['out']} phase=all tier={proposal.tier.name} ...")
    for what, how in proposal.facts.items():
        print(f"  {what}: {how}")


def propose(directory: Path, *, k: int = 0, name: str = "") -> Proposal:
    """A tier for the model of `directory`.

    Args:
        k: served experts a token; 0: the share of the model's own that the public tier serves (35b: half, 8b: all).
        name: of the tier; empty: made of the directory's.

    Raises:
        Edge0Error: no config.json, a family that is not supported (says what is missing), or numbers that make no tier.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise Edge0Error(f"base: {directory} has no config.json; give a model's directory")
    found = read_json(path, "download it again")
    layout = family_of(found)
    config = mlx_config(layout, found)
    text = config.get("text_config", config)
    raise_problems(
        str(path),
        list(layout.disagreements(text)),
        "what is trained would not be what is served: choose another model",
    )
    public = builtin_tier(layout.public_tier)
    architecture = {
        field: layout.config_value(text, field, None)
        for field in (*layout.required, *layout.from_zero, *layout.optional)
    }
    missing = sorted(f for f in (*layout.required, *layout.from_zero) if architecture[f] is None)
    raise_problems(str(path), [f"{field}: missing" for field in missing], f"a {layout.name} config.json has them")
    architecture = {field: value for field, value in architecture.items() if value is not None}
    k = k or max(1, architecture["num_experts_per_tok"] * public.k // public.base_k)
    label = re.sub("[^A-Za-z0-9._-]+", "-", directory.resolve().name)
    tier = Tier.from_dict(
        {
            "name": name or f"{label.lower()}-k{k}",
            "model": label,
            "family": layout.name,
            "k": k,
            "router": layout.router_rule(text),
            "feature_topk": public.feature_topk,
            "first_token": public.first_token,
            **_owners(layout.moe_layers(architecture), architecture["num_hidden_layers"], public),
            "head_width": 512 if architecture["hidden_size"] >= 1024 else 2 * architecture["hidden_size"],
            "lora": {
                "r": public.lora.r,
                "alpha": public.lora.alpha,
                "targets": layout.default_targets(architecture),
            },
            "architecture": architecture,
        }
    )
    return Proposal(tier, _facts(tier, config))


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises Edge0Error that says what of an unsupported one is there and what is missing."""
    for layout in families():
        if layout.describes(config):
            return layout
    text = config.get("text_config")
    kinds = [config.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else None]
    kind = next((kind for kind in kinds if isinstance(kind, str)), None)
    if kind is None:
        raise Edge0Error("config.json: names no model_type; it is not a transformers or MLX model's")
    mlx_lm = importlib.util.find_spec("mlx_lm")
    classes = {
        "transformers": kind in CONFIG_MAPPING,
        "mlx-lm": bool(mlx_lm and (Path(str(mlx_lm.origin)).parent / "models" / f"{kind}.py").is_file()),
    }
    has = [f"{library} {'has' if there else 'has no'} model of that name" for library, there in classes.items()]
    raise Edge0Error(
        f"config.json model_type: {kind!r} is not supported; supported are"
        f" {', '.join(sorted({layout.hf_model_type for layout in families()}))}. {'; '.join(has)}. A family needs both, and"
        " a file in edge0_runtime/contract/families"
    )


def _owners(moe: Sequence[int], layers: int, public: Tier) -> dict[str, list[int]]:
    """Owners and the layers that they predict: after the public tier's share of layers, the last layer as it has it."""
    first = max(round(public.owners[0] / public.num_layers * layers), 1, min(moe, default=layers))
    last = layers - public.num_layers + public.consumers[-1]
    owners = [n for n in moe if first <= n < last and n + 1 in moe]
    if not owners:
        raise Edge0Error(
            f"num_hidden_layers: of {layers} layers none is left to predict; a tier needs at least 4 in all"
        )
    return {"owners": owners, "consumers": [n + 1 for n in owners]}


def _facts(tier: Tier, config: Mapping[str, Any]) -> dict[str, str]:
    text = config.get("text_config", config)
    targets = checkpoint_layout({key: value for key, value in config.items() if key != "quantization"}, tier.layout)
    stored = [nbytes(*kind) for target in targets for kind in target.stored().values()]
    experts = expert_nbytes(targets, tier)
    layers = len(tier.layout.moe_layers(tier.architecture))
    bf16 = describe(empty_model(text, tier.layout, torch.bfloat16))
    heads, lora = (2 * sum(a * b for a, b in shapes.values()) for shapes in (tier.head_tensors(), tier.lora_tensors()))
    return {
        "parameters": f"{bf16.parameters:,}, bf16 {bf16.bytes / GIB:.2f} GiB (to train on it, beside activations)",
        "int4 checkpoint": f"{sum(stored) / GIB:.2f} GiB in {len(stored):,} tensors, of which {experts / GIB:.2f} GiB experts",
        "one expert": f"{experts // (layers * tier.num_experts):,} B; a token reads at most"
        f" {tier.k * experts / tier.num_experts / GIB:.3f} GiB of {tier.k} x {layers} at K={tier.k}",
        "adapters": f"{len(tier.owners)} heads {heads:,} B, {len(tier.lora_modules())} LoRA pairs {lora:,} B",
    }
