"""Reading an adapter: what breaks the contract is refused with all offenders; what has none needs a tier."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from edge0_runtime.contract import (
    Lora,
    read_adapter,
    read_header,
    write_adapter,
    write_atomic,
)
from tests.contract.adapters import A_KEY, B_KEY, HEAD_KEY, KINDS, OTHER, refusal, replaced, without_contract

# -- refusals when reading


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("lora", lambda t: t.pop(A_KEY), f"{A_KEY}: missing; its pair lora_B is there"),
        ("lora", lambda t: t.pop(B_KEY), f"{B_KEY}: missing; its pair lora_A is there"),
        ("lora", lambda t: t.update(extra=np.ones(1, np.float16)), "'extra': unknown"),
        ("lora", lambda t: t.update({A_KEY: t[A_KEY][:8]}), "rank 8 instead of 16"),
        ("lora", lambda t: t.update({A_KEY: t[A_KEY].T}), "transposed"),
        ("lora", lambda t: t.update({A_KEY: t[A_KEY].astype(np.float64)}), "dtype F64, must be one of F16, BF16, F32"),
        ("lora", lambda t: t.update({A_KEY: t[A_KEY].view(np.int16)}), "dtype I16, must be one of"),
        ("prerouter", lambda t: t[HEAD_KEY].__setitem__((3, 5), np.nan), "1 of 16384 values are not finite"),
        ("prerouter", lambda t: t[HEAD_KEY].__setitem__((3, 5), np.inf), "1 of 16384 values are not finite"),
        ("prerouter", lambda t: t.pop("layers.6.fc2.weight"), "layers.6.fc2.weight: missing"),
        ("prerouter", lambda t: t.update({"layers.7.fc1.weight": t[HEAD_KEY]}), "'layers.7.fc1.weight': unknown"),
        ("prerouter", lambda t: t.update({"heads" + k[6:]: t.pop(k) for k in list(t)}), f"{HEAD_KEY}: missing"),
    ],
)  # fmt: skip
def test_a_file_that_breaks_its_own_contract_is_refused(kind, change, reason, written):
    path = written(kind)
    tensors, metadata = safetensors.numpy.load_file(path), read_header(path).metadata
    change(tensors)
    write_atomic(path, tensors, metadata)
    text = refusal(read_adapter, path, kind)
    assert reason in text
    assert str(path) in text


def test_all_offenders_are_in_one_error_when_reading(written):
    path = written("lora")
    tensors, metadata = safetensors.numpy.load_file(path), read_header(path).metadata
    del tensors[A_KEY]
    tensors[B_KEY][0, 0] = np.nan
    write_atomic(path, tensors | {"x": np.ones(1, np.float16)}, metadata | {"K": "8"})
    text = refusal(read_adapter, path, "lora")
    for reason in (
        f"{A_KEY}: missing",
        f"{B_KEY}: 1 of",
        "'x': unknown",
        "metadata K: '8' in the file, '4' by the contract",
    ):
        assert reason in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "prerouter"), ("tier", "35b"), ("model", "x"), ("K", "8"), ("r", "8"), ("alpha", "16"),
        ("owners", "[1]"), ("start_layer", "3"), ("feature_topk", "teacher"), ("router", "sigmoid_group"),
        ("format_version", "0"), ("source", "x"),
        ("K", None), ("kind", None), ("format_version", None), ("K", "four"),
    ],
)  # fmt: skip
def test_flat_keys_that_contradict_the_contract_are_refused(key, value, written):
    text = refusal(read_adapter, replaced(written("lora"), key, value), "lora")
    assert f"metadata {key}: {value!r} in the file" in text


def test_the_same_number_written_otherwise_is_no_contradiction(written):
    path = replaced(replaced(written("lora"), "alpha", "32.0"), "owners", "[1,2,3,4,5,6]")
    assert read_adapter(path, "lora").has_contract


def test_an_adapter_of_the_other_kind_is_refused(written):
    assert "metadata kind: 'lora' in the file, 'prerouter' by" in refusal(read_adapter, written("lora"), "prerouter")
    assert "kind: 'adapter' is unknown" in refusal(read_adapter, written("lora"), "adapter")


def test_a_flat_key_is_read_strictly_too(written):
    text = refusal(read_adapter, replaced(written("lora"), "owners", "[" * 100_000), "lora")
    assert "metadata owners: '[[[" in text and len(text) < 1000


@pytest.mark.parametrize("with_contract", [True, False])
def test_a_newer_format_is_refused_with_both_versions(with_contract, written, nano):
    path = replaced(written("lora"), "format_version", "2")
    if not with_contract:
        replaced(path, "edge0", None)
    assert "format_version 2 is newer than 1" in refusal(read_adapter, path, "lora", nano)


@pytest.mark.parametrize(
    "document",
    [
        "", "[]", "null", "{", '{"tier": {}}', '{"tier": {}, "provenance": {}}', '{"tier": 1, "provenance": 1}',
        '{"tier": {}, "tier": {}, "provenance": {}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_contract_is_refused_even_with_a_fallback(document, written, nano):
    assert "metadata `edge0` is not a valid contract" in refusal(
        read_adapter, replaced(written("lora"), "edge0", document), "lora", nano
    )


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("tier", "k", "four"), ("tier", "k", 33), ("tier", "owners", "x"), ("tier", "lora", None),
        ("tier", "token_aware", 1), ("tier", "router", []), ("tier", "first_token", "guess"), ("tier", "extra", 1),
        ("tier", "architecture", {}), ("tier", "architecture", None), ("tier", "lora", {"r": 16, "alpha": "x", "targets": []}),
        ("tier", "lora", {"r": 16, "alpha": 32, "targets": None}), ("tier", "router", {"kind": "sigmoid_group", "n_group": 0}),
        ("provenance", "commit", None), ("provenance", "phases", {}), ("provenance", "phases", [{}]),
        ("provenance", "base_fingerprint", "abc"), ("provenance", "extra", 1), ("provenance", "teacher", {"id": "x"}),
        ("provenance", "created", "yesterday"), ("provenance", "created", "2026-01-02T03:04:05"),
        ("provenance", "data", {"fingerprint": "f", "rows": -1}), ("provenance", "prerouter_sha256", OTHER.upper()),
        ("provenance", "base_config", []), ("provenance", "base_config", {"a": {"b": 1}}),
    ],
)  # fmt: skip
def test_a_contract_with_a_wrong_field_is_refused(part, field, value, written):
    path = written("lora")
    document = json.loads(read_header(path).metadata["edge0"])
    document[part][field] = value
    assert "not a valid contract" in refusal(read_adapter, replaced(path, "edge0", json.dumps(document)), "lora")


TIER_FIELDS = ("name", "k", "family", "head", "owners", "lora", "first_token", "token_aware", "\x1b[31m")
RECORD_FIELDS = ("commit", "phases", "created", "base_fingerprint", "teacher", "base_config", "\x1b[31m")


@pytest.mark.parametrize(
    ("part", "field"), [*(("tier", field) for field in TIER_FIELDS), *(("provenance", field) for field in RECORD_FIELDS)]
)  # fmt: skip
def test_what_a_refusal_shows_of_a_strangers_value_is_escaped_and_cut(part, field, written):
    path, value = written("lora"), "\x1b[31m" * 99_999
    document = json.loads(read_header(path).metadata["edge0"])
    document[part][field] = [value] if field == "owners" else value
    text = refusal(read_adapter, replaced(path, "edge0", json.dumps(document)), "lora")
    assert "\x1b" not in text and len(text) < 2_000


def test_a_contract_with_an_extra_part_is_refused(written):
    path = written("lora")
    document = json.loads(read_header(path).metadata["edge0"]) | {"more": 1}
    text = refusal(read_adapter, replaced(path, "edge0", json.dumps(document)), "lora")
    assert "exactly the fields tier and provenance" in text


def test_damage_below_the_contract_is_named_by_the_strict_reader(written):
    path = written("lora")
    os.truncate(path, path.stat().st_size - 1)
    assert "truncated" in refusal(read_adapter, path, "lora")


def test_an_adapter_replaced_while_it_is_read_is_noticed(written, tensors, nano, provenance, monkeypatch):
    """Same size, other values: without the check the tensors of two files would be mixed."""
    import edge0_runtime.contract.artifacts as module

    path = written("lora")
    real = module.read_array
    calls = []

    def replacing(header, name):
        if len(calls) == 1:
            write_adapter_in_peace(path, "lora", nano, {k: -v for k, v in tensors("lora").items()}, provenance())
        calls.append(name)
        return real(header, name)

    def write_adapter_in_peace(*args):
        monkeypatch.setattr(module, "read_array", real)
        write_adapter(*args)

    monkeypatch.setattr(module, "read_array", replacing)
    assert "replaced or changed while in use" in refusal(read_adapter, path, "lora")


# -- files without a contract


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_a_contract_is_served_with_the_fallback_only(kind, tmp_path, tensors, nano):
    nested = json.dumps({"model": "edge0-35b", "K": "8"})  # as the public project's converter writes it
    path = without_contract(tmp_path / "x", tensors, kind, {"__metadata__": nested})
    adapter = read_adapter(path, kind, nano)
    assert (adapter.tier, adapter.has_contract, adapter.provenance) == (nano, False, None)
    assert "carries no contract" in refusal(read_adapter, path, kind)


def test_the_fallback_never_overrides_a_contract(written, nano):
    fallback = dataclasses.replace(nano, k=8, lora=Lora(r=8, alpha=1, targets=nano.lora.targets))
    assert read_adapter(written("lora"), "lora", fallback).tier == nano


@pytest.mark.parametrize(("key", "value"), [("kind", "prerouter"), ("K", "8"), ("r", "8"), ("alpha", "16")])
def test_flat_keys_that_contradict_the_fallback_are_refused(key, value, tmp_path, tensors, nano):
    flat = {"kind": "lora", "K": "4", "r": "16", "alpha": "32.0", "model": "edge0-nano-2", "owners": "all"}
    good = without_contract(tmp_path / "x", tensors, "lora", flat)
    assert not read_adapter(good, "lora", nano).has_contract
    bad = without_contract(tmp_path / "x", tensors, "lora", flat | {key: value})
    assert f"metadata {key}: {value!r} in the file" in refusal(read_adapter, bad, "lora", nano)
