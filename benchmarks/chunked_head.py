"""Peak memory and time of the vocabulary losses, chunked against dense, with a head of 248,320 rows (35b's vocabulary).

    python benchmarks/chunked_head.py                    # 256 to 4096 tokens; some minutes on two cores

Every cell is a process of its own: forward and backward of one loss on [tokens, 256] hidden states in float32 (the hidden size is
small so that the dense form fits), head frozen as in training. Memory is the rise of the peak resident set above what the
process held before the loss; time is CPU time, which busy neighbours do not stretch. A cell that would pass --limit-gib ends
with "does not fit" instead of troubling its neighbours.

One run of 29 November 2026, `--limit-gib 12.5`, beside other work (load 5 to 9 on 2 cores):
AMD EPYC, 2 cores, Linux; torch 2.13.0+cpu, 1 thread, float32; head 248,320 x 256, top-k 64; limit 12.5 GiB

    loss           tokens     dense GiB  dense CPU s  chunked GiB  chunked CPU s
    cross-entropy     256          0.72          2.1         0.72            2.0
    cross-entropy    1024          2.85          5.8         2.85            8.4
    cross-entropy    2048          5.69         14.6         2.86           15.5
    cross-entropy    4096         11.38         29.9         2.86           31.9
    reverse KL        256          1.19          2.5         1.20            3.4
    reverse KL       1024          4.75          9.1         4.75           13.3
    reverse KL       2048          9.48         21.8         4.75           27.0
    reverse KL       4096  does not fit            -         4.76           52.2

A chunk is 1024 tokens: beyond one chunk the memory of the chunked form stays, that of the dense form grows with the tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.record import machine
from edge0_train.losses import chunked, cross_entropy, reverse_kl
from edge0_train.report import table

VOCABULARY, HIDDEN, TOP_K = 248_320, 256, 64
LOSSES: dict[str, Callable[..., torch.Tensor]] = {"cross-entropy": cross_entropy, "reverse KL": reverse_kl}
GIB = 2**30


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 2048, 4096])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit-gib", type=float, default=14.0)
    parser.add_argument("--cell", nargs=3, metavar=("LOSS", "FORM", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        loss, form, tokens = options.cell
        print(json.dumps(cell(loss, form, int(tokens), options.threads, options.limit_gib)))
        return
    rows = []
    for loss in LOSSES:
        for tokens in options.tokens:
            dense, in_chunks = (_in_a_process(loss, form, tokens, options) for form in ("dense", "chunked"))
            if dense and in_chunks:
                assert abs(dense["value"] - in_chunks["value"]) <= 1e-5 * abs(dense["value"]), (dense, in_chunks)
            rows.append([loss, tokens, *(shown for one in (dense, in_chunks) for shown in _shown(one))])
            print(f"{rows[-1]}", file=sys.stderr, flush=True)
    print(
        f"{machine()}; torch {torch.__version__}, {options.threads} thread(s), float32; head {VOCABULARY:,} x {HIDDEN},"
        f" top-k {TOP_K}; limit {options.limit_gib:g} GiB"
    )
    print(table(["loss", "tokens", "dense GiB", "dense CPU s", "chunked GiB", "chunked CPU s"], rows))


def cell(loss: str, form: str, tokens: int, threads: int, limit_gib: float) -> dict[str, float]:
    """{value of the loss, rise of the peak resident set in GiB, CPU seconds} of one forward and backward."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    hidden_NH = torch.randn(tokens, HIDDEN, requires_grad=True)
    if loss == "cross-entropy":
        targets: tuple[torch.Tensor, ...] = (torch.randint(VOCABULARY, (tokens,)),)
    else:  # a teacher with nine tenths of its mass on TOP_K tokens
        ids_NS = (torch.randint(VOCABULARY, (tokens, 1)) + 997 * torch.arange(TOP_K)) % VOCABULARY
        targets = (ids_NS, torch.full(ids_NS.shape, 0.9 / TOP_K).log(), torch.full((tokens,), 0.1).log())
    limit = int(limit_gib * GIB)
    resource.setrlimit(resource.RLIMIT_AS, (_virtual_bytes() + limit,) * 2)
    before, began = peak_bytes(), time.process_time()
    if form == "dense":
        value = LOSSES[loss](head(hidden_NH), *targets)
    else:
        value = chunked(LOSSES[loss], hidden_NH, head, *targets)
    value.backward()
    seconds = time.process_time() - began
    return {"value": float(value), "gib": (peak_bytes() - before) / GIB, "seconds": seconds}


def peak_bytes() -> int:
    """Largest resident set so far; what comes before the loss takes no more than it keeps (Linux counts KiB, macOS bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _in_a_process(loss: str, form: str, tokens: int, options: argparse.Namespace) -> dict[str, float] | None:
    """A cell's result; None when it does not fit."""
    command = [sys.executable, __file__, "--threads", str(options.threads), "--limit-gib", str(options.limit_gib)]
    done = subprocess.run([*command, "--cell", loss, form, str(tokens)], capture_output=True, text=True)
    if done.returncode == 0:
        cell: dict[str, float] = json.loads(done.stdout)
        return cell
    if "memory" not in done.stderr:
        raise SystemExit(done.stderr)
    return None


def _shown(result: dict[str, float] | None) -> tuple[str, str]:
    return (f"{result['gib']:.2f}", f"{result['seconds']:.1f}") if result else ("does not fit", "-")


def _virtual_bytes() -> int:
    """What the process has mapped already; the limit counts from there (Linux; elsewhere there is no limit to set)."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 2**62


if __name__ == "__main__":
    main()
