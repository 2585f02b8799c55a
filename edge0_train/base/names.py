"""One table per family: transformers' parameters <-> the tensors of an MLX checkpoint.

A row (`Link`) is one transformers parameter, the MLX tensors it is made of, and what differs in value or
axes. Everything else here reads the table, in either direction. Adding a family adds a `FamilyNames`.
Sources: mlx-lm's `sanitize` of the model class, transformers' state_dict; the parity tests check by logits.

Three kinds of names occur. For layer 3's experts:
    transformers   model.layers.3.mlp.experts.gate_up_proj
    on disk (HF)   the same, or below `model.language_model.`, or ...mlp.experts.7.{gate,up}_proj.weight
    MLX            language_model.model.layers.3.mlp.switch_mlp.{gate,up}_proj.weight [, .scales, .biases]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from edge0_runtime.contract.errors import Edge0Error

Change = Literal["same", "one_centred", "conv_axes"]
Stored = Literal["float", "int4", "int8"]


@dataclass(frozen=True)
class Link:
    """One transformers parameter and the MLX tensors it is made of; `{n}` stands for the layer.

    Attributes:
        hf: the parameter's name in transformers' state_dict.
        mlx: MLX tensor names; several are the rows (dimension -2) of one parameter, in this order.
        change: one_centred: MLX holds w + 1 for transformers' w; conv_axes: [C, k, 1] for [C, 1, k].
        stored: how our int4 checkpoints hold it (mlx-lm's quant_predicate). Reading goes by what the file
            really holds.
        float32: keep float32 in a bfloat16 base. For vectors that transformers uses in float32 anyway and
            that bfloat16 cannot always hold exactly: A_log, and w of a stored w + 1.
        uncast: mlx-lm's convert leaves it in the source's dtype (cast_predicate).
        per_expert: name on disk of one expert's part of each `mlx` tensor, `{e}` for the expert; () if not an
            expert.
    """

    hf: str
    mlx: tuple[str, ...]
    change: Change = "same"
    stored: Stored = "float"
    float32: bool = False
    uncast: bool = False
    per_expert: tuple[str, ...] = ()

    def at(self, layer: int) -> Link:
        """This row for one layer."""
        return replace(
            self,
            hf=self.hf.replace("{n}", str(layer)),
            mlx=tuple(name.replace("{n}", str(layer)) for name in self.mlx),
            per_expert=tuple(name.replace("{n}", str(layer)) for name in self.per_expert),
        )

    def hf_shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Shape of the parameter, from the shapes of its MLX tensors (unpacked: [..., out, in])."""
        first = tuple(shapes[0])
        if self.change == "conv_axes":
            return (first[0], first[2], first[1])
        if len(shapes) == 1:
            return first
        return (*first[:-2], sum(shape[-2] for shape in shapes), first[-1])

    def to_hf(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter from its MLX tensors, in their dtype; exact for one_centred only in float32."""
        if self.change == "one_centred":
            return tensors[0] - 1
        if self.change == "conv_axes":
            return tensors[0].movedim(2, 1).contiguous()
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=-2)

    def to_mlx(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The MLX tensors of a parameter, in its dtype (mlx-lm too adds 1 in the source's); views if possible."""
        if self.change == "one_centred":
            return (tensor + 1,)
        if self.change == "conv_axes":
            return (tensor.movedim(2, 1),)
        return tensor.chunk(len(self.mlx), dim=-2) if len(self.mlx) > 1 else (tensor,)


@dataclass(frozen=True)
class FamilyNames:
    """The naming facts of one family.

    Attributes:
        family: name in `edge0_runtime.contract.families`.
        hf_model_type: transformers' model_type of the text model.
        table: all parameters.
        hf_disk_prefixes: {prefix on disk: prefix in the state_dict}, first match wins.
        dropped: prefixes of tensors that belong to no text model: vision and multi-token prediction.
        agreed: {config field: value} at which both libraries compute the same; both use that value when it is
            absent.
        mlx_config: (HF config.json as a dict) -> config.json that mlx-lm and transformers both read.
    """

    family: str
    hf_model_type: str
    table: tuple[Link, ...]
    hf_disk_prefixes: Mapping[str, str]
    dropped: tuple[str, ...]
    agreed: Mapping[str, Any]
    mlx_config: Callable[[Mapping[str, Any]], dict[str, Any]]

    def link_of_hf(self, name: str) -> Link | None:
        """The row that holds a transformers parameter, at its layer; None if no row does."""
        return _find(self.table, name, lambda link: (link.hf,))

    def link_of_mlx(self, name: str) -> Link | None:
        """The row that an MLX tensor is part of, at its layer; None if there is none."""
        return _find(self.table, name, lambda link: link.mlx)

    def is_dropped(self, name: str) -> bool:
        return name.startswith(self.dropped)

    def hf_name(self, disk_name: str) -> str:
        """A name in a HF directory as the state_dict has it; `experts.{e}.` stays."""
        for prefix, replacement in self.hf_disk_prefixes.items():
            if disk_name.startswith(prefix):
                return replacement + disk_name.removeprefix(prefix)
        return disk_name


def _find(table: Iterable[Link], name: str, of: Callable[[Link], tuple[str, ...]]) -> Link | None:
    match = re.search(r"\.layers\.(\d+)\.", name)
    general = name if match is None else f"{name[: match.start(1)]}{{n}}{name[match.end(1) :]}"
    for link in table:
        if general in of(link):
            return link if match is None else link.at(int(match[1]))
    return None


# -- qwen3_5_moe (mlx-lm: qwen3_5_moe.Model; transformers: Qwen3_5MoeForCausalLM)


def _qwen3_5_moe_table() -> tuple[Link, ...]:
    hf, mlx = "model.layers.{n}.", "language_model.model.layers.{n}."

    def row(path: str, **facts: Any) -> Link:
        return Link(hf + path, (mlx + path,), **facts)

    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    linears = (
        *(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
        "linear_attn.out_proj",
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    )

    def experts(hf_name: str, *projections: str) -> Link:
        return Link(
            f"{hf}mlp.experts.{hf_name}",
            tuple(f"{mlx}mlp.switch_mlp.{name}.weight" for name in projections),
            stored="int4",
            per_expert=tuple(f"{hf}mlp.experts.{{e}}.{name}.weight" for name in projections),
        )

    return (
        Link("model.embed_tokens.weight", ("language_model.model.embed_tokens.weight",), stored="int4"),
        Link("model.norm.weight", ("language_model.model.norm.weight",), "one_centred", float32=True),
        Link("lm_head.weight", ("language_model.lm_head.weight",), stored="int4"),
        *(row(f"{name}.weight", change="one_centred", float32=True) for name in norms),
        *(row(f"{name}.weight", stored="int4") for name in linears),
        row("mlp.gate.weight", stored="int8"),
        row("mlp.shared_expert_gate.weight", stored="int8"),
        experts("gate_up_proj", "gate_proj", "up_proj"),
        experts("down_proj", "down_proj"),
        row("linear_attn.conv1d.weight", change="conv_axes"),
        row("linear_attn.norm.weight"),  # the gated norm is not one-centred
        row("linear_attn.A_log", float32=True, uncast=True),
        row("linear_attn.dt_bias"),
    )


def _qwen3_5_moe_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nest a flat text config, and write out what mlx-lm would otherwise fill with its own defaults."""
    if "text_config" in config:
        top = {key: value for key, value in config.items() if key not in ("_name_or_path", "vision_config")}
        text = dict(config["text_config"])
    else:
        text = {key: value for key, value in config.items() if key not in ("_name_or_path", "architectures")}
        top = {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "tie_word_embeddings": text.get("tie_word_embeddings", False),
        }
    top["model_type"] = "qwen3_5_moe"
    text["model_type"] = "qwen3_5_moe_text"
    if "layer_types" in text:
        kinds = text["layer_types"]
        full = [n for n, kind in enumerate(kinds) if kind == "full_attention"]
        interval = text.setdefault("full_attention_interval", (full[0] if full else len(kinds)) + 1)
        if full != list(range(interval - 1, len(kinds), interval)):
            raise Edge0Error(
                f"config.json text_config.layer_types: full attention in layers {full}, but mlx-lm can only "
                f"have it in every full_attention_interval = {interval}th layer; correct the field or choose "
                "another model"
            )
    rope = text.get("rope_parameters") or {}
    for field in ("rope_theta", "partial_rotary_factor"):
        if field in rope:  # many mlx-lm classes read them flat, and fall back silently
            text.setdefault(field, rope[field])
    text.setdefault("norm_topk_prob", True)
    return top | {"text_config": text}


_FAMILIES = {
    "qwen3_5_moe": FamilyNames(
        family="qwen3_5_moe",
        hf_model_type="qwen3_5_moe_text",
        table=_qwen3_5_moe_table(),
        hf_disk_prefixes={"model.language_model.": "model."},
        dropped=("vision_tower", "model.visual", "mtp.", "language_model.mtp."),
        agreed={"norm_topk_prob": True, "attention_bias": False},
        mlx_config=_qwen3_5_moe_config,
    ),
}


def family_names(family: str) -> FamilyNames:
    """The names of a family. Raises Edge0Error naming the known ones."""
    if family not in _FAMILIES:
        raise Edge0Error(f"family: {family!r} has no name table; add one in names.py, known are {', '.join(_FAMILIES)}")
    return _FAMILIES[family]


def transformers_module(family: str, mlx_module: str) -> str:
    """`language_model.model.layers.3.self_attn.q_proj` -> `model.layers.3.self_attn.q_proj`.

    Raises:
        Edge0Error: no linear module of that name, or one that transformers fuses (routed experts).
    """
    link = family_names(family).link_of_mlx(f"{mlx_module}.weight")
    return _linear(family, mlx_module, link).hf.removesuffix(".weight")


def mlx_module(family: str, hf_module: str) -> str:
    """The way back of `transformers_module`. Raises Edge0Error as that does."""
    link = family_names(family).link_of_hf(f"{hf_module}.weight")
    return _linear(family, hf_module, link).mlx[0].removesuffix(".weight")


def _linear(family: str, path: str, link: Link | None) -> Link:
    if link is None or link.change != "same" or link.stored == "float" or link.per_expert:
        raise Edge0Error(
            f"module path {path!r}: {family} has no linear module of that name; "
            "the modules that a LoRA may sit on are those of Tier.lora_modules()"
        )
    return link
