"""Adapter files: what is written is what is served, and everything else is refused with all offenders."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from edge0_runtime.contract import (
    DataSource,
    Edge0Error,
    Lora,
    Provenance,
    Router,
    Tier,
    builtin_tier,
    check_binding,
    read_adapter,
    read_header,
    sha256_file,
    upstream_problems,
    write_adapter,
    write_atomic,
)

KINDS = ("prerouter", "lora")
BASE, OTHER = "a" * 64, "d" * 64
A_KEY = "language_model.model.layers.0.linear_attn.in_proj_z.lora_A"
B_KEY = "language_model.model.layers.0.linear_attn.in_proj_z.lora_B"
HEAD_KEY = "layers.1.fc1.weight"


def replaced(path: Path, key: str, value: str | None) -> Path:
    """Rewrite one metadata key of an adapter; None removes it."""
    metadata = dict(read_header(path).metadata)
    metadata.pop(key, None)
    write_atomic(path, safetensors.numpy.load_file(path), metadata if value is None else metadata | {key: value})
    return path


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(Edge0Error) as error:
        call(*args, **kwargs)
    return str(error.value)


@pytest.fixture
def written(tmp_path, nano, tensors, provenance):
    """written(kind) writes a good adapter of the nano tier and returns its path."""

    def make(kind: str, tier: Tier = nano, **fields) -> Path:
        path = tmp_path / tier.file_name(kind)
        write_adapter(path, kind, tier, tensors(kind), provenance(**fields))
        return path

    return make


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
    ],
)  # fmt: skip
def test_a_contract_with_a_wrong_field_is_refused(part, field, value, written):
    path = written("lora")
    document = json.loads(read_header(path).metadata["edge0"])
    document[part][field] = value
    assert "not a valid contract" in refusal(read_adapter, replaced(path, "edge0", json.dumps(document)), "lora")


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


def without_contract(path: Path, tensors, kind: str, metadata: dict[str, str]) -> Path:
    write_atomic(path, {k: v.astype(np.float16) for k, v in tensors(kind).items()}, metadata)
    return path


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


# -- binding


@pytest.fixture
def pair(written):
    """A prerouter and a LoRA made together."""
    prerouter = read_adapter(written("prerouter"), "prerouter")
    return prerouter, read_adapter(written("lora", prerouter_sha256=prerouter.sha256), "lora")


def test_files_made_together_bind_without_a_note(pair):
    prerouter, lora = pair
    assert check_binding(BASE, prerouter, lora) == []
    assert (
        check_binding(BASE, prerouter, None) == check_binding(BASE, None, lora) == check_binding(BASE, None, None) == []
    )


def test_another_base_is_refused_with_both_values_and_the_flag(pair):
    text = refusal(check_binding, OTHER, *pair)
    assert text.count(BASE) == text.count(OTHER) == 2  # for both files
    assert "--allow-mismatch" in text
    assert len(check_binding(OTHER, *pair, allow_mismatch=True)) == 2


@pytest.mark.parametrize("trained_with", [OTHER, None])
def test_another_prerouter_or_none_is_refused_with_both_values(pair, written, trained_with):
    prerouter, _ = pair
    lora = read_adapter(written("lora", prerouter_sha256=trained_with), "lora")
    text = refusal(check_binding, BASE, prerouter, lora)
    assert (trained_with or "no prerouter") in text
    assert prerouter.sha256 in text
    assert "--allow-mismatch" in text
    (note,) = check_binding(BASE, prerouter, lora, allow_mismatch=True)
    assert note.startswith("--allow-mismatch: ")


def test_adapters_of_two_tiers_are_refused_even_with_the_flag(pair, nano):
    prerouter, lora = pair
    other = dataclasses.replace(lora, tier=dataclasses.replace(nano, k=8))
    assert "k: 4 and 8" in refusal(check_binding, BASE, prerouter, other, allow_mismatch=True)
    other = dataclasses.replace(lora, tier=dataclasses.replace(nano, token_aware=True))
    assert "token_aware: False and True" in refusal(check_binding, BASE, prerouter, other, allow_mismatch=True)


def test_a_lora_of_another_rank_may_serve_with_the_same_heads(pair, nano):
    prerouter, lora = pair
    other = dataclasses.replace(lora, tier=dataclasses.replace(nano, lora=Lora(8, 16, nano.lora.targets)))
    assert check_binding(BASE, prerouter, other) == []


def test_files_without_a_contract_are_served_with_a_note(tmp_path, tensors, nano):
    adapters = [read_adapter(without_contract(tmp_path / k, tensors, k, {}), k, nano) for k in KINDS]
    notes = check_binding(BASE, *adapters)
    assert len(notes) == 2
    assert all("cannot be checked" in note for note in notes)


# -- upstream


def adapter_of_35b(pair, kind: str = "lora", **fields):
    tier = dataclasses.replace(builtin_tier("35b"), **fields)
    return dataclasses.replace(pair[KINDS.index(kind)], tier=tier)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_of_the_public_project_loads_there(pair, kind):
    assert upstream_problems(adapter_of_35b(pair, kind)) == []


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("lora", {"lora": Lora(8, 32, ())}, "r = 8 and alpha = 32; it scales by 32 / 16"),
        ("lora", {"lora": Lora(16, 16, ())}, "alpha = 16"),
        ("lora", {"k": 8}, "k is 8; it has 4"),
        (
            "lora",
            {"router": Router("softmax_topk", mass_k=16)},
            "router.mass_k is 16: weights are divided by a wider mass",
        ),
        ("prerouter", {"router": Router("softmax_topk", scaling=2.0)}, "router is Router("),
        ("prerouter", {"feature_topk": "teacher"}, "feature_topk is teacher"),
        ("prerouter", {"owners": (1, 2)}, "owners is (1, 2)"),
        ("prerouter", {"token_aware": True}, "token_aware is True"),
        ("lora", {"token_aware": True}, "token_aware is True"),
        ("prerouter", {"name": "mine"}, "tier mine is not one of its own"),
    ],
)
def test_what_the_public_runtime_cannot_serve_is_said(pair, kind, fields, reason):
    (problem,) = upstream_problems(adapter_of_35b(pair, kind, **fields))
    assert reason in problem


def test_the_loras_layout_does_not_concern_the_heads_upstream(pair):
    assert upstream_problems(adapter_of_35b(pair, "prerouter", lora=Lora(8, 8, ()))) == []


def test_other_dtypes_than_f16_are_said(pair):
    adapter = adapter_of_35b(pair)
    floats = dataclasses.replace(adapter, tensors={"x": np.ones(1, np.float32)})
    assert upstream_problems(floats) == ["tensors are float32; it serves F16 and cannot read BF16"]


# -- provenance


def test_a_wrong_record_cannot_even_be_made(provenance):
    phase = provenance().phases[0]
    for call in (
        lambda: provenance(commit=""),
        lambda: provenance(template_hash="x"),
        lambda: provenance(phases=[phase]),
        lambda: provenance(teacher={"id": "x", "revision": "y"}),
        lambda: dataclasses.replace(phase, metrics={"loss": float("nan")}),
        lambda: dataclasses.replace(phase, metrics={1: 0.5}),
        lambda: dataclasses.replace(phase, seed=True),
        lambda: dataclasses.replace(phase, parents={"base": "x"}),
        lambda: dataclasses.replace(phase, time="now"),
        lambda: DataSource("", 1),
        lambda: Provenance.from_dict(provenance().to_dict() | {"more": 1}),
        lambda: Provenance.from_dict({"commit": "x"}),
        lambda: Provenance.from_dict([]),
    ):
        with pytest.raises(Edge0Error, match=r"provenance"):
            call()


def test_a_record_survives_json(provenance):
    record = provenance(template_hash=None, data=DataSource("f", 3))
    assert Provenance.from_dict(json.loads(json.dumps(record.to_dict()))) == record
