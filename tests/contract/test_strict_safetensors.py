"""The strict reader names every kind of damage."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge0_runtime.contract import Edge0Error, atomic_replace, read_array, read_header, write_atomic
from edge0_runtime.contract.files import read_exact, strict_json
from edge0_runtime.contract.strict_safetensors import MAX_HEADER_BYTES


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refusal(path: Path) -> str:
    with pytest.raises(Edge0Error) as error:
        read_header(path)
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_good_file_gives_absolute_offsets_and_exact_values(craft):
    data = np.arange(6, dtype="<f4").tobytes() + np.array([7, -1], "<i2").tobytes()
    header = {"__metadata__": {"a": "b"}, "x": entry(shape=(2, 3), offsets=(0, 24)), "y": entry("I16", (2,), (24, 28))}
    path = craft(header, data)
    read = read_header(path)
    assert read.metadata == {"a": "b"}
    assert read.file_size == path.stat().st_size
    assert read.entries["y"].end == read.file_size
    assert read.entries["x"].end - read.entries["x"].start == 24
    np.testing.assert_array_equal(read_array(read, "x"), np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(read_array(read, "y"), np.array([7, -1], np.int16))
    assert read_array(read, "y").dtype == np.int16


def test_empty_and_scalar_tensors_are_valid(craft):
    header = {"none": entry(shape=(0, 5), offsets=(0, 0)), "one": entry(shape=(), offsets=(0, 4))}
    read = read_header(craft(header, np.float32(2.5).tobytes()))
    assert read_array(read, "none").shape == (0, 5)
    assert read_array(read, "one") == np.float32(2.5)
    assert read_array(read, "one").shape == ()


def test_bf16_comes_back_as_the_exact_float32(craft):
    bits = np.array([0x3F80, 0xC040, 0x0001, 0x7F80], "<u2")  # 1, -3, the smallest subnormal, infinity
    read = read_header(craft({"x": entry("BF16", (4,), (0, 8))}, bits.tobytes()))
    values = read_array(read, "x")
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.float32([1, -3, 2.0**-133, np.inf]))


@pytest.mark.parametrize(
    ("header", "size", "reason"),
    [
        ({"x": entry(shape=(True,))}, 4, "shape [True]"),
        ({"x": entry(shape=(1.0,))}, 4, "shape [1.0]"),
        ({"x": entry(shape=(-1,))}, 4, "shape [-1]"),
        ({"x": entry(shape=("1",))}, 4, "shape ['1']"),
        ({"x": entry(shape=(2**63,))}, 4, "whole numbers"),
        ({"x": entry(shape=[1] * 33)}, 4, "at most 32"),
        ({"x": entry() | {"shape": 1}}, 4, "shape 1 must be a list"),
        ({"x": entry("F31")}, 4, "dtype 'F31' is unknown"),
        ({"x": entry("f32")}, 4, "dtype 'f32' is unknown"),
        ({"x": entry() | {"dtype": ["F32"]}}, 4, "is unknown"),
        ({"x": entry(shape=(2,))}, 4, "needs 8 bytes, data_offsets give 4"),
        ({"x": entry("F16")}, 4, "needs 2 bytes, data_offsets give 4"),
        ({"x": entry(offsets=(0.0, 4))}, 4, "data_offsets"),
        ({"x": entry(offsets=(False, 4))}, 4, "data_offsets"),
        ({"x": entry(offsets=(-4, 0))}, 4, "data_offsets"),
        ({"x": entry(offsets=(4, 0))}, 4, "data_offsets"),
        ({"x": entry(offsets=(0, 4, 8))}, 4, "data_offsets"),
        ({"x": entry() | {"extra": 1}}, 4, "exactly dtype, shape and data_offsets"),
        ({"x": {"dtype": "F32", "shape": [1]}}, 4, "exactly dtype, shape and data_offsets"),
        ({"x": None}, 4, "exactly dtype, shape and data_offsets"),
        ({"x": entry(offsets=(4, 8))}, 8, "hole of 4 bytes before tensor 'x'"),
        ({"x": entry(), "y": entry(offsets=(8, 12))}, 12, "hole of 4 bytes before tensor 'y'"),
        ({"x": entry(), "y": entry()}, 4, "tensor 'y' overlaps tensor 'x'"),
        ({"x": entry(shape=(2,), offsets=(0, 8)), "y": entry(offsets=(4, 8))}, 8, "overlaps"),
        ({"x": entry()}, 5, "1 trailing bytes"),
        ({"x": entry()}, 3, "truncated"),
        ({}, 1, "1 trailing bytes"),
        ({"__metadata__": {"a": 1}, "x": entry()}, 4, "__metadata__ must map strings to strings"),
        ({"__metadata__": ["a"], "x": entry()}, 4, "__metadata__ must map strings to strings"),
        (b'["x"]', 0, "not a JSON object"),
        (b' {"x":' + json.dumps(entry()).encode() + b"}", 4, "not a JSON object"),
        (b'{"x":1,"x":1}', 0, "duplicate keys: 'x'"),
        (b'{"x":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4, "duplicate keys: 'dtype'"),
        (b'{"__metadata__":{"k":"1","k":"2"}}', 0, "duplicate keys: 'k'"),
        (b'{"x":NaN}', 0, "NaN is not a JSON number"),
        (b'{"x":-Infinity}', 0, "-Infinity is not a JSON number"),
        (b'{"x":' + b"[" * 100_000, 0, "not strict JSON"),
        (b'{"x":' + b"9" * 5000 + b"}", 0, "not strict JSON"),
        (b'{"x', 0, "not strict JSON"),
        (b'{"\xff":1}', 0, "not strict JSON"),
        (b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", 4, "not valid Unicode"),
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused_with_its_reason(craft, header, size, reason):
    assert reason in refusal(craft(header, bytes(size)))


def test_all_offenders_of_a_file_are_in_one_error(craft):
    bad_shape, far = entry(shape=(-2,), offsets=(4, 8)), entry(offsets=(12, 16))
    header = {"__metadata__": {"a": 1}, "p": entry("X9"), "q": bad_shape, "r": far}
    text = refusal(craft(header, bytes(20)))
    for reason in ("__metadata__", "'p': dtype", "'q': shape", "hole of 4 bytes before tensor 'r'", "4 trailing bytes"):
        assert reason in text


def test_a_tensor_inside_another_is_an_overlap_and_no_hole(craft):
    whole, inside = entry(shape=(3,), offsets=(0, 12)), entry(offsets=(4, 8))
    text = refusal(craft({"a": whole, "b": inside, "c": entry(offsets=(12, 16))}, bytes(16)))
    assert "'b' overlaps tensor 'a' at offset" in text
    assert "hole" not in text


def test_a_hostile_name_neither_floods_nor_controls_the_terminal(craft):
    text = refusal(craft({"\x1b[2J" + "x" * 100_000: None}))
    assert "\x1b" not in text
    assert len(text) < 2000


def test_a_header_over_the_limit_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)  # sparse
    assert f"header length is {MAX_HEADER_BYTES + 1}" in refusal(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git LFS pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML or XML page"),
        (b"\n  <html><head></head></html>", "HTML or XML page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "HTML or XML page"),
        (b"GGUF\x03\x00\x00\x00" + bytes(40), "GGUF"),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.", "pickle"),
        (b"\x93NUMPY\x01\x00" + bytes(40), ".npy"),
        (b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X" + bytes(40), "macOS companion"),
        (b"", "0 bytes are too few"),
        (b"404", "3 bytes are too few"),
        ((500).to_bytes(8, "little") + b"{}", "truncated"),
        (bytes(8) + b"{}", "truncated"),
    ],
)
def test_other_files_are_named_as_what_they_are(tmp_path, content, what):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert what in refusal(path)


def test_a_zip_archive_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", "x" * 1000)
    assert "zip archive" in refusal(path)


def test_the_bytes_of_a_pickle_are_still_a_valid_header_length(craft):
    header = json.dumps({"x": entry()}).encode()
    header += b" " * (0x0280 - len(header))  # 0x0280 little-endian is how a protocol 2 pickle begins
    assert "x" in read_header(craft(header, bytes(4))).entries


def test_a_dot_file_is_named_even_if_its_content_is_valid(craft):
    assert "macOS companion" in refusal(craft({"x": entry()}, bytes(4), name="._model.safetensors"))


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo"])
def test_what_is_no_regular_file_is_refused_without_blocking(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    assert ("cannot be read" if kind == "missing" else "not a regular file") in refusal(path)


def test_a_read_after_truncation_names_file_offset_wanted_and_got(craft):
    path = craft({"x": entry(shape=(4,), offsets=(0, 16))}, bytes(16))
    header = read_header(path)
    os.truncate(path, header.file_size - 6)
    with pytest.raises(Edge0Error, match=rf"offset {header.entries['x'].start} failed: wanted 16 bytes, got 10") as e:
        read_array(header, "x")
    assert str(path) in str(e.value)


def test_a_file_replaced_by_one_of_the_same_size_is_noticed(craft):
    path = craft({"x": entry()}, np.float32(1).tobytes())
    header = read_header(path)
    with atomic_replace(path) as temporary:
        temporary.write_bytes(path.read_bytes()[:-4] + np.float32(2).tobytes())
    with pytest.raises(Edge0Error, match="replaced or changed while in use"):
        read_array(header, "x")


def test_reads_loop_over_short_returns_and_report_io_errors(tmp_path):
    class Dripping:
        def seek(self, offset):
            self.at = offset

        def readinto(self, view):
            if self.at >= 7:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            view[0] = self.at
            self.at += 1
            return 1

    view = bytearray(5)
    read_exact(Dripping(), Path("f"), 2, memoryview(view))
    assert list(view) == [2, 3, 4, 5, 6]
    with pytest.raises(Edge0Error, match="f: read at offset 4 failed: wanted 5 bytes, got 3: Input/output error"):
        read_exact(Dripping(), Path("f"), 4, memoryview(view))


def test_an_unknown_tensor_is_refused_by_name(craft):
    with pytest.raises(Edge0Error, match="no tensor 'z'"):
        read_array(read_header(craft({"x": entry()}, bytes(4))), "z")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_single_changed_header_byte_is_refused_or_harmless(tmp_path, data):
    """Whatever the reader accepts, the library reads too, with the same names and shapes."""
    path = tmp_path / "fuzz.safetensors"
    write_atomic(path, {"a": np.ones((2, 3), np.float16), "b": np.ones(2, np.int32)}, {"k": "v"})
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    raw[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except Edge0Error:
        return
    loaded = safetensors.numpy.load(bytes(raw))
    assert {name: array.shape for name, array in loaded.items()} == {n: e.shape for n, e in header.entries.items()}


def test_strict_json_reads_what_is_valid():
    value = {"a": [1, -2.5, None, True, "\u00fc\u6f22"], "b": {"a": {}}, "": []}
    assert strict_json(json.dumps(value)) == strict_json(json.dumps(value, ensure_ascii=False).encode()) == value
