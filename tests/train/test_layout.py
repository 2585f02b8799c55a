"""The layout plan: tier 35b to the byte, and the real loader's view of such files, all without weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from edge0_runtime.contract.checkpoint import INDEX_NAME, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_runtime.experts.store import ExpertStore
from edge0_train.base.layout import checkpoint_layout, expert_nbytes, nbytes, quantization_block
from edge0_train.base.load import describe, empty_model, parameter_shapes
from edge0_train.base.shards import Group, write_shards
from edge0_train.base.weights import MlxWeights
from edge0_train.synthetic import synthetic_config, write_base

TIER = builtin_tier("35b")
NAMES = TIER.layout
LAYER = "language_model.model.layers.{}."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of the published size: the data is a hole."""
    directory = tmp_path_factory.mktemp("35b") / "base"
    assert write_base(directory, TIER, headers_only=True) == 19_508_787_456
    return directory


def open_weights(checkpoint: Checkpoint) -> MlxWeights:
    checkpoint.check_architecture(TIER)
    model = empty_model(checkpoint.text_config(), NAMES, torch.bfloat16)
    return MlxWeights.open(checkpoint, NAMES, parameter_shapes(model))


def test_35b_is_the_published_files_to_the_byte():
    targets = checkpoint_layout(synthetic_config(TIER), NAMES)
    stored = {name: kind for target in targets for name, kind in target.stored().items()}
    assert len(stored) == 1757
    assert sum(nbytes(*kind) for kind in stored.values()) == 19_508_787_456
    assert expert_nbytes(targets, TIER) == 18_119_393_280 == 40 * 256 * 1_769_472
    block = quantization_block(targets)
    overrides = {name: value for name, value in block.items() if isinstance(value, dict)}
    assert {k: v for k, v in block.items() if k not in overrides} == {"group_size": 64, "bits": 4, "mode": "affine"}
    gates = (f"{LAYER.format(n)}mlp.{gate}" for n in range(40) for gate in ("gate", "shared_expert_gate"))
    assert overrides == {gate: {"group_size": 64, "bits": 8} for gate in gates}
    words, halves = torch.uint32, torch.bfloat16
    for name, kind in {
        "0.mlp.switch_mlp.gate_proj.weight": ((256, 512, 256), words),
        "39.mlp.switch_mlp.up_proj.scales": ((256, 512, 32), halves),
        "7.mlp.switch_mlp.down_proj.weight": ((256, 2048, 64), words),
        "7.mlp.switch_mlp.down_proj.biases": ((256, 2048, 8), halves),
        "3.self_attn.q_proj.weight": ((8192, 256), words),
        "3.self_attn.q_norm.weight": ((256,), halves),
        "0.linear_attn.conv1d.weight": ((8192, 4, 1), halves),
        "0.linear_attn.in_proj_a.scales": ((32, 32), halves),
        "0.mlp.gate.weight": ((256, 512), words),
        "0.mlp.shared_expert_gate.weight": ((1, 512), words),
    }.items():
        assert stored[LAYER.format("").rstrip(".") + "." + name] == kind, name


def test_the_loader_takes_35b_shards_without_vision(directory):
    checkpoint = Checkpoint.open(directory)
    assert len({header.path for header, _ in checkpoint.entries.values()}) == 4 and (directory / INDEX_NAME).is_file()
    weights = open_weights(checkpoint)
    assert (len(checkpoint.entries), len(weights.links), weights.dropped) == (1757, 693, ())
    assert Counter(how.bits for how in weights.quantised.values()) == {4: 432, 8: 80}
    store = ExpertStore.open(checkpoint, TIER)
    assert {store.expert_nbytes(layer) for layer in range(40)} == {1_769_472} and store.total_nbytes == 18_119_393_280
    store.close()
    size = describe(empty_model(checkpoint.text_config(), NAMES, torch.bfloat16))
    assert size.parameters == 34_660_610_688 and size.bytes == pytest.approx(2 * size.parameters, rel=1e-6)


def test_the_loader_drops_35b_vision_tensors(directory, tmp_path):
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    vision = {f"vision_tower.blocks.{n}.attn.qkv.weight": ((3456, 1152), torch.bfloat16) for n in range(3)}
    (tmp_path / "extra").mkdir()
    write_shards(tmp_path / "extra", [Group(vision, tuple)])
    (tmp_path / "extra/model.safetensors").rename(tmp_path / "model-vision.safetensors")
    index = json.loads((directory / INDEX_NAME).read_text())
    index["weight_map"] |= dict.fromkeys(vision, "model-vision.safetensors")
    (tmp_path / INDEX_NAME).unlink()
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    weights = open_weights(Checkpoint.open(tmp_path))
    assert (len(weights.links), weights.dropped) == (693, tuple(sorted(vision)))


def test_every_35b_tensor_must_be_there_and_nothing_else(directory):
    checkpoint = Checkpoint.open(directory)
    gone = f"{LAYER.format(17)}mlp.switch_mlp.up_proj.biases"
    renamed = f"{LAYER.format(3)}self_attn.q_norm.weight"
    entries = {name: entry for name, entry in checkpoint.entries.items() if name != gone}
    entries["language_model.model.layers.40.input_layernorm.weight"] = entries.pop(renamed)
    with pytest.raises(Edge0Error) as problem:
        open_weights(dataclasses.replace(checkpoint, entries=entries))
    for offender in (gone.rpartition(".")[0], renamed, "layers.40.input_layernorm.weight: the model has no place"):
        assert offender in str(problem.value)


def test_the_overrides_of_config_json_must_agree_with_the_shapes(directory):
    checkpoint = Checkpoint.open(directory)
    gate = f"{LAYER.format(5)}mlp.gate"
    config = checkpoint.config | {
        "quantization": {k: v for k, v in checkpoint.config["quantization"].items() if k != gate}
    }
    with pytest.raises(Edge0Error, match=rf"{gate}: its shapes hold 8-bit codes, config.json says 4 bits"):
        open_weights(dataclasses.replace(checkpoint, config=config))


def test_the_plan_is_what_quantising_writes(make_config):
    """Nano's base was written from real tensors; its headers are those of the plan."""
    checkpoint = Checkpoint.open(make_config("head_distill").base.directory)
    written = {name: (entry.shape, entry.dtype) for name, (_, entry) in checkpoint.entries.items()}
    dtypes = {torch.uint32: "U32", torch.bfloat16: "BF16"}
    targets = checkpoint_layout(checkpoint.config, NAMES)
    planned = {name: (kind[0], dtypes[kind[1]]) for target in targets for name, kind in target.stored().items()}
    assert planned == written
    assert math.prod(written["language_model.model.embed_tokens.scales"][0]) == 384
