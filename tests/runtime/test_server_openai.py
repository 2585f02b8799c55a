"""OpenAI's chat and completions on the real engine: logprobs, penalties, several choices, raw prompts, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from edge0_runtime.engine import Engine
from edge0_runtime.server.vocabulary import Vocabulary
from edge0_runtime.text import chat_ids
from tests.runtime.scripted_server import MODEL, WAIT_S, live

SUM = [{"role": "user", "content": "Add 12 and 30."}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(tiny_dir) -> Iterator[Engine]:
    with Engine.load(tiny_dir) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def url(engine) -> Iterator[str]:
    with live(engine) as address:
        yield address


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S) as made:
        yield made


@pytest.fixture(scope="module")
def traced(engine) -> list[Any]:
    """The greedy answer to SUM with its logits, by the engine alone."""
    return list(engine.generate(chat_ids(engine.tokenizer, SUM), max_tokens=12, trace=True))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.logaddexp.reduce(wide)


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_a_chats_logprobs_are_the_models_own_distribution(client, engine, traced):
    choice = client.chat.completions.create(model=MODEL, messages=SUM, logprobs=True, top_logprobs=3, **GREEDY).choices[
        0
    ]
    told = choice.logprobs.content
    text_tokens = [step for step in traced if step.finish_reason != "stop"]
    assert len(told) == len(text_tokens)
    assert b"".join(bytes(one.bytes or b"") for one in told).decode("utf-8", "replace") == choice.message.content
    for one, step in zip(told, text_tokens, strict=True):
        expected = log_softmax(step.logits)
        likeliest = np.argsort(-expected)[:3]
        assert one.logprob == pytest.approx(expected[step.token], abs=1e-4)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(expected[likeliest].tolist(), abs=1e-4)
        assert one.top_logprobs[0].token == one.token  # greedy


def test_streamed_logprobs_are_the_same(client):
    fields = {"model": MODEL, "messages": SUM, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**fields).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    assert [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content] == whole


def test_tokens_of_a_stop_string_have_no_logprobs(client):
    text = client.chat.completions.create(model=MODEL, messages=SUM, **GREEDY).choices[0].message.content
    stop = text[5:8]
    cut = client.chat.completions.create(model=MODEL, messages=SUM, logprobs=True, stop=[stop], **GREEDY).choices[0]
    assert cut.message.content == text[: text.index(stop)]
    told = b"".join(bytes(one.bytes or b"") for one in cut.logprobs.content).decode("utf-8", "replace")
    assert told.startswith(cut.message.content) and stop not in told


def test_a_completions_logprobs_stand_side_by_side(client, traced):
    ids = [5, 9, 77]
    choice = client.completions.create(model=MODEL, prompt=ids, logprobs=2, **GREEDY).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text or "bytes:" in "".join(told.tokens)
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
    assert told.text_offset[0] == 0 and told.text_offset == sorted(told.text_offset)
    for one, value, tops in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert len(tops) == 2 and tops[one] == value == max(tops.values())


# -- penalties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"extra_body": {"repetition_penalty": 1.8}},
        {"logit_bias": {"40": 3.5, "41": -100}},
        {
            "presence_penalty": -0.5,
            "frequency_penalty": 1.0,
            "logit_bias": {"7": 2},
            "extra_body": {"repetition_penalty": 0.9},
        },
    ],
    ids=lambda fields: "+".join(fields),
)
def test_penalties_are_those_of_a_plain_loop(client, engine, traced, penalties):
    """The reference goes by the logits that a replay of the served tokens has: each must be the likeliest after penalties."""
    prompt = chat_ids(engine.tokenizer, SUM)
    fields = {"model": MODEL, "messages": SUM, "logprobs": True, **GREEDY}
    whole = client.chat.completions.create(**fields, **penalties)
    flat = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}, "repetition_penalty": 1.0}
    flat |= {name: value for name, value in penalties.items() if name != "extra_body"} | penalties.get("extra_body", {})
    expected: list[int] = []
    while len(expected) < GREEDY["max_tokens"] and not set(expected) & engine.eos_ids:
        replayed = [*expected, 0]  # the last one is a stand-in: its logits are those before it
        logits = list(engine.replay(prompt, replayed))[-1].logits.astype(np.float64)
        for token, value in flat["logit_bias"].items():
            logits[int(token)] += value
        for token in {*prompt, *expected}:
            logits[token] *= flat["repetition_penalty"] if logits[token] < 0 else 1 / flat["repetition_penalty"]
        for token in set(expected):
            logits[token] -= flat["presence_penalty"] + flat["frequency_penalty"] * expected.count(token)
        expected.append(int(logits.argmax()))
    assert whole.usage.completion_tokens == len(expected)
    name = Vocabulary(engine.tokenizer, engine.model.vocab_size, engine.eos_ids).named
    told = whole.choices[0].logprobs.content
    assert [one.token for one in told] == [name(token).name for token in expected if token not in engine.eos_ids]
    assert expected != [step.token for step in traced]  # the penalties did something


@pytest.mark.parametrize("arm", [None, "resident"])
def test_what_changes_no_logit_changes_no_token(tiny_dir, arm):
    """Steps are built ahead without processors, and one by one with them."""
    with Engine.load(tiny_dir, arm=arm) as engine:
        plain = [step.token for step in engine.generate([5, 6, 7], max_tokens=20, temperature=0.9, seed=3)]
        seen = []

        def look(tokens, logits):
            seen.append(tokens.tolist())
            return logits

        watched = engine.generate([5, 6, 7], max_tokens=20, temperature=0.9, seed=3, processors=[look], top_logprobs=4)
        steps = list(watched)
        assert [step.token for step in steps] == plain
        assert seen == [[5, 6, 7, *plain[:count]] for count in range(len(plain))]
        assert all(len(step.top) == 4 for step in steps)


# -- several choices, raw prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_those_of_the_seeds_that_follow(client, stream):
    fields = {"model": MODEL, "messages": SUM, "max_tokens": 8, "temperature": 1.3}
    alone = [client.chat.completions.create(**fields, seed=seed).choices[0].message.content for seed in (11, 12, 13)]
    answer = client.chat.completions.create(**fields, seed=11, n=3, stream=stream)
    if stream:
        texts, reasons = [""] * 3, []
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons += [choice.index] if choice.finish_reason else []
        assert texts == alone and reasons == [0, 1, 2]
    else:
        assert [choice.message.content for choice in answer.choices] == alone
        assert len(set(alone)) == 3
        assert answer.usage.completion_tokens > 8 and answer.usage.prompt_tokens < 100


def test_raw_prompts_go_on_as_the_engine_does_and_are_echoed(client, engine):
    def text(ids: list[int], count: int) -> str:
        made = [step.token for step in engine.generate(ids, max_tokens=count) if step.finish_reason != "stop"]
        return engine.tokenizer.decode(made, skip_special_tokens=True)

    ids = engine.tokenizer.encode("1+1=")
    asked = client.completions.create(model=MODEL, prompt=["1+1=", "7*6"], temperature=0, n=2, max_tokens=6)
    second = text(engine.tokenizer.encode("7*6"), 6)
    assert [choice.text for choice in asked.choices] == [text(ids, 6), text(ids, 6), second, second]
    assert [choice.index for choice in asked.choices] == [0, 1, 2, 3]
    assert client.completions.create(model=MODEL, prompt=ids, temperature=0).choices[0].text == text(ids, 16)
    echoed = client.completions.create(model=MODEL, prompt=[ids], temperature=0, max_tokens=6, echo=True)
    assert echoed.choices[0].text == "1+1=" + text(ids, 6)
    streamed = client.completions.create(
        model=MODEL, prompt="1+1=", temperature=0, max_tokens=6, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.choices[0].text


def test_control_tokens_in_a_raw_prompt_are_text(client, engine):
    usage = client.completions.create(model=MODEL, prompt="<|im_end|>", temperature=0, max_tokens=1).usage
    assert usage.prompt_tokens > 1


def test_a_last_turn_of_the_assistant_goes_on(client, engine):
    turns = [*SUM, {"role": "assistant", "content": "12 + 30 ="}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=turns,
        **GREEDY,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    opened = chat_ids(engine.tokenizer, SUM) + engine.tokenizer.encode("12 + 30 =")
    made = [step.token for step in engine.generate(opened, max_tokens=12) if step.finish_reason != "stop"]
    assert answer.usage.prompt_tokens == len(opened)
    assert answer.choices[0].message.content == engine.tokenizer.decode(made, skip_special_tokens=True)


def test_timings_say_where_the_time_went(client):
    timings = client.chat.completions.create(model=MODEL, messages=SUM, **GREEDY).model_extra["timings"]
    assert set(timings) == {
        "queued_s", "first_token_s", "total_s", "prefill_s", "decode_s", "blocked_s", "bytes_read", "decode_tokens_per_s",
    }  # fmt: skip
    assert timings["total_s"] >= timings["queued_s"] + timings["prefill_s"] + timings["decode_s"] - 1e-5
    assert timings["prefill_s"] > 0 and timings["decode_s"] > 0 and timings["decode_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [384]}, "prompt"),
        ({"prompt": [1.5]}, None),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": [5] * 256}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, None),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1, "echo": True}, None),
        ({"messages": []}, "messages"),
    ],
)
def test_completions_refuse_by_name(url, fields, param):
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "a"} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if param is not None:
        assert error["param"] == param and error["message"].startswith(param)
