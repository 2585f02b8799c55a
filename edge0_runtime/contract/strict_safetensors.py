"""Safetensors files, read strictly and written atomically.

`mx.load` and other readers accept holes, overlaps, trailing bytes, duplicate keys and float shapes; a damaged
or foreign file then fails late, or serves garbage. `read_header` refuses all of that before a tensor is read.

Writing is our own because the library writes its metadata in random order (safetensors issue 584): the same
tensors would get another sha256 in every process, and that hash binds a LoRA to its prerouter.

Layout: 8 bytes little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, tensors' bytes.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import (
    atomic_replace,
    open_regular,
    raise_problems,
    read_exact,
    shown,
    strict_json,
)

MAX_HEADER_BYTES = 16 << 20
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_NUMPY_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "U32": "<u4", "I32": "<i4",
    "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
_DTYPE_NAMES = {np.dtype(code): name for name, code in _NUMPY_DTYPES.items()}
_MAX_INTEGER = 2**63 - 1
_MAX_DIMENSIONS = 32  # keeps the product of a hostile shape small enough to print

# What people really have under a .safetensors name, by its first bytes.
_FOREIGN = (
    (b"version https://git-lfs", "a git LFS pointer, not the file itself: run `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive (PyTorch .pt or NumPy .npz): only safetensors is read, never pickle"),
    (b"GGUF", "a GGUF file: only safetensors is read"),
    (b"\x93NUMPY", "a NumPy .npy file: only safetensors is read"),
    (b"\x80\x02", "a Python pickle: only safetensors is read, never pickle"),
    (b"\x80\x03", "a Python pickle: only safetensors is read, never pickle"),
    (b"\x80\x04", "a Python pickle: only safetensors is read, never pickle"),
    (b"\x80\x05", "a Python pickle: only safetensors is read, never pickle"),
    (b"\x00\x05\x16\x07", "a macOS companion file (`._*`) under another name: copy the real file"),
)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file; its bytes are `start..end`, absolute offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file held when its header was read.

    Attributes:
        path: the file.
        entries: {name: entry} of all tensors.
        metadata: the file's `__metadata__`.
        file_size: in bytes.
        stamp: (size, inode, modification time in ns): tells a replaced file from the one that was checked. A
            retrained adapter has its predecessor's exact size.
    """

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    file_size: int
    stamp: tuple[int, int, int]


# -- reading


def read_header(path: str | Path) -> Header:
    """Read and check a file's header; no tensor is read.

    Raises Edge0Error that names the file and all offenders: a header over 16 MiB, JSON that is not strict,
    duplicate keys, shapes that are not whole numbers, unknown dtypes, sizes that disagree with dtype and
    shape, holes, overlaps, trailing bytes, truncation; and files that are something else altogether, by what
    they are.
    """
    path = Path(path)
    if path.name.startswith("._"):
        raise Edge0Error(f"{path}: a macOS companion file (`._*`), not a model file; use the file without the `._`")
    with open_regular(path) as file:
        stamp = _stamp(file)
        file_size = stamp[0]
        text = _header_text(file, path, file_size)
    try:
        document = strict_json(text)
    except ValueError as error:
        raise Edge0Error(
            f"{path}: the header is not strict JSON: {error}; download or export the file again"
        ) from error
    if not isinstance(document, dict) or not text.startswith(b"{"):
        raise Edge0Error(f"{path}: the header is not a JSON object; download or export the file again")

    problems: list[str] = []
    data_start = 8 + len(text)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append(f"__metadata__ must map strings to strings, it is {shown(metadata)}")
    entries: dict[str, TensorEntry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, value in document.items():
        entry = _entry(name, value, data_start, problems)
        if entry is not None:
            entries[name] = entry
            spans.append((entry.start, entry.end, name))
    if len(spans) == len(document):  # else every damaged entry would be reported a second time, as a hole
        problems += _tiling_problems(spans, data_start, file_size)
    raise_problems(f"{path}: not a valid safetensors file", problems, "download or export it again")
    return Header(path, entries, metadata, file_size, stamp)


def read_array(header: Header, name: str) -> np.ndarray:
    """Read one tensor in full: array of the entry's shape.

    The array has the file's dtype, except BF16, which NumPy lacks: it comes back as float32, which holds
    every bf16 value exactly (its bits, shifted left by 16). Raises Edge0Error for an unknown name, a short
    read, an I/O error, or a file that is no longer the one whose header was read.
    """
    if name not in header.entries:
        raise Edge0Error(f"{header.path}: has no tensor {name!r}")
    entry = header.entries[name]
    raw = np.empty(entry.end - entry.start, np.uint8)
    with open_regular(header.path) as file:
        read_exact(file, header.path, entry.start, raw.data)
        stamp = _stamp(file)
    if stamp != header.stamp:
        raise Edge0Error(
            f"{header.path}: replaced or changed while in use: (size, inode, time) was {header.stamp} when it was"
            f" checked and is {stamp} now; start again"
        )
    if entry.dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
    return raw.view(_NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)


def _stamp(file: io.FileIO) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_ino, status.st_mtime_ns


def _header_text(file: io.FileIO, path: Path, file_size: int) -> bytes:
    prefix = bytearray(min(64, file_size))
    read_exact(file, path, 0, memoryview(prefix))
    length = int.from_bytes(prefix[:8], "little")
    # Only an impossible length is taken for another format's bytes: a pickle's can be a possible one.
    if file_size < 10 or not 2 <= length <= min(MAX_HEADER_BYTES, file_size - 8):
        lowered = bytes(prefix).lstrip().lower()
        if lowered.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
            raise Edge0Error(f"{path}: an HTML or XML page, most likely a server's error: download the file again")
        for magic, what in _FOREIGN:
            if prefix.startswith(magic):
                raise Edge0Error(f"{path}: {what}")
        if file_size < 10:
            raise Edge0Error(f"{path}: {file_size} bytes are too few for a safetensors file; download it again")
        if length > MAX_HEADER_BYTES:
            raise Edge0Error(
                f"{path}: the header length is {length}, more than {MAX_HEADER_BYTES} bytes;"
                " not a safetensors file, or damaged: download it again"
            )
        raise Edge0Error(
            f"{path}: truncated: the header alone should have {length} bytes, the file has {file_size};"
            " download it again"
        )
    text = bytearray(length)
    read_exact(file, path, 8, memoryview(text))
    return bytes(text)


def _entry(name: str, value: Any, data_start: int, problems: list[str]) -> TensorEntry | None:
    """The entry `name`, or None if it has no usable place in the file; its problems are added."""
    where = f"tensor {shown(name)}"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        problems.append(f"{where}: the name is not valid Unicode")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        problems.append(f"{where}: must have exactly dtype, shape and data_offsets, it is {shown(value)}")
        return None
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    item = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None:
        problems.append(f"{where}: dtype {shown(dtype)} is unknown; known are {', '.join(DTYPE_BYTES)}")
    shape_ok = _whole_numbers(shape) and len(shape) <= _MAX_DIMENSIONS
    if not shape_ok:
        problems.append(
            f"{where}: shape {shown(shape)} must be a list of whole numbers of at least 0,"
            f" at most {_MAX_DIMENSIONS} of them"
        )
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problems.append(f"{where}: data_offsets {shown(offsets)} must be [start, end] with 0 <= start <= end")
        return None
    start, end = offsets
    if item is not None and shape_ok and end - start != item * math.prod(shape):
        problems.append(
            f"{where}: {dtype} {shape} needs {item * math.prod(shape)} bytes, data_offsets give {end - start}"
        )
    return TensorEntry(name, str(dtype), tuple(shape) if shape_ok else (), data_start + start, data_start + end)


def _whole_numbers(value: Any) -> bool:
    # type() and not isinstance(): a bool is an int in Python
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _MAX_INTEGER for n in value)


