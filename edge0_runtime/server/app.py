"""The HTTP endpoints: /v1/chat/completions, /v1/models, /health.

Sampling where a request says nothing: the model's generation_config.json, else OpenAI's temperature 1 and
top_p 1. An answer without max_tokens may fill the context. Errors carry OpenAI's error object and no
path; their cause is in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.sampling import Defaults
from edge0_runtime.server.answer import Answer, submit
from edge0_runtime.server.guard import LOOPBACK_NAMES, Guard, api_key_for, is_loopback
from edge0_runtime.server.schema import ApiError, ChatRequest, validation_error
from edge0_runtime.server.worker import QueueFullError, Worker, WorkerDeadError
from edge0_runtime.text import chat_ids

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

log = logging.getLogger("edge0_runtime.server")
RETRY_AFTER_S = 5
GRACE_S = 30  # how long SIGTERM lets running answers go on


def create_app(engine: Engine, model_id: str, host: str = "127.0.0.1") -> FastAPI:
    """The app around a loaded engine; its worker starts and ends with the app's lifespan.

    `host` is the address that the app will be served on: it decides who may ask (guard.py). Of the engine,
    only the tokenizer and numbers are used here; generating stays in the worker's thread.
    """
    worker = Worker(engine)
    defaults = Defaults.of_model(Path(engine.model_dir))
    model = {"id": model_id, "object": "model", "created": int(time.time()), "owned_by": "edge0"}

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    if is_loopback(host):
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK_NAMES, host], www_redirect=False)
    app.add_middleware(Guard, api_key=api_key_for(host), loopback=is_loopback(host))
    _add_error_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _check_model(body.model or model_id, model_id)
        prompt_ids, room = _prompt(engine, body)
        answer = _queue(worker, prompt_ids, body, defaults, room, model_id)
        # The loop itself holds tasks only weakly.
        request.state.watcher = asyncio.create_task(answer.cancel_on_disconnect(request))
        # Waiting for the first event gives a failure before any text a proper HTTP status, streamed or not.
        first = await answer.next()
        if not body.stream:
            return await answer.whole(first)
        chunks = answer.stream(first, body.stream_options.include_usage)
        return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(name, model_id)
        return model

    @app.get("/health")
    async def health() -> JSONResponse:
        status = "ok" if worker.alive else "the engine's thread has ended; restart the server"
        return JSONResponse({"status": status, "waiting": worker.waiting}, 200 if worker.alive else 503)

    return app


def bind(host: str, port: int) -> socket.socket:
    """The address to serve on, before a model is loaded for it; nobody can connect yet.

    Raises Edge0Error where the address is taken, or open to other machines without an API key.
    """
    api_key_for(host)
    address = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        address.bind((host, port))
    except (OSError, OverflowError) as problem:
        address.close()
        reason = getattr(problem, "strerror", None) or problem
        raise Edge0Error(f"--host {host} --port {port}: {reason}; choose another") from problem
    return address


def serve(engine: Engine, model_id: str, address: socket.socket) -> None:
    """Run the app on a bound socket until SIGINT or SIGTERM; running answers get GRACE_S seconds to end."""
    host, port = address.getsockname()[:2]
    # uvicorn raises the signal again once it has shut down; unhandled, that kills Python before its cleanup.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    app = create_app(engine, model_id, host)
    log.info("serving %s at http://%s:%d/v1", model_id, f"[{host}]" if ":" in host else host, port)
    config = uvicorn.Config(app, timeout_graceful_shutdown=GRACE_S, server_header=False)
    uvicorn.Server(config).run(sockets=[address])


def _check_model(name: str, model_id: str) -> None:
    if name != model_id:
        message = f"model: not served here; use {model_id!r} or leave it out"
        raise ApiError(404, message, "model", "model_not_found")


def _prompt(engine: Engine, body: ChatRequest) -> tuple[list[int], int]:
    """The prompt's ids, and how many tokens an answer may have."""
    try:
        ids = chat_ids(engine.tokenizer, [message.for_template() for message in body.messages])
    except Edge0Error as problem:
        raise ApiError(400, str(problem), "messages") from problem
    room = engine.context_length - len(ids)
    if room < 1:
        limit = engine.context_length
        message = f"messages: {len(ids)} tokens leave no room to answer in a context of {limit}; shorten them"
        raise ApiError(400, message, "messages", "context_length_exceeded")
    return ids, room


def _queue(
    worker: Worker, prompt_ids: list[int], body: ChatRequest, defaults: Defaults, room: int, model_id: str
) -> Answer:
    try:
        return submit(worker, prompt_ids, body.sampling(defaults, room), body.stop, model_id)
    except QueueFullError as problem:
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        raise ApiError(503, "the queue is full; try again later", None, "queue_full", headers) from problem
    except WorkerDeadError as problem:
        raise ApiError(503, "the engine has ended; restart the server", None, "engine_ended") from problem


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(_: Request, problem: Exception) -> Response:
        assert isinstance(problem, ApiError)
        return problem.response()

    async def invalid(_: Request, problem: Exception) -> Response:
        assert isinstance(problem, RequestValidationError)
        return validation_error(problem).response()

    async def http_error(_: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        return ApiError(problem.status_code, str(problem.detail), headers=problem.headers).response()

    async def unexpected(_: Request, problem: Exception) -> Response:
        return ApiError(500, "the server failed; its log has the cause").response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
