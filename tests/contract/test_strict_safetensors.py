"""The strict reader names every kind of damage; the writer replaces files in one step or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge0_runtime.contract import Edge0Error, atomic_replace, read_array, read_header, sha256_file, write_atomic
from edge0_runtime.contract.files import read_exact, strict_json
from edge0_runtime.contract.strict_safetensors import MAX_HEADER_BYTES


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refusal(path: Path) -> str:
    with pytest.raises(Edge0Error) as error:
        read_header(path)
    assert str(path) in str(error.value)
    return str(error.value)


# -- reading


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


# -- writing


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(
            st.sampled_from(["?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8", ">f4"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=5,
    )
)
def test_what_is_written_is_read_back_exactly_by_us_and_by_the_library(tmp_path, layout):
    random = np.random.default_rng(0)
    tensors = {name: random.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in layout.items()}
    path = tmp_path / "x.safetensors"
    write_atomic(path, tensors, {"kind": "test", "ü": '{"a": 1}'})
    header = read_header(path)
    assert header.metadata == {"kind": "test", "ü": '{"a": 1}'}
    assert header.entries.keys() == tensors.keys()
    loaded = safetensors.numpy.load_file(path)
    for name, array in tensors.items():
        for copy in (read_array(header, name), loaded[name]):
            np.testing.assert_array_equal(copy, array)
            assert copy.dtype == array.dtype.newbyteorder("=")
            assert copy.shape == array.shape
        assert header.entries[name].start % array.dtype.itemsize == 0


def test_strided_arrays_are_stored_in_row_order(tmp_path):
    arrays = {"matrix": np.arange(12, dtype=np.float32).reshape(3, 4).T[::2], "row": np.arange(6)[::-2]}
    write_atomic(tmp_path / "x.safetensors", arrays, {})
    for name, array in arrays.items():
        np.testing.assert_array_equal(read_array(read_header(tmp_path / "x.safetensors"), name), array)


def test_equal_input_gives_equal_bytes_in_any_process_and_order(tmp_path):
    script = (
        "import sys, numpy as np; from edge0_runtime.contract import write_atomic;"
        "names = sorted('abcdefgh', reverse=sys.argv[2] == 'r');"
        "write_atomic(sys.argv[1], {n: np.full(3, ord(n), 'f2') for n in names}, {n: n for n in names})"
    )
    hashes = set()
    for order in ("f", "r"):
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / order), order], check=True, cwd=Path(__file__).parents[2]
        )
        hashes.add(sha256_file(tmp_path / order))
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("tensors", "metadata", "reason"),
    [
        ({"x": np.ones(2, complex)}, {}, "'x': name or dtype complex128 cannot be stored"),
        ({"x": np.array(["a"], object)}, {}, "'x': name or dtype object cannot be stored"),
        ({"__metadata__": np.ones(2)}, {}, "cannot be stored"),
        ({"x": np.ones(2)}, {"a": 1}, "'a': 1 must be strings"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_writing(tmp_path, tensors, metadata, reason):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(Edge0Error, match=reason):
        write_atomic(path, tensors, metadata)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_full_disk_leaves_the_old_file_and_names_path_and_bytes(tmp_path):
    """RLIMIT_FSIZE makes the kernel refuse the write half way, as a full disk does; needs no root."""
    path = tmp_path / "x.safetensors"
    write_atomic(path, {"x": np.ones(8, np.float32)}, {})
    old = path.read_bytes()
    script = (
        "import resource, sys, numpy as np; from edge0_runtime.contract import Edge0Error, write_atomic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: write_atomic(sys.argv[1], {'x': np.ones(100_000, np.float32)}, {})\n"
        "except Edge0Error as error: print(error); sys.exit(2)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert run.returncode == 2, run.stderr
    assert str(path) in run.stdout
    assert "no room to write 400" in run.stdout  # 400,000 bytes of tensor and the header
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_at_the_last_steps_leaves_the_old_file(tmp_path, monkeypatch, step, code):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(Edge0Error, match="The old file is unchanged"):
        write_atomic(path, {"x": np.ones(8, np.float32)}, {})
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, RuntimeError, MemoryError])
def test_an_interrupted_replacement_leaves_the_old_file_and_no_other(tmp_path, interruption):
    path = tmp_path / "state.json"
    path.write_text("old")
    with pytest.raises(interruption), atomic_replace(path) as temporary:
        temporary.write_text("half")
        raise interruption
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_failed_check_of_the_finished_file_leaves_the_old_one(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    seen = []

    def check(written: Path) -> None:
        seen.append(read_header(written).entries.keys())
        raise Edge0Error("no")

    with pytest.raises(Edge0Error, match="no"):
        write_atomic(path, {"x": np.ones(1, np.float32)}, {}, check)
    assert seen == [{"x"}]
    assert path.read_bytes() == b"old"


def test_file_and_directory_reach_the_disk_around_the_rename(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        steps.append("sync directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def record_replace(source, target):
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    with atomic_replace(tmp_path / "x") as temporary:
        temporary.write_text("new")
    assert steps == ["sync file", "rename", "sync directory"]


def test_a_file_system_that_cannot_sync_directories_is_no_failure(tmp_path, monkeypatch):
    fsync = os.fsync

    def fail_on_directories(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_on_directories)
    with atomic_replace(tmp_path / "x") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "x").read_text() == "new"


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(Edge0Error, match=r"nowhere/x\.safetensors: cannot be written: No such file"):
        write_atomic(tmp_path / "nowhere" / "x.safetensors", {"x": np.ones(1, np.float32)}, {})


def test_an_error_about_another_file_passes_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_replace(tmp_path / "x"):
        (tmp_path / "input").read_bytes()


def test_sha256_of_a_file(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
