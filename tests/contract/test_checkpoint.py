"""A base directory is whole, agrees with its index, is named by a fingerprint, and fits its tier."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from edge0_runtime.contract import Checkpoint, Edge0Error, builtin_tier, write_atomic
from edge0_runtime.contract.tier import Router

INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "big": random.integers(0, 2**31, 5000).astype(np.uint32),  # 20,000 bytes: has a middle that is not read
        "norm": random.standard_normal(8).astype(np.float32),
        "gate": random.standard_normal((4, 3)).astype(np.float16),
    }


def make(directory: Path, shards: dict[str, dict[str, np.ndarray]], index: bool = True) -> Path:
    directory.mkdir(exist_ok=True)
    for shard, tensors in shards.items():
        write_atomic(directory / shard, tensors, {"format": "mlx"})
    if index:
        write_json(directory / INDEX, {"weight_map": {name: s for s, tensors in shards.items() for name in tensors}})
    write_json(directory / "config.json", {"quantization": {"bits": 4, "group_size": 64}, "hidden_size": 8})
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards and their index."""
    tensors = arrays()
    return make(tmp_path / "model", {A: {"big": tensors["big"]}, B: {n: tensors[n] for n in ("norm", "gate")}})


def refusal(directory: Path) -> str:
    with pytest.raises(Edge0Error) as error:
        Checkpoint.open(directory)
    assert str(directory) in str(error.value)
    return str(error.value)


# -- opening


def test_a_whole_checkpoint_opens_with_every_tensor_at_its_place(model):
    checkpoint = Checkpoint.open(model)
    assert checkpoint.config["hidden_size"] == 8
    assert checkpoint.entries.keys() == arrays().keys()
    header, entry = checkpoint.entries["gate"]
    assert header.path == model / B
    assert (model / B).read_bytes()[entry.start : entry.end] == arrays()["gate"].tobytes()


def test_a_single_file_needs_no_index(tmp_path):
    directory = make(tmp_path / "m", {"model.safetensors": arrays()}, index=False)
    assert Checkpoint.open(directory).entries.keys() == arrays().keys()


def test_adapters_and_macos_companions_beside_the_shards_are_left_out(model):
    for name in ("prerouter_edge0_x.safetensors", "lora_edge0_x.safetensors", "verify_edge0_x.safetensors", f"._{A}"):
        (model / name).write_bytes(b"\x00\x05\x16\x07" + bytes(100))
    assert Checkpoint.open(model).entries.keys() == arrays().keys()


def test_a_directory_with_only_macos_companions_says_so(model):
    for name in (A, B):
        (model / name).rename(model / f"._{name}")
    assert f"._{A}, ._{B}: macOS companion files, not shards" in refusal(model)


def test_a_path_that_is_no_directory_is_refused(model):
    assert "not a directory" in refusal(model / A)
    assert "not a directory" in refusal(model / "absent")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda m: (m / A).unlink(), f"names shard {A}, which is missing"),
        (lambda m: os.truncate(m / A, 1000), f"{A}: not a valid safetensors file"),
        (lambda m: (m / A).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git LFS pointer"),
        (lambda m: (m / A).write_bytes(b"<!DOCTYPE html><html></html>"), "HTML or XML page"),
        (lambda m: (m / "config.json").unlink(), "config.json is missing"),
        (lambda m: (m / "config.json").write_text("{"), "config.json: not strict JSON"),
        (lambda m: (m / "config.json").write_text("[]"), "config.json: not a JSON object"),
        (lambda m: (m / "config.json").write_text('{"a": 1, "a": 2}'), "duplicate keys: 'a'"),
        (lambda m: (m / INDEX).write_text('{"weight_map": {"x": "model1", "x": "y"}}'), "duplicate keys: 'x'"),
        (lambda m: write_json(m / INDEX, {"weight_map": {"x": 1}}), "weight_map must map tensor names to shard names"),
        (lambda m: write_json(m / INDEX, {"metadata": {}}), "weight_map must map"),
        (lambda m: write_json(m / INDEX, {"weight_map": {"x": "../model.safetensors"}}), "not a model*.safetensors"),
        (lambda m: write_json(m / INDEX, {"weight_map": {"x": "._model.safetensors"}}), "not a model*.safetensors"),
        (lambda m: write_atomic(m / A, {"more": np.ones(1)}, {}), f"tensor more is in shard {A}, but {INDEX} does not"),
        (lambda m: write_atomic(m / A, {"other": np.ones(1)}, {}), f"tensor big is not in its shard {A}"),
        (lambda m: write_atomic(m / A, arrays(), {}), f"tensor norm lies in two shards: {A}, {B}"),
        (lambda m: shutil.copy(m / A, m / "model.safetensors"), "shard model.safetensors is not named by"),
    ],
)  # fmt: skip
def test_every_kind_of_broken_directory_fails_before_loading(model, damage, reason):
    damage(model)
    assert reason in refusal(model)


