"""What a family's table of names is made of: transformers' parameters <-> the tensors of an MLX checkpoint.

A row (`Link`) is one transformers parameter, the MLX tensors it is made of, and what differs in value or
axes. Everything else here reads the table, in either direction.
Sources: mlx-lm's `sanitize` of the model class, transformers' state_dict; the parity tests check by logits.

Three kinds of names occur. For layer 3's experts:
    transformers   model.layers.3.mlp.experts.gate_up_proj
    on disk (HF)   the same, or below `model.language_model.`, or ...mlp.experts.7.{gate,up}_proj.weight
    MLX            language_model.model.layers.3.mlp.switch_mlp.{gate,up}_proj.weight [, .scales, .biases]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from edge0_runtime.contract.families import family

Config = Mapping[str, Any]  # the text part of a config.json, or a tier's architecture
Change = Literal["same", "one_centred", "conv_axes", "channels", "absorbed"]
Stored = Literal["float", "int4", "int8"]


@dataclass(frozen=True)
class Link:
    """One transformers parameter and the MLX tensors it is made of; `{n}` stands for the layer.

    Attributes:
        hf: the parameter's name in transformers' state_dict.
        mlx: MLX tensor names, in the parameter's order.
        change: what differs.
            same: nothing; several MLX tensors are its rows (dimension -2).
            one_centred: MLX holds w + 1 for transformers' w.
            conv_axes: MLX holds [C, k, 1] for [C, 1, k]; several are its channels (dimension 0).
            channels: no axes differ; several MLX tensors are its channels (dimension 0).
            absorbed: latent attention's kv_b_proj [heads * (nope + v), r], which mlx-lm splits by head into embed_q
                [heads, r, nope] and unembed_out [heads, v, r].
        stored: how our int4 checkpoints hold it (mlx-lm's quant_predicate). Reading goes by what the file
            really holds.
        linear: it is the weight of a linear module that a LoRA may sit on.
        float32: keep float32 in a bfloat16 base. For tensors that transformers uses in float32 anyway and
            that bfloat16 cannot always hold exactly: A_log, and w of a stored w + 1.
        uncast: mlx-lm's convert leaves it in the source's dtype (cast_predicate).
        disk: where a transformers directory may hold it in parts: the part's name for each `mlx` tensor, `{e}` for
            the expert if every expert has its own; () if it is always one tensor.
        when: (config, layer) -> whether the row is about this layer: a name may mean different things in layers of
            different kinds.
    """

    hf: str
    mlx: tuple[str, ...]
    change: Change = "same"
    stored: Stored = "float"
    linear: bool = False
    float32: bool = False
    uncast: bool = False
    disk: tuple[str, ...] = ()
    when: Callable[[Config, int], bool] = lambda config, layer: True

    def at(self, layer: int) -> Link:
        """This row for one layer."""
        return replace(
            self,
            hf=self.hf.replace("{n}", str(layer)),
            mlx=tuple(name.replace("{n}", str(layer)) for name in self.mlx),
            disk=tuple(name.replace("{n}", str(layer)) for name in self.disk),
        )

    def hf_shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Shape of the parameter, from the shapes of its MLX tensors (unpacked: [..., out, in])."""
        return tuple(self.to_hf([torch.empty(*shape, device="meta") for shape in shapes]).shape)

    def to_hf(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter from its MLX tensors, in their dtype; exact for one_centred only in float32."""
        if self.change == "one_centred":
            return tensors[0] - 1
        if self.change == "absorbed":
            return torch.cat([tensors[0].mT, tensors[1]], dim=1).flatten(0, 1)
        if self.change == "conv_axes":
            tensors = [tensor.movedim(2, 1) for tensor in tensors]
        if len(tensors) == 1:
            return tensors[0].contiguous()
        return torch.cat(list(tensors), dim=-2 if self.change == "same" else 0)

    def to_mlx(self, tensor: torch.Tensor, config: Config) -> tuple[torch.Tensor, ...]:
        """The MLX tensors of a parameter, in its dtype (mlx-lm too adds 1 in the source's); views if possible."""
        if self.change == "one_centred":
            return (tensor + 1,)
        if self.change == "absorbed":
            heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
            return heads[:, : config["qk_nope_head_dim"]].mT, heads[:, config["qk_nope_head_dim"] :]
        if self.change == "conv_axes":
            tensor = tensor.movedim(2, 1)
        return tensor.chunk(len(self.mlx), dim=-2 if self.change == "same" else 0) if len(self.mlx) > 1 else (tensor,)

    @property
    def per_expert(self) -> bool:
        """Whether the parts on disk are single experts, to be stacked."""
        return any("{e}" in name for name in self.disk)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """A part as it lies on disk (experts stacked) -> its MLX tensor; also the way back."""
        return tensor.movedim(2, 1) if self.change == "conv_axes" else tensor


@dataclass(frozen=True)
class FamilyNames:
    """The naming facts of one family.

    Attributes:
        family: name in `edge0_runtime.contract.families`.
        hf_model_type: transformers' model_type of the text model.
        table: all parameters. Where several rows are about one parameter in one layer, checkpoints hold it in
            different forms; the first is the one that we write.
        disk_renames: (pattern, replacement) that turn names in a transformers directory into those of the
            state_dict, all applied in this order.
        dropped: patterns of the beginnings of tensor names that belong to no text model: vision, multi-token
            prediction.
        agreed: {config field: value, or the function of config that gives it} at which both libraries compute the
            same; both use that value when it is absent.
        mlx_config: (HF config.json as a dict) -> config.json that mlx-lm and transformers both read.
        cpu_options: of a transformers model's forward pass on a CPU, which change its time and not its result.
        spare_layers: layers of a checkpoint beyond the model's depth are multi-token prediction, to be dropped.
    """

    family: str
    hf_model_type: str
    table: tuple[Link, ...]
    disk_renames: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    agreed: Mapping[str, Any]
    mlx_config: Callable[[Config], dict[str, Any]]
    cpu_options: Mapping[str, Any] = field(default_factory=dict)
    spare_layers: bool = False

    def links_of_hf(self, name: str, config: Config) -> tuple[Link, ...]:
        """The rows about a transformers parameter, at its layer: the forms that checkpoints hold it in."""
        general, layer = _general(name)
        return tuple(link.at(layer) for link in self.table if link.hf == general and link.when(config, layer))

    def link_of_mlx(self, name: str) -> Link | None:
        """The row that an MLX tensor is part of, at its layer; None if there is none."""
        general, layer = _general(name)
        return next((link.at(layer) for link in self.table if general in link.mlx), None)

    def is_dropped(self, name: str, config: Config) -> bool:
        """Whether a checkpoint's tensor belongs to no text model."""
        general, layer = _general(name)
        spare = self.spare_layers and layer >= config["num_hidden_layers"]
        ignored = general.partition(".layers.{n}.")[2].startswith(family(self.family).ignored)
        return spare or ignored or any(re.match(pattern, name) for pattern in self.dropped)

    def hf_name(self, disk_name: str) -> str:
        """A name in a transformers directory as the state_dict has it; parts (`Link.disk`) stay parts."""
        for pattern, replacement in self.disk_renames:
            disk_name = re.sub(pattern, replacement, disk_name)
        return disk_name

    def disagreements(self, config: Config) -> Iterator[str]:
        """Config values at which transformers and mlx-lm compute different things, a sentence each."""
        for name, value in self.agreed.items():
            agreed = value(config) if callable(value) else value
            if config.get(name, agreed) != agreed:
                yield f"{name}: {config[name]!r}; transformers and mlx-lm agree only at {agreed!r}"


def _general(name: str) -> tuple[str, int]:
    """A tensor's name with `{n}` for its layer, and the layer (-1 outside of all)."""
    match = re.search(r"\.layers\.(\d+)\.", name)
    return (name, -1) if match is None else (f"{name[: match.start(1)]}{{n}}{name[match.end(1) :]}", int(match[1]))
