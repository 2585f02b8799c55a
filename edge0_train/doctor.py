"""`python -m edge0_train doctor tier=35b`: what this machine has and lacks for every phase, and about how long each would take.

    python -m edge0_train doctor tier=35b hardware=1x80gb

Speeds are measured here for some seconds; hours follow from them by formulas that are printed. They count multiplications,
weights read and bytes written, and nothing else: a real run takes up to about three times as long where kernels are small
(short rows, little models, packed codes), and is never much faster.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base.load import DTYPES
from edge0_train.base.packed import unpacked_numel
from edge0_train.build import sketch_student
from edge0_train.config import PHASES, Config, configure, examples
from edge0_train.data.counts import Rows
from edge0_train.environment import PACKAGES, package_version
from edge0_train.fit import shortfalls
from edge0_train.inputs import missing_inputs
from edge0_train.machine import device_name, disk_free, has_gpu, limits
from edge0_train.memory import GIB, phase_need
from edge0_train.report import table
from edge0_train.tracking import wandb_mode

USAGE = "usage: python -m edge0_train doctor tier=TIER [hardware=NAME] [setting=value ...]"
SIDE = {"cpu": 1024, "cuda": 8192}
"""Of the square matrices whose product is timed."""
FILE_BYTES = 64 * 2**20
REPEATS = 4
"""The best counts; the first one only warms up."""


@dataclass(frozen=True)
class Speeds:
    """Of this machine: multiply-adds count as two operations; bytes a second of the device's memory and of the disk."""

    flops: float
    memory: float
    write: float
    read: float


@dataclass(frozen=True)
class Work:
    """What a phase does: operations of its matrix products, bytes of weights that decode steps read, bytes on the disk."""

    flops: float
    memory: float = 0
    written: float = 0
    read: float = 0

    def seconds(self, speeds: Speeds) -> float:
        """One after the other, as nothing here overlaps for long."""
        computing = max(self.flops / speeds.flops, self.memory / speeds.memory)
        return computing + self.written / speeds.write + self.read / speeds.read


def doctor(overrides: Sequence[str], config_dir: str | None = None) -> str:
    """The page. Raises Edge0Error for settings that are wrong."""
    configs = _configs(overrides, config_dir)
    config = configs[0]
    at_hand = limits(config)
    torch.set_num_threads(config.threads)
    here = config.base.device if has_gpu(config.base.device) else "cpu"
    speeds = measure(config, here)
    lines = [
        f"python {platform.python_version()}, {platform.system()} {platform.machine()}",
        ", ".join(f"{name} {package_version(name)}" for name in PACKAGES),
        f"wandb: {_wandb(config)}",
        f"computes on: {device_name(here)}"
        + f" (base.device={config.base.device} is not here)" * (here != config.base.device),
        f"{at_hand.name}: {at_hand.processes} x {at_hand.device / GIB:.1f} GiB of device memory, {at_hand.host / GIB:.1f} GiB"
        f" of host memory; {disk_free(config.root) / GIB:.1f} GiB of disk free for {config.root}",
        f"measured here: {speeds.flops / 1e9:,.0f} GFLOP/s in {config.base.dtype}, memory {speeds.memory / 1e9:,.1f} GB/s,"
        f" disk {speeds.write / 1e6:,.0f} MB/s written, {speeds.read / 1e6:,.0f} MB/s read",
        "",
        _hours(configs, speeds),
        "",
        "hours = max(operations / FLOP/s, decode steps x bytes of the weights / memory's B/s) + bytes / disk's B/s.",
        "Operations of a token: 2 P forward (P: parameters it uses), 4 P with gradients through the frozen base, 6 P with"
        " gradient checkpointing. All rows are taken to be text.max_length long.",
        "A lower bound: expect one to three times as long. After some steps a run's own bar shows the time that is left.",
        "",
    ]
    made: set[str] = set()
    for one in configs:
        problems = missing_inputs(one, made)
        lines.append(f"{one.phase}: {'something' if problems else 'nothing'} is missing{':' * bool(problems)}")
        lines += [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)]
        made.update(PHASES[one.phase].writes)
    return "\n".join(lines)


def _configs(overrides: Sequence[str], config_dir: str | None) -> list[Config]:
    """Every phase of the chain; what has no default gets its example, which `missing_inputs` then misses."""
    words = [word for word in overrides if not word.startswith(("phase=", "dry_run="))] + ["dry_run=true"]
    plain = configure("phase=export", *words, config_dir=config_dir)
    shown = {name: one for name, (one, _) in examples(plain.tier).items() if name != "base.source"}
    values = {"teacher.directory": plain.teacher.directory, "text.prompts": plain.text.prompts}
    words += [one for name, one in shown.items() if not values[name]]
    return [configure(f"phase={phase}", *words, config_dir=config_dir) for phase in plain.chain]


