"""Where the server listens, taken before a model is loaded for it."""

from __future__ import annotations

import contextlib
import errno
import socket
from types import TracebackType

from edge0_runtime.contract.errors import Edge0Error

LOOPBACKS = ("127.0.0.1", "::1")
TRIES = 16  # to find a port that is free in both families
NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Address:
    """Bound sockets of one port. Whoever connects from now on is answered, if a moment later.

    Attributes:
        host, port: as they are asked for; a port of 0 has become the one that was free. sockets: one a family.
    """

    def __init__(self, host: str, sockets: list[socket.socket]) -> None:
        self.host, self.sockets = host, sockets
        self.port: int = sockets[0].getsockname()[1]
        for one in sockets:
            one.listen()

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def close(self) -> None:
        """Listen no more."""
        for one in self.sockets:
            one.close()

    def __enter__(self) -> Address:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def bind(host: str, port: int) -> Address:
    """Take an address; `localhost` is both loopback families, where this machine has both.

    Raises Edge0Error where it is taken, in either family: a client that tries the other one would meet another server.
    """
    try:
        return Address(host, _both_loopbacks(port) if host == "localhost" else [_bound(host, port)])
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise Edge0Error(f"--host {host} --port {port}: {reason}; choose another") from problem


def _both_loopbacks(port: int) -> list[socket.socket]:
    four, six = LOOPBACKS
    for last in range(TRIES, 0, -1):
        first = _bound(four, port)
        try:
            return [first, _bound(six, first.getsockname()[1])]
        except OSError as problem:
            if problem.errno in NO_IPV6:
                return [first]
            first.close()
            if port or last == 1:  # else: free in one family by chance alone
                raise
    raise AssertionError("unreachable")


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    with contextlib.ExitStack() as failing:
        failing.callback(bound.close)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == LOOPBACKS[1]:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
        failing.pop_all()
    return bound
