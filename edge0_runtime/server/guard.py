"""Who may talk to the server.

On a loopback address: anybody on this machine, but no web page: Host and Origin must be loopback names or allowed by name, and
CORS is off unless an origin is allowed. On any other address: only callers with an API key. Where there is a key, it is always
asked for.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import read_text
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.settings import Settings

log = logging.getLogger("edge0_runtime.server")
KEY_VARIABLE = "EDGE0_API_KEY"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
MAX_BODY_BYTES = 4 * 2**20
MAX_KEY_FILE = 2**16
BODY_S = 30.0  # that a body may pause
OPEN_PATHS = ("/health", "/")  # for probes and for the page's first load, which have no key
OPEN_FOLDER = "/page/"  # the page's files, the same for everybody; what it then asks for needs the key
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#]+)(:\d*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Access:
    """Who may talk.

    Attributes:
        keys: any of them is asked for; none: nobody is asked.
        hosts: names in a Host header; None: any. origins: web pages, as browsers name them, or `*`.
    """

    keys: tuple[bytes, ...] = ()
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()

    @classmethod
    def to(cls, host: str, settings: Settings) -> Access:
        """To a server on an address. Raises Edge0Error where other machines reach it and there is no key."""
        keys = api_keys(settings.api_key_file)
        loopback = is_loopback(host)
        if not keys and not loopback:
            raise Edge0Error(
                f"--host {host}: other machines can reach it; set an API key in {KEY_VARIABLE} or --api-key-file, or use"
                " localhost"
            )
        names = frozenset({*LOOPBACK_NAMES, host.lower(), *(name.strip("[]") for name in settings.allow_hosts)})
        return cls(keys, names if loopback or settings.allow_hosts else None, frozenset(settings.allow_origins))

    def knows(self, key: bytes) -> bool:
        """Whether a key is one of ours; takes as long for any."""
        return any([hmac.compare_digest(key, one) for one in self.keys])

    def serves(self, host: str) -> bool:
        """Whether a Host header names this server: a page elsewhere can make its own name resolve to our address."""
        if self.hosts is None:
            return True
        named = HOST.fullmatch(host)
        return named is not None and named[1].strip("[]").lower() in self.hosts

    def welcomes(self, origin: str) -> bool:
        """Whether a web page may ask. Where any Host may, a key is needed, which pages elsewhere don't have."""
        if self.hosts is None or "*" in self.origins or origin in self.origins:
            return True
        return _origin_host(origin) in self.hosts


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; of names, `localhost` alone counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def api_keys(path: Path | None = None) -> tuple[bytes, ...]:
    """The key of the environment and those of a file, one a line; empty lines and those that begin with # are none.

    Raises Edge0Error where the file can't be read, holds none, or a line that no header can carry.
    """
    keys = [os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else []
    if path is not None:
        lines = [line.strip() for line in read_text(path, MAX_KEY_FILE).splitlines()]
        found = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
        if wrong := [number for number, line in found.items() if not line.isprintable() or " " in line]:
            raise Edge0Error(f"{path}: line {wrong[0]} is no API key; write one a line, without spaces")
        if not found:
            raise Edge0Error(f"{path}: it holds no API key; write one a line")
        if path.stat().st_mode & 0o077:  # a warning: containers mount secrets so
            log.warning("%s: other users of this machine can use this file of API keys; `chmod 600` it", path)
        keys += found.values()
    return tuple(key.encode() for key in keys)


def _origin_host(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None


def _given_key(headers: Headers) -> bytes:
    """As OpenAI's clients send it, or as Anthropic's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode("latin-1")


class Guard:
    """ASGI middleware: Host, Origin, API key, size and pace of the body."""

    def __init__(self, app: ASGIApp, access: Access, max_body: int = MAX_BODY_BYTES) -> None:
        self._app, self._access, self._max_body = app, access, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 400, 401, 403 or 413, or pass the request on with its body counted; what is not HTTP goes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        access, origin = self._access, headers.get("origin")
        if not access.serves(headers.get("host", "")):
            return ApiError(400, "Host: this server doesn't go by that name; start it with --allow-host NAME")
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        if access.keys and not is_open and not access.knows(_given_key(headers)):
            return ApiError(
                401,
                "Authorization: missing or wrong; send `Authorization: Bearer <the API key>`, or `x-api-key`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if origin is not None and not access.welcomes(origin):
            return ApiError(
                403, "Origin: web pages from other sites may not use this server; start it with --allow-origin ORIGIN"
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"body: larger than the limit of {self._max_body} bytes; send fewer messages")

    def _limited(self, receive: Receive) -> Receive:
        """Counts the body as it comes, since a chunked one announces no length, and waits only so long for more of it."""
        seen, complete = 0, False

        async def counted() -> Message:
            nonlocal seen, complete
            try:
                async with asyncio.timeout(None if complete else BODY_S):
                    message = await receive()
            except TimeoutError as problem:
                raise HTTPException(408, f"body: nothing came for {BODY_S:g} seconds; send all of it") from problem
            seen += len(message.get("body", b""))
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            if seen > self._max_body:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted
