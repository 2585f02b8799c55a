"""What every protocol's request becomes, and the events that answer it. Nothing here, or behind it, knows a protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from edge0_runtime.sampling import Penalties, Sampling

if TYPE_CHECKING:
    from edge0_runtime.server.grammar import Grammar
    from edge0_runtime.server.markup import Splitter

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class GenerationRequest:
    """What is to be generated: `n` choices for each prompt, one after the other; a choice's number is prompt * n + i.

    Attributes:
        prompts: token ids, each at least one. sampling: its max_tokens is cut to what the context leaves a prompt; choice i of
            a prompt draws by seed + i.
        stops: strings that end a choice, and are not part of it.
        logprobs: None: none are told.
        splitter: choice -> what parts its text into thinking, text and tool calls; None: all of it is text.
        grammar: what a choice's text must be; None: anything.
        progress: tell of the prompt's as well.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    penalties: Penalties = field(default_factory=Penalties)
    n: int = 1
    stops: tuple[str, ...] = ()
    logprobs: Logprobs | None = None
    splitter: Callable[[int], Splitter] | None = None
    grammar: Grammar | None = None
    progress: bool = False


@dataclass(frozen=True)
class Logprobs:
    """What to tell of every token: beside it the `top` likeliest ones. `named`: token id -> how it is called."""

    top: int
    named: Callable[[int], TokenName]


@dataclass(frozen=True)
class TokenName:
    """A token for people, and its bytes in the text; None for a control token, which is no text."""

    name: str
    data: bytes | None


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token, its log-probability under the model's own distribution in nats, and the likeliest in its place."""

    token: TokenName
    logprob: float
    top: tuple[tuple[TokenName, float], ...] = ()


@dataclass(frozen=True)
class Progress:
    """How far the engine is with a choice's prompt: of `total` tokens, `processed` are done, `cached` of them from before.

    `seconds`: since it began.
    """

    choice: int
    total: int
    cached: int
    processed: int
    seconds: float


@dataclass(frozen=True)
class Text:
    """Final text of a choice, and the tokens that it came with where they were asked for."""

    choice: int
    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Thinking:
    """Final text of a choice that is thought and not said."""

    choice: int
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call: `index` counts the choice's calls, `arguments` is a JSON object as text."""

    choice: int
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChoiceEnd:
    """Nothing follows of this choice. `stopped_by`: the stop string that ended it, if one did."""

    choice: int
    reason: Reason
    stopped_by: str | None = None


@dataclass(frozen=True)
class Finished:
    """Nothing follows of this request. Tokens of all choices; a prompt counts once, however many choices it has.

    Attributes:
        thinking_tokens: of the completion tokens. cached_tokens: of the prompts, those that did not have to be processed again.
        queued_s: until the engine took the request. first_token_s, total_s: from its arrival too.
        prefill_s, decode_s: what the engine worked on prompts and on answers. blocked_s: of those, waiting for experts.
        bytes_read: of experts, from the disk. decode_tokens_per_s: (n - 1) / (t_last - t_first), over all choices.
    """

    prompt_tokens: int
    completion_tokens: int
    thinking_tokens: int
    cached_tokens: int
    queued_s: float
    first_token_s: float
    total_s: float
    prefill_s: float
    decode_s: float
    blocked_s: float
    bytes_read: int
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Cancelled:
    """Nobody waits for the rest of this request."""


@dataclass(frozen=True)
class Failed:
    """The request failed inside the server; the log has the cause, which may hold paths. `ending`: the server ends, no more."""

    ending: bool = False


Event = Progress | Text | Thinking | ToolCall | ChoiceEnd | Finished | Cancelled | Failed


@dataclass
class Choice:
    """What the events of one choice add up to."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    reason: Reason = "stop"
    stopped_by: str | None = None


def collected(events: Iterable[Event]) -> list[Choice]:
    """All choices of a request, in their order."""
    choices: dict[int, Choice] = {}
    for event in events:
        match event:
            case Text(number, text, tokens):
                choices.setdefault(number, Choice()).text += text
                choices[number].tokens += tokens
            case Thinking(number, text):
                choices.setdefault(number, Choice()).thinking += text
            case ToolCall(number):
                choices.setdefault(number, Choice()).calls.append(event)
            case ChoiceEnd(number, reason, stopped_by):
                choice = choices.setdefault(number, Choice())
                choice.reason, choice.stopped_by = reason, stopped_by
            case _:
                pass
    return [choices[number] for number in sorted(choices)]
