"""Running the server: its health and numbers, request ids and log lines, and how it begins and ends."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge0_runtime.engine import Engine
from edge0_runtime.server import logs, running
from edge0_runtime.server.address import bind
from edge0_runtime.server.running import Server, loading
from tests.runtime.scripted_server import (
    HELLO,
    URL,
    WAIT_S,
    FakeEngine,
    ask,
    client_of,
    error_of,
    events,
    live,
    served,
    streamed_text,
)


@pytest.fixture(scope="module")
def engine(tiny_dir, budget) -> Iterator[Engine]:
    """With room for some experts, so that others are read."""
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 8)) as loaded:
        yield loaded


# -- health and metrics ------------------------------------------------------------------------------------------------


def test_health_is_degraded_after_failures_until_one_succeeds():
    engine = FakeEngine(fail_at=0)
    with client_of(engine) as client:
        for failures in (1, 2):
            ask(client)
            health = client.get("/health")
            assert health.status_code == 200 and health.json()["status"] == "degraded"
            assert f"{failures} in a row" in health.json()["reason"]
        engine.fail_at = None
        ask(client)
        assert client.get("/health").json() == {"status": "ready", "waiting": 0, "running": 0}
        assert client.head("/health").status_code == 200 and not client.head("/health").content


def samples(client: Any) -> dict[str, float]:
    response = client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    return {
        sample.name + "".join(f"|{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_metrics_count_what_was_asked_and_what_the_engine_did(engine):
    with client_of(engine) as client:
        before = samples(client)
        usage = [ask(client, max_tokens=5, temperature=0, seed=seed).json()["usage"] for seed in range(3)]
        ask(client, max_tokens=4, stream=True)
        assert ask(client, max_tokens=0).status_code == 400
        assert client.get("/nothing/here").status_code == 404
        after, stats = samples(client), engine.stats()
    assert after[f"edge0_requests_total|{URL}|200"] == 4
    assert after[f"edge0_requests_total|{URL}|400"] == after["edge0_requests_total|other|404"] == 1
    prompt = usage[0]["prompt_tokens"]
    assert after["edge0_tokens_total|prompt"] == 4 * prompt
    completion = sum(one["completion_tokens"] for one in usage)
    assert completion < after["edge0_tokens_total|completion"] <= completion + 4
    for name in ("queue", "first_token", "generation"):
        assert after[f"edge0_{name}_seconds_count"] == 4 and before[f"edge0_{name}_seconds_count"] == 0
    assert after["edge0_expert_hits_total"] == stats["expert_hits"] > before["edge0_expert_hits_total"]
    assert after["edge0_expert_misses_total"] == stats["expert_misses"] > 0
    assert after["edge0_expert_read_bytes_total"] == stats["expert_bytes"] > before["edge0_expert_read_bytes_total"]
    assert after["edge0_blocked_seconds_total"] == pytest.approx(stats["blocked_load_seconds"])
    assert after["edge0_expert_slots"] == 8 >= after["edge0_experts_held"] > 0
    assert after["edge0_memory_bytes|expert_slots"] == stats["expert_slot_bytes"]
    assert after["edge0_memory_bytes|process"] > after["edge0_memory_bytes|allocator"] > 0
    assert (after["edge0_queue_length"], after["edge0_up"]) == (0, 1)


# -- request ids and logs ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def logged(*, as_json: bool = True, level: logs.Level = "debug") -> Iterator[io.StringIO]:
    """What the server logs inside the block."""
    root, package, text = logging.getLogger(), logging.getLogger("edge0_runtime"), io.StringIO()
    handler, before = logging.StreamHandler(text), (root.handlers, package.level, logging.getLogger("uvicorn").level)
    root.handlers = [handler]
    logs.configure(as_json=as_json, level=level)
    try:
        yield text
    finally:
        root.handlers = before[0]
        package.setLevel(before[1])
        logging.getLogger("uvicorn").setLevel(before[2])


def test_a_request_id_is_taken_or_made_and_is_in_every_answer():
    with client_of(FakeEngine(fail_at=0)) as client:
        for path, status in (("/health", 200), ("/nothing", 404), ("/v1/models/other", 404)):
            response = client.get(path, headers={"X-Request-Id": "mine/1"})
            assert (response.status_code, response.headers["x-request-id"]) == (status, "mine/1")
        made = {client.get("/health").headers["x-request-id"] for _ in range(3)}
        assert len(made) == 3 and all(len(name) == 32 for name in made)
        assert client.post(URL, json={"messages": HELLO}).headers["x-request-id"]
        for wrong in ("", "a b", "x" * 129, "ä"):
            response = client.get("/health", headers={b"X-Request-Id": wrong.encode()})
            assert response.status_code == 400 and "128" in error_of(response)["message"]
            assert len(response.headers["x-request-id"]) == 32
        assert client.get("/health", headers={"X-Request-Id": "x" * 128}).status_code == 200


def test_a_failure_that_nobody_foresaw_has_its_request_id_too(monkeypatch):
    with client_of(FakeEngine()) as client:
        monkeypatch.setattr(client.app.state.service, "health", lambda: 1 / 0)
        response = client.get("/health", headers={"X-Request-Id": "lost"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "lost")


def test_json_lines_name_the_request_in_every_thread_and_no_prompt(engine):
    secret = "Geheimnis 4711"
    turn = [{"role": "user", "content": secret}]
    with logged() as text, live(engine) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        for name, stream in (("whole", False), ("streamed", True)):
            body = {"messages": turn, "max_tokens": 4, "stream": stream}
            client.post(URL, json=body, headers={"X-Request-Id": name}).raise_for_status()
        long = [{"role": "user", "content": secret * 1000}]
        client.post(URL, json={"messages": long, "temperature": 9}, headers={"X-Request-Id": "refused"})
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= set(line)
    for name in ("whole", "streamed"):
        generated, answered = (line for line in lines if line.get("request_id") == name)
        assert 1 <= generated["completion_tokens"] <= 4 and generated["total_s"] >= generated["first_token_s"] > 0
        assert (answered["method"], answered["endpoint"], answered["status"]) == ("POST", URL, 200)
    (refused,) = (line for line in lines if line.get("request_id") == "refused")
    assert refused["status"] == 400
    assert "Geheimnis" not in text.getvalue() and "4711" not in text.getvalue()


@pytest.mark.parametrize("as_json", [True, False])
def test_a_failure_in_the_engines_thread_names_its_request(as_json):
    with logged(as_json=as_json) as text, client_of(FakeEngine(fail_at=1)) as client:
        client.post(URL, json={"messages": HELLO}, headers={"X-Request-Id": "unlucky"})
    (line,) = (line for line in text.getvalue().splitlines() if "failed" in line)
    if as_json:
        told = json.loads(line)
        assert told["request_id"] == "unlucky" and "short read" in told["exception"]
    else:
        assert "[unlucky]" in text.getvalue()


def test_a_path_cannot_write_to_the_terminal_and_probes_are_not_logged():
    with logged(as_json=False, level="info") as text, client_of(FakeEngine()) as client:
        client.get("/%1b[31mred")
        client.get("/health")
        client.get("/metrics")
    assert "red" in text.getvalue() and "\x1b" not in text.getvalue()
    assert "/health" not in text.getvalue() and "/metrics" not in text.getvalue()


# -- the beginning -----------------------------------------------------------------------------------------------------


def test_while_a_model_loads_everybody_is_told_so_and_a_silent_client_delays_nothing():
    with bind("localhost", 0) as address:
        urls = [f"http://{host}:{address.port}" for host in ("127.0.0.1", "[::1]")[: len(address.sockets)]]
        with loading(address), socket.create_connection(("127.0.0.1", address.port)):
            for url in urls:
                health = httpx.get(f"{url}/health", timeout=WAIT_S)
                assert (health.status_code, health.json()) == (503, {"status": "loading"})
                told = httpx.post(url + URL, json={"messages": HELLO}, timeout=WAIT_S)
                assert told.status_code == 503 and int(told.headers["retry-after"]) > 0
                assert error_of(told)["code"] == "loading"
        with served(FakeEngine(), address=address):
            assert [httpx.get(f"{url}/health", timeout=WAIT_S).json()["status"] for url in urls] == ["ready"] * len(
                urls
            )


# -- the end -----------------------------------------------------------------------------------------------------------


def end(server: Server) -> None:
    server.handle_exit(signal.SIGTERM, None)


def test_on_a_signal_running_answers_end_and_new_requests_are_told_to_come_again():
    engine = FakeEngine(pause_at=3)
    with served(engine) as (server, url), httpx.Client(base_url=url, timeout=WAIT_S) as client:
        with client.stream("POST", URL, json={"messages": HELLO, "stream": True}) as response:
            assert engine.paused.wait(WAIT_S)
            end(server)
            refused = httpx.post(url + URL, json={"messages": HELLO}, timeout=WAIT_S)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert error_of(refused)["code"] == "server_ending"
            health = httpx.get(f"{url}/health", timeout=WAIT_S)
            assert health.status_code == 503 and health.json()["status"] == "degraded"
            engine.go.set()
            response.read()
        assert streamed_text(events(response)) == "Hi there" and events(response)[-1] == "[DONE]"


def test_what_is_not_done_in_time_ends_with_an_error(monkeypatch):
    engine = FakeEngine(pause_at=3)
    bodies = []

    def answer(url: str, stream: bool) -> None:
        bodies.append((stream, httpx.post(url + URL, json={"messages": HELLO, "stream": stream}, timeout=WAIT_S)))

    with served(engine, grace_s=0.0) as (server, url):
        threads = [threading.Thread(target=answer, args=(url, stream)) for stream in (True, False)]
        threads[0].start()
        assert engine.paused.wait(WAIT_S)
        threads[1].start()
        assert any(httpx.get(f"{url}/health").json()["waiting"] == 1 for _ in range(5000))
        end(server)
        for thread in threads:
            thread.join(WAIT_S)
    results = dict(bodies)
    *chunks, last = events(results[True])
    assert streamed_text(chunks) == "Hi " and last["error"]["code"] == "server_ending"
    assert results[False].status_code == 503 and error_of(results[False])["code"] == "server_ending"


def test_the_second_signal_ends_the_process_at_once(monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(running.os, "_exit", codes.append)
    engine = FakeEngine(pause_at=0)
    with served(engine) as (server, url):
        client = threading.Thread(target=lambda: httpx.post(url + URL, json={"messages": HELLO}, timeout=WAIT_S))
        client.start()
        assert engine.paused.wait(WAIT_S)
        end(server)
        assert codes == []
        server.handle_exit(signal.SIGINT, None)
        assert codes == [128 + signal.SIGINT]
        engine.go.set()
        client.join(WAIT_S)


def test_an_idle_server_ends_although_connections_are_open():
    with served(FakeEngine()) as (server, url), httpx.Client(base_url=url) as client:
        assert ask(client).status_code == 200  # and stays connected
        silent = socket.create_connection(("127.0.0.1", httpx.URL(url).port))
        end(server)
    silent.close()
