"""Many clients at once, of whom some vanish, send slowly or read slowly; then: is the server as it was, and was it right?

    python scripts/load_test.py runs/quickstart/model --seconds 120 --clients 50 --requests 500

Starts `edge0_runtime serve` on a free port. First every question is asked alone; each answer that arrives under load must be the
same text. Then the clients come, each with its own seeded draws of a behaviour (BEHAVIOURS). Before and after, when nothing
runs, the server's threads, open files and memory are counted; afterwards questions are asked one after the other, and the memory
must stay flat. Prints one JSON object; exit code 1 with what was wrong in `problems`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 120.0
SETTLE_S = 30.0  # until nothing of the clients may be left
WARM_UP = 0.2  # of the seconds, and of the requests
MAX_GROWTH_MIB = 32.0
"""Of a process that has served everything already: allocators keep some memory, leaks go on."""


def questions(tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of every question; each has one right answer, greedy or by its seed."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for number in range(8):
        common = {"max_tokens": tokens, "seed": number, "temperature": 0.0 if number % 2 else 1.2}
        if number % 4 == 3:
            asked.append((RAW, common | {"prompt": f"9+{number}="}))
        else:
            text = f"Add {100 + 37 * number} and {11 * number}." + " Again." * 8 * (number % 3)
            asked.append((CHAT, common | {"messages": [{"role": "user", "content": text}]}))
    return asked


class Footprint(NamedTuple):
    """Of the server's process."""

    threads: int
    files: int
    rss_mib: float


@dataclass
class Load:
    """What all clients share."""

    url: str
    asked: list[tuple[str, dict[str, Any]]]
    right: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def judge(self, number: int, status: int, text: str | None) -> str:
        """The outcome of a question that was answered, or was not since the queue was full."""
        if status == 503:
            return "refused"
        if status != 200 or text != self.right[number]:
            self.problems.append(f"question {number}: status {status}, got {text!r}, right is {self.right[number]!r}")
            return "wrong"
        return "right"


# -- what clients do ---------------------------------------------------------------------------------------------------


async def whole(load: Load, draw: random.Random) -> str:
    """Wait for the answer."""
    number = draw.randrange(len(load.asked))
    return await _whole(load, number)


async def streamed(load: Load, draw: random.Random, pause_s: float = 0.0) -> str:
    """Read the answer as it comes."""
    number = draw.randrange(len(load.asked))
    path, body = load.asked[number]
    async with _client(load) as client, client.stream("POST", path, json=body | {"stream": True}) as response:
        raw = b""
        async for piece in response.aiter_raw(256):
            raw += piece
            await asyncio.sleep(pause_s)
    return load.judge(number, response.status_code, _text_of_stream(raw) if response.status_code == 200 else None)


async def slowly_read(load: Load, draw: random.Random) -> str:
    """Read it in small pieces with pauses."""
    return await streamed(load, draw, pause_s=0.02)


async def slowly_sent(load: Load, draw: random.Random) -> str:
    """Send the request in pieces with pauses."""
    number = draw.randrange(len(load.asked))
    path, body = load.asked[number]
    data = json.dumps(body).encode()

    async def pieces() -> Any:
        for start in range(0, len(data), 40):
            yield data[start : start + 40]
            await asyncio.sleep(0.02)

    async with _client(load) as client:
        response = await client.post(path, content=pieces(), headers={"Content-Type": "application/json"})
    return load.judge(number, response.status_code, _text(response))


async def vanishing(load: Load, draw: random.Random) -> str:
    """Go away at some moment: in the queue, while the prompt is read, or in mid-answer."""
    path, body = draw.choice(load.asked)
    await _abandoned(load, _request(path, body | {"stream": draw.random() < 0.5}), draw.random() * 0.3)
    return "gone"


async def half_sent(load: Load, draw: random.Random) -> str:
    """Go away in the middle of the request's head or body."""
    data = _request(*draw.choice(load.asked))
    await _abandoned(load, data[: draw.randrange(len(data))], draw.random() * 0.1)
    return "gone"


Behaviour = Callable[[Load, random.Random], Awaitable[str]]
BEHAVIOURS: dict[Behaviour, float] = {whole: 3, streamed: 3, vanishing: 3, slowly_read: 1, slowly_sent: 1, half_sent: 1}
"""With their shares."""


def _client(load: Load) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=load.url, timeout=TIMEOUT_S)


async def _whole(load: Load, number: int) -> str:
    path, body = load.asked[number]
    async with _client(load) as client:
        response = await client.post(path, json=body)
    return load.judge(number, response.status_code, _text(response))


def _text(response: httpx.Response) -> str | None:
    return _text_of(response.json()["choices"][0]) if response.status_code == 200 else None


