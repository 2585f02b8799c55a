"""The page at / in a real browser, over the real engine: what a person can do, with mouse or keys, at any width."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from edge0_runtime.catalog import Catalog, Entry
from edge0_runtime.engine import Engine
from edge0_runtime.serving import Serving
from tests.runtime.browser import Page
from tests.runtime.scripted_server import URL, live

GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(tiny_dir: Path, budget: Callable[..., float]) -> Iterator[Engine]:
    """Experts are read in every step."""
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 7)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with live(engine) as started:
        yield started


def api(url: str, *contents: str, system: str | None = None, **fields: Any) -> str:
    """The whole answer to the last of `contents`, those before being user and assistant in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    body = {"messages": messages} | GREEDY | fields
    return httpx.post(url + URL, json=body, timeout=60).json()["choices"][0]["message"]["content"]


def greedy(page: Page) -> None:
    page.fill(temperature="0", max_tokens="12")


def kept(page: Page) -> list[Any]:
    """The turns as the page keeps them: what was asked and answered, as text."""
    turns = json.loads(page.script("return sessionStorage.getItem('edge0.conversation')") or "[]")
    return [(turn["user"], *(answer["text"] for answer in turn["answers"])) for turn in turns]


# -- talking -----------------------------------------------------------------------------------------------------------


def test_an_answer_streams_in_and_equals_the_apis(page: Page, url: str) -> None:
    page.open(url)
    page.fill(temperature="0", max_tokens="40")
    page.script("""
        window.lengths = new Set();
        const look = () => lengths.add(document.querySelector('.answer .text')?.textContent.length ?? 0);
        new MutationObserver(look).observe(document.getElementById('messages'), {childList: true, subtree: true});
    """)
    page.say("1+1")
    page.answered()
    assert kept(page) == [("1+1", api(url, "1+1", max_tokens=40))]
    assert page.script("return lengths.size") > 3
    assert "40 tokens" in page.text(".answer .note") and "tokens/s" in page.text(".answer .note")
    assert page.text("#prompt") == "" and page.focused() == "Message"


def test_a_second_turn_sends_the_first_and_a_reload_keeps_both(page: Page, url: str) -> None:
    page.open(url)
    greedy(page)
    page.say("1+1")
    page.answered()
    page.say("and 2?")
    page.answered(2)
    first = api(url, "1+1")
    assert kept(page) == [("1+1", first), ("and 2?", api(url, "1+1", first, "and 2?"))]
    shown = page.texts(".text")
    page.driver.refresh()
    page.wait(lambda: page.texts(".text") == shown)
    page.click("#new")
    assert kept(page) == [] and page.all(".turn") == []


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_the_text_and_ends_the_generation(page: Page, url: str, engine: Engine, how: str) -> None:
    page.open(url)
    page.fill(temperature="0")
    page.say("1+1")
    page.wait(lambda: page.text(".answer .text"))
    assert not page.one("#send").is_enabled() and page.one("#messages").get_attribute("aria-busy") == "true"
    if how == "button":
        page.click("#stop")
    else:
        page.press(Keys.ESCAPE)
    (text,) = page.answered()
    assert text and "stopped" in page.text(".answer .note")
    page.wait(lambda: engine.observation.state == "idle")
    assert page.one("#send").is_enabled() and page.one("#messages").get_attribute("aria-busy") == "false"


def test_regenerate_answers_again_and_forgets_what_came_after(page: Page, url: str, engine: Engine) -> None:
    page.open(url)
    greedy(page)
    for count, text in enumerate(("1+1", "and 2?"), 1):
        page.say(text)
        page.answered(count)
    before, requests = kept(page), engine.stats()["requests"]
    page.click(".answer button")
    page.answered(1)
    assert kept(page) == before[:1] and engine.stats()["requests"] == requests + 1
    page.fill(temperature="2", seed="7")
    page.click(".answer button")
    page.wait(lambda: kept(page) != before[:1] and page.answered(1))
    assert kept(page) == [("1+1", api(url, "1+1", temperature=2, seed=7))]


