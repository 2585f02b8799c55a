"""The floors of each package: a module imports from lower floors only, and no file is too long to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = 350
CODE = ("edge0_runtime", "edge0_train", "recipes", "scripts", "benchmarks", "tests")

# From the ground up. A name is a module or a folder; a folder's own modules may import each other.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "edge0_runtime": (
        ("contract",),
        ("scanning",),
        ("libraries", "units", "hub", "activations"),
        ("experts", "inspection"),  # bytes: they know neither routing nor step
        ("host", "routing", "sampling", "sticky", "text"),
        ("step", "heads", "layers", "lora", "network", "embedding", "plan", "snapshot"),
        ("gates",),
        ("arms",),
        ("model",),
        ("sharing", "serving"),
        ("loading", "sequence"),
        ("prefix",),  # what requests share that begin alike
        ("request",),
        ("observation",),
        ("engine",),
        ("catalog",),
        ("measure", "server"),
        ("cli",),
        ("__main__",),
    ),
    "edge0_train": (
        # The int4 base in torch; settings; what a run is made with, how it is kept and stopped.
        ("base", "checkpoint", "best", "config", "environment", "foreign", "locking", "stopping"),
        ("student", "run", "report", "machine"),  # the student path, which knows no settings; run directory; printing
        ("data", "tracking"),  # text rows, which are written by a student or teacher; W&B
        ("losses", "locality", "loop"),
        ("adapters",),  # files between phases
        ("teacher",),  # which one fits, and what it is called
        ("build", "synthetic", "propose"),  # from settings to models
        ("objectives",),
        ("measure",),
        ("memory",),
        ("fit",),  # a machine's memory against a phase's
        ("plan",),  # what is said before step 1
        ("inputs",),  # what a phase finds before it starts
        ("phases", "doctor"),
        ("sweep",),
        ("cli",),
        ("__main__",),
    ),
}


def room(path: Path, package: str) -> str:
    """The first name below the package: a module or a folder."""
    return path.relative_to(ROOT / package).with_suffix("").parts[0]


def modules(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if path != ROOT / package / "__init__.py")


def imported_rooms(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """(line, room of the package) of every import, those inside functions and for types included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == package and len(parts) > 1:
                yield node.lineno, parts[1]


@pytest.mark.parametrize("package", FLOORS)
def test_every_room_has_a_floor(package: str) -> None:
    known = {name for floor in FLOORS[package] for name in floor}
    assert known == {room(path, package) for path in modules(package)}


@pytest.mark.parametrize("package", FLOORS)
def test_nothing_is_imported_from_above_or_from_next_door(package: str) -> None:
    floor = {name: number for number, names in enumerate(FLOORS[package]) for name in names}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {room(path, package)} imports {other}"
        for path in modules(package)
        for line, other in imported_rooms(path, package)
        if other != room(path, package) and floor[other] >= floor[room(path, package)]
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", CODE)
def test_no_module_is_too_long(folder: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert not {str(path.relative_to(ROOT)): count for path, count in lengths.items() if count > LONGEST}


def test_phases_and_recipes_import_no_phase() -> None:
    """What they share are objectives; a recipe runs a phase by its name, or hands an objective to the loop itself."""
    for file in (*(ROOT / "edge0_train" / "phases").glob("[a-z]*.py"), *(ROOT / "recipes").rglob("*.py")):
        found = [
            node.module
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("edge0_train.phases")
        ]
        assert not found, f"{file.relative_to(ROOT)} imports {found}"


def test_the_losses_know_no_student_path() -> None:
    source = (ROOT / "edge0_train" / "losses.py").read_text(encoding="utf-8")
    names = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    students = [name for name in names if name and name.startswith("edge0_train.student")]
    assert students == ["edge0_train.student.router"]


def test_an_upward_import_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text(
        "from edge0_train.phases import PHASES\nimport edge0_train.cli\n"
        "def later():\n    from edge0_train import objectives\n"
    )
    assert {name for _, name in imported_rooms(file, "edge0_train")} == {"phases", "cli", "objectives"}
