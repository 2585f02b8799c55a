"""A nano teacher as a model: built from its tier, saved for both libraries, loaded with nothing amiss."""

import json
from pathlib import Path

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from edge0_runtime.contract.tier import Tier
from edge0_train.data.tasks import problems
from edge0_train.synthetic import model_config
from recipes.nano.teacher.families import FAMILIES
from recipes.nano.teacher.rows import encode_rows


def build_model(tier: Tier, seed: int) -> PreTrainedModel:
    """The tier's architecture in float32, with weights that transformers draws from `seed`."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(model_config(tier, **FAMILIES[tier.family].fields))


def save(tier: Tier, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """A directory that both transformers and mlx-lm load."""
    out.mkdir(parents=True, exist_ok=True)
    tensors, config = FAMILIES[tier.family].files(tier, model)
    safetensors.torch.save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)


def load_checked(out: Path) -> PreTrainedModel:
    """The saved model in float32 by transformers; AssertionError unless every tensor found its place."""
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise AssertionError(f"AutoModelForCausalLM.from_pretrained({out}) reports {wrong}; see save.")
    return model.eval()


def mlx_difference(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, seed: int) -> float | None:
    """Relative L2 of mlx-lm's logits against transformers' on one eval row, both float32; None without mlx-lm.

    The load is strict, so this also checks that mlx-lm finds every tensor.
    """
    try:
        import mlx.core as mx
        from mlx_lm.utils import load_model
    except ImportError:
        return None
    mlx_model, _ = load_model(out)
    mlx_model.set_dtype(mx.float32)
    ids_BT, _, _ = encode_rows(tokenizer, problems("eval", seed, 1))
    with torch.no_grad():
        ours = model(ids_BT).logits
    theirs = torch.tensor(mlx_model(mx.array(ids_BT.tolist())).tolist())
    difference: float = ((theirs - ours).norm() / ours.norm()).item()
    return difference