def test_edit_asks_anew_from_there(page: Page, url: str) -> None:
    page.open(url)
    greedy(page)
    for count, text in enumerate(("1+1", "and 2?"), 1):
        page.say(text)
        page.answered(count)
    page.click(".question button")
    page.press(Keys.ESCAPE)  # changed one's mind
    page.wait(lambda: page.focused() == "Edit")
    assert len(kept(page)) == 2
    page.press(Keys.ENTER)
    page.wait(lambda: page.focused() == "Edit the message")
    page.press("2", Keys.ENTER)
    page.answered(1)
    assert kept(page) == [("1+12", api(url, "1+12"))] and page.focused() == "Message"


def test_system_prompt_and_sampling_go_with_the_request(page: Page, url: str) -> None:
    page.open(url)
    fields = {"temperature": "1.5", "top_p": "0.9", "top_k": "20", "min_p": "0.01", "seed": "11", "max_tokens": "9"}
    page.fill(system="Be brief.", **fields)
    page.say("1+1")
    page.answered()
    numbers = {name: json.loads(value) for name, value in fields.items()}
    assert kept(page) == [("1+1", api(url, "1+1", system="Be brief.", **numbers))]
    assert "cut at the most tokens" in page.text(".answer .note")


def test_a_setting_out_of_range_is_not_sent(page: Page, url: str, engine: Engine) -> None:
    page.open(url)
    requests = engine.stats()["requests"]
    page.fill(temperature="3")
    page.say("1+1")
    assert page.all(".turn") == [] and page.focused() == "Temperature"
    assert page.one("#prompt").get_attribute("value") == "1+1" and engine.stats()["requests"] == requests


def test_a_refusal_is_said_in_the_servers_words(page: Page, url: str) -> None:
    page.console = ("400 (Bad Request)",)
    page.open(url)
    page.script("document.getElementById('prompt').value = 'long '.repeat(400)")
    page.say("!")
    page.answered()
    assert "leave no room to answer" in page.text(".answer .problem")
    greedy(page)
    page.say("1+1")  # the turn that failed is not sent
    page.answered(2)
    assert kept(page)[1] == ("1+1", api(url, "1+1"))


# -- two models --------------------------------------------------------------------------------------------------------


def test_two_models_answer_side_by_side_each_going_on_from_its_own(page: Page, url: str, tiny_dir: Path) -> None:
    page.open(url)
    page.wait(lambda: page.text("#serving"))
    assert not page.one("#models").is_displayed() and page.script("return document.getElementById('models').hidden")
    page.leave()
    entries = {"both": Entry(tiny_dir), "base": Entry(tiny_dir, Serving(prerouter=False, lora=False))}
    with Catalog.load(entries) as catalog, live(catalog) as both:
        page.open(both)
        greedy(page)
        page.wait(lambda: page.one("#models").is_displayed())
        page.click("#other-model option[value=base]")
        page.say("1+1")
        page.answered(2)
        page.say("and 2?")
        page.answered(4)
        left, right = page.all(".turn:first-child .answer")
        assert left.rect["y"] == right.rect["y"] and left.rect["x"] < right.rect["x"]
        assert page.texts(".turn:first-child .answer h3") == ["both", "base"]
        one, two = (api(both, "1+1", model=name) for name in catalog)
        assert one != two
        later = (api(both, "1+1", one, "and 2?", model="both"), api(both, "1+1", two, "and 2?", model="base"))
        assert kept(page) == [("1+1", one, two), ("and 2?", *later)]
        served = page.texts("#serving li")
        assert ["prerouter on" in served[0], "LoRA on" in served[0]] == [True, True]
        assert ["prerouter off" in served[1], "LoRA off" in served[1]] == [True, True]
        page.leave()
