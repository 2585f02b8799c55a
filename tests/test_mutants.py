"""The list of changes that tests must notice (tests/mutants.yaml) still fits the code; scripts/mutants.py tries them."""

from __future__ import annotations

import ast
import queue
import sys
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


# -- the script --------------------------------------------------------------------------------------------------------


def test_what_is_noticed_is_killed_and_the_tree_is_put_back(tmp_path: Path) -> None:
    code, test = (
        "def double(x):\n    return 2 * x\n",
        "from code_ import double\n\n\ndef test_it():\n    assert double(2) == 4\n",
    )
    (tmp_path / "code_.py").write_text(code)
    (tmp_path / "test_it.py").write_text(test)
    trees: queue.Queue[Path] = queue.Queue()
    trees.put(tmp_path)
    verdicts = {}
    for replace in ("3 * x", "x + x", "2 *"):
        mutant = script.Mutant(replace, "code_.py", "2 * x", replace, ["test_it.py::test_it"])
        outcome = script.tried(mutant, trees)
        verdicts[replace] = outcome["verdict"], outcome["killed_by"], outcome["unnoticed_by"]
        assert (tmp_path / "code_.py").read_text() == code
    assert verdicts["3 * x"] == ("killed", ["test_it.py::test_it"], [])
    assert verdicts["x + x"] == ("survived", [], ["test_it.py::test_it"])
    assert verdicts["2 *"][0] == "broken"  # a syntax error says nothing of the tests


@pytest.mark.parametrize("find", ["lambda", "a"])
def test_a_text_that_is_not_there_once_is_an_error_that_names_it(find: str) -> None:
    with pytest.raises(ValueError, match=f"some: its text occurs [02] times in f.py, not once: '{find}'"):
        script.Mutant("some", "f.py", find, "", []).applied("a = a")


def test_rows_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--only", MUTANTS[0].name, "--only", "nothing"])
    with pytest.raises(SystemExit):
        script.main()
    assert "nothing are not all names of rows in tests/mutants.yaml" in capsys.readouterr().err
