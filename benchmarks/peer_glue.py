"""How other programs that stream experts into mlx-lm's models are called; none of their code is here.

They run on mlx's CPU build with what follows, which changes neither what they compute nor when they read:

* float32, like our engine on a CPU: `set_dtype` on mlx-lm's model, and slots whose scales and biases are float32, since
  `gather_qmm` beside float32 activations would cast those of all slots in every call.
* boyle asks for macOS' F_NOCACHE; the name stands for a call without effect here. Its loader also asks how much memory
  Metal has, so its parts are called one by one, in its order.
* bigrig reads through a memory map, which can't be slowed; the function that hands out a part of it is.
"""

from __future__ import annotations

import fcntl
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from benchmarks.slow_disk import SlowDisk
from edge0_runtime.contract.errors import Edge0Error


class Shape(NamedTuple):
    """What a peer is to load.

    Attributes:
        directory: checkpoint as mlx-lm reads it, with the served K in its config. scratch: folder for files of its own.
        k: experts a token. layers: MoE layers. slots: experts it may hold for each. expert_nbytes: of one, on disk.
    """

    directory: Path
    scratch: Path
    k: int
    layers: int
    slots: int
    expert_nbytes: int


def streamlx(shape: Shape, disk: SlowDisk, prefetch: bool = True) -> Any:
    """github.com/srcterm/streamlx: LRU slots for each layer; reads what the next layer's gate makes of this layer's input."""
    os.environ["STREAMLX_PREFETCH"] = str(int(prefetch))
    integrate = importlib.import_module("streamlx.integrate")
    budget = shape.layers * shape.slots * shape.expert_nbytes
    model, _, pools, _ = integrate.load_streaming_model(str(shape.directory), budget, k=shape.k)
    _expect("streamlx", shape, [pool.n_slots for pool in pools.values()])
    model.set_dtype(mx.float32)
    for pool in pools.values():
        for parts in pool.pool.values():
            for name in ("scales", "biases"):
                parts[name] = parts[name].astype(mx.float32)
    os.pread = disk.slowed(os.pread, len)
    return model


def streamlx_without(shape: Shape, disk: SlowDisk) -> Any:
    """streamlx, its prefetch off."""
    return streamlx(shape, disk, prefetch=False)


def boyle(shape: Shape, disk: SlowDisk, store: bool = False) -> Any:
    """PyPI's boyle: LRU slots for each layer, what is missing read by eight threads."""
    fcntl.F_NOCACHE = fcntl.F_GETFD  # type: ignore[attr-defined]
    runtime, build = importlib.import_module("boyle._runtime"), importlib.import_module("boyle.build")
    folder = shape.scratch / "boyle"
    if store and not (folder / "colo.json").exists():
        build.build_store(str(shape.directory), folder)
    model, _ = importlib.import_module("mlx_lm.utils").load_model(shape.directory, lazy=True)
    model.set_dtype(mx.float32)
    capacities = [shape.slots] * shape.layers
    colo = str(folder) if store else None
    wrapped = runtime.apply_expert_offload(model, str(shape.directory), capacity_plan=capacities, colo_dir=colo)
    _expect("boyle", shape, [shape.slots] * wrapped)
    mx.eval(model.parameters())
    os.pread = disk.slowed(os.pread, len)
    return model


def boyle_built(shape: Shape, disk: SlowDisk) -> Any:
    """boyle with its own file of experts (`boyle build`): one read an expert instead of nine."""
    return boyle(shape, disk, store=True)


def bigrig(shape: Shape, disk: SlowDisk) -> Any:
    """PyPI's bigrig: LFU with ageing for each layer, its own file of experts, read through a memory map."""
    stream = importlib.import_module("bigrig_engine.stream")
    store = importlib.import_module("bigrig_engine.fetch").WeightStore
    blob = stream.ensure_packed(str(shape.directory), str(shape.scratch / "bigrig.experts"), verbose=False)
    model, _, handle = stream.load_streaming(str(shape.directory), blob, capacity=shape.slots, verbose=False)
    _expect("bigrig", shape, [pool.capacity for pool in handle.pools])
    model.set_dtype(mx.float32)
    store.region_view = disk.slowed(store.region_view, len)
    return model


def _expect(name: str, shape: Shape, slots: list[int]) -> None:
    if slots != [shape.slots] * shape.layers:
        raise Edge0Error(f"{name}: it holds {slots} experts a layer, not {shape.slots} in each of {shape.layers}")


# Its name in the table -> (package as --peer names it, how it is called).
PEERS: dict[str, tuple[str, Callable[[Shape, SlowDisk], Any]]] = {
    "streamlx": ("streamlx", streamlx),
    "streamlx, no prefetch": ("streamlx", streamlx_without),
    "boyle": ("boyle", boyle),
    "boyle, built store": ("boyle", boyle_built),
    "bigrig": ("bigrig", bigrig),
}
