"""What whoever runs the server sets, beside the models and the address."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge0_runtime.contract.errors import Edge0Error

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
HOST = re.compile(r"\[[0-9a-f:.]+\]|[a-z0-9_.-]+")


@dataclass(frozen=True)
class Settings:
    """Defaults are those of `edge0_runtime serve`. Raises Edge0Error where a value can't be honoured.

    Attributes:
        api_key_file: of keys, one a line, that are accepted beside EDGE0_API_KEY; None: no file.
        allow_origins: web pages that may use the server, each as a browser names it (`https://app.example`); `*`: all.
        allow_hosts: names that the server is called by beside the loopback ones, without port.
        max_tokens: of an answer whose request doesn't say; None: the protocol's own default.
        sampling: `temperature`, `top_p`, `top_k` and `min_p` of such a request, before what the model says; checked values.
    """

    api_key_file: Path | None = None
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for origin in self.allow_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise Edge0Error(
                    f"--allow-origin {origin}: not an origin; write it as a browser does, in lower case and without a path:"
                    " https://app.example or http://192.168.0.2:3000, or * for all"
                )
        for host in self.allow_hosts:
            if not HOST.fullmatch(host):
                raise Edge0Error(
                    f"--allow-host {host}: not a host name; write it in lower case, without port and scheme:"
                    " host.docker.internal"
                )
