"""An 8b base under mlx-lm's names and under the published ones: the same values to the bit, read by both packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.inspection import inspect
from edge0_runtime.lora import apply_lora
from edge0_runtime.network import load_network
from edge0_train.base import load_base, quantize_checkpoint
from edge0_train.config import configure
from edge0_train.phases.quantize import quantize
from edge0_train.run import open_run
from tests.parity.both import mlx_steps, some_ids, tensors_of
from tests.random_adapters import random_lora, write_adapters
from tests.tiny_ling import tiny_ling, tiny_ling_tier
from tests.twins import TWINS

TIER = tiny_ling_tier(lora={"r": 4, "alpha": 8, "targets": list(TWINS["bailing_moe_v3"].targets)})
NAMES = ("mlx", "published")
PROMPT = np.random.default_rng(3).integers(3, 384, size=11).tolist()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model quantised twice."""
    root = tmp_path_factory.mktemp("ling")
    source = tiny_ling(root / "hf")
    for names in NAMES:
        assert quantize_checkpoint(source, root / names, TIER, names=names)["names"] == names
        write_adapters(root / names, TIER)
    return {names: root / names for names in NAMES}


def test_only_experts_and_the_absorbed_projection_have_other_names(bases: dict[str, Path]) -> None:
    mlx, published = (tensors_of(bases[names]) for names in NAMES)
    renamed = {name.replace(".switch_mlp.", ".experts."): value for name, value in mlx.items()}
    latent = "model.layers.3.attention."
    keys, values = (renamed.pop(f"{latent}{half}.weight") for half in ("embed_q", "unembed_out"))
    whole = published.pop(f"{latent}kv_b_proj.weight")
    assert torch.equal(torch.cat([keys.mT, values], dim=1).flatten(0, 1), whole)
    assert renamed.keys() == published.keys()
    assert all(torch.equal(renamed[name], value) for name, value in published.items())


@pytest.mark.parametrize("packed", [None, "disk"])
def test_training_reads_the_same_values_from_both(bases: dict[str, Path], packed: Any) -> None:
    one, two = (load_base(bases[names], TIER, packed=packed)[0] for names in NAMES)
    assert one.state_dict().keys() == two.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(one(some_ids(12)).logits, two(some_ids(12)).logits)


def test_mlx_lm_computes_the_same_bits_from_both_with_the_lora_on_kv_b_proj(bases: dict[str, Path]) -> None:
    logits = []
    for names in NAMES:
        network: Any = load_network(bases[names], TIER.layout, float32=True)
        network.set_dtype(mx.float32)
        apply_lora(network, random_lora(TIER), TIER.lora, mx.float32)
        logits.append(mlx_steps(network, some_ids(12), 5))
    assert torch.equal(*logits)


def test_the_engine_serves_the_same_from_both(bases: dict[str, Path]) -> None:
    served = []
    for names in NAMES:
        with Engine.load(bases[names]) as engine:
            steps = list(engine.generate(PROMPT, max_tokens=12, ignore_eos=True, trace=True))
            served.append([(step.token, step.experts.tobytes(), step.logits.tobytes()) for step in steps])
    assert served[0] == served[1]


def test_the_expert_store_finds_the_same_bytes_in_both(bases: dict[str, Path]) -> None:
    found = []
    for names in NAMES:
        store = ExpertStore.open(Checkpoint.open(bases[names]), TIER)
        buffers = [bytearray(tensor.nbytes) for tensor in store.tensors[2]]
        store.read(2, 5, [[memoryview(buffer)] for buffer in buffers])
        store.close()
        found.append(buffers)
    assert found[0] == found[1] and any(found[0][0])


def test_inspect_says_whose_names_a_base_has(bases: dict[str, Path]) -> None:
    said = {names: inspect(bases[names])["base"] for names in NAMES}
    assert {names: base["names"] for names, base in said.items()} == {names: names for names in NAMES}
    reasons = set(said["mlx"]["upstream_problems"]) - set(said["published"]["upstream_problems"])
    assert len(reasons) == 2 and all("base.names=published" in reason for reason in reasons)
    assert said["published"]["upstream_problems"] == []


def test_adapters_bind_to_the_names_too(bases: dict[str, Path], tmp_path: Path) -> None:
    """Equal values under other names are another base: refused, served all the same with the flag."""
    for path in bases["published"].iterdir():
        where = bases["mlx"] if "_edge0_" in path.name else bases["published"]
        (tmp_path / path.name).symlink_to(where / path.name)
    with pytest.raises(Edge0Error, match=r"(?s)was trained for base .* --allow-mismatch"):
        Engine.load(tmp_path)
    with Engine.load(tmp_path, allow_mismatch=True) as other, Engine.load(bases["mlx"]) as own:
        tokens = [[step.token for step in engine.generate(PROMPT, max_tokens=12)] for engine in (other, own)]
    assert tokens[0] == tokens[1]


def test_the_published_8b_is_one_file_however_large(bases: dict[str, Path], tmp_path: Path) -> None:
    """The public runtime reads its experts from model.safetensors alone."""
    source = bases["mlx"].parent / "hf"
    small = {"shard_bytes": 50_000}
    assert quantize_checkpoint(source, tmp_path / "mlx", TIER, names="mlx", **small)["shards"] > 1
    assert quantize_checkpoint(source, tmp_path / "published", TIER, names="published", **small)["shards"] == 1
    assert tensors_of(tmp_path / "published").keys() == tensors_of(bases["published"]).keys()


def test_published_names_are_the_default_of_the_public_tiers_alone() -> None:
    said = {}
    for tier in ("35b", "8b", "nano", "nano-ling"):
        said[tier] = configure("phase=quantize", f"tier={tier}", "base.source=x", "teacher.directory=x").base.names
    assert said == {"35b": "published", "8b": "published", "nano": "mlx", "nano-ling": "mlx"}
    assert configure("phase=quantize", "tier=8b", "base.source=x", "base.names=mlx").base.names == "mlx"


def test_phase_quantize_writes_the_names_that_are_asked_for(tmp_path: Path) -> None:
    for names in NAMES:
        config = configure("phase=quantize", "tier=nano-ling", f"root={tmp_path / names}", f"base.names={names}")
        assert quantize(config, open_run(config))["names"] == names
        tensors = Checkpoint.open(config.base.directory).entries
        assert any(".mlp.experts." in name for name in tensors) == (names == "published")
        load_base(config.base.directory, config.tier)
