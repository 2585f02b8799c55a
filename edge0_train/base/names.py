"""Module names and config.json of a family, in transformers' spelling and in MLX's (the data: `contract/families`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Family, family
from edge0_runtime.contract.files import read_json, shown
from edge0_runtime.contract.links import Config, Link
from edge0_runtime.contract.tier import Tier


def transformers_module(family_name: str, mlx_module: str) -> str:
    """`language_model.model.layers.3.self_attn.q_proj` -> `model.layers.3.self_attn.q_proj`.

    Raises:
        Edge0Error: no linear module of that name, or one that transformers fuses (routed experts).
    """
    link = family(family_name).link_of_mlx(f"{mlx_module}.weight")
    return _linear(family_name, mlx_module, () if link is None else (link,)).hf.removesuffix(".weight")


def mlx_module(family_name: str, hf_module: str, config: Config) -> str:
    """The way back of `transformers_module`, in a model of that config. Raises Edge0Error as that does."""
    links = family(family_name).links_of_hf(f"{hf_module}.weight", config)
    return _linear(family_name, hf_module, links).mlx[0].removesuffix(".weight")


def _linear(family_name: str, path: str, links: Sequence[Link]) -> Link:
    for link in links:
        if link.linear:
            return link
    raise Edge0Error(
        f"module path {path!r}: {family_name} has no linear module of that name; "
        "the modules that a LoRA may sit on are those of Tier.lora_modules()"
    )


def mlx_config(layout: Family, config: Config) -> dict[str, Any]:
    """config.json that mlx-lm and transformers both read, from a transformers or MLX model's of that family.

    Raises Edge0Error for one that is nested too deeply for transformers to copy.
    """
    try:
        return layout.mlx_config(config, lambda kind, fields: own_fields(AutoConfig.for_model(kind, **fields)))
    except RecursionError as error:
        raise Edge0Error("config.json: nested too deeply; download it again") from error


def read_model_config(file: Path, layout: Family, setting: str) -> dict[str, Any]:
    """`mlx_config` of the config.json that `setting` leads to. Raises Edge0Error: it is not JSON, or not of that family."""
    found = read_json(file, "download it again")
    if not layout.describes(found):
        kind = shown(found.get("model_type"))
        raise Edge0Error(
            f"{setting}: {file} is of model_type {kind}, not of {layout.name}; choose the matching tier or model"
        )
    try:
        return mlx_config(layout, found)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise Edge0Error(
            f"{setting}: {file} is not a {layout.name} model's config.json ({error}); download it again"
        ) from error


def is_quantised(config: Config) -> bool:
    """Whether a config.json, of either library, says that the weights are codes."""
    text = config.get("text_config")
    parts = (config, text) if isinstance(text, Mapping) else (config,)
    return any(part.get(name) for part in parts for name in ("quantization", "quantization_config"))


def tier_config(tier: Tier, **fields: Any) -> PreTrainedConfig:
    """transformers' config of the tier's architecture and router, with `fields` and the library's defaults elsewhere."""
    aliases = tier.layout.aliases
    named = {aliases.get(name, name): value for name, value in fields.items()}
    return AutoConfig.for_model(tier.layout.hf_model_type, **(tier.config_fields() | named))


def own_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as a dict, without the fields that every model type has."""
    anyones = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    return {name: value for name, value in config.to_dict().items() if name not in anyones}
