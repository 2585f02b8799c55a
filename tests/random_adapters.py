"""Random adapter files of a tier: no quality, but every routing and every LoRA module matters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from edge0_runtime.contract.artifacts import write_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.provenance import Provenance
from edge0_runtime.contract.tier import Tier


def random_heads(tier: Tier, seed: int = 1) -> dict[str, np.ndarray]:
    """Heads whose predictions are spread over the experts and differ from token to token."""
    rng = np.random.default_rng(seed)
    scale = {"fc1": 1.0, "fc2": 4.0, "linear_init": 3.0}
    return {
        key: (rng.standard_normal(shape) * scale[key.split(".")[2]] / np.sqrt(shape[1])).astype(np.float16)
        for key, shape in tier.head_tensors().items()
    }


def random_lora(tier: Tier, seed: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        key: (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float16)
        for key, shape in tier.lora_tensors().items()
    }


def write_adapters(directory: Path, tier: Tier, heads: dict[str, np.ndarray] | None = None) -> None:
    """Random adapters of `tier`, bound to the base in `directory` and to each other; or these heads with a random LoRA."""
    checkpoint = Checkpoint.open(directory)
    base = checkpoint.identity()
    provenance = Provenance(
        tool_version="0", commit="test", phases=(), base_fingerprint=base.fingerprint,
        tokenizer_hash=checkpoint.tokenizer_hash(), template_hash=checkpoint.template_hash(), teacher=None, data=None,
        prerouter_sha256=None, created="2026-01-01T00:00:00+00:00",
        base_config=base.config,
    )  # fmt: skip
    heads = heads or random_heads(tier)
    sha256 = write_adapter(directory / tier.file_name("prerouter"), "prerouter", tier, heads, provenance)
    provenance = dataclasses.replace(provenance, prerouter_sha256=sha256)
    write_adapter(directory / tier.file_name("lora"), "lora", tier, random_lora(tier), provenance)
