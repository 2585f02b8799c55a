"""What a model family is to Edge0: names and shapes in its MLX checkpoint, nothing about its mathematics.

A family answers three questions from a model's architecture numbers (the text part of its `config.json`):
which layers have a router, which linear modules a recovery LoRA may sit on, and where the routed experts lie.
Shapes were checked against the published files to the byte; names are those of mlx-lm's model classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge0_runtime.contract.errors import Edge0Error

Architecture = Mapping[str, Any]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
QUANTISED_PARTS = ("weight", "scales", "biases")


@dataclass(frozen=True)
class Family:
    """Names and shapes of one model family in MLX's checkpoint layout.

    Attributes:
        name: the `family` of a tier.
        layer_prefix: path of decoder layer N, with `{n}` for N.
        experts: path of the stacked routed experts below a layer.
        router: path of the router below a layer.
        required: architecture fields that the family's shapes are made of.
        layer_modules: (architecture, layer) -> {path below the layer: (in_features, out_features)} of the linear
            modules that a recovery LoRA may sit on.
        is_moe: (architecture, layer) -> whether the layer has routed experts.
    """

    name: str
    layer_prefix: str
    experts: str
    router: str
    required: tuple[str, ...]
    layer_modules: Callable[[Architecture, int], dict[str, tuple[int, int]]]
    is_moe: Callable[[Architecture, int], bool]

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

    def expert_tensor(self, layer: int, projection: str, part: str) -> str:
        """Name of one stacked expert tensor, e.g. `...layers.3.mlp.switch_mlp.up_proj.scales`."""
        return f"{self.layer_path(layer)}.{self.experts}.{projection}.{part}"


def _qwen3_5_modules(arch: Architecture, layer: int) -> dict[str, tuple[int, int]]:
    hidden = arch["hidden_size"]
    if (layer + 1) % arch["full_attention_interval"] == 0:
        queries = arch["num_attention_heads"] * arch["head_dim"]
        keys = arch["num_key_value_heads"] * arch["head_dim"]
        mixer = {
            "self_attn.q_proj": (hidden, 2 * queries),  # per head: [query ; output gate]
            "self_attn.k_proj": (hidden, keys),
            "self_attn.v_proj": (hidden, keys),
            "self_attn.o_proj": (queries, hidden),
        }
    else:
        keys = arch["linear_num_key_heads"] * arch["linear_key_head_dim"]
        values = arch["linear_num_value_heads"] * arch["linear_value_head_dim"]
        mixer = {
            "linear_attn.in_proj_qkv": (hidden, 2 * keys + values),
            "linear_attn.in_proj_z": (hidden, values),
            "linear_attn.in_proj_a": (hidden, arch["linear_num_value_heads"]),
            "linear_attn.in_proj_b": (hidden, arch["linear_num_value_heads"]),
            "linear_attn.out_proj": (values, hidden),
        }
    shared = arch["shared_expert_intermediate_size"]
    return mixer | {
        "mlp.shared_expert.gate_proj": (hidden, shared),
        "mlp.shared_expert.up_proj": (hidden, shared),
        "mlp.shared_expert.down_proj": (shared, hidden),
    }


_FAMILIES = {
    "qwen3_5_moe": Family(
        name="qwen3_5_moe",
        layer_prefix="language_model.model.layers.{n}",
        experts="mlp.switch_mlp",
        router="mlp.gate",
        required=(
            "num_hidden_layers", "hidden_size", "vocab_size", "num_experts", "num_experts_per_tok",
            "moe_intermediate_size", "shared_expert_intermediate_size", "full_attention_interval",
            "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_key_head_dim",
            "linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim",
        ),
        layer_modules=_qwen3_5_modules,
        is_moe=lambda arch, layer: True,
    ),
}  # fmt: skip


def family(name: str) -> Family:
    """The family called `name`. Raises Edge0Error naming the supported ones."""
    if name not in _FAMILIES:
        raise Edge0Error(f"family: {name!r} is not supported; choose one of {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[name]
