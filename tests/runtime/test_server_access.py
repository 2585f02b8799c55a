"""Who may talk to the server: API keys, names in Host, web pages, and the addresses that it listens on."""

from __future__ import annotations

import errno
import logging
import socket

import httpx
import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.server import guard
from edge0_runtime.server.address import bind
from edge0_runtime.server.guard import Access, api_keys
from edge0_runtime.server.settings import Settings
from tests.runtime.scripted_server import HELLO, URL, WAIT_S, FakeEngine, ask, client_of, live

PAGE = "https://app.example"


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("EDGE0_API_KEY", raising=False)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the team\nerste\n\n  zweite-ü  \n")
    path.chmod(0o600)
    return path


def test_any_key_of_file_and_environment_is_taken_in_either_header(key_file, monkeypatch):
    monkeypatch.setenv("EDGE0_API_KEY", "umgebung")
    with client_of(FakeEngine(), "0.0.0.0", Settings(api_key_file=key_file)) as client:

        def status(**headers: str) -> int:
            encoded = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
            return client.post(URL, json={"messages": HELLO}, headers=encoded).status_code

        for key in ("erste", "zweite-ü", "umgebung"):
            assert status(authorization=f"Bearer {key}") == status(x_api_key=key) == 200
            assert status(authorization=f"bearer {key}") == 200
        for key in ("", "# of the team", "erst", "erste ", "erste\nzweite-ü"):
            assert status(x_api_key=key) == 401
        assert status(authorization="Bearer falsch", x_api_key="erste") == 401  # the first one counts, said to be wrong
        assert status(authorization="Basic erste") == status() == 401
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"x-api-key": "erste"}).status_code == 200
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "no API key"), ("# nothing\n\n", "no API key"), ("a b\n", "line 1"), ("good\n\nb\x07d\n", "line 3")],
)
def test_a_file_without_usable_keys_is_refused(tmp_path, text, says):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(Edge0Error, match=says) as refused:
        api_keys(path)
    assert str(path) in str(refused.value) and "good" not in str(refused.value)
    with pytest.raises(Edge0Error, match="cannot be read"):
        api_keys(tmp_path / "nowhere")


def test_a_file_that_others_can_read_is_warned_of(key_file, caplog):
    with caplog.at_level(logging.WARNING):
        api_keys(key_file)
        assert not caplog.records
        key_file.chmod(0o640)
        assert len(api_keys(key_file)) == 2
    assert "chmod 600" in caplog.text and "erste" not in caplog.text


# -- names and pages ---------------------------------------------------------------------------------------------------


def test_allowed_hosts_are_served_beside_the_loopback_names():
    with client_of(FakeEngine(), "localhost", Settings(allow_hosts=("host.docker.internal", "[fd00::1]"))) as client:
        for host in ("host.docker.internal:11434", "HOST.docker.internal", "localhost", "[::1]:1", "[FD00::1]:8080"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host
        wrong = ("docker.internal", "host.docker.internal.evil.example", "x@localhost", "localhost/", "[::1", "", "*")
        for host in wrong:
            response = client.get("/v1/models", headers={"Host": host})
            assert response.status_code == 400, host
            assert "--allow-host" in response.json()["error"]["message"]
        page = {"Origin": "http://host.docker.internal:11434"}
        assert client.get("/v1/models", headers=page).status_code == 200


def test_allowed_origins_may_use_the_server_and_others_may_not(monkeypatch):
    monkeypatch.setenv("EDGE0_API_KEY", "key")
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with client_of(FakeEngine(), settings=Settings(allow_origins=(PAGE,))) as client:
        preflight = client.options(URL, headers={"Origin": PAGE} | asks)  # without the key, as browsers do
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in preflight.headers
        answer = ask_from(client, PAGE)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        denied = client.get("/v1/models", headers={"Origin": PAGE})
        assert denied.status_code == 401 and denied.headers["access-control-allow-origin"] == PAGE
        for other in ("https://evil.example", "http://app.example", f"{PAGE}:444", f"{PAGE}.evil.example", "null"):
            assert client.options(URL, headers={"Origin": other} | asks).status_code == 400
            assert ask_from(client, other).status_code == 403
            assert "access-control-allow-origin" not in ask_from(client, other).headers


def test_all_origins_can_be_allowed_but_never_with_credentials():
    with client_of(FakeEngine(), settings=Settings(allow_origins=("*",))) as client:
        answer = ask_from(client, "https://anywhere.example")
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


def ask_from(client: httpx.Client, origin: str) -> httpx.Response:
    headers = {"Origin": origin, "Authorization": "Bearer key"}
    return client.post(URL, json={"messages": HELLO}, headers=headers)


@pytest.mark.parametrize("origin", ["app.example", "https://App.example", f"{PAGE}/", f"{PAGE}/x", "null", "", "**"])
def test_what_is_no_origin_is_refused_at_the_start(origin):
    with pytest.raises(Edge0Error, match="--allow-origin"):
        Settings(allow_origins=(origin,))


@pytest.mark.parametrize("host", ["http://x", "x:80", "*", "", "a b", "fd00::1"])
def test_what_is_no_host_is_refused_at_the_start(host):
    with pytest.raises(Edge0Error, match="--allow-host"):
        Settings(allow_hosts=(host,))


def test_another_address_with_a_key_serves_any_name_unless_names_are_given(monkeypatch):
    monkeypatch.setenv("EDGE0_API_KEY", "key")
    assert Access.to("0.0.0.0", Settings()).serves("anything.example")
    named = Access.to("0.0.0.0", Settings(allow_hosts=("box.lan",)))
    assert named.serves("box.lan:8080") and named.serves("localhost") and not named.serves("anything.example")


# -- slow senders ------------------------------------------------------------------------------------------------------


def test_a_body_that_stops_coming_is_given_up(monkeypatch):
    monkeypatch.setattr(guard, "BODY_S", 0.05)
    head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with live(FakeEngine()) as url, socket.create_connection(("127.0.0.1", httpx.URL(url).port), WAIT_S) as connection:
        connection.sendall(head.encode() + b'{"messages":')
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert ask(httpx.Client(base_url=url)).status_code == 200


# -- addresses ---------------------------------------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_localhost_is_both_loopback_families():
    with bind("localhost", 0) as address:
        assert [one.getsockname()[:2] for one in address.sockets] == [
            ("127.0.0.1", address.port),
            ("::1", address.port),
        ]
        assert address.url == f"http://localhost:{address.port}"
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, address.port), WAIT_S).close()
    with socket.socket(socket.AF_INET6) as taken:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(("::1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Edge0Error, match=f"--host localhost --port {port}: "):
            bind("localhost", port)
        bind("127.0.0.1", port).close()  # and nothing was left bound


def test_without_ipv6_localhost_is_the_other_family(monkeypatch):
    whole = socket.socket.bind

    def refusing(self: socket.socket, where: tuple) -> None:
        if self.family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        whole(self, where)

    class Socket(socket.socket):
        bind = refusing

    monkeypatch.setattr(socket, "socket", Socket)
    with bind("localhost", 0) as address:
        assert [one.getsockname()[0] for one in address.sockets] == ["127.0.0.1"]
