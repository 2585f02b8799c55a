"""What the engine does, for the page and for whoever asks: /v1/engine, and /v1/engine/events as server-sent events.

Looking changes nothing: numbers are read that the engine's thread has counted (`observation.py`), and steps are counted only
while somebody is subscribed to the events. Nothing here holds a path of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from edge0_runtime.contract.artifacts import KINDS
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.host.memory import peak_rss_bytes, process_io, rss_bytes
from edge0_runtime.inspection import inspect
from edge0_runtime.observation import PREDICTED, RAN, READ, Seen
from edge0_runtime.server.errors import ApiError

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine
    from edge0_runtime.server.served import Served

EVENT_S = 0.25
SILENT_EVENTS = 40  # without news, until a comment says that the connection lives
MAX_WATCHERS = 16
STEPS_SHOWN = 64  # of the last ones, in an event


def router(models: Mapping[str, Served]) -> APIRouter:
    """The two endpoints, for models by name, which share base and memory."""
    routes = APIRouter()
    engines = {name: served.engine for name, served in models.items()}
    first = next(iter(engines.values()))

    @cache
    def adapters() -> dict[str, dict[str, Any]]:
        return {name: _adapters(engine) for name, engine in engines.items()}

    @routes.get("/v1/engine")
    async def state() -> dict[str, Any]:
        made_with = await asyncio.to_thread(adapters)  # reads files, once
        model = first.model
        return {
            "object": "engine",
            "layers": list(first.observation.layers),
            "experts": model.store.num_experts,
            "memory": _memory(first),
            "plan": None if model.plan is None else model.plan.to_dict(),
            "models": [_serving(served) | made_with[name] for name, served in models.items()],
        }

    @routes.get("/v1/engine/events")
    async def events(request: Request) -> StreamingResponse:
        if first.observation.watchers >= MAX_WATCHERS:
            raise ApiError(503, f"{MAX_WATCHERS} clients watch the engine already; close one of them")
        stream = _events(engines, request)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return routes


async def _events(engines: Mapping[str, Engine], request: Request) -> AsyncIterator[str]:
    """An event of each model at once, then one wherever something happened; until the client leaves or the server ends."""
    server = getattr(request.app.state, "server", None)  # uvicorn's, where it runs in one: it waits for open streams
    with contextlib.ExitStack() as watching:
        for engine in engines.values():
            watching.enter_context(engine.observation.watch())
        before = {name: engine.observation.seen() for name, engine in engines.items()}
        silent = 0
        for name, engine in engines.items():
            yield _event(name, engine, before[name], before[name])
        while server is None or not server.should_exit:
            await asyncio.sleep(EVENT_S)
            silent += 1
            for name, engine in engines.items():
                last, now = before[name], engine.observation.seen()
                if now.steps != last.steps or now.state != last.state or now.state == "prompt":
                    before[name], silent = now, 0
                    yield _event(name, engine, last, now)
            if silent >= SILENT_EVENTS:
                silent = 0
                yield ": still here\n\n"


def _event(name: str, engine: Engine, before: Seen, now: Seen) -> str:
    """What happened in one model between two looks, and how it stands now.

    `cells` are the experts that something happened to: [row of `layers`, expert, ran, predicted, read].
    """
    counts_3LE = now.counts_3LE - before.counts_3LE
    steps = now.steps - before.steps
    rows_N, experts_N = np.nonzero(counts_3LE.any(axis=0))
    cells = np.stack([rows_N, experts_N, *(counts_3LE[kind, rows_N, experts_N] for kind in (RAN, PREDICTED, READ))], 1)
    recent = now.recent[-min(steps, STEPS_SHOWN) :] if steps else ()
    data = {
        "model": name,
        "state": now.state,
        "steps": steps,
        "seconds": now.seconds - before.seconds,
        **{counter: now.totals[counter] - before.totals[counter] for counter in now.totals},
        "guessed": now.guessed - before.guessed,
        "guessed_right": now.guessed_right - before.guessed_right,
        "recent": [[step.seconds, step.blocked_seconds, step.bytes_read] for step in recent],
        "cells": cells.tolist(),
        "memory": _memory(engine),
        "stats": engine.stats(),
    }
    return f"data: {json.dumps(data, allow_nan=False)}\n\n"


def _serving(served: Served) -> dict[str, Any]:
    """How one model is served."""
    engine, model, tier = served.engine, served.engine.model, served.engine.model.tier
    predicted = tier.consumers if model.heads is not None and model.arm.needs_heads else ()
    return {
        "name": served.id,
        "state": engine.observation.state,
        "tier": tier.name,
        "base": tier.model,
        "k": tier.k,
        "arm": model.arm_name,
        "prerouter": model.heads is not None,
        "predicted_layers": list(predicted),
        "lora": model.lora_modules > 0,
        "lora_modules": model.lora_modules,
        "context_length": engine.context_length,
        "defaults": {field: getattr(served.defaults, field) for field in ("temperature", "top_p", "top_k", "min_p")},
        "stats": engine.stats(),
    }


def _memory(engine: Engine) -> dict[str, int | None]:
    """Four memories that are often mixed up, and what came from the device. Bytes."""
    model, io = engine.model, process_io()
    memory, plan = model.memory, model.plan
    slot = 0 if memory is None else memory.nbytes // max(1, memory.slots)
    return {
        "allocator": mx.get_active_memory(),
        "allocator_peak": mx.get_peak_memory(),
        "process": rss_bytes(),
        "process_peak": peak_rss_bytes(),
        "budget": None if plan is None else plan.budget_bytes,
        "experts_held": None if memory is None else int(memory.counters()["held"]) * slot,
        "experts_room": None if memory is None else memory.nbytes,
        "device_read": None if io is None else io.device,
    }


def _adapters(engine: Engine) -> dict[str, Any]:
    """The adapter files as `inspect` finds them now; `served`: it is the very file that was loaded."""
    identity = engine.model.identity
    loaded = {"prerouter": identity.prerouter_sha256, "lora": identity.lora_sha256}
    try:
        found = inspect(engine.model_dir, engine.model.tier.name, engine.model.adapters_dir)
    except Edge0Error:  # damaged or gone since it was loaded; which file it is, the next start says
        return {"fingerprint": identity.fingerprint, "adapters": None, "belong_together": None}
    files = {kind: found[kind] for kind in KINDS}
    return {
        "fingerprint": identity.fingerprint,
        "adapters": {
            kind: None if data is None else data | {"served": data["sha256"] == loaded[kind]}
            for kind, data in files.items()
        },
        "belong_together": "no" if found["problems"] else "unknown" if found["unchecked"] else "yes",
    }
