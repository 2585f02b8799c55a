"""`response_format`: a random model writes JSON of the schema that is asked for; schemas that can't be followed are refused."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from edge0_runtime.engine import Engine
from edge0_runtime.server.grammar import MAX_SCHEMA_LENGTH
from tests.runtime.scripted_server import HELLO, URL, events, live, streamed_text

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 2,
            "maxItems": 3,
        },
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tiny_dir):
    with Engine.load(tiny_dir) as engine, live(engine) as address:
        yield address


def form(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


def ask(url: str, **fields: object) -> httpx.Response:
    return httpx.post(url + URL, json={"messages": HELLO, "max_tokens": 180, "seed": 1} | fields, timeout=20)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_random_model_keeps_to_a_schema(url, temperature):
    response = ask(url, temperature=temperature, **form(SCHEMA))
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    found = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert len(found["name"]) <= 6 and found["kind"] in ("a", "b") and 2 <= len(found["sizes"]) <= 3
    assert all(0 <= size <= 99 for size in found["sizes"])
    streamed = events(ask(url, temperature=temperature, stream=True, **form(SCHEMA)))
    assert streamed_text(streamed) == choice["message"]["content"]


def test_an_object_of_any_kind_begins_as_one(url):
    text = ask(url, max_tokens=20, response_format={"type": "json_object"}).json()["choices"][0]["message"]["content"]
    assert text.lstrip().startswith("{")


def test_other_requests_are_not_touched(url):
    plain = ask(url, temperature=0, max_tokens=12).json()["choices"]
    ask(url, temperature=0, max_tokens=12, **form(SCHEMA))
    assert ask(url, temperature=0, max_tokens=12).json()["choices"] == plain


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"not": {"type": "string"}},
        {"$ref": "http://evil.example/schema.json"},
        {"$ref": "#/$defs/missing"},
        {"type": "string", "pattern": "(?=x)"},
        {"type": "string", "pattern": "(((a{1,999}){1,999}){1,999}){1,999}b"},
        {"enum": ["x" * MAX_SCHEMA_LENGTH]},
    ],
    ids=["type", "not", "url", "pointer", "lookahead", "explosion", "size"],
)
def test_a_schema_that_cannot_be_followed_is_refused(url, schema):
    response = ask(url, **form(schema))
    assert response.status_code in (200, 400), response.text
    if "pattern" in schema and response.status_code == 200:
        return  # llguidance may follow it lazily
    error = response.json()["error"]
    assert error["param"] == "response_format" and error["message"].startswith("response_format")


def test_a_mask_is_the_bits_of_its_tokens(tiny_dir):
    """Against the plain reading of llguidance's bits, one by one."""
    import mlx.core as mx

    from edge0_runtime.server.grammar import Grammar, json_grammar
    from edge0_runtime.server.vocabulary import Vocabulary

    with Engine.load(tiny_dir) as engine:
        vocabulary = Vocabulary(engine.tokenizer, engine.model.vocab_size, engine.eos_ids)
        mask = Grammar(vocabulary, json_grammar({"enum": ["xa", "xb"]}, "f"), "f").processor(2)
        ids = [5, 6]
        logits = mx.zeros((1, engine.model.vocab_size))
        for expected in ('"', "x", "ab", '"'):
            allowed = np.flatnonzero(np.isfinite(np.array(mask(mx.array(ids), logits))[0]))
            names = {vocabulary.named(int(token)).name for token in allowed}
            assert {name[0] for name in names} == set(expected)
            ids.append(int(next(token for token in allowed if vocabulary.named(int(token)).name == expected[0])))
        end = np.flatnonzero(np.isfinite(np.array(mask(mx.array(ids), logits))[0]))
        assert set(end.tolist()) == set(engine.eos_ids)
