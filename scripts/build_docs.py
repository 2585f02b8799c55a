"""Builds the docs site: `python docs/build.py`, or `make docs`; the site is build/site, and every warning is an error.

First everything that the site is made of is laid out in build/docs:

* the pages of docs/, and the repository's own pages that mkdocs.yml names (CONTRIBUTING.md, ...);
* what these link to anywhere in the repository: recipes' pages, pictures, recorded runs;
* the page of all settings, as `python -m edge0_train settings --markdown` prints it;
* an API page for each package, from docstrings alone: nothing is imported.

Then `GENERATOR` makes the site of it. It sees plain Markdown and one configuration file, no code of ours, so that another one
that reads mkdocs.yml can take its place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
PACKAGES = ("edge0_runtime", "edge0_train")
GENERATOR = (sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file")
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<after>#[^)\s]*)?(?=\))")


def main() -> int:
    """Lay the sources out and run the generator; returns its exit code."""
    shutil.rmtree(BUILD / "docs", ignore_errors=True)
    configuration = lay_out(BUILD / "docs")
    (BUILD / "mkdocs.yml").write_text(configuration, encoding="utf-8")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's authors
    code = subprocess.run([*GENERATOR, str(BUILD / "mkdocs.yml")], cwd=BUILD, env=environment).returncode
    if code == 0:
        print(f"docs: {(BUILD / 'site' / 'index.html').relative_to(ROOT)}")
    return code


def lay_out(folder: Path) -> str:
    """Write all of the site's sources below `folder`; returns the configuration with its complete navigation.

    Raises FileNotFoundError naming page and link where a link leads nowhere.
    """
    configuration = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").glob("*.md"))]
    pages += [Path(name) for name in re.findall(r"\b[A-Z]+\.md\b", configuration)]
    linked = copy(pages, folder)
    write(folder / "settings.md", settings_page())
    api = api_pages()
    for name, text in api.items():
        write(folder / name, text)
    return configuration + navigation("Recipes", linked) + navigation("API", api)


def copy(pages: list[Path], folder: Path) -> list[str]:
    """Pages, what they link to, what that links to, and so on; returns the names of pages found by a link alone."""
    waiting, done = list(pages), set(pages)
    while waiting:
        page = waiting.pop()
        if page.suffix != ".md":
            write(folder / place(page), (ROOT / page).read_bytes())
            continue
        text = (ROOT / page).read_text(encoding="utf-8")
        new = {file for _, file in links(page, text)} - done
        done |= new
        waiting += sorted(new)
        write(folder / place(page), with_new_links(page, text))
    return sorted(str(place(page)) for page in done - set(pages) if page.suffix == ".md")


def place(file: Path) -> Path:
    """Where a file of the repository lies in the site: docs/ is its root, all else keeps its path."""
    return file.relative_to("docs") if file.parts[0] == "docs" else file


def links(page: Path, text: str) -> Iterator[tuple[re.Match[str], Path]]:
    """(match, file in the repository) of each link of a page to a file; those to other sites, and to made pages, are left out."""
    for match in LINK.finditer(text):
        target = match["target"]
        file = Path(os.path.normpath(page.parent / target))
        if "://" in target or place(file).name == "settings.md":
            continue
        if not (ROOT / file).is_file():
            raise FileNotFoundError(f"{page}: its link to {target} leads nowhere")
        yield match, file


def with_new_links(page: Path, text: str) -> str:
    """The page's text with each link leading to where its file lies in the site."""
    for match, file in reversed(list(links(page, text))):
        target = os.path.relpath(place(file), place(page).parent)
        text = text[: match.start("target")] + target + text[match.end("target") :]
    return text


def settings_page() -> str:
    """Every setting with its type, default and meaning, as the one declaration has them."""
    command = [sys.executable, "-m", "edge0_train", "settings", "--markdown"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def api_pages() -> dict[str, str]:
    """{file name: text} of one page for each package that holds modules of its own."""
    pages = {}
    folders = sorted({path.parent for top in PACKAGES for path in (ROOT / top).rglob("*.py")})
    for folder in folders:
        package = ".".join(folder.relative_to(ROOT).parts)
        modules = [f"{package}.{path.stem}" for path in sorted(folder.glob("[!_]*.py"))]
        if modules:
            words = f"\n::: {package}\n    options: {{members: false, show_root_heading: false}}\n"
            pages[f"api/{package}.md"] = f"# {package}\n" + words + "".join(f"\n::: {name}\n" for name in modules)
    return pages


def navigation(title: str, names: Iterable[str]) -> str:
    """Lines for the end of mkdocs.yml's `nav`."""
    return "".join([f"  - {title}:\n", *(f"      - {name}\n" for name in names)])


def write(path: Path, content: str | bytes) -> None:
    """A file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


if __name__ == "__main__":
    sys.exit(main())
