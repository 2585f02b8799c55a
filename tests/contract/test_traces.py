"""Reference traces keep their meaning in the file, and a trace that cannot be true is refused."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import safetensors.numpy

from edge0_runtime.contract import (
    Edge0Error,
    PromptTrace,
    ReferenceTrace,
    read_header,
    read_trace,
    write_atomic,
    write_trace,
)

LAYERS, K, TOP, VOCABULARY, EXPERTS = 8, 4, 5, 384, 32  # the nano tier's


def prompt_trace(seed: int, length: int, steps: int) -> PromptTrace:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((steps, VOCABULARY)).astype(np.float32)
    top = np.argsort(-logits, axis=-1)[:, :TOP]
    routed = np.argsort(random.random((steps, LAYERS, EXPERTS)), axis=-1)[..., :K]
    return PromptTrace(
        prompt_ids_P=random.integers(0, VOCABULARY, length),
        generated_ids_T=top[:, 0],
        experts_TLK=np.sort(routed, axis=-1),
        logits_ids_TN=top,
        logits_values_TN=np.take_along_axis(logits, top, axis=-1),
    )


@pytest.fixture
def trace() -> ReferenceTrace:
    return ReferenceTrace(
        tier="nano",
        base_fingerprint="a" * 64,
        prerouter_sha256="b" * 64,
        lora_sha256=None,
        compute_dtype="float32",
        prompts=(prompt_trace(0, 7, 4), prompt_trace(1, 1, 9)),
    )


@pytest.fixture
def with_own(trace: ReferenceTrace) -> ReferenceTrace:
    """The same in version 2: with the prompt's routing and the own choices of nano's six owners."""
    random = np.random.default_rng(5)
    prompts = []
    for prompt in trace.prompts:
        shapes = ((len(prompt.prompt_ids_P), LAYERS, EXPERTS), (len(prompt.generated_ids_T), 6, EXPERTS))
        experts, own = (np.sort(np.argsort(random.random(shape), axis=-1)[..., :K], axis=-1) for shape in shapes)
        experts[-1] = prompt.experts_TLK[0]
        prompts.append(dataclasses.replace(prompt, prompt_experts_PLK=experts, own_TOK=own))
    return dataclasses.replace(trace, prompts=tuple(prompts))


def damaged(trace: ReferenceTrace, **change) -> ReferenceTrace:
    """`trace` with fields of its second prompt changed by the given functions."""
    first, second = trace.prompts
    fields = {name: function(getattr(second, name).copy()) for name, function in change.items()}
    return dataclasses.replace(trace, prompts=(first, dataclasses.replace(second, **fields)))


def put(position, value):
    def change(array):
        array[position] = value
        return array

    return change


def test_a_trace_survives_the_file(tmp_path, trace, nano):
    path = tmp_path / nano.file_name("verify")
    write_trace(path, trace, nano)
    assert path.name == "verify_edge0_nano.safetensors"
    read = read_trace(path, nano)
    for field in ("tier", "base_fingerprint", "prerouter_sha256", "lora_sha256", "compute_dtype"):
        assert getattr(read, field) == getattr(trace, field)
    assert len(read.prompts) == 2
    for one, two in zip(read.prompts, trace.prompts, strict=True):
        for field in dataclasses.fields(PromptTrace):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name))
    header = read_header(path)
    assert {(name, entry.dtype, entry.shape) for name, entry in header.entries.items() if ".1" in name} == {
        ("prompt.1.ids", "I32", (1,)),
        ("generated.1.ids", "I32", (9,)),
        ("experts.1", "I32", (9, LAYERS, K)),
        ("logits.1.ids", "I32", (9, TOP)),
        ("logits.1.values", "F32", (9, TOP)),
    }
    assert header.metadata["kind"] == "verify"
    assert "lora_sha256" not in header.metadata


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"generated_ids_T": lambda a: a[:-1]}, "generated: shape [8], by the experts' shape it must be [9]"),
        ({"logits_values_TN": lambda a: a[:, :-1]}, "logits values: shape [9, 4]"),
        ({"logits_ids_TN": lambda a: a[1:]}, "logits ids: shape [8, 5]"),
        ({"experts_TLK": lambda a: a[0]}, "dimensions, must be [1, 1, 3, 2, 2]"),
        ({"prompt_ids_P": lambda a: a[:0]}, "prompt: empty"),
        ({"prompt_ids_P": put(0, -1)}, "prompt: ids -1..-1, must lie in 0..383"),
        ({"prompt_ids_P": put(0, VOCABULARY)}, "prompt: ids 384..384, must lie in 0..383"),
        ({"prompt_ids_P": lambda a: a.astype(float)}, "prompt: dtype float64, must be integers"),
        ({"experts_TLK": put((0, 0, -1), EXPERTS)}, "must lie in 0..31"),
        ({"experts_TLK": lambda a: a[..., ::-1]}, "experts: ids of a layer must rise"),
        ({"experts_TLK": lambda a: np.concatenate([a[..., :1], a[..., :-1]], axis=-1)}, "each once"),
        ({"experts_TLK": lambda a: a[:, 1:]}, "experts: 7 layers and K = 4, tier nano has 8 and K = 4"),
        ({"experts_TLK": lambda a: a[..., 1:]}, "experts: 8 layers and K = 3, tier nano has 8 and K = 4"),
        ({"logits_values_TN": put((2, 3), np.nan)}, "logits values: not all finite"),
        ({"logits_values_TN": lambda a: a[:, ::-1]}, "logits values: must fall"),
        ({"logits_ids_TN": lambda a: np.repeat(a[:, :1], TOP, axis=1)}, "logits ids: an id occurs twice"),
        ({"generated_ids_T": lambda a: np.roll(a, 1)}, "generated: step 0 is not the largest logit"),
    ],
)
def test_a_trace_that_cannot_be_true_is_refused_when_written_and_when_read(tmp_path, trace, nano, change, reason):
    path = tmp_path / "x.safetensors"
    write_trace(path, trace, nano)
    old = path.read_bytes()
    with pytest.raises(Edge0Error) as error:
        write_trace(path, damaged(trace, **change), nano)
    assert "prompt 1: " in str(error.value)
    assert reason in str(error.value)
    assert path.read_bytes() == old

    prompt = damaged(trace, **change).prompts[1]
    if prompt.prompt_ids_P.dtype.kind == "i":  # else the file's dtype is refused instead
        tensors = safetensors.numpy.load_file(path)
        tensors |= {
            "prompt.1.ids": prompt.prompt_ids_P.astype(np.int32),
            "generated.1.ids": prompt.generated_ids_T.astype(np.int32),
            "experts.1": prompt.experts_TLK.astype(np.int32),
            "logits.1.ids": prompt.logits_ids_TN.astype(np.int32),
            "logits.1.values": prompt.logits_values_TN,
        }
        write_atomic(path, tensors, read_header(path).metadata)
        with pytest.raises(Edge0Error) as error:
            read_trace(path, nano)
        assert reason in str(error.value)
        assert str(path) in str(error.value)


def test_what_is_newer_survives_the_file_which_says_so_in_its_version(tmp_path, trace, with_own, nano):
    """An older program would take it for strangers; a file without it is what it always was."""
    without_own = dataclasses.replace(
        with_own, prompts=tuple(dataclasses.replace(prompt, own_TOK=None) for prompt in with_own.prompts)
    )
    for value, version in ((trace, "1"), (with_own, "2"), (without_own, "2")):
        write_trace(tmp_path / "x", value, nano)
        assert read_header(tmp_path / "x").metadata["format_version"] == version
        for one, two in zip(read_trace(tmp_path / "x", nano).prompts, value.prompts, strict=True):
            np.testing.assert_array_equal(one.own_TOK, two.own_TOK)
            np.testing.assert_array_equal(one.prompt_experts_PLK, two.prompt_experts_PLK)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: a[1:], "shape [8, 6, 4], must be [9, 6, 4]"),
        (lambda a: np.concatenate([a, a[:1]]), "shape [10, 6, 4], must be [9, 6, 4]"),
        (lambda a: a[:, 1:], "shape [9, 5, 4], must be [9, 6, 4]"),
        (lambda a: a[..., 1:], "shape [9, 6, 3], must be [9, 6, 4]"),
        (lambda a: a[0], "shape [6, 4], must be [9, 6, 4]"),
        (lambda a: a[..., ::-1], "ids of a layer must rise"),
        (put((0, 0, -1), EXPERTS), "..32, must lie in 0..31"),
        (lambda a: None, "there for some prompts and not for others"),
    ],
)
def test_newer_parts_that_cannot_be_true_are_refused(tmp_path, with_own, nano, change, reason):
    for name, field in (("own", "own_TOK"), ("prompt_experts", "prompt_experts_PLK")):
        with pytest.raises(Edge0Error) as error:
            write_trace(tmp_path / "x", damaged(with_own, **{field: change}), nano)
        assert f"{name}: " in str(error.value)
        assert name != "own" or reason in str(error.value)


def test_the_prompts_routing_ends_where_the_rows_begin(tmp_path, with_own, nano):
    """Catches positions that are shifted, by padding say."""
    rolled = damaged(with_own, prompt_experts_PLK=lambda a: a[:, ::-1])
    with pytest.raises(Edge0Error, match="prompt 1: prompt_experts: the last position isn't what row 0"):
        write_trace(tmp_path / "x", rolled, nano)


def test_tied_logits_may_go_either_way(tmp_path, trace, nano):
    tie = damaged(
        trace,
        logits_values_TN=lambda values: np.repeat(values[:, :1], TOP, axis=1),
        generated_ids_T=lambda ids: trace.prompts[1].logits_ids_TN[:, 2],
    )
    write_trace(tmp_path / "x", tie, nano)


def test_without_a_tier_ids_are_only_bounded_by_their_dtype(tmp_path, trace):
    write_trace(tmp_path / "x", damaged(trace, prompt_ids_P=put(0, 2**31 - 1)))
    assert read_trace(tmp_path / "x").prompts[1].prompt_ids_P[0] == 2**31 - 1
    with pytest.raises(Edge0Error, match="must lie in"):
        write_trace(tmp_path / "x", damaged(trace, prompt_ids_P=put(0, 2**31)))


def test_prompts_must_agree_in_layers_and_k(tmp_path, trace):
    with pytest.raises(Edge0Error, match=r"prompts differ in \[layers, K\]: \(7, 4\), \(8, 4\)"):
        write_trace(tmp_path / "x", damaged(trace, experts_TLK=lambda a: a[:, 1:]))


def test_no_prompts_and_another_tier_are_refused(tmp_path, trace, nano):
    with pytest.raises(Edge0Error, match="no prompts"):
        write_trace(tmp_path / "x", dataclasses.replace(trace, prompts=()))
    with pytest.raises(Edge0Error, match="tier 'mini' is not 'nano'"):
        write_trace(tmp_path / "x", dataclasses.replace(trace, tier="mini"), nano)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t, m: t.pop("experts.1"), "experts.1: missing"),
        (lambda t, m: t.pop("prompt.0.ids"), "prompt.1.ids: unknown"),
        (lambda t, m: t.update(extra=np.ones(1)), "extra: unknown"),
        (lambda t, m: t.update({"experts.0": t["experts.0"].astype(np.int64)}), "experts.0: dtype I64, must be I32"),
        (lambda t, m: m.update(kind="lora"), "kind is 'lora', must be 'verify'"),
        (lambda t, m: m.update(format_version="2"), "prompt.0.experts: missing"),
        (lambda t, m: m.update(format_version="2") or t.update({"own.0": t["experts.0"]}), "own.1: missing"),
        (lambda t, m: m.update(format_version="3"), "format_version '3' is not one of 1, 2: update Edge0"),
        (lambda t, m: m.pop("kind"), "metadata kind is missing"),
        (lambda t, m: m.pop("base_fingerprint"), "metadata base_fingerprint is missing"),
        (lambda t, m: t.clear(), "no prompts"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, trace, change, reason):
    path = tmp_path / "x.safetensors"
    write_trace(path, trace)
    tensors, metadata = safetensors.numpy.load_file(path), dict(read_header(path).metadata)
    change(tensors, metadata)
    write_atomic(path, tensors, metadata)
    with pytest.raises(Edge0Error) as error:
        read_trace(path)
    assert reason in str(error.value)
    assert str(path) in str(error.value)
