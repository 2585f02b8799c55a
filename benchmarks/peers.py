"""Ours and other programs that stream experts: the same checkpoint, memory and simulated disk, one core, in one run.

    pip install --no-deps --target /tmp/peers/boyle boyle==0.2.1
    pip install --no-deps --target /tmp/peers/bigrig bigrig==0.9.1
    git clone https://github.com/srcterm/streamlx /tmp/peers/streamlx && git -C /tmp/peers/streamlx checkout 146507b
    python benchmarks/peers.py models results/peers --peer streamlx=/tmp/peers/streamlx --peer boyle=/tmp/peers/boyle \
        --peer bigrig=/tmp/peers/bigrig

disk_bound.yaml at K = 4 (checkpoints as in benchmarks/disk_bound.py), float32, 16 experts a layer for everybody; ours has them in
one pool. Each is a process of its own: the whole answer unmeasured, without the simulated disk, then once more behind it,
decode tokens/s from the first token to the last. Exact programs answer greedily and should give the ids of our on_demand
without LoRA; the prerouter, as served, processes the same ids. A run whose row is there isn't repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx
from mlx_lm.generate import generate_step

from benchmarks.budgets import budget_for
from benchmarks.disk_bound import MIB, PROMPT, STICKY, load, make_checkpoint
from benchmarks.peer_glue import PEERS, Shape
from benchmarks.record import Row, add_rows, circumstances, read_rows
from benchmarks.slow_disk import SlowDisk
from edge0_runtime.contract.edge import parser_of

K, SLOTS, GIB = 4, 16, 2**30
OURS = ("on_demand", "lookahead", "prerouter", STICKY)


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("models", type=Path, help="folder of the checkpoints")
    parser.add_argument("out", type=Path, help="folder of rows.jsonl and table.md")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="where its package lies")
    parser.add_argument("--mib-s", type=int, nargs="+", default=[200, 400], metavar="N", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of the answer (%(default)s)")
    parser.add_argument("--core", type=int, default=0, metavar="N", help="that all run on (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="without the sticky tier")
    parser.add_argument("--one", nargs=2, metavar=("WHO", "MIB_S"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    places = {name: Path(path) for name, _, path in (peer.partition("=") for peer in args.peer)}
    if unknown := sorted(places.keys() - {package for package, _ in PEERS.values()}):
        parser.error(f"--peer: {', '.join(unknown)} isn't known; add how it is called to benchmarks/peer_glue.py")
    rows = args.out / "rows.jsonl"
    if args.one:
        known = next((row["ids"] for row in read_rows(rows) if row["who"] == OURS[0]), None)
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.models, args.tokens, known)))
        return
    everybody = [*OURS[: 3 if args.plain else 4], *(who for who, (package, _) in PEERS.items() if package in places)]
    for number in range(args.rounds):
        for mib_s in args.mib_s:
            for who in everybody if number % 2 == 0 else [everybody[0], *everybody[:0:-1]]:
                key = {"who": who, "mib_s": mib_s, "round": number}
                if any(key.items() <= row.items() for row in read_rows(rows)):
                    continue
                found = circumstances() | {"version": version(places[PEERS[who][0]]) if who in PEERS else None}
                add_rows(rows, [key | _in_a_process(who, mib_s, places, args.core) | found])
                print(f"{key}, load before it {found['load'][0]:.1f}", file=sys.stderr, flush=True)
    text = table(read_rows(rows))
    (args.out / "table.md").write_text(text)
    print(text, end="")


def _in_a_process(who: str, mib_s: int, places: dict[str, Path], core: int) -> Row:
    """The row of one run, on one core."""
    path = [str(places[PEERS[who][0]])] if who in PEERS else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        ["taskset", "--cpu-list", str(core), sys.executable, *sys.argv, "--one", who, str(mib_s)],
        env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{who} at {mib_s} MiB/s exited {done.returncode}; the same command goes on from here")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def version(place: Path) -> str:
    """Of the package that lies there: what pip wrote, or the commit of a checkout."""
    for info in place.glob("*.dist-info"):
        return info.name.removesuffix(".dist-info")
    done = subprocess.run(
        ["git", "-C", str(place), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


# -- one run ---------------------------------------------------------------------------------------------------------


def measure(who: str, mib_s: int, models: Path, tokens: int, known: list[int] | None) -> Row:
    """Two runs of the same answer, the second measured. `known`: the ids that an arm with predictions processes."""
    disk, directory = SlowDisk(math.inf), make_checkpoint(K, models)
    run = _ours(who, directory, disk, known) if who in OURS else _peer(who, directory, disk)
    list(run(tokens))
    disk.bytes_per_second = mib_s * MIB
    mx.reset_peak_memory()
    ids, at, carried = [], [], []
    for token in run(tokens):
        ids.append(token)
        at.append(time.perf_counter())
        carried.append(disk.carried)
    return {
        "ids": ids,
        "tokens_per_second": (len(at) - 1) / (at[-1] - at[0]),
        "bytes_per_step": (carried[-1] - carried[0]) / (len(at) - 1),
        "mlx_peak_bytes": mx.get_peak_memory(),
    }


def _ours(who: str, directory: Path, disk: SlowDisk, known: list[int] | None) -> Any:
    """tokens -> an iterable of the answer's ids, from our engine."""
    predicts = who not in OURS[:2]
    os.preadv = disk.slowed(os.preadv, int)
    arm = "prerouter" if predicts else who
    options: dict[str, Any] = {"sticky": who == STICKY, "arm": arm, "prerouter": predicts, "lora": predicts}
    with load(directory, **options, memory_budget=1.0) as engine:  # less than all experts
        budget = budget_for(engine.model, len(engine.model.store.tensors) * SLOTS) / GIB
    engine = load(directory, **options, memory_budget=budget)
    prompt_ids = engine.tokenizer.encode(PROMPT)

    def run(tokens: int) -> Iterable[int]:
        if predicts:
            assert known is not None
            steps = engine.replay(prompt_ids, known[:tokens])
        else:
            steps = engine.generate(prompt_ids, max_tokens=tokens, ignore_eos=True)
        return (step.token for step in steps)

    return run


