"""Connections whose client does nothing any more: uvicorn would keep them, and there are only so many."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 30.0  # at least, and at most twice as long


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which ends a connection when for so long no request comes whole, or nothing of an answer is read.

    A body that pauses is the guard's; what the server itself takes long for is nobody's fault.
    """

    _look: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin to look."""
        super().connection_made(transport)
        self._look = self.loop.call_later(PATIENCE_S, self._looked, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        self._look.cancel()
        super().connection_lost(exc)

    def _looked(self, before: Any) -> None:
        now = self._waits_for_client()
        if now is not None and now == before:
            self.transport.abort()
        else:
            self._look = self.loop.call_later(PATIENCE_S, self._looked, now)

    def _waits_for_client(self) -> Any:
        """What for, which is the same as long as the client does nothing; None where it isn't the client's turn."""
        if unsent := self.transport.get_write_buffer_size():
            return "being read", self.cycle, unsent
        idle = self.cycle is None or self.cycle.response_complete
        return ("a request", self.cycle) if idle else None
