"""What a model family is to Edge0: names and shapes in MLX and in transformers, nothing about its mathematics.

A family is data, one file each in `families/`. By it the runtime finds the experts, training maps names both ways, and a tier
follows from the model's architecture numbers (the text part of its `config.json`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from edge0_runtime.contract.links import Config, Link, without_layer

Architecture = Mapping[str, Any]
Fill = Callable[[str, Config], dict[str, Any]]
"""(transformers' model_type, fields of a config.json) -> that model type's own fields, with transformers' defaults."""
Names = Literal["mlx", "published"]
"""Whose names a base has: those of mlx-lm's classes, or those of the published file, which the public runtime reads."""
NAMES: tuple[Names, ...] = get_args(Names)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
QUANTISED_PARTS = ("weight", "scales", "biases")


@dataclass(frozen=True)
class Kept:
    """How many numbers a layer keeps of a sequence, as mlx-lm's caches hold them.

    Attributes:
        token: for each token of context, in the dtype of the computing.
        inputs: a convolution's last inputs, likewise. state: of a recurrence, in float32.
        scores: not kept, but made for each pair of a prompt chunk's and the context's tokens.
        unfolded: likewise for each token of the context, where keys and values are made of latents.
    """

    token: int = 0
    inputs: int = 0
    state: int = 0
    scores: int = 0
    unfolded: int = 0


@dataclass(frozen=True)
class Family:
    """Names and shapes of one model family; fields of config.json are mlx-lm's (`ModelArgs`).

    Attributes:
        name: the `family` of a tier; also the name of mlx-lm's module with the model class.
        hf_model_type: transformers' model_type of the text model.

        In MLX's checkpoint layout:
        layer_prefix: path of decoder layer N, with `{n}` for N.
        embedding: path of the token embedding.
        experts: path of the stacked routed experts below a layer, in mlx-lm's network and in what it converts.
        other_experts: the path below a layer under which the published file holds the experts, where it is another.
        router: path of the router below a layer.
        expert_bias: name of the expert bias below the router of a family whose router chooses the experts and their
            weights itself (sigmoid_group). None: its router is a linear layer, and the block chooses by its logits.
        one_file: the public runtime reads the base from one file alone.
        ignored: beginnings, below a layer, of the names of tensors in published files that the model has no use for.

        In transformers' model:
        hf_layer_prefix, hf_router, hf_expert_bias: likewise; the router returns logits, weights and indices, and has
            `.weight` [E, H].
        hf_recurrent: path below a layer of the mixer that carries a state; "" if the family has none.
        is_recurrent: (architecture, layer) -> whether the layer's mixer is that one.
        disk_renames: (pattern, replacement) that turn names in a transformers directory into those of the
            state_dict, all applied in this order.
        dropped: patterns of the beginnings of tensor names that belong to no text model: vision, multi-token
            prediction.
        spare_layers: layers of a checkpoint beyond the model's depth are multi-token prediction, to be dropped.

        In both:
        table: all parameters. Where several rows are about one parameter in one layer, checkpoints hold it in
            different forms; the first is mlx-lm's, which we write if the published ones (`Link.published`) aren't wanted.
        agreed: {config field: value, or the function of config that gives it} at which both libraries compute the
            same; both use that value when it is absent.
        mlx_config: (a transformers or MLX config.json, what fills in transformers' defaults) -> config.json that mlx-lm and
            transformers both read.

        For tiers:
        required: architecture fields that the family's shapes are made of, whole numbers from 1.
        from_zero: fields like the required ones, but whole numbers from 0. optional: whole numbers from 1, or absent,
            or null in config.json.
        num_experts: the field that counts the routed experts of a layer.
        expert_width: the field that is a routed expert's width.
        aliases: {field: the name that transformers saves it under}; where config.json has that name, it counts.
        derived: {field: (config, its value by that name) -> its value, for one that config.json may say by another field too;
            or what contradicts it}.
        layer_modules: (architecture, layer) -> {path below the layer: (in_features, out_features)} of the linear
            modules that a recovery LoRA may sit on.
        kept: (architecture, layer) -> what the layer keeps of a sequence.
        is_moe: (architecture, layer) -> whether the layer has routed experts.
        router_kind: of a tier's router. router_fields: {field of a tier's router: (config.json's name of it, its value where
            config.json has none)}.
        renormalises: the config.json field that says whether the chosen experts' weights are renormalised; None: they always are.
        spared: linear modules that a LoRA may sit on, but does not unless it is asked to.
        public_tier: the built-in tier whose rules a new tier of the family starts with: its public one, or else the 35b.
    """

    name: str
    hf_model_type: str
    layer_prefix: str
    embedding: str
    experts: str
    router: str
    table: tuple[Link, ...]
    mlx_config: Callable[[Config, Fill], dict[str, Any]]
    required: tuple[str, ...]
    layer_modules: Callable[[Architecture, int], dict[str, tuple[int, int]]]
    kept: Callable[[Architecture, int], Kept]
    other_experts: tuple[str, ...] = ()
    expert_bias: str | None = None
    one_file: bool = False
    ignored: tuple[str, ...] = ()
    hf_layer_prefix: str = "model.layers.{n}"
    hf_router: str = "mlp.gate"
    hf_expert_bias: str = "e_score_correction_bias"
    hf_recurrent: str = ""
    is_recurrent: Callable[[Architecture, int], bool] = lambda arch, layer: False
    disk_renames: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    spare_layers: bool = False
    agreed: Mapping[str, Any] = field(default_factory=dict)
    from_zero: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    num_experts: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    aliases: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Config, Any], Any]] = field(default_factory=dict)
    is_moe: Callable[[Architecture, int], bool] = lambda arch, layer: True
    router_kind: str = "softmax_topk"
    router_fields: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    renormalises: str | None = None
    spared: tuple[str, ...] = ()
    public_tier: str = "35b"

    # -- what a tier asks ----------------------------------------------------------------------------------------------

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

    def default_targets(self, arch: Architecture) -> list[str]:
        """Every kind of linear module that a LoRA may sit on, but those that are spared; in the layers' order."""
        kinds = [path for layer in range(arch["num_hidden_layers"]) for path in self.layer_modules(arch, layer)]
        return [path for path in dict.fromkeys(kinds) if path not in self.spared]

    def moe_layers(self, arch: Architecture) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(n for n in range(arch["num_hidden_layers"]) if self.is_moe(arch, n))

    def expert_tensors(self, layer: int, projection: str, part: str) -> tuple[str, ...]:
        """The names that one stacked expert tensor may have, e.g. `...layers.3.mlp.switch_mlp.up_proj.scales`."""
        paths = (self.experts, *self.other_experts)
        return tuple(f"{self.layer_path(layer)}.{path}.{projection}.{part}" for path in paths)

    def describes(self, config: Config) -> bool:
        """Whether a config.json is of a model of this family, whoever wrote it."""
        text = config.get("text_config")
        kinds = config.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else None
        return self.hf_model_type in kinds or self.name in kinds

    @property
    def published_experts(self) -> str:
        """Path of the experts below a layer in the published file."""
        return (*self.other_experts, self.experts)[0]

    def names_of(self, tensors: Iterable[str]) -> list[Names]:
        """Whose names a checkpoint with these tensors has for its experts; both where they are the same."""
        below = {without_layer(name)[0].partition(".layers.{n}.")[2].rpartition(".")[0] for name in tensors}
        paths: dict[Names, str] = {"mlx": self.experts, "published": self.published_experts}
        return [names for names, path in paths.items() if f"{path}.{PROJECTIONS[0]}" in below]

    def config_value(self, config: Config, name: str, default: Any) -> Any:
        """An architecture field in the text part of a config.json, whoever saved it; `default` if it has none."""
        alias = self.aliases.get(name, name)
        return config[alias] if alias in config else config.get(name, default)

    def router_rule(self, config: Config) -> dict[str, Any]:
        """Fields of a tier's router that routes as the base of that config.json does."""
        rule = {name: config.get(field, default) for name, (field, default) in self.router_fields.items()}
        if self.renormalises is not None:
            rule["renormalise"] = bool(config.get(self.renormalises, True))
        return {"kind": self.router_kind} | rule

    # -- what transformers calls it ------------------------------------------------------------------------------------

    def hf_router_path(self, layer: int) -> str:
        """Path of a layer's router in transformers' model."""
        return f"{self.hf_layer_prefix.format(n=layer)}.{self.hf_router}"

    def hf_recurrent_paths(self, arch: Architecture) -> tuple[str, ...]:
        """Paths of all mixers that carry a state, in transformers' model."""
        layers = (n for n in range(arch["num_hidden_layers"]) if self.is_recurrent(arch, n))
        return tuple(f"{self.hf_layer_prefix.format(n=n)}.{self.hf_recurrent}" for n in layers)

    def links_of_hf(self, name: str, config: Config) -> tuple[Link, ...]:
        """The rows about a transformers parameter, at its layer: the forms that checkpoints hold it in."""
        general, layer = without_layer(name)
        return tuple(link.at(layer) for link in self.table if link.hf == general and link.when(config, layer))

    def written_link(self, name: str, config: Config, names: Names) -> Link | None:
        """The row by which a transformers parameter is written under these names; None if the table lacks it."""
        links = self.links_of_hf(name, config)
        return next((link for link in links if link.published and names == "published"), links[0] if links else None)

    def link_of_mlx(self, name: str) -> Link | None:
        """The row that an MLX tensor is part of, at its layer; None if there is none."""
        general, layer = without_layer(name)
        return next((link.at(layer) for link in self.table if general in link.mlx), None)

    def is_dropped(self, name: str, config: Config) -> bool:
        """Whether a checkpoint's tensor belongs to no text model."""
        general, layer = without_layer(name)
        spare = self.spare_layers and layer >= config["num_hidden_layers"]
        ignored = general.partition(".layers.{n}.")[2].startswith(self.ignored)
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
