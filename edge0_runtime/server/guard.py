"""Who may talk to the server.

On a loopback address: anybody on this machine, but no web page (Host and Origin must be loopback names, CORS
is off). On any other address: only callers with the API key of EDGE0_API_KEY. Where that is set, it is always
asked for.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.server.errors import ApiError

KEY_VARIABLE = "EDGE0_API_KEY"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")
MAX_BODY_BYTES = 4 * 2**20
OPEN_PATHS = ("/health",)  # for probes, which have no key


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; of names, `localhost` alone counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def api_key_for(host: str) -> str | None:
    """The API key of the environment. Raises Edge0Error where `host` needs one and there is none."""
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(host):
        raise Edge0Error(
            f"--host {host}: other machines can reach it; set an API key in {KEY_VARIABLE}, or use 127.0.0.1"
        )
    return key


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
    """ASGI middleware: API key, Origin, size of the body. Host is Starlette's TrustedHostMiddleware's."""

    def __init__(self, app: ASGIApp, api_key: str | None, loopback: bool, max_body: int = MAX_BODY_BYTES) -> None:
        self._app, self._loopback, self._max_body = app, loopback, max_body
        self._expected = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 401, 403 or 413, or pass the request on with its body counted; what is not HTTP goes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        asks = self._expected is not None and path not in OPEN_PATHS
        if asks and not hmac.compare_digest(_given_key(headers), self._expected or b""):
            return ApiError(
                401,
                "Authorization: missing or wrong; send `Authorization: Bearer <the API key>`, or `x-api-key`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        origin = headers.get("origin")
        if self._loopback and origin is not None and _origin_host(origin) not in LOOPBACK_NAMES:
            return ApiError(403, "Origin: web pages from other sites may not use this server")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"body: larger than the limit of {self._max_body} bytes; send fewer messages")

    def _limited(self, receive: Receive) -> Receive:
        """Counts the body as it comes, since a chunked one announces no length."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted
