"""The page's files and headers, and the engine's endpoints, without a browser."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

import edge0_runtime.server.page as page
from edge0_runtime.engine import Engine
from edge0_runtime.observation import RAN, READ
from edge0_runtime.server import observe
from edge0_runtime.server.app import create_app
from edge0_runtime.server.guard import KEY_VARIABLE
from tests.runtime.scripted_server import HELLO, MODEL, URL, WAIT_S, FakeEngine, client_of, error_of, live

FOLDER = Path(page.__file__).parent
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in page.TYPES)
MARKED = "c622dc6824a1c92c2d10ea9ede2fc872e46128afcc34b298e6ddee6f387ace8e"  # 18.2.1's lib/marked.esm.js but for its last line


@pytest.fixture(scope="module")
def engine(tiny_dir: Path, budget: Callable[..., float]) -> Iterator[Engine]:
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 7)) as loaded:
        yield loaded


@pytest.fixture
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(create_app({MODEL: engine}), base_url="http://127.0.0.1:8080") as started:
        yield started


# -- files -------------------------------------------------------------------------------------------------------------


def test_every_file_comes_with_its_type_and_the_policy() -> None:
    with client_of(FakeEngine()) as client:
        assert client.get("/").text == (FOLDER / "index.html").read_text(encoding="utf-8")
        for name in FILES:
            response = client.get(f"/page/{name}")
            assert response.content == (FOLDER / name).read_bytes()
            assert response.headers["content-type"].split(";")[0] == page.TYPES[Path(name).suffix]
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy and "http" not in policy and "*" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/__init__.py", "/page/..%2fguard.py", "/page//etc/passwd"]
)  # fmt: skip
def test_nothing_else_is_served(path: str) -> None:
    with client_of(FakeEngine()) as client:
        assert error_of(client.get(path))["message"] == "Not Found"


def test_the_page_opens_without_the_key_and_the_engine_only_with_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    with TestClient(create_app({MODEL: engine}, "0.0.0.0"), base_url="http://example.org") as client:
        assert client.get("/").status_code == client.get("/page/app.js").status_code == 200
        for path in ("/v1/engine", "/v1/engine/events", "/v1/models", "/pages"):
            assert client.get(path).status_code == 401, path
        assert client.get("/page/../v1/engine").status_code in (401, 404)  # as clients normalise it
        assert client.get("/v1/engine", headers={"Authorization": "Bearer sesame"}).status_code == 200


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_the_pages_own_requests_pass_the_guard_and_a_strangers_do_not(name: str) -> None:
    """A browser sends the origin with its port; the page's own is the host that it came from."""
    with client_of(FakeEngine()) as client:
        own = {"Host": f"{name}:8080", "Origin": f"http://{name}:8080"}
        assert client.post(URL, json={"messages": HELLO}, headers=own).status_code == 200
        assert client.get("/", headers={"Host": f"{name}:8080"}).status_code == 200
        strange = own | {"Origin": "http://evil.example:8080"}
        assert client.post(URL, json={"messages": HELLO}, headers=strange).status_code == 403
        assert client.get("/", headers={"Host": "evil.example:8080"}).status_code == 400


def test_no_file_needs_another_host_or_what_the_policy_forbids() -> None:
    for name in FILES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        if name.startswith("vendor/"):
            continue
        hosts = set(re.findall(r"https?://[\w.-]+", text)) - {"http://www.w3.org"}  # SVG's name space
        assert not hosts, name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", text
        ), name
        for imported in re.findall(r'from "(.+?)"', text):
            assert (FOLDER / name).parent.joinpath(imported).is_file(), (name, imported)
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    assert all((FOLDER / name).is_file() for name in re.findall(r'(?:href|src)="page/(.+?)"', html))


def test_the_vendored_library_is_as_published() -> None:
    assert hashlib.sha256((FOLDER / "vendor" / "marked.esm.js").read_bytes()).hexdigest() == MARKED
    assert "Permission is hereby granted, free of charge" in (FOLDER / "vendor" / "marked.LICENSE").read_text()


# -- the engine --------------------------------------------------------------------------------------------------------


