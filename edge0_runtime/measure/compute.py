"""What a step takes without its reads: measured on a few layers of the model's own shapes, whose weights are all zero.

They are served by the engine's own path, as the prerouter arm streams them; the experts that zero weights choose are always the
same, so after the first step nothing is read. What a layer more costs is the difference of two depths.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from edge0_runtime.contract.artifacts import Kind, write_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.provenance import Provenance
from edge0_runtime.contract.tier import Tier
from edge0_runtime.experts.reader import IO_THREADS
from edge0_runtime.loading import load_model
from edge0_runtime.measure.outline import shortened, write_outline
from edge0_runtime.model import Model
from edge0_runtime.prefix.cuts import cut
from edge0_runtime.request import decode, prefill
from edge0_runtime.sequence import Sequence
from edge0_runtime.serving import Serving

LEAST_STEPS, MOST_STEPS = 8, 64  # measured, of each depth
SECONDS = 2.0  # enough of them
WARM = 3  # steps before
MOST_EXPERTS = 16  # of a layer; enough for any K to be chosen of


def step_seconds(checkpoint: Checkpoint, tier: Tier) -> float:
    """Median seconds of a decode step of the whole model with everything that it needs in memory."""
    depths = _depths(tier)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as models:
        timed = [
            _steps(
                models.enter_context(contextlib.closing(_load(Path(folder) / str(layers), checkpoint, tier, layers)))
            )
            for layers in depths
        ]
        rounds: list[list[float]] = []
        while len(rounds) < LEAST_STEPS or (len(rounds) < MOST_STEPS and sum(map(sum, rounds)) < SECONDS):
            rounds.append([next(steps) for steps in timed])  # taking turns, so that all see the same machine
    shallow, *deep = (float(statistics.median(times)) for times in zip(*rounds, strict=True))
    if not deep:
        return shallow
    low, high = depths
    return shallow + max(0.0, deep[0] - shallow) * (tier.num_layers - low) / (high - low)


def _depths(tier: Tier) -> tuple[int, ...]:
    """Two numbers of layers, a period of mixers apart, each with the model's first layers; one if it has no more than those."""
    layout, arch = tier.layout, tier.architecture
    recurrent = [layout.is_recurrent(arch, n) for n in range(tier.num_layers)]
    period = recurrent.index(False) + 1
    first = layout.moe_layers(arch)[0] + 2  # one MoE layer on its own gate, one predicted
    low = period * math.ceil(first / period)
    return (low, low + period) if low + period <= tier.num_layers else (tier.num_layers,)


def _load(directory: Path, checkpoint: Checkpoint, tier: Tier, layers: int) -> Model:
    """A model of so many layers, with adapters; it holds all experts but one, so it streams."""
    groups = tier.router.n_group
    experts = min(tier.num_experts, groups * math.ceil(max(MOST_EXPERTS, 2 * tier.k) / groups))
    outline, short = shortened(checkpoint, tier, layers=layers, experts=experts)
    directory.mkdir()
    write_outline(directory, outline)
    made = Checkpoint.open(directory)
    _write_adapters(made, short)

    def load(budget_bytes: int | None) -> Model:
        return load_model(
            made, Serving(), budget_bytes=budget_bytes, io_threads=IO_THREADS, allow_mismatch=False, float32=False
        )  # fmt: skip

    model = load(None)
    plan = model.plan
    assert plan is not None
    if not plan.full:
        return model
    model.close()
    return load(plan.fixed_bytes + (plan.slots - 1) * plan.slot_nbytes)


def _write_adapters(checkpoint: Checkpoint, tier: Tier) -> None:
    base = checkpoint.identity()

    def write(kind: Kind, shapes: dict[str, tuple[int, int]], prerouter_sha256: str | None) -> str:
        made = Provenance(
            tool_version="doctor", commit="none", phases=(), base_fingerprint=base.fingerprint, tokenizer_hash="0" * 64,
            template_hash=None, teacher=None, data=None, prerouter_sha256=prerouter_sha256,
            created=datetime.datetime.now(datetime.UTC).isoformat(), base_config=base.config,
        )  # fmt: skip
        tensors = {key: np.full(shape, 1e-3, np.float32) for key, shape in shapes.items()}
        return write_adapter(checkpoint.directory / tier.file_name(kind), kind, tier, tensors, made)

    write("lora", tier.lora_tensors(), write("prerouter", tier.head_tensors(), None))


def _steps(model: Model) -> Iterator[float]:
    """Seconds of one decode step after the other, without those that warm up."""
    sequence, cancel = Sequence(model), threading.Event()
    logits_V = prefill(sequence, cut([0, 0], 1, ()), 1, cancel)
    assert logits_V is not None
    tokens = decode(sequence, logits_V, WARM + MOST_STEPS + 1, mx.argmax, frozenset(), cancel, ahead=False, trace=False)
    for _ in range(WARM):
        next(tokens)
    while True:
        began = time.perf_counter()
        next(tokens)
        yield time.perf_counter() - began
