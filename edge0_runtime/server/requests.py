"""What every HTTP request has: an id, a line in the log, a place in the metrics."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.logs import REQUEST_ID, fields
from edge0_runtime.server.metrics import Metrics

log = logging.getLogger("edge0_runtime.server")
HEADER = "X-Request-Id"
SCOPE = "edge0.request_id"
ID = re.compile(r"[!-~]{1,128}")
PROBES = ("/health", "/metrics")  # asked every few seconds


class Requests:
    """ASGI middleware around all others: takes or makes the request's id, and notes how the request ended."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; 400 where its id is none. What is not HTTP goes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given, began, status = Headers(scope=scope).get(HEADER), time.perf_counter(), 500
        wrong = given is not None and ID.fullmatch(given) is None
        scope[SCOPE] = name = uuid.uuid4().hex if given is None or wrong else given
        REQUEST_ID.set(name)  # for this request's task, which ends with it

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            if wrong:
                refusal = ApiError(400, f"{HEADER}: it must be 1 to 128 printable ASCII characters without spaces")
                await refusal.response(scope["path"])(scope, receive, tagged)
            else:
                await self._app(scope, receive, tagged)
        finally:
            self._note(scope, status, time.perf_counter() - began)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        endpoint: str = getattr(scope.get("route"), "path", "other")
        self._metrics.answered(endpoint, status)
        values = fields(method=scope["method"], endpoint=endpoint, status=status, seconds=round(seconds, 6))
        level = logging.DEBUG if endpoint in PROBES else logging.INFO
        log.log(level, "%s %s: %d after %.3f s", scope["method"], scope["path"], status, seconds, extra=values)