def _hours(configs: Sequence[Config], speeds: Speeds) -> str:
    rows = []
    for config in configs:
        planned = Rows.unwritten(config)
        need, at_hand = phase_need(config, planned), limits(config)
        device, host = (f"{sum(parts.values()) / GIB:.1f}" for parts in (need.device, need.host))
        alone = 1 if PHASES[config.phase].alone else at_hand.processes
        hours = work(config).seconds(speeds) / 3600 / alone
        fits = "no" if shortfalls(config, need, at_hand) else "yes"
        rows.append([config.phase, device, host, fits, f"{hours:.2g}"])
    return table(["phase", "device GiB", "host GiB", "fits", "hours, at the least"], rows)


def work(config: Config) -> Work:
    """What a phase of this configuration does, all text being as long as configuration allows."""
    path = sketch_student(config, lora=False, heads=False)
    every = unpacked_numel(path.model)
    tier, sample, optim, rows = config.tier, config.sample, config.optim, Rows.unwritten(config)
    width = 4 if config.base.dtype == "float32" else 2
    layers = len(tier.layout.moe_layers(tier.architecture))
    routed = layers * tier.num_experts * 3 * tier.hidden_size * tier.expert_width

    def used(k: int) -> float:
        return every - routed * (1 - k / tier.num_experts)

    def writing(count: int, k: int, batch: int) -> Work:
        tokens = count * config.text.max_length
        steps = -(-count // batch) * sample.max_new_tokens
        return Work(2 * used(k) * tokens, steps * width * min(every, used(k) * batch))

    trained = optim.steps * optim.rows * rows.mean
    heads = sum(a * b for a, b in tier.head_tensors().values())
    through = 6 if config.base.gradient_checkpointing else 4
    loads = 0.5625 * every
    match config.phase:
        case "quantize":
            return Work(0, written=loads, read=2 * every)
        case "teacher_text":
            return writing(sample.prompts + sample.eval_prompts, tier.base_k, sample.batch)
        case "head_distill" | "head_refine":
            return Work((2 * used(tier.k) + 6 * heads) * trained, read=loads)
        case "student_sft":
            return Work((through * used(tier.k) + 6 * heads) * trained, read=loads)
        case "on_policy":
            rollout = writing(optim.steps * optim.rows, tier.k, sample.batch)
            scoring = 2 * used(tier.base_k) * trained
            return Work(
                rollout.flops + scoring + through * used(tier.k) * trained, rollout.memory, read=loads + 2 * every
            )
        case "evaluate":
            stages = len(config.chain)
            once = writing(sample.eval_prompts, tier.base_k, sample.batch)
            return Work(stages * 2 * once.flops, stages * once.memory, read=loads + 2 * every)
        case _:
            want = config.export
            traces = writing(want.trace_prompts, tier.k, want.trace_prompts)
            return Work(traces.flops, traces.memory, written=loads, read=loads)


def measure(config: Config, device: str) -> Speeds:
    """Speeds of this machine, some seconds in all."""
    kind = device.partition(":")[0]
    side, dtype = SIDE[kind], DTYPES[config.base.dtype]
    matrix = torch.randn(side, side, device=device).to(dtype)

    def timed(run: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            run()
            if kind == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    flops = 2 * side**3 / timed(lambda: matrix @ matrix)
    block, other = (torch.zeros(FILE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    memory = 2 * FILE_BYTES / timed(lambda: other.copy_(block))
    write, read = disk_speeds(config.root)
    return Speeds(flops, memory, write, read)


def disk_speeds(path: str) -> tuple[float, float]:
    """(written, read) bytes a second of the file system that `path` is or would be on."""
    place = Path(path).absolute()
    while not place.is_dir():
        place = place.parent
    data = os.urandom(FILE_BYTES)
    with tempfile.NamedTemporaryFile(dir=place, prefix=".edge0-doctor-") as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        write = FILE_BYTES / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        file.seek(0)
        while file.read(2**20):
            pass
        read = FILE_BYTES / (time.perf_counter() - began)
    return write, read


def _wandb(config: Config) -> str:
    """Whether runs would arrive: what is set, and whether there is a key."""
    if package_version("wandb") == "absent":
        return "not installed; metrics go to metrics.jsonl"
    mode = wandb_mode(config)
    key = bool(os.environ.get("WANDB_API_KEY")) or _netrc_has_wandb()
    return f"{mode}, {'logged in' if key else 'not logged in: `wandb login` before logger.wandb=online'}"


def _netrc_has_wandb() -> bool:
    file = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return "api.wandb.ai" in file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def doctor_command(arguments: Sequence[str]) -> None:
    """The subcommand. Raises Edge0Error without a tier."""
    if [*arguments] in (["--help"], ["-h"]):
        print(USAGE, __doc__, sep="\n\n")
        return
    config_dir, words = None, [*arguments]
    for flag in ("--config-dir", "-cd"):
        if flag in words:
            at = words.index(flag)
            config_dir = words[at + 1] if at + 1 < len(words) else None
            del words[at : at + 2]
    flags = [word for word in words if word.startswith("-")]
    if flags or not any(word.startswith("tier=") for word in words):
        raise Edge0Error(f"doctor: {f'{flags[0]} is unknown' if flags else 'no tier'}; {USAGE}")
    print(doctor(words, config_dir))
    sys.stdout.flush()
