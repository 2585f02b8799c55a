"""Every citation of a section in docs/ points to a section that is there, under the title that it gives.

Two forms, in code, settings, tests and pages alike:

    docs/method.md 2.2          a heading that begins with this number; "1.2, 1.3" and "1.2-1.5" name several
    docs/streaming.md "Paths"   a heading with this text; after a number as well: docs/method.md 2.2 "SFT"
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEARCHED = ("edge0_runtime", "edge0_train", "configs", "recipes", "scripts", "benchmarks", "notebooks", "tests", "docs")
SUFFIXES = {".py", ".yaml", ".md", ".sh", ".ipynb"}
NUMBER = r"\d+(?:\.\d+)*"
CITATION = re.compile(
    rf'docs/(?P<page>[\w-]+\.md)(?: (?P<numbers>{NUMBER}(?:(?:, |-){NUMBER})*))?(?:,? \\?"(?P<title>[^"\n\\]+)\\?")?'
)


def headings(markdown: str) -> list[str]:
    """The text of all headings, those in fenced blocks left out."""
    outside = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#{1,6} +(.+?) *$", outside, re.MULTILINE)


def problems(text: str, pages: dict[str, list[str]]) -> Iterator[str]:
    """What is wrong with each citation in `text`; `pages` maps a page's name to its headings."""
    for match in CITATION.finditer(text):
        page, title = match["page"], match["title"]
        if page not in pages:
            yield f"{match[0]}: there is no docs/{page}"
            continue
        cited = [
            (number, [heading for heading in pages[page] if re.match(rf"{re.escape(number)}\.?(?: |$)", heading)])
            for number in re.findall(NUMBER, match["numbers"] or "")
        ]
        yield from (f"{match[0]}: docs/{page} has no section {number}" for number, found in cited if not found)
        named = [heading for _, found in cited for heading in found] if cited else pages[page]
        if title and not any(title.casefold() in heading.casefold() for heading in named):
            yield f"{match[0]}: no heading {title!r} there; headings: {', '.join(named)}"


def sources() -> list[Path]:
    files = [path for folder in SEARCHED for path in (ROOT / folder).rglob("*")]
    files += [path for path in ROOT.iterdir() if path.suffix in SUFFIXES]
    return sorted(p for p in files if p.suffix in SUFFIXES and p != Path(__file__) and "__pycache__" not in p.parts)


def test_every_cited_section_exists() -> None:
    pages = {path.name: headings(path.read_text(encoding="utf-8")) for path in (ROOT / "docs").glob("*.md")}
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sources()}
    assert sum(len(CITATION.findall(text)) for text in texts.values()) > 40, "the citations' form has changed"
    found = [f"{path}: {problem}" for path, text in texts.items() for problem in problems(text, pages)]
    assert not found, "\n".join(found)


PAGES = {"method.md": headings("# The method\n## 2. Training\n### 2.1 Heads\n```\n# 7 no heading\n```\n## Paths\n")}


@pytest.mark.parametrize(
    "text",
    [
        "docs/method.md",
        "(docs/method.md 2)",
        "docs/method.md 2, 2.1.",
        "docs/method.md 2-2.1",
        'docs/method.md 2.1 "heads"',
        'docs/method.md "Paths"',
    ],
)
def test_a_right_citation_passes(text: str) -> None:
    assert not list(problems(text, PAGES))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("docs/methods.md 2", "there is no docs/methods.md"),
        ("docs/method.md 0.2", "no section 0.2"),
        ("docs/method.md 2.1, 2.2", "no section 2.2"),
        ("docs/method.md 7", "no section 7"),
        ("docs/method.md 2.11", "no section 2.11"),
        ('docs/method.md 2.1 "Paths"', "no heading 'Paths'"),
        ('docs/method.md "Roads"', "no heading 'Roads'"),
    ],
)
def test_a_wrong_citation_is_named(text: str, problem: str) -> None:
    (found,) = problems(text, PAGES)
    assert problem in found
