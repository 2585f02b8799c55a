"""One generation for the command line: ids, text and timings together, and a trace of executed experts."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier
from edge0_runtime.sampling import Sampling
from edge0_runtime.text import TextStream, chat_ids, decoder

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine, Token

Record = Callable[["Token"], None]


@dataclass(frozen=True)
class Generation:
    """What came out. `ids` has the end token, if one came; `text` has not. Times from the start."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: str
    first_token_s: float
    total_s: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON data, with usage in tokens and the speed after the first token (None if there is but one)."""
        count, steady_s = len(self.ids), self.total_s - self.first_token_s
        return {
            "prompt_ids": self.prompt_ids,
            "ids": self.ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": len(self.prompt_ids),
                "completion_tokens": count,
                "total_tokens": len(self.prompt_ids) + count,
            },
            "timings": {
                "first_token_s": self.first_token_s,
                "total_s": self.total_s,
                "decode_tokens_per_s": (count - 1) / steady_s if count > 1 else None,
            },
        }


def generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    show: Callable[[str], None],
    ignore_eos: bool = False,
    record: Record | None = None,
    cancel: threading.Event | None = None,
) -> Generation:
    """Generate to the end or until `cancel` is set, showing text as it becomes final and recording every token."""
    started = time.perf_counter()
    times: list[float] = []
    ids: list[int] = []
    pieces: list[str] = []
    stream = TextStream(decoder(engine.tokenizer))
    reason = None
    options = asdict(sampling)
    for step in engine.generate(prompt_ids, **options, ignore_eos=ignore_eos, cancel=cancel, trace=record is not None):
        reason = step.finish_reason
        times.append(time.perf_counter() - started)
        if reason == "cancelled":
            break
        ids.append(step.token)
        if record is not None:
            record(step)
        if reason != "stop":
            pieces.append(stream.add(step.token))
            show(pieces[-1])
    pieces.append(stream.finish())
    show(pieces[-1])
    return Generation(list(prompt_ids), ids, "".join(pieces), str(reason), times[0], times[-1])


class RefusedTurnError(Edge0Error):
    """A conversation that the template or the context doesn't take; a shorter or another one may do."""


def reply(
    engine: Engine,
    turns: Sequence[Mapping[str, str]],
    args: Namespace,
    show: Callable[[str], None],
    cancel: threading.Event | None = None,
) -> Generation:
    """The assistant's answer to a conversation; `args` has max_tokens, temperature, top_p, seed or None.

    Raises RefusedTurnError before anything is generated.
    """
    try:
        prompt_ids = chat_ids(engine.tokenizer, turns)
    except Edge0Error as problem:
        raise RefusedTurnError(str(problem)) from problem
    room = engine.context_length - len(prompt_ids)
    if room < 1:
        limit = engine.context_length
        raise RefusedTurnError(
            f"messages: {len(prompt_ids)} tokens leave no room to answer in a context of {limit}; shorten them"
        )
    defaults = engine.defaults
    sampling = Sampling(
        max_tokens=room if args.max_tokens is None else min(args.max_tokens, room),
        temperature=defaults.temperature if args.temperature is None else args.temperature,
        top_p=defaults.top_p if args.top_p is None else args.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        seed=args.seed,
    )
    return generate(engine, prompt_ids, sampling, show, cancel=cancel)


@contextlib.contextmanager
def expert_trace(path: Path | None, tier: Tier, prompt_ids: Sequence[int]) -> Iterator[Record | None]:
    """Gives a function that writes one JSON line per step to `path`; None without a path.

    A line is {"step": s, "token": the id fed at this step, "experts": {layer: [ids, rising]}}. Step 0 is fed
    the prompt's last token and yields the first generated one.
    """
    if path is None:
        yield None
        return
    layers = tier.layout.moe_layers(tier.architecture)
    fed = prompt_ids[-1] if prompt_ids else -1
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as problem:
        raise Edge0Error(f"--trace {path}: {problem.strerror}; choose a file that can be written") from problem
    with file:

        def record(step: Token) -> None:
            nonlocal fed
            assert step.experts is not None
            experts = {str(layer): row.tolist() for layer, row in zip(layers, step.experts, strict=True)}
            file.write(json.dumps({"step": step.index, "token": fed, "experts": experts}) + "\n")
            fed = step.token

        yield record