def test_the_engine_says_what_it_serves_and_no_path(client: TestClient, engine: Engine, tiny_dir: Path) -> None:
    response = client.get("/v1/engine")
    data = response.json()
    assert str(tiny_dir) not in response.text and str(tiny_dir.parent.parent) not in response.text
    (served,) = data["models"]
    assert served["name"] == MODEL and served["state"] == "idle" and served["stats"] == engine.stats()
    assert engine.model.plan is not None and data["plan"] == engine.model.plan.to_dict()
    assert (data["experts"], data["layers"]) == (8, [0, 1, 2, 3])
    assert (served["tier"], served["k"], served["arm"]) == ("tiny", 2, "prerouter")
    assert (served["prerouter"], served["lora"], served["predicted_layers"]) == (True, True, [1, 2])
    memory = data["memory"]
    assert 0 < memory["allocator"] <= memory["allocator_peak"] and 0 < memory["process"] <= memory["process_peak"]
    assert memory["budget"] == data["plan"]["budget_bytes"] and memory["experts_held"] <= memory["experts_room"]
    for kind, sha in (
        ("prerouter", engine.model.identity.prerouter_sha256),
        ("lora", engine.model.identity.lora_sha256),
    ):
        assert served["adapters"][kind]["sha256"] == sha and served["adapters"][kind]["served"] is True
    assert served["belong_together"] in ("yes", "unknown")


def test_what_is_not_served_is_said_to_be_off(tiny_dir: Path) -> None:
    with (
        Engine.load(tiny_dir, prerouter=False, lora=False, arm="resident") as engine,
        TestClient(create_app({MODEL: engine}), base_url="http://127.0.0.1") as client,
    ):
        data = client.get("/v1/engine").json()
    (served,) = data["models"]
    assert (served["prerouter"], served["lora"], served["predicted_layers"], data["plan"]) == (False, False, [], None)
    assert [served["adapters"][kind]["served"] for kind in ("prerouter", "lora")] == [False, False]
    assert data["memory"]["budget"] is data["memory"]["experts_room"] is None


def test_damaged_adapter_files_are_no_failure_and_no_path(tiny_dir: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_dir, tmp_path / "model")
    with (
        Engine.load(directory) as engine,
        TestClient(create_app({MODEL: engine}), base_url="http://127.0.0.1") as client,
    ):
        (directory / "lora_edge0_tiny.safetensors").write_bytes(b"damaged")
        response = client.get("/v1/engine")
    assert (
        response.status_code == 200
        and response.json()["models"][0]["adapters"] is None
        and str(tmp_path) not in response.text
    )


def first_events(
    url: str, until: Callable[[dict[str, Any]], bool], while_open: Callable[[], Any]
) -> list[dict[str, Any]]:
    """Events from before `while_open` is called up to one that is `until`."""
    found: list[dict[str, Any]] = []
    with httpx.stream("GET", f"{url}/v1/engine/events", timeout=WAIT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == 1:
                    while_open()
                if until(found[-1]) and len(found) > 1:
                    break
    return found


def test_events_add_up_to_what_the_engine_did(engine: Engine) -> None:
    with live(engine) as url:
        before = engine.observation.seen()

        def ask() -> None:
            body = {"messages": HELLO, "temperature": 0, "max_tokens": 20}
            assert httpx.post(url + URL, json=body, timeout=WAIT_S).status_code == 200

        _, *found = first_events(url, lambda event: event["state"] == "idle" and event["steps"] > 0, ask)
    after = engine.observation.seen()
    done = after.counts_3LE - before.counts_3LE
    summed = np.zeros_like(done)
    for event in found:
        for row, expert, *numbers in event["cells"]:
            summed[:, row, expert] += numbers
    assert np.array_equal(summed, done) and done[RAN].sum() > 0 < done[READ].sum()
    assert sum(event["steps"] for event in found) == after.steps - before.steps == 19
    assert sum(event["loads"] for event in found) == done[READ].sum()
    assert all(len(event["recent"]) == event["steps"] for event in found)


def test_who_leaves_watches_no_more_and_too_many_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    left, events = threading.Event(), observe._events

    async def noted(*arguments: Any) -> Any:
        try:
            async for event in events(*arguments):
                yield event
        finally:
            left.set()

    monkeypatch.setattr(observe, "_events", noted)
    monkeypatch.setattr(observe, "MAX_WATCHERS", 1)
    with live(engine) as url:
        with httpx.stream("GET", f"{url}/v1/engine/events", timeout=WAIT_S) as response:
            lines = response.iter_lines()  # what nobody holds is closed, and with it the response
            assert next(lines).startswith("data: ")
            assert engine.observation.watchers == 1
            refused = httpx.get(f"{url}/v1/engine/events", timeout=WAIT_S)
            assert refused.status_code == 503 and "close one" in error_of(refused)["message"]
        assert left.wait(WAIT_S)
        assert engine.observation.watchers == 0


def test_a_server_that_ends_ends_its_events(engine: Engine) -> None:
    app = create_app({MODEL: engine})
    app.state.server = SimpleNamespace(should_exit=True)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        response = client.get("/v1/engine/events")  # comes back at all
    assert len(response.text.strip().splitlines()) == 1 and engine.observation.watchers == 0
