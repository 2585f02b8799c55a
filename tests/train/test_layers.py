"""The floors of edge0_train: a module imports from its own floor and from lower ones, never from a higher one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import edge0_train

PACKAGE = Path(edge0_train.__file__).parent
RECIPES = PACKAGE.parent / "recipes"
FLOORS = (
    ("base",),  # the int4 checkpoint and its families in torch
    ("config", "student"),  # settings; the student path, which knows no settings
    ("run", "report", "checkpoint", "best"),  # the run directory and what is said and kept of a run
    ("data",),  # text rows; they are written by a student or teacher
    ("losses", "loop"),
    ("adapters", "plan"),  # files between phases; what is said before step 1
    ("build", "synthetic", "propose"),  # from settings to models
    ("objectives",),
    ("measure",),
    ("phases",),
    ("cli",),
)
"""Lowest first. A name is a module or a package right below edge0_train."""
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}


def sources(root: Path) -> list[Path]:
    return sorted(file for file in root.rglob("*.py") if "assets" not in file.parts)


def imports(file: Path, *, lazy: bool) -> Iterator[str]:
    """Dotted names that a file imports from edge0_train, without that prefix.

    Args:
        lazy: imports inside functions too. They are how a lower floor may ask a registry of a higher one for its names.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if lazy else _at_import(tree)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("edge0_train.") for name in names if name.startswith("edge0_train."))


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _at_import(child)


def name_of(file: Path) -> str:
    """The module or package right below edge0_train that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_module_has_a_floor() -> None:
    modules = {name_of(file) for file in sources(PACKAGE)} - {"__init__", "__main__"}
    assert modules == set(HEIGHT)


@pytest.mark.parametrize("name", HEIGHT)
def test_no_floor_imports_a_higher_one(name: str) -> None:
    upward = [
        f"{file.relative_to(PACKAGE)} imports {found}"
        for file in sources(PACKAGE)
        if name_of(file) == name
        for found in imports(file, lazy=False)
        if HEIGHT[found.split(".")[0]] > HEIGHT[name]
    ]
    assert not upward


def test_no_phase_imports_another_phase() -> None:
    for file in (PACKAGE / "phases").glob("*.py"):
        if file.stem != "__init__":  # the list of them
            assert not [found for found in imports(file, lazy=True) if found.startswith("phases")], file.name


def test_no_recipe_imports_a_phase() -> None:
    """They run one by its name, or hand an objective to the loop themselves."""
    for file in sources(RECIPES):
        assert not [found for found in imports(file, lazy=True) if found.startswith("phases")], file


def test_the_losses_know_no_student_path() -> None:
    found = [name for name in imports(PACKAGE / "losses.py", lazy=True) if name.startswith("student")]
    assert found and all(name.startswith("student.router.") for name in found)


def test_an_upward_import_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text(
        "from edge0_train.phases import PHASES\nimport edge0_train.cli\n"
        "if True:\n    from edge0_train.data import rows\n"
        "def later():\n    from edge0_train.objectives import passes\n"
    )
    assert [*imports(file, lazy=False)] == ["phases.PHASES", "cli", "data.rows"]
    assert {*imports(file, lazy=True)} == {"phases.PHASES", "cli", "data.rows", "objectives.passes"}