def test_without_an_index_the_shards_names_tell_which_one_is_missing(model):
    (model / INDEX).unlink()
    assert Checkpoint.open(model).entries.keys() == arrays().keys()
    (model / A).unlink()
    assert f"shard {A} is missing" in refusal(model)


def test_a_tensor_that_moved_to_another_shard_is_told_with_both_places(model):
    tensors = arrays()
    write_atomic(model / A, {"big": tensors["big"], "norm": tensors["norm"]}, {})
    write_atomic(model / B, {"gate": tensors["gate"]}, {})
    text = refusal(model)
    assert f"tensor norm is not in its shard {B}" in text
    assert f"tensor norm is in shard {A}, but {INDEX} puts it in {B}" in text


def test_all_offenders_are_in_one_error(model):
    (model / "config.json").unlink()
    os.truncate(model / A, 500)
    shutil.copy(model / B, model / "model-old.safetensors")
    text = refusal(model)
    for reason in ("config.json is missing", "truncated", "model-old.safetensors is not named"):
        assert reason in text
    assert "tensor gate lies in two" in text
    assert "tensor norm lies in two" in text


# -- fingerprint and hashes


def test_the_fingerprint_does_not_depend_on_sharding_or_metadata(model, tmp_path):
    tensors = arrays()
    other = make(tmp_path / "other", {A: {"norm": tensors["norm"]}, B: {n: tensors[n] for n in ("big", "gate")}})
    assert Checkpoint.open(model).fingerprint() == Checkpoint.open(other).fingerprint()
    single = make(tmp_path / "single", {"model.safetensors": tensors}, index=False)
    write_atomic(single / "model.safetensors", tensors, {"other": "metadata"})
    write_json(single / "config.json", {"quantization": {"group_size": 64, "bits": 4}, "other": 1})
    assert Checkpoint.open(model).fingerprint() == Checkpoint.open(single).fingerprint()


def changed_fingerprint(tmp_path: Path, tensors: dict[str, np.ndarray], config: dict | None = None) -> bool:
    before = Checkpoint.open(make(tmp_path / "before", {"model.safetensors": arrays()}, index=False)).fingerprint()
    directory = make(tmp_path / "after", {"model.safetensors": tensors}, index=False)
    if config is not None:
        write_json(directory / "config.json", config)
    after = Checkpoint.open(directory).fingerprint()
    assert len(before) == len(after) == 64
    return before != after


@pytest.mark.parametrize("position", [0, 1023, -1024, -1])
def test_the_fingerprint_detects_a_changed_edge_of_a_tensor(tmp_path, position):
    tensors = arrays()
    tensors["big"][position] ^= 1
    assert changed_fingerprint(tmp_path, tensors)


def test_the_fingerprint_does_not_see_the_middle_of_a_large_tensor(tmp_path):
    tensors = arrays()
    tensors["big"][1024:-1024] ^= 1
    assert not changed_fingerprint(tmp_path, tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"gate": t["gate"].reshape(3, 4)},
        lambda t: t | {"gate": t["gate"].view(np.int16)},
        lambda t: {("gate2" if n == "gate" else n): a for n, a in t.items()},
        lambda t: {n: a for n, a in t.items() if n != "gate"},
        lambda t: t | {"more": np.zeros(1, np.float32)},
        lambda t: t | {"norm": t["norm"][::-1]},
    ],
)
def test_the_fingerprint_detects_names_shapes_dtypes_and_values(tmp_path, change):
    assert changed_fingerprint(tmp_path, change(arrays()))


def test_the_fingerprint_covers_the_quantisation_but_not_the_rest_of_the_config(tmp_path):
    quantization = {"bits": 4, "group_size": 64}
    assert not changed_fingerprint(tmp_path, arrays(), {"quantization": quantization, "hidden_size": 9})
    assert changed_fingerprint(tmp_path, arrays(), {"quantization": quantization | {"bits": 8}})
    assert changed_fingerprint(tmp_path, arrays(), {})


