"""The HTTP server when an engine fails, a client leaves, the queue is full or the server ends."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
from collections.abc import Callable

import httpx
import pytest

from edge0_runtime.sampling import Sampling
from edge0_runtime.server.exchange import Failed, GenerationRequest
from edge0_runtime.server.worker import MAX_WAITING, Job, Worker
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
    streamed_text,
)

# -- failures ----------------------------------------------------------------------------------------------------------


def test_an_exception_fails_its_request_only():
    engine = FakeEngine(fail_at=0)
    with client_of(engine) as client:
        for fields in ({}, {"stream": True}):
            response = ask(client, **fields)
            assert response.status_code == 500
            assert error_of(response)["type"] == "server_error"
        engine.fail_at = None
        assert ask(client).status_code == 200
        assert client.get("/health").status_code == 200


def test_an_exception_in_mid_stream_is_an_error_object_and_no_end():
    with client_of(FakeEngine(fail_at=2)) as client:
        *chunks, last = events(ask(client, stream=True))
    assert streamed_text(chunks) == "Hi"
    assert last["error"]["type"] == "server_error" and "secret" not in json.dumps(last)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_health_says_so():
    with client_of(FakeEngine(fail_at=0, problem=SystemExit(3))) as client:
        assert ask(client).status_code == 500
        assert client.get("/health").status_code == 503
        response = ask(client)
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_ended"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dying_thread_takes_no_more_jobs_when_its_last_client_hears_of_it():
    worker, engine = Worker(), FakeEngine(fail_at=0, problem=SystemExit(3))
    heard = queue.SimpleQueue()
    worker.start()
    with contextlib.closing(worker):
        request = GenerationRequest(((1,),), Sampling(max_tokens=1, temperature=0.0))
        worker.submit(Job("last", engine, request, lambda event: heard.put((event, worker.alive))))
        assert heard.get(timeout=WAIT_S) == (Failed(), False)


# -- lifecycle ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_at", [0, 3], ids=["during prefill", "in mid-text"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_the_generation(pause_at, stream):
    engine = FakeEngine(pause_at=pause_at)
    with live(engine) as url:
        gone = client_that_waits(url, stream)
        assert engine.paused.wait(WAIT_S)
        gone.close()
        assert engine.closed.wait(WAIT_S)  # although nobody let it go on
        engine.pause_at = None
        assert ask(httpx.Client(base_url=url)).json()["choices"][0]["finish_reason"] == "stop"


def client_that_waits(url: str, stream: bool) -> socket.socket:
    """A request on its way, without anybody to read the answer."""
    body = json.dumps({"messages": HELLO, "stream": stream})
    connection = socket.create_connection(("127.0.0.1", httpx.URL(url).port))
    head = ["Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    connection.sendall("\r\n".join([f"POST {URL} HTTP/1.1", *head, "", body]).encode())
    return connection


def test_a_full_queue_answers_503_until_somebody_leaves():
    engine = FakeEngine(pause_at=0)
    with live(engine) as url, httpx.Client(base_url=url) as client:
        running = client_that_waits(url, stream=False)
        assert engine.paused.wait(WAIT_S)
        waiting = [client_that_waits(url, stream=False) for _ in range(MAX_WAITING)]
        until(lambda: client.get("/health").json()["waiting"] == MAX_WAITING)
        response = ask(client)
        assert response.status_code == 503
        assert error_of(response)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) > 0
        for connection in waiting:
            connection.close()
        until(lambda: client.get("/health").json()["waiting"] == 0)
        engine.go.set()
        assert ask(client).status_code == 200
        assert len(engine.calls) == 2  # those who left the queue were never started
        running.close()


def until(condition: Callable[[], bool]) -> None:
    """Ask the server again and again; each request is the pause."""
    assert any(condition() for _ in range(5000))


def test_shutting_down_ends_a_running_generation():
    engine = FakeEngine(pause_at=3)
    with live(engine) as url:
        connection = client_that_waits(url, stream=True)
        assert engine.paused.wait(WAIT_S)
    assert engine.closed.is_set()  # although nobody let it go on
    connection.close()
