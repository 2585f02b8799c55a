"""From the command to its first token: `serve`, asked as soon as it listens, and `generate`; and which imports take the time.

    python -m benchmarks.start_up runs/quickstart/model > rows.jsonl
    python -m benchmarks.start_up runs/quickstart/model --imports          # the slowest imports of `serve`, by their own time

A row for each round: seconds of wall time from starting the process to "serving" on stderr, to the first streamed token, and to
`generate`'s first token; and the processor's seconds up to `serve`'s first token, which other programs don't lengthen. Rounds
after the first find the files in the page cache, and the list that `edge0_runtime/scanning.py` keeps.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.record import Row, circumstances
from edge0_runtime.contract.edge import parser_of

PROMPT = "Add 299 and 289."
SERVE = ("-m", "edge0_runtime", "serve")
SLOWEST = 25


def serve_seconds(model_dir: Path) -> Row:
    """Of `serve`: to listening, and to the first streamed token of a request sent then."""
    command = [sys.executable, *SERVE, str(model_dir), "--port", "0"]
    client = httpx.Client(timeout=60, verify=False)  # made before: certificates take a tenth of a second to read
    began = time.perf_counter()
    with client, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = next(filter(None, (re.search(r"serving .* at (http\S+)", line) for line in process.stderr)), None)
            if found is None:
                raise SystemExit(f"{model_dir}: `serve` ended before it listened; run it by hand")
            listening = time.perf_counter() - began
            body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 8}
            with client.stream("POST", f"{found[1]}/chat/completions", json=body) as response:
                next(line for line in response.iter_lines() if re.search(r'"content": ?"[^"]', line))
                first = time.perf_counter() - began
                cpu = psutil.Process(process.pid).cpu_times()
        finally:
            process.terminate()
    return {"serve_listening_s": listening, "serve_first_token_s": first, "serve_cpu_s": cpu.user + cpu.system}


def generate_seconds(model_dir: Path) -> Row:
    """Of `generate`: to its first character on stdout, or its end if there is none."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "edge0_runtime", "generate", str(model_dir), "--prompt", PROMPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return {"generate_first_token_s": time.perf_counter() - began}


def slowest_imports() -> str:
    """What `serve` imports until it could load a model, by own time: a line each of milliseconds, own and with all below."""
    script = "import edge0_runtime.cli, edge0_runtime.catalog, edge0_runtime.server.app"
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script], check=True, capture_output=True, text=True
    )
    rows = re.findall(r"^import time: +(\d+) \| +(\d+) \| ( *\S+)", told.stderr, re.MULTILINE)
    rows = sorted(rows, key=lambda row: -int(row[0]))[:SLOWEST]
    return "\n".join(f"{int(own) / 1e3:7.1f} {int(all_) / 1e3:8.1f}  {name.strip()}" for own, all_, name in rows)


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--imports", action="store_true")
    args = parser.parse_args()
    if args.imports:
        print(slowest_imports())
        return
    began = circumstances()
    for number in range(args.rounds):
        times = serve_seconds(args.model_dir) | generate_seconds(args.model_dir)
        print(json.dumps(began | {"round": number, "load_average": os.getloadavg()[0]} | times), flush=True)


if __name__ == "__main__":
    main()
