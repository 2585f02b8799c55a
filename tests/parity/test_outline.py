"""What doctor takes a tier's base to be is what training writes for it; and its advice is a configuration."""

from __future__ import annotations

import math

import pytest

from edge0_runtime.contract.strict_safetensors import DTYPE_BYTES
from edge0_runtime.contract.tier import builtin_tier, builtin_tier_names
from edge0_runtime.measure.outline import outline_of_tier
from edge0_train.base.layout import checkpoint_layout, quantization_block
from edge0_train.config import configure
from edge0_train.synthetic import synthetic_config

DTYPES = {"torch.bfloat16": "BF16", "torch.uint32": "U32"}


@pytest.mark.parametrize("name", builtin_tier_names())
def test_a_tiers_base_has_the_names_shapes_and_dtypes_that_quantising_writes(name: str) -> None:
    tier = builtin_tier(name)
    outline, config = outline_of_tier(tier), synthetic_config(tier)
    targets = checkpoint_layout(config, tier.layout, "published")
    assert outline.tensors == {
        name: (DTYPES[str(dtype)], tuple(shape)) for t in targets for name, (shape, dtype) in t.stored().items()
    }
    assert outline.config["quantization"] == quantization_block(targets)
    special = {"bos_token_id", "eos_token_id", "pad_token_id"}
    text, other = (part.get("text_config", part) for part in (outline.config, config))
    assert {key for key in text.keys() | other.keys() if text.get(key) != other.get(key)} <= special | {"quantization"}
    if name == "35b":
        sizes = [DTYPE_BYTES[dtype] * math.prod(shape) for dtype, shape in outline.tensors.values()]
        assert (len(sizes), sum(sizes)) == (1757, 19_508_787_456)


def test_what_doctor_advises_to_train_can_be_composed() -> None:
    config = configure("phase=student_sft", "tier=35b", "tier.router.sticky.bias=2", "tier.router.sticky.window=2")
    assert (config.tier.router.sticky.bias, config.tier.router.sticky.window) == (2.0, 2)
    assert configure("phase=student_sft", "tier=35b", "tier.k=2").tier.k == 2
