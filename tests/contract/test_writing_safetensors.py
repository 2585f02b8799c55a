"""The writer replaces files in one step or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge0_runtime.contract import Edge0Error, atomic_replace, read_array, read_header, sha256_file, write_atomic


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

    def interrupted() -> None:
        with atomic_replace(path) as temporary:
            temporary.write_text("half")
            raise interruption

    with pytest.raises(interruption):
        interrupted()
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
