"""The app: the protocols' endpoints (a file each), /v1/models, /health.

Sampling where a request says nothing: the model's generation_config.json, else OpenAI's temperature 1 and
top_p 1. An answer without max_tokens may fill the context. Errors carry OpenAI's error object and no
path; their cause is in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.server import anthropic, openai_chat, openai_completions, openai_responses
from edge0_runtime.server.errors import ApiError, validation_error
from edge0_runtime.server.guard import LOOPBACK_NAMES, Guard, api_key_for, is_loopback
from edge0_runtime.server.served import Served
from edge0_runtime.server.service import Service
from edge0_runtime.server.worker import Worker

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

log = logging.getLogger("edge0_runtime.server")
PROTOCOLS = (openai_chat, openai_completions, openai_responses, anthropic)
GRACE_S = 30  # how long SIGTERM lets running answers go on


def create_app(engines: Mapping[str, Engine], host: str = "127.0.0.1") -> FastAPI:
    """The app around loaded engines by the names that requests ask for; its worker starts and ends with the app's lifespan.

    A request that names none gets the first. `host` is the address that the app will be served on: it decides who may ask
    (guard.py). Of the engines, only the tokenizer and numbers are used here; generating stays in the worker's one thread.
    """
    worker = Worker()
    service = Service({name: Served(name, engine) for name, engine in engines.items()}, worker)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    if is_loopback(host):
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK_NAMES, host], www_redirect=False)
    app.add_middleware(Guard, api_key=api_key_for(host), loopback=is_loopback(host))
    _add_error_handlers(app)

    for protocol in PROTOCOLS:
        protocol.add_routes(app, service)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_listed(served) for served in service.models.values()]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        return _listed(service.model(name))

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


def serve(engines: Mapping[str, Engine], address: socket.socket) -> None:
    """Run the app on a bound socket until SIGINT or SIGTERM; running answers get GRACE_S seconds to end."""
    host, port = address.getsockname()[:2]
    # uvicorn raises the signal again once it has shut down; unhandled, that kills Python before its cleanup.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    app = create_app(engines, host)
    log.info("serving %s at http://%s:%d/v1", ", ".join(engines), f"[{host}]" if ":" in host else host, port)
    logs = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    logs["handlers"]["access"]["stream"] = "ext://sys.stderr"  # stdout is for what --json says
    config = uvicorn.Config(app, log_config=logs, timeout_graceful_shutdown=GRACE_S, server_header=False)
    uvicorn.Server(config).run(sockets=[address])


def _listed(served: Served) -> dict[str, Any]:
    return {"id": served.id, "object": "model", "created": served.created, "owned_by": "edge0"}


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(request: Request, problem: Exception) -> Response:
        assert isinstance(problem, ApiError)
        return problem.response(request.url.path)

    async def invalid(request: Request, problem: Exception) -> Response:
        assert isinstance(problem, RequestValidationError)
        return validation_error(problem).response(request.url.path)

    async def http_error(request: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        error = ApiError(problem.status_code, str(problem.detail), headers=problem.headers)
        return error.response(request.url.path)

    async def unexpected(request: Request, problem: Exception) -> Response:
        return ApiError(500, "the server failed; its log has the cause").response(request.url.path)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
