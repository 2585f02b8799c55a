"""The list of changes that tests must notice (tests/mutants.yaml) still fits the code; scripts/mutants.py tries them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.scripts_by_path import load_script

ROOT = Path(__file__).parents[1]
script = load_script("mutants")
MUTANTS = script.read_mutants()


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len({*names})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_row_fits_the_code(mutant) -> None:
    """Its text occurs once, the change is one and is still Python, and the tests that must fail are there."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(text)
    assert changed != text and mutant.tests
    ast.parse(changed)
    for test in mutant.tests:
        file, _, name = test.partition("::")
        functions = [n for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, ast.FunctionDef)]
        assert name.partition("[")[0] in {function.name for function in functions}, test
