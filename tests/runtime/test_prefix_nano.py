"""Conversations with the embedded models, by their own template and tokenizer: what is known changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.contract.tier import builtin_tier
from edge0_runtime.engine import Engine
from edge0_runtime.text import chat_ids
from edge0_train.base import quantize_checkpoint
from tests.random_adapters import write_adapters

ASSETS = Path(__file__).parents[2] / "edge0_train" / "assets"
QUESTIONS = ["Add 299 and 289.", "Now subtract 17 from that.", "And which one was larger?"]


@pytest.fixture(scope="module", params=["nano", "nano-ling"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded teacher in int4, with random adapters."""
    tier = builtin_tier(request.param)
    made = tmp_path_factory.mktemp(request.param) / "model"
    quantize_checkpoint(ASSETS / f"{request.param}-teacher", made, tier)
    write_adapters(made, tier)
    return made


def conversation(engine: Engine, **sampling: Any) -> tuple[list[list[int]], list[int], list[int]]:
    """(answers, the prompts' lengths, what was known of them): three turns, the last asked for again, then edited."""
    messages: list[dict[str, str]] = [
        {"role": "system", "content": "You answer in one short sentence, and never at length."}
    ]
    answers, lengths, known = [], [], []

    def ask() -> None:
        prompt = chat_ids(engine.tokenizer, messages)
        tokens = list(engine.generate(prompt, max_tokens=12, **sampling))
        answers.append([token.token for token in tokens])
        lengths.append(len(prompt))
        known.append(tokens[-1].cached_tokens)

    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        ask()
        messages.append(
            {"role": "assistant", "content": engine.tokenizer.decode(answers[-1], skip_special_tokens=True)}
        )
    messages.pop()
    ask()
    messages[-1] = {"role": "user", "content": "And which of the two was smaller?"}
    ask()
    return answers, lengths, known


@pytest.mark.parametrize(
    ("flags", "sampling"),
    [({}, {}), ({"prerouter": False, "lora": False}, {"temperature": 1.0, "top_p": 0.9, "seed": 3})],
)
def test_a_conversation_is_the_same_and_begins_where_it_is_known(
    directory: Path, flags: dict[str, bool], sampling: dict[str, Any]
) -> None:
    with Engine.load(directory, **flags) as engine:
        expected, lengths, none = conversation(engine, **sampling)
    with Engine.load(directory, **flags, prefix_cache=None) as engine:
        answers, _, known = conversation(engine, **sampling)
    assert answers == expected
    assert none == [0] * 5 and known[0] == 0
    assert all(0 < cached < length for cached, length in zip(known[1:], lengths[1:], strict=True))
    assert known[1] < known[2] < known[3]  # a turn begins behind the question before; asked again, behind its own
    assert known[2] <= known[4] < known[3]  # edited, behind the answer before it, or the question if that is short
    assert lengths[3] - known[3] < 16
