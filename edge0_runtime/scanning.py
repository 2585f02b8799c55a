"""transformers' list of its own modules, kept between processes: making it takes 1.2 s, half of the time to a first token.

At every import transformers reads its 2,500 source files, twice, to learn which module defines which name. The answer is a
function of the installed files, so it is kept in the user's cache directory, by version and time of installation. Where it can't
be kept or read, transformers reads them as ever.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from edge0_runtime.contract.files import atomic_replace, read_json

SCANNER = "transformers.utils.import_utils"
SCAN = "create_import_structure_from_path"
MAX_KEPT = 16 * 2**20
Structure = dict[Any, Any]
"""{folder: its structure, and requirements (a frozenset): {module: the names that it exports (a set)}}."""


@contextlib.contextmanager
def scan_kept() -> Iterator[None]:
    """Inside the block transformers is imported with the list that an earlier process made, if it wasn't imported before."""
    spec = importlib.util.find_spec("transformers")
    if "transformers" in sys.modules or spec is None or spec.origin is None:
        yield
        return
    models = Path(spec.origin).parent / "models"
    finder = _Finder(lambda module: _keep(module, models))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds SCANNER as ever, and has `change` called with it as soon as it is imported."""

    def __init__(self, change: Callable[[ModuleType], None]) -> None:
        self._change = change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != SCANNER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._change)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader, change: Callable[[ModuleType], None]) -> None:
        self._inner, self._change = inner, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._change(module)


def _keep(module: ModuleType, models: Path) -> None:
    """Have the scan of `models` answered from the file, or by one scan that writes it."""
    scan: Callable[[Any], Structure] | None = getattr(module, SCAN, None)
    if scan is None:  # another version, which does it another way
        return
    known: list[Structure] = []

    @functools.wraps(scan)
    def answered(path: Any) -> Structure:
        if Path(path) not in (models, models / "__init__.py"):
            return scan(path)
        if not known:
            known.append(_kept(models) or _written(scan(path), models))
        return known[0]

    setattr(module, SCAN, answered)


def kept_at(models: Path) -> Path:
    """The file for these modules."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    version = importlib.metadata.version("transformers")
    return Path(cache) / "edge0" / f"transformers-{version}-{models.stat().st_mtime_ns:x}.json"


def _kept(models: Path) -> Structure | None:
    """None where there is no such file, or not one of ours."""
    try:
        return _structure(read_json(kept_at(models), "", MAX_KEPT))
    except Exception:  # whatever it is, the scan is right
        return None


def _written(structure: Structure, models: Path) -> Structure:
    with contextlib.suppress(Exception):  # a home that can't be written, or none
        path, data = kept_at(models), json.dumps(_plain(structure)).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path, needed_bytes=len(data)) as temporary:
            temporary.write_bytes(data)
    return structure


def _plain(structure: Structure) -> dict[str, Any]:
    """As JSON data: {"folders": {name: the same}, "modules": [[requirements, {module: names}]]}."""
    folders = {key: _plain(value) for key, value in structure.items() if isinstance(key, str)}
    modules = [
        [sorted(key), {module: sorted(names) for module, names in value.items()}]
        for key, value in structure.items()
        if not isinstance(key, str)
    ]
    return {"folders": folders, "modules": modules}


def _structure(data: dict[str, Any]) -> Structure:
    found: Structure = {name: _structure(value) for name, value in data["folders"].items()}
    for requirements, modules in data["modules"]:
        found[frozenset(requirements)] = {module: set(names) for module, names in modules.items()}
    return found
