"""What is said when a request can't be served: one error, and the object that each protocol wants for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

MAX_SHOWN_PATH = 100
MAX_SHOWN_ERRORS = 5
ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request that can't be served: an HTTP status, a sentence, OpenAI's `param` and `code` where it has them."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # A client's own field names may be in here, and JSON can spell halves of characters that UTF-8 can't.
        message, param = printable(message), param if param is None else printable(param)
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def openai(self) -> dict[str, Any]:
        """OpenAI's error object; the type says whose fault it is: the request's below status 500, else ours."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's, whose type follows from the status."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> JSONResponse:
        """The error object of the protocol that the path belongs to, with its status and headers."""
        body = self.anthropic() if path.startswith(ANTHROPIC_PATHS) else self.openai()
        return JSONResponse(body, self.status, headers=dict(self.headers or {}))


def printable(text: str) -> str:
    """The text without halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode("utf-8")


def validation_error(problem: RequestValidationError) -> ApiError:
    """Pydantic's list of errors as one sentence per field; of values, only numbers are shown."""
    errors = problem.errors()
    shown = "; ".join(_sentence(error) for error in errors[:MAX_SHOWN_ERRORS])
    more = f"; and {len(errors) - MAX_SHOWN_ERRORS} more" if len(errors) > MAX_SHOWN_ERRORS else ""
    return ApiError(400, shown + more, param=_path(errors[0]["loc"]) or None)


def _sentence(error: Mapping[str, Any]) -> str:
    path, kind, value = _path(error["loc"]) or "body", error["type"], error.get("input")
    if kind == "extra_forbidden":
        return f"{path}: unknown field; leave it out"
    if kind == "missing":
        return f"{path}: missing"
    if kind == "json_invalid":
        return "body: not valid JSON"
    shown = f" (got {value!r})" if type(value) in (int, float, bool) else ""
    return f"{path}: {error['msg'].removeprefix('Value error, ')}{shown}"


def _path(loc: Sequence[str | int]) -> str:
    """("body", "messages", 1, "role") -> "messages[1].role"."""
    if loc[-1:] and isinstance(loc[-1], int) and len(loc) == 2:  # a position in broken JSON
        return ""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[1:]).lstrip(".")
    return path if len(path) <= MAX_SHOWN_PATH else path[:MAX_SHOWN_PATH] + "..."