def _tiling_problems(spans: list[tuple[int, int, str]], data_start: int, file_size: int) -> list[str]:
    problems = []
    reached, holder = data_start, ""
    for start, end, name in sorted(spans):
        if start > reached:
            problems.append(f"hole of {start - reached} bytes before tensor {shown(name)} (at offset {reached})")
        elif start < reached:
            problems.append(f"tensor {shown(name)} overlaps tensor {shown(holder)} at offset {start}")
        if end >= reached:
            reached, holder = end, name
    if reached > file_size:
        problems.append(f"truncated: the header describes {reached} bytes, the file has {file_size}")
    elif reached < file_size:
        problems.append(f"{file_size - reached} trailing bytes that belong to no tensor, from offset {reached}")
    return problems


# -- writing


def write_atomic(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a safetensors file in one step: readers see the old file or the new one, never a part.

    Equal input gives equal bytes. Tensors lie by dtype, larger first, then by name, so all are aligned.

    Args:
        path: the file; its directory must exist.
        tensors: {name: array}; dtypes of NumPy that safetensors has (no bfloat16).
        metadata: the file's `__metadata__`.
        check: called with the finished temporary file; if it raises, the old file stays.

    Raises Edge0Error naming the path (and on a full disk the bytes needed); the old file is then untouched
    and the temporary file gone.
    """
    path = Path(path)
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    arrays: list[np.ndarray] = []
    problems: list[str] = []
    end = 0
    for name in names:
        array = tensors[name]
        dtype = _DTYPE_NAMES.get(array.dtype.newbyteorder("<"))
        if dtype is None or name == "__metadata__":
            problems.append(f"tensor {shown(name)}: name or dtype {array.dtype} cannot be stored")
            continue
        array = np.asarray(array, dtype=_NUMPY_DTYPES[dtype], order="C")
        start, end = end, end + array.nbytes
        document[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}
        arrays.append(array)
    problems += [f"metadata {k!r}: {v!r} must be strings" for k, v in metadata.items() if not type(k) is type(v) is str]
    raise_problems(f"{path}: cannot be written", problems, "convert the tensors and metadata first")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    if len(text) > MAX_HEADER_BYTES:
        raise Edge0Error(
            f"{path}: the header would have {len(text)} bytes, more than {MAX_HEADER_BYTES}; split the file"
        )

    with atomic_replace(path, needed_bytes=8 + len(text) + end) as temporary:
        with open(temporary, "xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays:
                file.write(array.reshape(-1).view(np.uint8).data)
        if check is not None:
            check(temporary)
