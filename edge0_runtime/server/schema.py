"""What the protocols' requests have in common.

Every field is honoured or refused with 400, never ignored. Null means absent. Fields that ask for nothing, or for what an
answer is like anyway, are accepted. `top_k`, `min_p`, `repetition_penalty` and `return_progress` are extensions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from edge0_runtime.sampling import Penalties, Sampling
from edge0_runtime.server.errors import printable
from edge0_runtime.server.served import Served

MAX_STOP_LENGTH = 256
MAX_BIASES = 1024
MAX_CHOICES = 4


class Strict(BaseModel):
    """No unknown field, no conversion between types, no NaN; null is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


def whole_characters(value: Any) -> Any:
    """A string without halves of surrogate pairs, which JSON can spell."""
    if isinstance(value, str) and printable(value) != value:
        raise ValueError("half of a surrogate pair is no character")
    return value


def text_content(value: Any) -> Any:
    """A string, or a list of text parts as the string that they join to."""
    if isinstance(value, list):
        for index, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
                raise ValueError(f'part {index} is not {{"type": "text", "text": "..."}}; only text is supported')
        value = "".join(part["text"] for part in value)
    return whole_characters(value)


def only(*neutral: Any) -> BeforeValidator:
    """A field that isn't served: nothing is accepted but values that ask for nothing."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in neutral):
            raise ValueError("not supported by this server; leave it out")
        return value

    return BeforeValidator(check)


TEXT_PARTS = ("text", "input_text", "output_text")
Characters = Annotated[str, BeforeValidator(whole_characters)]
Content = Annotated[str, BeforeValidator(text_content)]
Stop = Annotated[
    list[Annotated[Characters, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class StreamOptions(Strict):
    """Of a streamed answer: `include_usage` asks for a last chunk with the count of tokens."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class OpenAIRequest(Strict):
    """The fields that OpenAI's chat and its completions share."""

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Annotated[Stop, Field(max_length=4)] = []
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] = {}
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_progress: bool = False

    # No effect on an answer.
    user: str | None = None

    @model_validator(mode="after")
    def _progress_is_streamed(self) -> OpenAIRequest:
        if self.return_progress and not self.stream:
            raise ValueError("return_progress needs stream: true")
        return self

    def sampling(self, served: Served, max_tokens: int | None) -> Sampling:
        """Arguments for the engine. Without `max_tokens` an answer may fill the context, which limits it in any case."""
        chosen = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return sampling(served, max_tokens, self.seed, chosen)

    def penalties(self, served: Served) -> Penalties:
        """What changes the logits. Raises ApiError where `logit_bias` names no token."""
        numbers = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return served.penalties(*numbers, self.logit_bias)


def sampling(served: Served, max_tokens: int | None, seed: int | None, chosen: dict[str, Any]) -> Sampling:
    """What a request says of sampling; where it says nothing (None), what the model's generation_config.json says."""
    merged = {name: getattr(served.defaults, name) if value is None else value for name, value in chosen.items()}
    return Sampling(
        max_tokens=served.max_tokens(max_tokens),
        seed=None if seed is None else seed % 2**64,  # OpenAI's is signed, MLX's is not
        **merged,
    )
