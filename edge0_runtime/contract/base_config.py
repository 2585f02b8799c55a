"""What of a base's config.json decides what it computes: adapters record it, and serving compares it field by field.

The fingerprint covers tensors and quantisation alone: rope_theta times ten would serve other text from the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge0_runtime.contract.files import shown
from edge0_runtime.contract.model_files import text_config

WITHOUT_EFFECT = frozenset(
    {
        # whose file it is, and which class reads it: ours is the family's
        "_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "vision_config",
        # storage and what a library's call returns; the quantisation is compared by itself
        "dtype", "torch_dtype", "quantization", "quantization_config", "use_cache", "return_dict", "output_attentions",
        "output_hidden_states", "output_router_logits", "chunk_size_feed_forward", "pretraining_tp",
        # training
        "attention_dropout", "hidden_dropout", "embedding_dropout", "output_dropout", "initializer_range",
        "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_z_loss_coef", "mtp_loss_scaling_factor",
        # multi-token prediction, which is dropped
        "num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
        # ids, and the length that a context may have; YaRN's original length lies in its own field
        "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "model_max_length",
        # other heads than the language model's
        "id2label", "label2id", "problem_type", "is_encoder_decoder",
    }
)  # fmt: skip
"""Fields that change nothing of a forward pass. Any other, known or not, is compared."""
_QUANTISATION = ("group_size", "bits", "mode")


def mathematical_fields(config: dict[str, Any]) -> dict[str, Any]:
    """{field: value} of all that may change what a config.json's language model computes.

    Nested fields are named by dots. A null counts as absent. `quantization.*` are the general values; those of single modules
    are in the fingerprint.
    """
    fields = flat({name: value for name, value in text_config(config).items() if name not in WITHOUT_EFFECT})
    quantization = config.get("quantization") or config.get("quantization_config")
    if isinstance(quantization, Mapping):
        fields |= flat({name: quantization.get(name) for name in _QUANTISATION}, "quantization.")
    return fields


def config_differences(trained: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """A sentence for every field of `mathematical_fields` that differs, by name."""
    return [
        f"{shown_name(name)} was {_value(trained, name)} in its config.json and is {_value(served, name)}"
        for name in sorted(trained.keys() | served.keys())
        if trained.get(name) != served.get(name)
    ]


def shown_name(name: str) -> str:
    """A foreign field's name: as it is if it is a plain one, else escaped and cut."""
    return name if name.replace(".", "").isidentifier() and name.isascii() and len(name) <= 100 else shown(name)


def _value(fields: Mapping[str, Any], name: str) -> str:
    return shown(fields[name]) if name in fields else "absent"


def flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{name with dots: value} of nested fields; a null counts as absent."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found
