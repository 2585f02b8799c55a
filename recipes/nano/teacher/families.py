"""What of a nano teacher is its architecture's own: config fields, how experts are kept in use, the files it is saved as.

Shapes: B rows, T tokens, N = B * T, E experts, K chosen experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from edge0_runtime.contract.tier import Tier
from edge0_train.base.links import to_mlx
from edge0_train.student.router import select
from edge0_train.synthetic import synthetic_config

Files = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""The tensors of model.safetensors, and config.json."""
AUXILIARY_WEIGHT = 0.02
BIAS_RATE = 1e-3  # DeepSeek-V3's


@dataclass(frozen=True)
class Family:
    """One architecture's part of the recipe.

    Attributes:
        label: what the model is. about: its architecture, a format string over the tier's.
        balancing: the rule of `balance`, and what the second number that it returns says.
        balance: (tier, model, router logits [N, E] of every MoE layer, mask [B, T]) -> (what to add to the loss, how uneven
            the experts' use was; 1 is even). It may move the routers' biases: call it once after every training pass.
        files: (tier, model) -> what both transformers and mlx-lm load.
        fields: of the config, beside what the tier says.
    """

    label: str
    about: str
    balancing: str
    balance: Callable[[Tier, PreTrainedModel, Sequence[torch.Tensor], torch.Tensor], tuple[torch.Tensor, float]]
    files: Callable[[Tier, PreTrainedModel], Files]
    fields: Mapping[str, Any]


# -- Qwen3.5-MoE -------------------------------------------------------------------------------------------------------


def auxiliary_loss(
    tier: Tier, model: PreTrainedModel, router_logits: Sequence[torch.Tensor], mask_BT: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The load-balance loss, times its weight and as it is.

    transformers pools the counts of all layers before it compares them, so layers could be uneven in
    opposite ways; here each layer is balanced by itself. Its scale is K at even use, hence the division.
    """
    losses = [
        load_balancing_loss_func((logits_NE,), tier.num_experts, tier.base_k, mask_BT) for logits_NE in router_logits
    ]
    mean = torch.stack(losses).mean() / tier.base_k
    return AUXILIARY_WEIGHT * mean, mean.item()


def to_bf16(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """bf16 such that both sides compute with the same numbers.

    transformers scales by 1 + w in float32; mlx-lm stores 1 + w, in bf16, whose steps near 1 are coarser than
    those of w: 0.4 % of difference in the logits. So 1 + w is rounded here. The gated norm has no 1.
    """
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = (1 + tensor).to(torch.bfloat16).float() - 1
    return tensor.to(torch.bfloat16).contiguous()


def qwen_files(tier: Tier, model: PreTrainedModel) -> Files:
    """bf16 in the layout that both sides load: model.language_model.*, fused experts, tied head left out.

    mlx-lm knows model type qwen3_5_moe only, with the language model under `text_config`, and reads
    full_attention_interval where transformers writes layer_types. transformers' AutoModelForCausalLM takes
    the text part out of the same file by itself.
    """
    tensors = {
        name.replace("model.", "model.language_model.", 1): to_bf16(name, tensor)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    interval = tier.architecture["full_attention_interval"]
    text = model.config.to_dict() | {"full_attention_interval": interval, "dtype": "bfloat16", "_name_or_path": ""}
    text.pop("transformers_version", None)
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "transformers_version": transformers.__version__,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
    }
    return tensors, config


QWEN = Family(
    label="Qwen3.5-MoE",
    about="{num_hidden_layers} layers (3 gated delta net : 1 full attention), hidden {hidden_size}, {num_experts} experts of"
    " {moe_intermediate_size}, top-{num_experts_per_tok}, a shared expert of\n{shared_expert_intermediate_size}, vocabulary"
    " {vocab_size}, tied embeddings, bf16.",
    balancing=f"load-balance weight {AUXILIARY_WEIGHT}; `balance` is the load-balance loss",
    balance=auxiliary_loss,
    files=qwen_files,
    fields={
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
        },
        "router_aux_loss_coef": AUXILIARY_WEIGHT,
        "tie_word_embeddings": True,
    },
)

# -- Ling 3 ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def move_biases(
    tier: Tier, model: PreTrainedModel, router_logits: Sequence[torch.Tensor], mask_BT: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """No loss; each layer's expert bias takes a step towards even use: bias += rate * sign(mean load - load).

    DeepSeek-V3's rule (arXiv 2412.19437, 2.1.2): the bias takes part in choosing experts, not in weighing them. The second
    number is the busiest expert's load over the mean, mean over layers.
    """
    own_N, unevenness = mask_BT.flatten().bool(), []
    for layer, logits_NE in zip(tier.layout.moe_layers(tier.architecture), router_logits, strict=True):
        bias_E = model.get_submodule(tier.layout.hf_router_path(layer)).get_buffer(tier.layout.hf_expert_bias)
        chosen_NK = select(tier.router, logits_NE[own_N], tier.base_k, bias_E)
        load_E = chosen_NK.flatten().bincount(minlength=tier.num_experts).float()
        bias_E += BIAS_RATE * (load_E.mean() - load_E).sign()
        unevenness.append(load_E.max() / load_E.mean())
    return torch.zeros(()), torch.stack(unevenness).mean().item()


def ling_files(tier: Tier, model: PreTrainedModel) -> Files:
    """The published original's layout: single experts, kv_b_proj whole; bf16, but float32 where the base is loaded so."""
    config = synthetic_config(tier, **LING.fields)
    tensors: dict[str, torch.Tensor] = {}
    for hf_name, tensor in model.state_dict().items():
        *_, link = tier.layout.links_of_hf(hf_name, config)  # the forms of ours come first
        parts = list(to_mlx(link, tensor if link.float32 else tensor.to(torch.bfloat16), config))
        disk = list(link.mlx)
        if link.per_expert:
            parts = [expert for part in parts for expert in part]
            disk = [name.replace("{e}", str(e)) for name in link.disk for e in range(tier.num_experts)]
        tensors |= {name: part.contiguous() for name, part in zip(disk, parts, strict=True)}
    return tensors, config | {"dtype": "bfloat16", "transformers_version": transformers.__version__}


LING = Family(
    label="Ling 3 MoE",
    about="{num_hidden_layers} layers (3 Kimi delta attention : 1 latent attention; the first has a dense MLP of"
    " {intermediate_size}), hidden {hidden_size}, {num_experts}\nexperts of {moe_intermediate_size}, top-{num_experts_per_tok},"
    " {num_shared_experts} shared expert, vocabulary {vocab_size}, bf16 (routers, convolutions and what a state decays by in"
    " float32).",
    balancing=f"expert biases move by {BIAS_RATE} a step; `balance` is the busiest expert's load over the mean",
    balance=move_biases,
    files=ling_files,
    fields={"max_position_embeddings": 512, "rope_theta": 10_000.0, "num_mtp_layers": 0},
)

FAMILIES = {"qwen3_5_moe": QWEN, "bailing_moe_v3": LING}
"""By `Tier.family`."""
