"""Rows of a family's table of names: transformers' parameters <-> the tensors of an MLX checkpoint.

A row (`Link`) is one transformers parameter, the MLX tensors it is made of, and what differs in value or axes; it is data, and
what is done to tensors by it is edge0_train's (`base/links.py`).
Sources: mlx-lm's `sanitize` of the model class, transformers' state_dict; the parity tests check by logits.

Three kinds of names occur. For layer 3's experts:
    transformers   model.layers.3.mlp.experts.gate_up_proj
    on disk (HF)   the same, or below `model.language_model.`, or ...mlp.experts.7.{gate,up}_proj.weight
    MLX            language_model.model.layers.3.mlp.switch_mlp.{gate,up}_proj.weight [, .scales, .biases]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Config = Mapping[str, Any]
"""The text part of a config.json, or a tier's architecture."""
Change = Literal["same", "one_centred", "conv_axes", "channels", "absorbed"]
Stored = Literal["float", "int4", "int8"]
ABSORBED = "kv_b_proj"
ABSORBED_HALVES = ("embed_q", "unembed_out")
"""Beside each other in every latent attention of mlx-lm's."""


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
            absorbed: latent attention's `ABSORBED` [heads * (nope + v), r], which mlx-lm splits by head into its
                `ABSORBED_HALVES` [heads, r, nope] and [heads, v, r].
        stored: how our int4 checkpoints hold it (mlx-lm's quant_predicate). Reading goes by what the file
            really holds.
        linear: it is the weight of a linear module that a LoRA may sit on.
        float32: keep float32 in a bfloat16 base. For tensors that transformers uses in float32 anyway and
            that bfloat16 cannot always hold exactly: A_log, and w of a stored w + 1.
        uncast: mlx-lm's convert leaves it in the source's dtype (cast_predicate).
        published: the form of the published file, where that is another than mlx-lm's.
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
    published: bool = False
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

    @property
    def per_expert(self) -> bool:
        """Whether the parts on disk are single experts, to be stacked."""
        return any("{e}" in name for name in self.disk)


def without_layer(name: str) -> tuple[str, int]:
    """A tensor's name with `{n}` for its layer, and the layer (-1 outside of all)."""
    match = re.search(r"\.layers\.(\d+)\.", name)
    return (name, -1) if match is None else (f"{name[: match.start(1)]}{{n}}{name[match.end(1) :]}", int(match[1]))