def test_tokenizer_and_template_hashes(model):
    checkpoint = Checkpoint.open(model)
    with pytest.raises(Edge0Error, match=r"tokenizer\.json"):
        checkpoint.tokenizer_hash()
    (model / "tokenizer.json").write_bytes(b"{}")
    assert checkpoint.tokenizer_hash() == hashlib.sha256(b"{}").hexdigest()
    assert checkpoint.template_hash() is None
    write_json(model / "tokenizer_config.json", {"eos_token": "x"})
    assert checkpoint.template_hash() is None
    write_json(model / "tokenizer_config.json", {"chat_template": "ü{{ x }}"})
    inline = checkpoint.template_hash()
    assert inline == hashlib.sha256("ü{{ x }}".encode()).hexdigest()
    (model / "chat_template.jinja").write_text("ü{{ x }}", encoding="utf-8")
    assert checkpoint.template_hash() == inline
    (model / "chat_template.jinja").write_text("other")  # the file wins over the inlined one
    assert checkpoint.template_hash() != inline
    (model / "chat_template.jinja").unlink()
    write_json(model / "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "a"}]})
    assert checkpoint.template_hash() not in (None, inline)


# -- architecture


def checkpoint_with(config: dict) -> Checkpoint:
    return Checkpoint(Path("m"), config, {})


@pytest.mark.parametrize("nested", [True, False])
def test_a_matching_architecture_passes_nested_or_flat(nano, nested):
    text = dict(nano.architecture)
    checkpoint = checkpoint_with({"text_config": text, "hidden_size": 1} if nested else text)
    assert checkpoint.text_config() is text
    checkpoint.check_architecture(nano)


def test_all_differing_fields_are_listed_with_both_values(nano):
    config = dict(nano.architecture) | {"hidden_size": 65, "num_experts": 16}
    del config["vocab_size"]
    with pytest.raises(Edge0Error) as error:
        checkpoint_with(config).check_architecture(nano)
    for reason in (
        "hidden_size: tier nano has 64, config.json has 65",
        "num_experts: tier nano has 32, config.json has 16",
        "vocab_size: tier nano has 384, config.json has nothing",
    ):
        assert reason in str(error.value)
    assert "head_dim" not in str(error.value)


@pytest.mark.parametrize("explicit", [True, False])
def test_the_attention_interval_is_derived_from_layer_types(nano, explicit):
    config = dict(nano.architecture)
    if not explicit:
        del config["full_attention_interval"]
    linear, full = "linear_attention", "full_attention"
    checkpoint_with(config | {"layer_types": [linear, linear, linear, full] * 2}).check_architecture(nano)
    for types, has in (
        ([linear, full] * 4, "4, but layer_types that imply 2" if explicit else "2"),
        ([linear, linear, linear, full] + [linear] * 4, "['linear"),
        ([linear] * 8, "['linear"),
        (None, "None"),
    ):
        with pytest.raises(Edge0Error) as error:
            checkpoint_with(config | {"layer_types": types}).check_architecture(nano)
        assert f"full_attention_interval: tier nano has 4, config.json has {has}" in str(error.value)


LING_CONFIG = dict(builtin_tier("8b").architecture) | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
AS_TRANSFORMERS_SAVES = {
    "head_dim": 64, "linear_head_dim": 128, "num_expert_group": 8, "num_experts_per_token": 8,
}  # fmt: skip


def test_fields_count_under_the_name_that_transformers_saves_them_under():
    tier = builtin_tier("8b")
    checkpoint_with(LING_CONFIG).check_architecture(tier)
    saved = LING_CONFIG | AS_TRANSFORMERS_SAVES
    del saved["n_group"], saved["num_experts_per_tok"]
    checkpoint_with(saved).check_architecture(tier)
    with pytest.raises(Edge0Error, match=r"head_dim: tier 8b has 128, config\.json has 64"):
        checkpoint_with(saved | {"linear_head_dim": 64}).check_architecture(tier)


def test_how_a_router_chooses_is_part_of_the_architecture():
    tier = builtin_tier("8b")
    wrong = LING_CONFIG | {"n_group": 4, "routed_scaling_factor": 1.0}
    del wrong["topk_group"]
    with pytest.raises(Edge0Error) as error:
        checkpoint_with(wrong).check_architecture(tier)
    for reason in ("n_group: tier 8b has 8, config.json has 4", "topk_group: tier 8b has 4, config.json has nothing",
                   "routed_scaling_factor: tier 8b has 2.5, config.json has 1.0"):  # fmt: skip
        assert reason in str(error.value)
    softmax = dataclasses.replace(tier, router=Router("softmax_topk"))
    with pytest.raises(Edge0Error, match=r"router\.kind: tier 8b has softmax_topk, bailing_moe_v3 routes otherwise"):
        checkpoint_with(LING_CONFIG).check_architecture(softmax)


def test_an_optional_number_must_be_absent_where_the_tier_has_none():
    tier = builtin_tier("8b")
    numbers = {name: value for name, value in tier.architecture.items() if name != "q_lora_rank"}
    tier = dataclasses.replace(tier, architecture=numbers)
    for value in (None, 256):
        config = LING_CONFIG | {"q_lora_rank": value}
        if value is None:
            checkpoint_with(config).check_architecture(tier)
        else:
            with pytest.raises(Edge0Error, match=r"q_lora_rank: tier 8b has None, config\.json has 256"):
                checkpoint_with(config).check_architecture(tier)