def _peer(who: str, directory: Path, disk: SlowDisk) -> Any:
    """tokens -> an iterable of the answer's ids, from mlx-lm's own loop over the peer's model."""
    with load(directory, arm="on_demand", prerouter=False, lora=False, memory_budget=1.0) as engine:
        store = engine.model.store
        layers, prompt_ids = sorted(store.tensors), engine.tokenizer.encode(PROMPT)
        nbytes = store.expert_nbytes(layers[0])
    view = peer_view(directory, K)
    model = PEERS[who][1](Shape(view, view.parent, K, len(layers), SLOTS, nbytes), disk)
    return lambda tokens: (int(token) for token, _ in generate_step(mx.array(prompt_ids), model, max_tokens=tokens))


def peer_view(directory: Path, k: int) -> Path:
    """A folder with the checkpoint's files, no adapters, and the served K in its config, which is all that they know."""
    view = directory.with_name(f"{directory.name}-view") / directory.name
    view.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "num_experts_per_tok" in part:
            part["num_experts_per_tok"] = k
    (view / "config.json").write_text(json.dumps(config))
    for path in directory.iterdir():
        if path.name == "config.json" or "_edge0_" in path.name:
            continue
        # A single file is not what every peer looks for.
        name = "model-00001-of-00001.safetensors" if path.name == "model.safetensors" else path.name
        if not (view / name).exists():
            (view / name).symlink_to(path.resolve())
    return view


# -- reading ---------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """A Markdown line for each program and disk: medians and ranges; speed over the fastest peer's median."""
    reference = next(row["ids"] for row in rows if row["who"] == OURS[0])
    lines = [
        "| disk, MiB/s | | tok/s | over the best peer | MiB a token | MLX's peak, MiB | ids |",
        "|---|---|---|---|---|---|---|",
    ]
    for mib_s in dict.fromkeys(row["mib_s"] for row in rows):
        here = [row for row in rows if row["mib_s"] == mib_s]
        speeds = {
            who: sorted(row["tokens_per_second"] for row in here if row["who"] == who)
            for who in dict.fromkeys(row["who"] for row in here)
        }
        best = max((statistics.median(speeds[who]) for who in speeds if who in PEERS), default=math.nan)
        for who, found in speeds.items():
            own = [row for row in here if row["who"] == who]
            lines.append(
                f"| {mib_s} | {who} | {statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"
                f" | {statistics.median(found) / best:.2f}"
                f" | {statistics.median(row['bytes_per_step'] for row in own) / MIB:.0f}"
                f" | {max(row['mlx_peak_bytes'] for row in own) / MIB:.0f} | {_ids(who, own, reference)} |"
            )
    return "\n".join(lines) + "\n"


def _ids(who: str, rows: Sequence[Row], reference: list[int]) -> str:
    """Whether an exact program's greedy ids are those of our on_demand."""
    if who in OURS[2:]:
        return "given"
    for row in rows:
        if row["ids"] != reference:
            same = [a == b for a, b in zip(row["ids"], reference, strict=True)]
            return f"others from token {same.index(False)}"
    return "same"


if __name__ == "__main__":
    main()
