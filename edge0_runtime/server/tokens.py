"""POST /tokenize, /detokenize and /apply-template, in llama.cpp's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field

from edge0_runtime.server.openai_chat import ChatRequest
from edge0_runtime.server.schema import Characters, Strict
from edge0_runtime.server.served import Served
from edge0_runtime.server.service import Service

MAX_TOKENS = 2**20


class TokenizeRequest(Strict):
    """Body of POST /tokenize.

    Attributes:
        add_special: put before the text what the tokenizer puts at the beginning of every text.
        parse_special: take the text of a control token for that token. In prompts it is text.
        with_pieces: tell each token's text too.
    """

    model: str | None = None
    content: Characters
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TOKENS)]


def add_routes(app: FastAPI, service: Service) -> None:
    """The endpoints, on the app."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        served = service.model(body.model)
        return {"tokens": await service.prepare(lambda: _tokens(served, body))}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        served = service.model(body.model)
        return {"content": await service.prepare(lambda: served.text_of(served.known(body.tokens, "tokens")))}

    @app.post("/apply-template")
    async def apply_template(body: ChatRequest) -> dict[str, str]:
        """What a chat request becomes: the very prompt, as text."""
        served = service.model(body.model)
        return {"prompt": await service.prepare(lambda: served.text_of(body.request(served).prompts[0]))}


def _tokens(served: Served, body: TokenizeRequest) -> list[Any]:
    ids = served.tokens_of(body.content, add_special=body.add_special, parse_special=body.parse_special)
    if not body.with_pieces:
        return ids
    vocabulary = served.vocabulary("with_pieces")
    return [{"id": token, "piece": _piece(vocabulary.tokens.decode_bytes([token]))} for token in ids]


def _piece(data: bytes) -> str | list[int]:
    """Text; bytes, where they are no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
