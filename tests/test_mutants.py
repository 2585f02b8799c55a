"""The list of changes that tests must notice (tests/mutants.yaml) still fits the code; scripts/mutants.py tries them."""

from __future__ import annotations

import ast
import json
import subprocess
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
    code = "def double(x):\n    return 2 * x\n"
    test = "from double import double\n\n\ndef test_it():\n    assert double(2) == 4\n"
    for tree in ("a", "b"):
        (tmp_path / tree).mkdir()
        (tmp_path / tree / "double.py").write_text(code)
        (tmp_path / tree / "test_it.py").write_text(test)
    tries = """
import json, pathlib, sys
sys.path.insert(1, sys.argv[1])
import mutants
rows = [mutants.Mutant(new, "double.py", "2 * x", new, ["test_it.py::test_it"]) for new in ("3 * x", "x + x", "2 *")]
json.dump(mutants.try_all(rows, [pathlib.Path("a").resolve(), pathlib.Path("b").resolve()]), open("found.json", "w"))
"""  # a process of its own: the script forks
    subprocess.run([sys.executable, "-c", tries, str(ROOT / "scripts")], cwd=tmp_path, check=True)
    found = {row["name"]: row for row in json.loads((tmp_path / "found.json").read_text())}
    test_id = ["test_it.py::test_it"]
    for name, verdict, killed_by in (
        ("3 * x", "killed", test_id),
        ("x + x", "survived", []),
        ("2 *", "broken", ["test_it.py"]),
    ):
        assert (found[name]["verdict"], found[name]["killed_by"]) == (verdict, killed_by)
        assert found[name]["unnoticed_by"] == ([] if verdict == "killed" else test_id)
    assert {(tmp_path / tree / "double.py").read_text() for tree in ("a", "b")} == {code}


@pytest.mark.parametrize("find", ["lambda", "a"])
def test_a_text_that_is_not_there_once_is_an_error_that_names_it(find: str) -> None:
    with pytest.raises(ValueError, match=f"some: its text occurs [02] times in f.py, not once: '{find}'"):
        script.Mutant("some", "f.py", find, "", []).applied("a = a")


def test_rows_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--only", MUTANTS[0].name, "--only", "nothing"])
    with pytest.raises(SystemExit):
        script.main()
    assert "nothing are not all names of rows in tests/mutants.yaml" in capsys.readouterr().err
