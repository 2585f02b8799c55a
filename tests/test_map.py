"""The README's map of the house equals the tree.

The map is the fenced block below the heading `## Map of the house`. A line is

    <two spaces per level><names>  <description>

with one path or several, one space apart, and two spaces or more before the description. A folder's name
ends with a slash, and its Python files may be named in its description instead of on lines of their own. `*.py` names
all that lie in a folder: one that is a registry, where a new file needs no line.
"""

import re
from pathlib import Path

import pathspec
import pytest

ROOT = Path(__file__).parents[1]
HEADING = "## Map of the house"
PACKAGES = ("edge0_runtime", "edge0_train")
UNLISTED = {"__init__.py", "__main__.py"}


def map_block(readme: str) -> str:
    """The text of the first fenced block below the heading. Raises ValueError where there is none."""
    match = re.search(
        rf"^{re.escape(HEADING)}[ \t]*\n(?:(?!#).*\n)*?```.*\n(?P<block>(?:.*\n)*?)```", readme, re.MULTILINE
    )
    if not match:
        raise ValueError(f"README.md: no fenced block below the heading {HEADING!r}")
    return match["block"]


def named_paths(block: str) -> set[str]:
    """The paths a map names, relative to the root; folders end with a slash."""
    paths: set[str] = set()
    folders: list[str] = []  # the open folder of each level
    for line in block.splitlines():
        text = line.strip()
        if not text:
            continue
        level, odd = divmod(len(line) - len(line.lstrip(" ")), 2)
        if odd or level > len(folders):
            raise ValueError(f"map: {line!r} is not two spaces per level below a folder")
        names, _, description = re.sub(r"\s{2,}", "\n", text).partition("\n")
        parent = "".join(folders[level - 1 : level])
        entries = [parent + name for name in names.split(" ")]
        paths.update(entries)
        del folders[level:]
        if len(entries) == 1 and entries[0].endswith("/"):
            folders.append(entries[0])
            paths.update(entries[0] + name for name in re.findall(r"[\w./-]+\.py\b", description))
    return paths


@pytest.fixture(scope="module")
def named() -> set[str]:
    return named_paths(map_block((ROOT / "README.md").read_text(encoding="utf-8")))


def test_every_path_of_the_map_exists(named: set[str]) -> None:
    missing = sorted(
        path
        for path in named
        if not ((ROOT / path).is_dir() if path.endswith("/") else any(found.is_file() for found in ROOT.glob(path)))
    )
    assert not missing, "the map names, but the tree lacks:\n" + "\n".join(missing)


def test_every_top_level_entry_is_on_the_map(named: set[str]) -> None:
    """Files and folders that git keeps; dot files are left to the reader."""
    ignored = pathspec.PathSpec.from_lines("gitignore", (ROOT / ".gitignore").read_text().splitlines())
    entries = {
        path.name
        for path in ROOT.iterdir()
        if not path.name.startswith(".")
        and not ignored.match_file(path.name + "/" * path.is_dir())
        and (path.is_file() or any(inner.is_file() for inner in path.rglob("*")))
    }
    unnamed = sorted(entries - {path.split("/")[0] for path in named})
    assert not unnamed, "missing on the map:\n" + "\n".join(unnamed)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_on_the_map(named: set[str], package: str) -> None:
    modules = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py") if path.name not in UNLISTED
    }
    assert modules, f"{package} is empty"
    unnamed = sorted(path for path in modules - named if f"{path.rpartition('/')[0]}/*.py" not in named)
    assert not unnamed, "missing on the map:\n" + "\n".join(unnamed)


def test_parser_reads_levels_several_names_and_descriptions() -> None:
    block = """\
pyproject.toml Makefile  how to build
pkg/                     a package
  sub/  two files: a.py (first), b.py

    deep/c.py            one more
  top.py other.py        mentions nothing.py
  kinds/
    *.py                 one a kind
tests/
"""
    assert named_paths(block) == {
        "pyproject.toml",
        "Makefile",
        "pkg/",
        "pkg/sub/",
        "pkg/sub/a.py",
        "pkg/sub/b.py",
        "pkg/sub/deep/c.py",
        "pkg/top.py",
        "pkg/other.py",
        "pkg/kinds/",
        "pkg/kinds/*.py",
        "tests/",
    }


@pytest.mark.parametrize("block", ["   odd.py", "file.py\n  below_a_file.py"])
def test_parser_refuses_a_line_without_a_folder_above_it(block: str) -> None:
    with pytest.raises(ValueError, match="two spaces per level"):
        named_paths(block)


def test_parser_takes_the_block_below_the_heading_and_before_the_next() -> None:
    readme = f"# T\n```\nno/\n```\n\n{HEADING}\n\nWords.\n\n```text\nyes/\n```\n\n```\nlater/\n```\n"
    assert map_block(readme) == "yes/\n"
    with pytest.raises(ValueError, match="no fenced block"):
        map_block(f"{HEADING}\n\nWords.\n\n## Next\n\n```\nno/\n```\n")
