"""Ling 3's tiny random twin: one file in the original layout, or a model in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from edge0_runtime.contract.tier import Tier
from edge0_train.base.affine import quantize
from tests.tiny_models import TEACHER, TOKENIZER_FILES

ARCHITECTURE: dict[str, Any] = {
    "num_hidden_layers": 4,  # 3 KDA, 1 MLA; the first is dense
    "hidden_size": 64,
    "vocab_size": 384,
    "intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 4,
    "num_attention_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
ROUTER: dict[str, Any] = {"kind": "sigmoid_group", "n_group": 4, "topk_group": 2, "scaling": 2.5}
_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias", "mlp.gate.weight")


def tiny_ling_tier(**overrides: Any) -> Tier:
    """A tier for `tiny_ling`: overrides are fields of the tier, or of its architecture."""
    data: dict[str, Any] = {
        "name": "tiny-ling",
        "model": "tiny-random",
        "family": "bailing_moe_v3",
        "k": 2,
        "router": ROUTER,
        "feature_topk": "teacher",
        "first_token": "predicted",
        "owners": [1, 2],
        "consumers": [2, 3],
        "head_width": 32,
        "lora": {
            "r": 4,
            "alpha": 8,
            "targets": ["attention.q_proj", "attention.kv_b_proj", "mlp.shared_experts.up_proj"],
        },
        "architecture": ARCHITECTURE,
    }
    numbers = {key: value for key, value in overrides.items() if key in ARCHITECTURE}
    fields = {key: value for key, value in overrides.items() if key not in ARCHITECTURE}
    return Tier.from_dict(data | fields | {"architecture": ARCHITECTURE | numbers})


def ling_config(**overrides: Any) -> dict[str, Any]:
    """A config.json with the fields of the published one."""
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "n_group": ROUTER["n_group"],
        "topk_group": ROUTER["topk_group"],
        "routed_scaling_factor": ROUTER["scaling"],
        "norm_topk_prob": True,
        "moe_shared_expert_intermediate_size": 64,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **ARCHITECTURE,
        **overrides,
    }


def random_ling(tier: Tier, seed: int = 0) -> torch.nn.Module:
    """A frozen float32 Ling 3 of the tier's architecture, in memory only; routing and text depend on every token."""
    router = tier.router
    config = ling_config(
        **tier.architecture, n_group=router.n_group, topk_group=router.topk_group, routed_scaling_factor=router.scaling
    )
    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "dtype")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bailing_hybrid", **fields))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=random)
            if tensor.ndim > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5 * (3.0 if "mlp.gate." in name else 1.0))
            elif name.endswith("norm.weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif name.endswith("dt_bias"):
                tensor.copy_(0.3 * noise - 2)  # a state that lasts a few tokens
            else:
                tensor.copy_(0.3 * noise)
    return model.requires_grad_(False).eval()


def tiny_ling(directory: Path | str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Ling 3 and a small chat tokenizer in the original layout, which both libraries read.

    Args:
        seed: of the weights.
        overrides: fields of the config; `dtype="float32"` stores float32 instead of bfloat16.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = ling_config(**overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    model = random_ling(tiny_ling_tier(**{k: v for k, v in overrides.items() if k in ARCHITECTURE}), seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        value = tensor if name.endswith(_FLOAT32) else tensor.to(getattr(torch, config["dtype"]))
        for part, disk_name in _disk_names(name, config):
            tensors[disk_name] = part(value).contiguous().clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        shutil.copyfile(TEACHER / name, directory / name)
    return directory


def _disk_names(name: str, config: dict[str, Any]) -> list[tuple[Any, str]]:
    """[(how to cut the part out, its name)] of a parameter in the original layout."""
    name = name.replace("embed_tokens", "word_embeddings").replace("self_attn.", "attention.")
    name = name.replace("forget_gate.", "").replace("e_score_correction_bias", "expert_bias")
    if ".layers." in name and (int(name.split(".")[2]) + 1) % config["layer_group_size"] == 0:
        name = name.replace("o_proj", "dense")
    if "conv1d" in name:
        return [
            (lambda w, i=i: w.chunk(3)[i], name.replace("conv1d", f"{which}_conv1d")) for i, which in enumerate("qkv")
        ]
    if ".mlp.experts." not in name:
        return [(lambda w: w, name)]
    path, experts = name.rpartition(".")[0], range(config["num_experts"])
    if name.endswith("down_proj"):
        return [(lambda w, e=e: w[e], f"{path}.{e}.down_proj.weight") for e in experts]
    return [
        (lambda w, e=e, half=half: w[e].chunk(2)[half], f"{path}.{e}.{which}_proj.weight")
        for e in experts
        for half, which in enumerate(("gate", "up"))
    ]


def publish(converted: Path, source: Path, out: Path) -> Path:
    """The int4 directory in the published file's layout, as far as it is known.

    Experts below `mlp.experts`, kv_b_proj packed (8 bits, as an override), more modules quantised than mlx-lm's convert
    does (embeddings, head, low-rank projections), and an old copy of heads that no model has a place for.
    """
    shutil.copytree(converted, out)
    tensors, original = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    tensors = {name: value for name, value in tensors.items() if "embed_q" not in name and "unembed_out" not in name}
    for name, value in original.items():
        module, kv_b = name.removesuffix(".weight"), name.endswith("kv_b_proj.weight")
        more = module.endswith(("_proj", "word_embeddings", "lm_head")) and name in tensors
        if kv_b or (more and f"{module}.scales" not in tensors):
            parts = quantize(value, 8 if kv_b else 4)
            tensors |= dict(zip((name, f"{module}.scales", f"{module}.biases"), parts, strict=True))
        if kv_b:
            config["quantization"][module] = {"group_size": 64, "bits": 8}
    tensors = {name.replace(".switch_mlp.", ".experts."): value for name, value in tensors.items()}
    for part in ("layers.1.mlp.pregate.fc1", "layers.1.mlp.pregate.fc2", "layers.2.mlp.pregate.fc1"):
        tensors[f"model.{part}.weight"] = torch.zeros(4, 8)
    save_file(tensors, out / "model.safetensors", metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return out
