"""Connections whose client does nothing any more are ended; an engine that takes long is waited for."""

from __future__ import annotations

import contextlib
import json
import socket

import httpx
import pytest

from edge0_runtime.server import answer, connections, guard, service
from edge0_runtime.server.address import bind
from tests.runtime.scripted_server import HELLO, URL, WAIT_S, FakeEngine, served


def closed_by_server(connection: socket.socket) -> bool:
    """Reads all that comes; raises where the server leaves the connection open."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(2**16):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /"])
def test_a_head_that_stops_coming_is_given_up(sent, monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE_S", 0.05)
    with served(FakeEngine()) as (_, url):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port), WAIT_S) as connection:
            connection.sendall(sent)
            assert closed_by_server(connection)
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_client_that_stops_reading_is_given_up(monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE_S", 0.05)
    body = json.dumps({"tokens": [97] * 200_000})
    head = (
        f"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    address = bind("127.0.0.1", 0)
    address.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with served(FakeEngine(), address=address) as (server, url), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", address.port))
        connection.sendall(f"{head}\r\n\r\n{body}".encode())

        def gone() -> bool:
            """Asks the server, which has taken our connection before that one."""
            httpx.get(f"{url}/health").raise_for_status()
            clients = {one.client for one in list(server.server_state.connections)}
            return connection.getsockname() not in clients

        assert any(gone() for _ in range(5000))
        connection.settimeout(WAIT_S)
        assert len(b"".join(iter(lambda: connection.recv(2**16), b""))) < 200_000


def test_a_slow_engine_is_waited_for(monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE_S", 0.02)
    monkeypatch.setattr(guard, "BODY_S", 0.02)
    monkeypatch.setattr(answer, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(service, "FIRST_EVENT_S", 0.05)
    engine = FakeEngine(pause_at=0)
    asked = {"messages": HELLO, "stream": True}
    with served(engine) as (_, url), httpx.stream("POST", url + URL, json=asked, timeout=WAIT_S) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(6)][::2] == [answer.KEEP_ALIVE.strip()] * 3  # seven times the patience
        engine.go.set()
        assert "data: [DONE]" in list(lines)