def _text_of(choice: dict[str, Any]) -> str:
    text = choice.get("text", choice.get("message", choice.get("delta", {})).get("content"))
    return text or ""


def _text_of_stream(raw: bytes) -> str:
    lines = [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: ")]
    if lines[-1] != "[DONE]":
        return f"no end: {lines[-1]}"
    return "".join(_text_of(json.loads(line)["choices"][0]) for line in lines[:-1])


def _request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body)
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*head, "", data]).encode()


async def _abandoned(load: Load, data: bytes, after_s: float) -> None:
    parts = urlsplit(load.url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(data)
    await asyncio.sleep(after_s)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


# -- the test ----------------------------------------------------------------------------------------------------------


async def crowd(load: Load, clients: int, seconds: float, seed: int) -> None:
    """So many clients for so long."""
    until = time.monotonic() + seconds

    async def one(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        while time.monotonic() < until:
            (behave,) = draw.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
            try:
                outcome = await behave(load, draw)
            except (httpx.HTTPError, OSError) as problem:
                outcome = "failed"
                load.problems.append(f"{behave.__name__}: {type(problem).__name__}: {problem}")
            load.outcomes[f"{behave.__name__}: {outcome}"] += 1
            if outcome == "refused":
                await asyncio.sleep(draw.random() * 0.2)

    await asyncio.gather(*(one(number) for number in range(clients)))


async def in_a_row(load: Load, count: int) -> None:
    """So many questions one after the other."""
    for number in range(count):
        load.outcomes[f"in a row: {await _whole(load, number % len(load.asked))}"] += 1


def footprint(load: Load, process: psutil.Process, like: Footprint | None = None) -> Footprint:
    """Of the server when nothing runs and waits; waits until threads and files are as few as in `like`, but not for ever."""
    until = time.monotonic() + SETTLE_S
    while True:
        health = httpx.get(f"{load.url}/health", timeout=TIMEOUT_S).json()
        now = Footprint(process.num_threads(), process.num_fds(), process.memory_info().rss / 2**20)
        settled = health["running"] == health["waiting"] == 0
        settled &= like is None or (now.threads <= like.threads and now.files <= like.files)
        if settled or time.monotonic() > until:
            return now
        time.sleep(0.1)


def compared(load: Load, what: str, before: Footprint, after: Footprint) -> dict[str, Any]:
    """Both, and as problems what grew."""
    for name in ("threads", "files"):
        if getattr(after, name) > getattr(before, name):
            load.problems.append(f"{what}: {name} grew from {getattr(before, name)} to {getattr(after, name)}")
    if after.rss_mib - before.rss_mib > MAX_GROWTH_MIB:
        load.problems.append(f"{what}: memory grew from {before.rss_mib:.1f} to {after.rss_mib:.1f} MiB")
    return {"before": before._asdict(), "after": after._asdict()}


@contextlib.contextmanager
def served(model_dir: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`edge0_runtime serve` on a free port: its URL and process."""
    command = [sys.executable, "-m", "edge0_runtime", "serve", str(model_dir), "--port", "0", "--json"]
    with subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)


def run(model_dir: Path, *, seconds: float, clients: int, requests: int, tokens: int, seed: int) -> dict[str, Any]:
    """The whole test: what happened, and what was wrong."""
    with served(model_dir) as (url, process):
        load, watched = Load(url, questions(tokens)), psutil.Process(process.pid)
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            load.right = [_text(client.post(path, json=body)) or "" for path, body in load.asked]
        asyncio.run(crowd(load, clients, seconds * WARM_UP, seed + 1))
        before = footprint(load, watched)
        asyncio.run(crowd(load, clients, seconds, seed))
        under_load = compared(load, "under load", before, footprint(load, watched, before))
        asyncio.run(in_a_row(load, int(requests * WARM_UP)))
        before = footprint(load, watched)
        asyncio.run(in_a_row(load, requests))
        row = compared(load, "in a row", before, footprint(load, watched, before))
        health = httpx.get(f"{url}/health", timeout=TIMEOUT_S)
        if health.json()["status"] != "ready":
            load.problems.append(f"health: {health.text}")
    if process.returncode != 0:
        load.problems.append(f"the server ended with {process.returncode}")
    outcomes = dict(sorted(load.outcomes.items()))
    return {"outcomes": outcomes, "under_load": under_load, "in_a_row": row, "problems": load.problems}


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--seconds", type=float, default=120.0, help="under load (default %(default)g)")
    parser.add_argument("--clients", type=int, default=50, help="(default %(default)s)")
    parser.add_argument("--requests", type=int, default=500, help="in a row (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args(argv))
    result = run(args.pop("model_dir"), **args)
    print(json.dumps(result, indent=2))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
