"""The app: the protocols' endpoints (a file each), /v1/models, /health, /metrics.

Sampling where a request says nothing: the server's settings, else the model's generation_config.json, else OpenAI's temperature
1 and top_p 1. An answer without max_tokens may fill the context, if the settings don't say otherwise. Errors carry OpenAI's error
object and no path; their cause is in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from edge0_runtime.server import anthropic, observe, openai_chat, openai_completions, openai_responses, page, tokens
from edge0_runtime.server.errors import ApiError, validation_error
from edge0_runtime.server.guard import Access, Guard
from edge0_runtime.server.metrics import CONTENT_TYPE
from edge0_runtime.server.requests import HEADER, SCOPE, Requests
from edge0_runtime.server.served import Served
from edge0_runtime.server.service import Service
from edge0_runtime.server.settings import Settings
from edge0_runtime.server.worker import Worker

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

PROTOCOLS = (openai_chat, openai_completions, openai_responses, anthropic, tokens)


def create_app(
    engines: Mapping[str, Engine],
    host: str = "127.0.0.1",
    settings: Settings | None = None,
    access: Access | None = None,
) -> FastAPI:
    """The app around loaded engines by the names that requests ask for; its worker starts and ends with the app's lifespan.

    A request that names none gets the first. `host` is the address that the app will be served on: it decides who may ask
    (guard.py), unless `access` is known already. Of the engines, only the tokenizer and numbers are used here; generating stays
    in the worker's one thread.

    Raises Edge0Error where the settings can't be honoured, or other machines reach the address and there is no API key.
    """
    settings = settings or Settings()
    access = access or Access.to(host, settings)
    service = Service({name: Served(name, engine, settings) for name, engine in engines.items()}, Worker())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.add_middleware(Guard, access=access)
    if settings.allow_origins:
        # Around the guard: a browser asks first without a key, and pages may read refusals.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[HEADER, "Retry-After"],
        )
    app.add_middleware(Requests, metrics=service.metrics)
    _add_error_handlers(app)
    app.include_router(page.router())
    app.include_router(observe.router(service.models))

    for protocol in PROTOCOLS:
        protocol.add_routes(app, service)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_listed(served) for served in service.models.values()]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        return _listed(service.model(name))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        status, told = service.health()
        return JSONResponse(told, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return app


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
        headers = {HEADER: request.scope[SCOPE]}  # this one goes out past the middlewares
        return ApiError(500, "the server failed; its log has the cause", headers=headers).response(request.url.path)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
