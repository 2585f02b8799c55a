"""What a chat request may hold, and errors in OpenAI's shape.

Every field is honoured or refused with 400, never ignored. Null means absent. Three OpenAI fields ask for
nothing that changes an answer and are accepted as they are: `user`, `metadata`, `store` (nothing is stored).
`top_k` and `min_p` are extensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from edge0_runtime.sampling import Defaults, Sampling

MAX_MESSAGES = 2048
MAX_STOP_LENGTH = 256
MAX_SHOWN_PATH = 100


class ApiError(Exception):
    """Becomes an HTTP response with OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # A client's own field names may be in here, and JSON can spell halves of characters that UTF-8 can't.
        message, param = _printable(message), param if param is None else _printable(param)
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error object; the type says whose fault it is: the request's below status 500, else ours."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error object with its status and headers."""
        return JSONResponse(self.body(), self.status, headers=dict(self.headers or {}))


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


class _Strict(BaseModel):
    """No unknown field, no conversion between types, no NaN; null is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


def _text_content(value: Any) -> Any:
    """A string, or OpenAI's list of text parts as the string that they join to."""
    if isinstance(value, list):
        for index, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f'part {index} is not {{"type": "text", "text": "..."}}; only text is supported')
        value = "".join(part["text"] for part in value)
    if isinstance(value, str) and _printable(value) != value:
        raise ValueError("half of a surrogate pair is no character")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Message(_Strict):
    """One turn. `developer` is OpenAI's newer name for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_content)]

    def for_template(self) -> dict[str, str]:
        """The turn under the role names that chat templates know."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(_Strict):
    """Of a streamed answer: `include_usage` asks for a last chunk with the count of tokens."""

    include_usage: bool = False


class TextFormat(_Strict):
    """The one `response_format` that is served; `json_object` and `json_schema` are refused."""

    type: Literal["text"]


class ChatRequest(_Strict):
    """Body of POST /v1/chat/completions."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        BeforeValidator(_as_list),
        Field(max_length=4),
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    # No effect on an answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    # Refused, unless set to what an answer is like anyway.
    n: Annotated[int, Field(ge=1, le=1)] = 1
    logprobs: Literal[False] = False
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] = []
    tool_choice: Literal["none", "auto"] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise ValueError(f"max_tokens {old} and max_completion_tokens {new} differ; send one of them")
        return self

    def sampling(self, defaults: Defaults, room: int) -> Sampling:
        """Arguments for the engine. `room` tokens fit the context, and that limit wins over max_tokens."""
        asked = self.max_completion_tokens or self.max_tokens or room
        chosen = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        merged = {name: getattr(defaults, name) if value is None else value for name, value in chosen.items()}
        seed = None if self.seed is None else self.seed % 2**64  # OpenAI's is signed, MLX's is not
        return Sampling(max_tokens=min(asked, room), seed=seed, **merged)


_UNSUPPORTED = {
    "n", "logprobs", "response_format", "tools", "tool_choice",
    "logit_bias", "presence_penalty", "frequency_penalty",
}  # fmt: skip


def validation_error(problem: RequestValidationError) -> ApiError:
    """Pydantic's list of errors as one sentence per field; of values, only numbers are shown."""
    errors = problem.errors()
    shown = "; ".join(_sentence(error) for error in errors[:5])
    more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
    return ApiError(400, shown + more, param=_path(errors[0]["loc"]) or None)


def _sentence(error: Mapping[str, Any]) -> str:
    path, kind, value = _path(error["loc"]) or "body", error["type"], error.get("input")
    if path.split(".")[0] in _UNSUPPORTED:
        return f"{path}: not supported by this server; leave it out"
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
