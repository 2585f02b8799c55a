"""The docs hold together, without the site's generator: pages, links, the API's modules, the commands that they tell to run."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from edge0_runtime import cli as runtime_cli
from edge0_train import cli as train_cli
from tests.scripts_by_path import load_script

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("recipes/*/README.md")),
]
build_docs = load_script("build_docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_docs, "settings_page", lambda: "# Settings\n")
        (folder.parent / "mkdocs.yml").write_text(build_docs.lay_out(folder), encoding="utf-8")
    return folder


def test_every_link_of_the_site_leads_to_a_file_of_it(site: Path) -> None:
    links = [
        (page, match["target"])
        for page in site.rglob("*.md")
        for match in build_docs.LINK.finditer(page.read_text(encoding="utf-8"))
        if "://" not in match["target"]
    ]
    assert len(links) > 20
    lost = [f"{page.relative_to(site)}: {target}" for page, target in links if not (page.parent / target).is_file()]
    assert not lost, "\n".join(lost)


def test_every_page_of_the_site_is_in_its_navigation(site: Path) -> None:
    navigation = (site.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"\S+\.md$", navigation, re.MULTILINE)
    assert sorted(named) == sorted(path.relative_to(site).as_posix() for path in site.rglob("*.md"))


@pytest.mark.parametrize("package", build_docs.PACKAGES)
def test_every_public_module_is_in_the_api_reference(package: str) -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / package).rglob("[!_]*.py")}
    documented = set(re.findall(r"^::: (\S+)$", "".join(build_docs.api_pages().values()), re.MULTILINE))
    assert modules
    assert modules <= documented


def test_a_link_to_nowhere_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/train.md: its link to lost.md leads nowhere"):
        list(build_docs.links(Path("docs/train.md"), "[here](method.md) and [there](lost.md#section)"))


def test_links_follow_their_files_into_the_site() -> None:
    text = (
        "[a](method.md#x) ![b](../benchmarks/results/disk_bound/speed.png) [c](https://arxiv.org) [d](../SECURITY.md)"
    )
    moved = build_docs.with_new_links(Path("docs/results.md"), text)
    assert (
        moved
        == "[a](method.md#x) ![b](benchmarks/results/disk_bound/speed.png) [c](https://arxiv.org) [d](SECURITY.md)"
    )
    assert build_docs.with_new_links(Path("SECURITY.md"), "[a](docs/artifacts.md)") == "[a](artifacts.md)"


# -- commands --------------------------------------------------------------------------------------

# Placeholders, and subcommands, which do not compose: tests/e2e/test_bring_your_own.py and tests/train/test_inputs.py run those.
SKIPPED = {"...", "COMMAND", "inspect", "settings", "doctor", "--config-dir"}


def commands(program: str) -> list[list[str]]:
    """The arguments of every call of `program` in an indented line of the pages, each once; placeholders are left out."""
    found: dict[tuple[str, ...], None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(rf"^ {{4,}}(?:.* )?{re.escape(program)} (.*)$", text, re.MULTILINE):
            arguments = shlex.split(re.split(r" > |\s#", line)[0])
            if not SKIPPED & set(arguments):
                found[tuple(arguments)] = None
    return [list(arguments) for arguments in found]


@pytest.mark.parametrize("arguments", commands("edge0_runtime"), ids=" ".join)
def test_every_runtime_command_of_the_docs_is_understood(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets as far as to miss the model directory (argparse would exit)."""
    monkeypatch.chdir(tmp_path)
    code = runtime_cli.main(arguments)
    error = capsys.readouterr().err
    assert code == 0 or (code == 2 and "not a directory" in error), error


@pytest.mark.parametrize("arguments", commands("-m edge0_train"), ids=" ".join)
def test_every_training_command_of_the_docs_composes(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["edge0_train", *arguments, "--cfg", "job"])
    train_cli.main()
    assert "run_dir:" in capsys.readouterr().out


def test_every_file_that_a_command_names_exists() -> None:
    pattern = r"\b((?:scripts|benchmarks|recipes)/[\w/]+\.(?:py|sh|yaml))\b"
    named = {(page.name, path) for page in PAGES for path in re.findall(pattern, page.read_text(encoding="utf-8"))}
    assert len(named) > 5
    lost = sorted(f"{page}: {path}" for page, path in named if not (ROOT / path).is_file())
    assert not lost, "\n".join(lost)
