"""Rows of a source of prompts: one file or many, a dataset on this disk or one by its name; each row with its place."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import load_dataset, load_from_disk
from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import (
    one_line,
    open_regular,
    read_bytes,
    read_json,
    read_json_lines,
    strict_json,
)

LINES = (".jsonl", ".jsonl.gz", ".ndjson")
READ = (*LINES, ".json", ".parquet")
"""Endings of the files that are read."""
OTHERS = (".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".xlsx", ".arrow", ".json.gz", ".yaml")
"""Endings of a file, and of no dataset's name."""
FORMS = f"a file, folder or glob of {', '.join(READ)}, a directory of save_to_disk, or a dataset's name"
MAX_ARRAY, MAX_VALUES = 256 * 2**20, 50_000_000
"""Bytes, and values, of a .json file that is one array: it is held in memory whole."""


@dataclass(frozen=True)
class Row:
    """One row: its place ("line 3"), and its value, or else why it has none."""

    place: str
    value: Any = None
    problem: str = ""


def read_source(source: str, split: str) -> Iterator[Row]:
    """Rows of `text.prompts`, streamed.

    Raises Edge0Error: there is no such file, dataset or split, or it cannot be read.
    """
    path = Path(source)
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            _check_saved(path)
            yield from _guarded(source, lambda: _pick(load_from_disk(source), source, split))
        else:
            yield from _files(source, _shards(path, split))
    elif glob.has_magic(source) and not path.exists():
        yield from _files(source, sorted(map(Path, glob.glob(source, recursive=True))))
    elif path.exists() or source.endswith((*READ, *OTHERS)):
        yield from _files(source, [path])
    else:
        yield from _guarded(source, lambda: _pick(load_dataset(source, streaming=True), source, split))


def _check_saved(folder: Path) -> None:
    """`datasets` would wait at a FIFO, and hold a JSON file of any size."""
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".json":
            read_json(file, "write the directory again with save_to_disk")
        elif not file.is_dir():
            open_regular(file).close()


def _pick(data: Any, source: str, split: str) -> Iterable[Any]:
    """The split of a dataset that has several; a single one has none to choose from."""
    if isinstance(data, Mapping):
        if split not in data:
            raise _no_split(source, split, data)
        data = data[split]
    rows: Iterable[Any] = data
    return rows


def _no_split(source: str, split: str, splits: Iterable[Any]) -> Edge0Error:
    names = [str(name) for name in splits]
    return Edge0Error(
        f"text.split: {source} has no split {split!r} but {', '.join(names)}; choose one, e.g. text.split={names[0]}"
    )


def _shards(folder: Path, split: str) -> list[Path]:
    """The files of a folder's split, by the convention of `datasets`: names tell the splits apart, all is train if none does."""
    try:
        patterns = get_data_patterns(str(folder))
    except EmptyDatasetError:
        return []
    found = {
        str(name): [Path(file) for file in files if file.endswith(READ)]
        for name, files in DataFilesDict.from_patterns(patterns, base_path=str(folder)).items()
    }
    found = {name: files for name, files in found.items() if files}
    if found and split not in found:
        raise _no_split(str(folder), split, found)
    return found.get(split, [])


def _files(source: str, files: list[Path]) -> Iterator[Row]:
    if not files:
        raise Edge0Error(f"text.prompts: {source} holds no file that is read; give {FORMS}")
    for file in files:
        if not file.exists():
            raise Edge0Error(f"text.prompts: {file} does not exist; give {FORMS}")
        if not file.name.endswith(READ):
            raise Edge0Error(f"text.prompts: {file}: {file.suffix or 'such'} files are not read; {_rewrite(file)}")
    for file in files:
        where = f"{file.name} " if len(files) > 1 else ""
        if file.name.endswith(LINES):
            yield from _lines(file, where)
        elif file.suffix == ".json":
            yield from _json(file, where)
        else:
            open_regular(file).close()
            yield from _guarded(str(file), lambda file=file: _parquet(file), where)


def _rewrite(file: Path) -> str:
    """How to make a file that is read of one that is not."""
    if file.suffix not in (".csv", ".arrow"):
        return f"give {FORMS}"
    kind, new = file.suffix.removeprefix("."), file.with_suffix(".jsonl")
    code = f"import datasets; datasets.load_dataset({kind!r}, data_files={str(file)!r}, split='train').to_json({str(new)!r})"
    return f'write it as JSON lines: python -c "{code}"'


def _parquet(file: Path) -> Iterable[Any]:
    rows: Iterable[Any] = load_dataset("parquet", data_files=glob.escape(str(file)), split="train", streaming=True)
    return rows


def _lines(file: Path, where: str) -> Iterator[Row]:
    bad: list[tuple[int, str]] = []
    for number, value in read_json_lines(file, "", bad=lambda number, why: bad.append((number, why))):
        yield from _told(bad, where)
        yield Row(f"{where}line {number}", value)
    yield from _told(bad, where)


def _told(bad: list[tuple[int, str]], where: str) -> Iterator[Row]:
    """The bad lines before this one, once."""
    while bad:
        number, why = bad.pop(0)
        yield Row(f"{where}line {number}", problem=why.partition(" (")[0])


def _json(file: Path, where: str) -> Iterator[Row]:
    """One array of rows; or JSON lines under that name, as many datasets have them."""
    with open_regular(file) as raw:
        is_array = raw.read(4096).lstrip().startswith(b"[")
    if not is_array:
        yield from _lines(file, where)
        return
    try:
        values = strict_json(read_bytes(file, MAX_ARRAY), MAX_VALUES)
    except ValueError as error:
        raise Edge0Error(f"text.prompts: {file}: not strict JSON ({error}); write it anew, or as JSON lines") from error
    for number, value in enumerate(values, 1):
        yield Row(f"{where}row {number}", value)


def _guarded(source: str, load: Any, where: str = "") -> Iterator[Row]:
    """Rows of `datasets`, whose columns all rows have: what is null in one of them was not there."""
    try:
        for number, value in enumerate(load(), 1):
            yield Row(f"{where}row {number}", _without_nulls(value))
    except Edge0Error:
        raise
    except Exception as error:  # datasets raises many types; all mean that the source cannot be read
        raise Edge0Error(
            f"text.prompts: {source!r} cannot be loaded ({one_line(error)}); give tasks, {FORMS}"
        ) from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
