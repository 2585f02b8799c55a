"""What a model family is to Edge0: names and shapes in its MLX checkpoint, nothing about its mathematics.

A family answers three questions from a model's architecture numbers (the text part of its `config.json`):
which layers have a router, which linear modules a recovery LoRA may sit on, and where the routed experts lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Architecture = Mapping[str, Any]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
QUANTISED_PARTS = ("weight", "scales", "biases")


@dataclass(frozen=True)
class Family:
    """Names and shapes of one model family in MLX's checkpoint layout; fields are mlx-lm's (`ModelArgs`).

    Attributes:
        name: the `family` of a tier; also the name of mlx-lm's module with the model class.
        layer_prefix: path of decoder layer N, with `{n}` for N.
        embedding: path of the token embedding.
        experts: path of the stacked routed experts below a layer, in mlx-lm's network and in what it converts.
        router: path of the router below a layer.
        required: architecture fields that the family's shapes are made of, whole numbers from 1.
        layer_modules: (architecture, layer) -> {path below the layer: (in_features, out_features)} of the linear
            modules that a recovery LoRA may sit on.
        is_moe: (architecture, layer) -> whether the layer has routed experts.
        expert_bias: name of the expert bias below the router of a family whose router chooses the experts and their
            weights itself (sigmoid_group). None: its router is a linear layer, and the block chooses by its logits.
        renormalises: the config.json field that says whether the chosen experts' weights are renormalised; None: they always are.
        from_zero: fields like the required ones, but whole numbers from 0. optional: whole numbers from 1, or absent,
            or null in config.json.
        num_experts: the field that counts the routed experts of a layer.
        aliases: {field: the name that transformers saves it under}; where config.json has that name, it counts.
        other_experts: further paths below a layer under which published files hold the experts.
        expert_width: the field that is a routed expert's width.
        spared: linear modules that a LoRA may sit on, but does not unless it is asked to.
        public_tier: the built-in tier whose rules a new tier of the family starts with: its public one, or else the 35b.
        ignored: beginnings, below a layer, of the names of tensors in published files that the model has no use for.
    """

    name: str
    layer_prefix: str
    embedding: str
    experts: str
    router: str
    required: tuple[str, ...]
    layer_modules: Callable[[Architecture, int], dict[str, tuple[int, int]]]
    is_moe: Callable[[Architecture, int], bool] = lambda arch, layer: True
    expert_bias: str | None = None
    renormalises: str | None = None
    from_zero: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    num_experts: str = "num_experts"
    aliases: Mapping[str, str] = field(default_factory=dict)
    other_experts: tuple[str, ...] = ()
    expert_width: str = "moe_intermediate_size"
    spared: tuple[str, ...] = ()
    public_tier: str = "35b"
    ignored: tuple[str, ...] = ()

    def layer_path(self, layer: int) -> str:
        """Path of decoder layer `layer`, e.g. `language_model.model.layers.3`."""
        return self.layer_prefix.format(n=layer)

    def linear_modules(self, arch: Architecture) -> dict[str, tuple[int, int]]:
        """{full module path: (in_features, out_features)} of all modules that a LoRA may sit on."""
        return {
            f"{self.layer_path(layer)}.{path}": shape
            for layer in range(arch["num_hidden_layers"])
            for path, shape in self.layer_modules(arch, layer).items()
        }

    def moe_layers(self, arch: Architecture) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(n for n in range(arch["num_hidden_layers"]) if self.is_moe(arch, n))

    def expert_tensors(self, layer: int, projection: str, part: str) -> tuple[str, ...]:
        """The names that one stacked expert tensor may have, e.g. `...layers.3.mlp.switch_mlp.up_proj.scales`."""
        paths = (self.experts, *self.other_experts)
        return tuple(f"{self.layer_path(layer)}.{path}.{projection}.{part}" for path in paths)

    def config_value(self, config: Mapping[str, Any], name: str, default: Any) -> Any:
        """An architecture field in the text part of a config.json, whoever saved it; `default` if it has none."""
        alias = self.aliases.get(name, name)
        return config[alias] if alias in config else config.get(name, default)
