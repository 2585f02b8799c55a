"""Adapter files: what is written is what is served, and nothing else is written."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from edge0_runtime.contract import (
    DataSource,
    Tier,
    builtin_tier,
    read_adapter,
    read_header,
    sha256_file,
    write_adapter,
    write_atomic,
)
from tests.contract.adapters import A_KEY, B_KEY, BASE, HEAD_KEY, KINDS, OTHER, refusal, replaced

# -- payloads


@pytest.mark.parametrize(
    ("name", "heads", "head_bytes", "pairs", "lora_bytes", "examples"),
    [
        ("35b", 33, 138_412_032, 310, 42_332_160, {
            "layers.38.fc1.weight": (512, 2560),
            "language_model.model.layers.3.self_attn.q_proj.lora_B": (8192, 16),
            "language_model.model.layers.0.linear_attn.out_proj.lora_A": (16, 4096),
        }),
        ("8b", 16, 38_797_312, 153, 16_379_904, {
            "layers.22.fc1.weight": (512, 1792),
            "layers.7.linear_init.weight": (128, 1792),
            "model.layers.0.mlp.down_proj.lora_A": (16, 4608),
            "model.layers.1.attention.b_proj.lora_B": (16, 16),
            "model.layers.1.attention.g_proj.lora_B": (2048, 16),
            "model.layers.3.attention.g_proj.lora_B": (16, 16),
            "model.layers.3.attention.kv_b_proj.lora_A": (16, 512),
            "model.layers.3.attention.kv_b_proj.lora_B": (4096, 16),
            "model.layers.23.attention.q_b_proj.lora_B": (3072, 16),
            "model.layers.23.attention.dense.lora_A": (16, 2048),
        }),
    ],
)  # fmt: skip
def test_payloads_of_the_published_tiers_to_the_byte(name, heads, head_bytes, pairs, lora_bytes, examples):
    def f16_bytes(shapes):
        return sum(2 * out * inner for out, inner in shapes.values())

    tier = builtin_tier(name)
    assert len(tier.head_tensors()) == 3 * heads
    assert f16_bytes(tier.head_tensors()) == head_bytes
    assert len(tier.lora_tensors()) == 2 * pairs
    assert f16_bytes(tier.lora_tensors()) == lora_bytes
    tensors = tier.head_tensors() | tier.lora_tensors()
    assert {key: tensors[key] for key in examples} == examples


# -- round trip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_back_as_its_f16_rounding_with_tier_and_provenance(
    kind, tmp_path, nano, tensors, provenance
):
    path = tmp_path / nano.file_name(kind)
    record = provenance(prerouter_sha256=OTHER if kind == "lora" else None, data=DataSource("rows-v1", 12))
    sha256 = write_adapter(path, kind, nano, tensors(kind), record)
    adapter = read_adapter(path, kind)
    assert (adapter.kind, adapter.path, adapter.sha256, adapter.has_contract) == (kind, path, sha256, True)
    assert adapter.sha256 == sha256_file(path)
    assert adapter.tier == nano
    assert adapter.provenance == record
    assert adapter.tensors.keys() == tensors(kind).keys()
    for key, array in tensors(kind).items():
        assert adapter.tensors[key].dtype == np.float16
        np.testing.assert_array_equal(adapter.tensors[key], array.astype(np.float16))


def test_token_aware_heads_survive_the_file_and_no_other_tier_takes_them(tmp_path, nano, tensors, provenance):
    tier, path = dataclasses.replace(nano, token_aware=True), tmp_path / "x"
    random = np.random.default_rng(0)
    heads = {key: random.standard_normal(shape).astype(np.float16) for key, shape in tier.head_tensors().items()}
    write_adapter(path, "prerouter", tier, heads, provenance())
    adapter = read_adapter(path, "prerouter")
    assert adapter.tier == tier
    np.testing.assert_array_equal(adapter.tensors[HEAD_KEY], heads[HEAD_KEY])
    assert "shape [128, 128], must be [128, 192]" in refusal(
        write_adapter, path, "prerouter", tier, tensors("prerouter"), provenance()
    )
    assert "shape [128, 192], must be [128, 128]" in refusal(
        write_adapter, path, "prerouter", nano, heads, provenance()
    )
    without_contract = tmp_path / "y"
    write_atomic(without_contract, heads, {})
    assert "must be [128, 128]" in refusal(read_adapter, without_contract, "prerouter", nano)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_from_before_token_aware_heads_is_read_as_without(kind, written, nano):
    path = written(kind)
    document = json.loads(read_header(path).metadata["edge0"])
    assert document["tier"].pop("token_aware") is False
    assert read_adapter(replaced(path, "edge0", json.dumps(document)), kind).tier == nano


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_plain_f16_safetensors_with_the_flat_keys(kind, written, nano):
    path = written(kind)
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}  # noqa: SIM118
    assert metadata.keys() == {
        "kind", "tier", "model", "K", "r", "alpha", "owners", "start_layer", "feature_topk", "router", "format_version",
        "source", "edge0",
    }  # fmt: skip
    flat = {
        key: metadata[key] for key in ("kind", "tier", "K", "r", "alpha", "owners", "start_layer", "format_version")
    }
    assert flat == {
        "kind": kind, "tier": "nano", "K": "4", "r": "16", "alpha": "32", "owners": "[1, 2, 3, 4, 5, 6]",
        "start_layer": "2", "format_version": "1",
    }  # fmt: skip
    document = json.loads(metadata["edge0"])
    assert Tier.from_dict(document["tier"]) == nano
    assert document["provenance"]["base_fingerprint"] == BASE


def test_equal_input_gives_equal_bytes_whatever_the_order(written, tmp_path, nano, tensors, provenance):
    def phases(*names):
        return (dataclasses.replace(provenance().phases[0], metrics=dict.fromkeys(names, 0.5)),)

    path = written("lora", phases=phases("loss", "recall"))
    backwards = dict(reversed(tensors("lora").items()))
    other = tmp_path / "other.safetensors"
    write_adapter(other, "lora", nano, backwards, provenance(phases=phases("recall", "loss")))
    assert path.read_bytes() == other.read_bytes()
    write_adapter(other, "lora", nano, backwards, provenance(created="2026-01-02T03:04:06Z"))
    assert path.read_bytes() != other.read_bytes()


def test_float16_and_float32_of_the_same_values_give_the_same_file(tmp_path, nano, tensors, provenance):
    halves = {key: array.astype(np.float16) for key, array in tensors("lora").items()}
    one = write_adapter(tmp_path / "1", "lora", nano, halves, provenance())
    two = write_adapter(
        tmp_path / "2", "lora", nano, {k: a.astype(np.float32) for k, a in halves.items()}, provenance()
    )
    assert one == two


# -- refusals when writing


@pytest.mark.parametrize(
    ("kind", "key", "value", "reason"),
    [
        ("lora", A_KEY, None, f"{A_KEY}: missing; its pair lora_B is there"),
        ("lora", B_KEY, None, f"{B_KEY}: missing; its pair lora_A is there"),
        ("lora", "model.norm.lora_A", np.ones((16, 64), np.float32), "'model.norm.lora_A': unknown"),
        ("lora", A_KEY, np.ones((8, 64), np.float32), "shape [8, 64], must be [16, 64]: rank 8 instead of 16"),
        ("lora", B_KEY, np.ones((64, 8), np.float32), "shape [64, 8], must be [64, 16]: rank 8 instead of 16"),
        ("lora", A_KEY, np.ones((64, 16), np.float32), "shape [64, 16], must be [16, 64]: transposed"),
        ("lora", A_KEY, np.zeros((16, 64), np.float32), f"{A_KEY}: all zero"),
        ("prerouter", HEAD_KEY, None, f"{HEAD_KEY}: missing"),
        ("prerouter", "layers.1.fc1.bias", np.ones(128, np.float32), "'layers.1.fc1.bias': unknown"),
        ("prerouter", HEAD_KEY, np.ones((128, 129), np.float32), "shape [128, 129], must be [128, 128]"),
        ("prerouter", HEAD_KEY, np.ones((128, 128), np.float64), "dtype float64, must be float32 or float16"),
        ("prerouter", HEAD_KEY, np.zeros((128, 128), np.float32), f"{HEAD_KEY}: all zero"),
        ("prerouter", HEAD_KEY, np.full((128, 128), 1e-8, np.float32), f"{HEAD_KEY}: all zero (in F16)"),
        ("prerouter", HEAD_KEY, np.full((128, 128), np.nan, np.float32), "16384 of 16384 values are not finite"),
        ("prerouter", HEAD_KEY, np.full((128, 128), -np.inf, np.float16), "values are not finite"),
        ("prerouter", HEAD_KEY, np.full((128, 128), -65520, np.float32), "65520 is outside the F16 range"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_contract_are_not_written(
    kind, key, value, reason, tmp_path, nano, tensors, provenance
):
    changed = {k: v for k, v in (tensors(kind) | {key: value}).items() if v is not None}
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(b"old")
    assert reason in refusal(write_adapter, path, kind, nano, changed, provenance())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["adapter.safetensors"]


def test_the_largest_f16_is_still_written(tmp_path, nano, tensors, provenance):
    edge = np.full((128, 128), 65504, np.float32)
    write_adapter(tmp_path / "x", "prerouter", nano, tensors("prerouter") | {HEAD_KEY: edge}, provenance())
    assert (read_adapter(tmp_path / "x", "prerouter").tensors[HEAD_KEY] == 65504).all()


def test_an_untrained_lora_is_refused_but_a_single_idle_module_is_not(tmp_path, nano, tensors, provenance):
    untrained = {k: np.zeros_like(v) if k.endswith("lora_B") else v for k, v in tensors("lora").items()}
    assert "untrained" in refusal(write_adapter, tmp_path / "x", "lora", nano, untrained, provenance())
    write_adapter(tmp_path / "x", "lora", nano, tensors("lora") | {B_KEY: untrained[B_KEY]}, provenance())


def test_all_offenders_are_in_one_error_when_writing(tmp_path, nano, tensors, provenance):
    changed = tensors("lora") | {A_KEY: np.full((16, 64), np.inf, np.float32), "x": np.ones(1, np.float32)}
    del changed[B_KEY]
    text = refusal(write_adapter, tmp_path / "x", "lora", nano, changed, provenance())
    for reason in (f"{A_KEY}: 1024 of 1024 values", "'x': unknown", f"{B_KEY}: missing"):
        assert reason in text


def test_a_prerouter_names_no_prerouter(tmp_path, nano, tensors, provenance):
    record = provenance(prerouter_sha256=OTHER)
    assert "only a LoRA" in refusal(write_adapter, tmp_path / "x", "prerouter", nano, tensors("prerouter"), record)


def test_a_tier_that_would_not_read_back_is_not_written(tmp_path, nano, tensors, provenance):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    broken = dataclasses.replace(nano, feature_topk="sometimes")
    text = refusal(write_adapter, path, "lora", broken, tensors("lora"), provenance())
    assert f"{path}: metadata `edge0`" in text
    assert "sometimes" in text
    assert path.read_bytes() == b"old"


def test_a_tier_that_reads_back_as_another_is_not_written(tmp_path, nano, tensors, provenance):
    ambiguous = dataclasses.replace(nano, owners=list(nano.owners))
    text = refusal(write_adapter, tmp_path / "x", "lora", ambiguous, tensors("lora"), provenance())
    assert "what was read back differs" in text


def test_a_file_that_reads_back_differently_is_not_committed(tmp_path, nano, tensors, provenance, monkeypatch):
    """A disk that lies: one bit flips between writing and reading back."""
    import edge0_runtime.contract.artifacts as module

    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    real = module.read_array

    def flipping(header, name):
        array = real(header, name)
        if name == B_KEY:
            array.view(np.uint16)[-1, -1] ^= 1
        return array

    monkeypatch.setattr(module, "read_array", flipping)
    text = refusal(write_adapter, path, "lora", nano, tensors("lora"), provenance())
    assert "what was read back differs" in text
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.safetensors"]
