"""The server's page in headless Chromium: what a person does there, and what must never happen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.runtime.scripted_server import WAIT_S

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "no chromium with chromedriver here; on Debian: apt-get install chromium chromium-driver"
OWN_SCHEMES = ("data", "about", "blob", "chrome", "devtools", "chrome-extension")


def start_browser() -> webdriver.Chrome:
    """A browser that nothing outside is needed for; it may run as root and without a screen."""
    options = webdriver.ChromeOptions()
    assert CHROMIUM and DRIVER
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))


class Page:
    """The page of one server in one tab.

    Attributes:
        console: allowed console messages, by a part of their text; anything else is a failure of `check`.
    """

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.urls: tuple[str, ...] = ()
        self.console: tuple[str, ...] = ()
        for kind in ("browser", "performance"):
            driver.get_log(kind)  # of the test before

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> Page:
        """A visit, at that size and with that colour scheme; `leave` has forgotten what an earlier one left."""
        self.urls += (url,)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        self.driver.get(f"{url}/")
        return self

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def wait(self, condition: Callable[[], Any], what: str = "") -> Any:
        return WebDriverWait(self.driver, WAIT_S, poll_frequency=0.02).until(lambda _: condition(), what)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.wait(lambda: next(iter(self.all(selector)), None), selector)

    def text(self, selector: str) -> str:
        """As in the DOM, shown or not; nothing is waited for. Empty where there is no such element."""
        return self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        return self.script("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)

    def click(self, selector: str, index: int = 0) -> None:
        self.wait(lambda: len(self.all(selector)) > index and self.all(selector)[index].is_enabled(), selector)
        self.all(selector)[index].click()

    def press(self, *keys: str) -> None:
        """Wherever the focus is."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def shift(self, key: str) -> None:
        """Shift and that key, wherever the focus is."""
        webdriver.ActionChains(self.driver).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    def fill(self, **settings: str) -> None:
        """Fields of the settings form."""
        self.script("document.getElementById('settings').open = true")
        for name, value in settings.items():
            field = self.one(f"#settings [name={name}]")
            field.clear()
            field.send_keys(value)

    def say(self, text: str) -> None:
        """Send a message."""
        self.one("#prompt").send_keys(text, Keys.ENTER)

    def answered(self, count: int = 1) -> list[str]:
        """The answers, once there are so many and none is being written."""
        done = "return document.getElementById('stop').hidden && !!document.querySelector('.answer button')"
        self.wait(lambda: self.script(done) and len(self.all(".answer")) == count, f"{count} answers")
        return self.texts(".answer .text")

    def focused(self) -> str:
        """What has the focus, by its accessible name."""
        return self.driver.switch_to.active_element.accessible_name

    def leave(self) -> None:
        """Forget what the tab holds of this visit."""
        self.script("sessionStorage.clear()")
        self.driver.get("about:blank")

    def check(self) -> None:
        """Nobody else's host was asked, and the console is silent but for what was allowed."""
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        assert not [message for message in said if not any(part in message for part in self.console)]
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        foreign = [url for url in asked if urlsplit(url).scheme not in OWN_SCHEMES and not url.startswith(self.urls)]
        assert asked and not foreign
