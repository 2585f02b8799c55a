"""Log lines of the server: for people, or an object a line. Each names its request; none holds text of a prompt."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from edge0_runtime.contract.files import printable

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that the running code works for, in its task and in the worker's thread."""


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """`extra` of a log call: values that a JSON line has by name beside its message."""
    return {"fields": values}


class Lines(logging.Formatter):
    """The message, and the request in brackets."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or several with a traceback; escaped, since it may quote strangers' files."""
        request = REQUEST_ID.get()
        return printable(super().format(record) + (f" [{request}]" if request else ""))


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id, `fields`, and exception with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The object; ASCII alone."""
        request = REQUEST_ID.get()
        data = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        data |= {"request_id": request} if request else {}
        data |= getattr(record, "fields", {})
        data |= {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(data, default=str)


def configure(*, as_json: bool = False, level: Level = "info") -> None:
    """Let all that this process logs be written so. uvicorn's own news are only shown where everything is."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines() if as_json else Lines())
    logging.getLogger("edge0_runtime").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(
        "INFO" if level == "debug" else max("warning", level, key=LEVELS.index).upper()
    )
