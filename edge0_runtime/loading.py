"""From a model directory to a `Model`: checked strictly, then loaded.

The mathematics is mlx-lm's. In every MoE block two submodules are replaced, the gate and the expert call, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from edge0_runtime.arms import DEFAULT, Parts, arm_class
from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind, find_adapter
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier, builtin_tier
from edge0_runtime.embedding import StreamedEmbedding
from edge0_runtime.experts.pool import slot_nbytes
from edge0_runtime.experts.reader import MAX_IO_THREADS
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.experts.streaming import ResidentSwitchGLU, StreamingSwitchGLU
from edge0_runtime.gates import Gate, wrap_gate
from edge0_runtime.heads import Heads
from edge0_runtime.lora import apply_lora
from edge0_runtime.model import Fixed, Identity, Model
from edge0_runtime.network import SlicedMixer, evaluate, load_network, network_nbytes, to_float32, widened_nbytes
from edge0_runtime.plan import check_memory
from edge0_runtime.step import Running

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapters:
    """The tier of a model directory, and those of its two adapter files that are served.

    Either file's tier serves both: `check_binding` refuses two that differ (the LoRA's own layout aside).
    """

    tier: Tier
    prerouter: Adapter | None
    lora: Adapter | None


def find_adapters(directory: Path, *, prerouter: bool, lora: bool, tier_name: str | None) -> Adapters:
    """Read the wanted adapter files of `directory` and find out the tier.

    The tier is the one in the files' contract; for files without one, and for serving without any, the
    built-in tier `tier_name` (or the one in the file's name). Raises Edge0Error naming the missing file and
    the flag that does without.
    """
    found = {kind: find_adapter(directory, kind, tier_name) for kind in KINDS}
    wanted: dict[Kind, bool] = {"prerouter": prerouter, "lora": lora}
    for kind in KINDS:
        if wanted[kind] and found[kind] is None:
            name = f"{kind}_edge0_{tier_name or '<tier>'}.safetensors"
            raise Edge0Error(
                f"{directory / name}: file not found; put the exported file there, or serve without it: --no-{kind}"
            )
    known = found["prerouter"] or found["lora"]  # a file that is not served still says the K it was made for
    if known is None and tier_name is None:
        raise Edge0Error(f"{directory}: no adapter file there names a tier; choose one with --tier")
    tier = known.tier if known else builtin_tier(str(tier_name))
    return Adapters(tier, found["prerouter"] if prerouter else None, found["lora"] if lora else None)


def load_model(
    checkpoint: Checkpoint,
    *,
    arm: str | None,
    prerouter: bool,
    lora: bool,
    budget_bytes: int | None,
    io_threads: int,
    allow_mismatch: bool,
    tier_name: str | None,
    float32: bool,
    context: int | None = None,
) -> Model:
    """Load a model directory; the arguments are those of `Engine.load`, the budget in bytes.

    The directory's other files are to be checked before (`check_library_files`).

    Bindings that can't be checked are logged as warnings. Raises Edge0Error before anything large is read.
    """
    if arm is None:
        arm = DEFAULT if prerouter else "on_demand"
    needs_heads = arm_class(arm).needs_heads
    if needs_heads and not prerouter:
        raise Edge0Error(f"arm: {arm} needs the prerouter file; leave out one of --arm and --no-prerouter")
    if not 1 <= io_threads <= MAX_IO_THREADS:
        raise Edge0Error(f"io_threads: {io_threads} must be between 1 and {MAX_IO_THREADS}")
    adapters = find_adapters(checkpoint.directory, prerouter=needs_heads, lora=lora, tier_name=tier_name)
    _check_supported(adapters.tier)
    checkpoint.check_architecture(adapters.tier)
    base = checkpoint.identity()
    for note in check_binding(base, adapters.prerouter, adapters.lora, allow_mismatch):
        log.warning("%s", note)
    identity = Identity(
        base.fingerprint, *(None if a is None else a.sha256 for a in (adapters.prerouter, adapters.lora))
    )
    store = ExpertStore.open(checkpoint, adapters.tier, base.fingerprint)
    float32 = float32 or needs_float32()
    with contextlib.ExitStack() as undo:
        undo.callback(store.close)
        model = build_model(
            checkpoint, adapters, identity, store, arm=arm, context=context, io_threads=io_threads, float32=float32
        )
        undo.callback(model.close)
        if model.arm.streams:
            model.resize(budget_bytes)
        else:
            model.hold_embedding(True)
            model.widen()
        evaluate(model.network)
        undo.pop_all()
    return model


def build_model(
    checkpoint: Checkpoint,
    adapters: Adapters,
    identity: Identity,
    store: ExpertStore,
    *,
    arm: str,
    io_threads: int,
    float32: bool,
    context: int | None = None,
) -> Model:
    """A model that knows what it needs (`Model.plan_for`); nothing of the base is read yet."""
    tier = adapters.tier
    context_length = _context_length(checkpoint)
    network = load_network(checkpoint.directory, tier.layout, float32=float32)
    modules = dict(network.named_modules())
    if float32:
        to_float32(network, packed_too=False)
    base_bytes = network_nbytes(network) - _expert_nbytes(tier, modules)
    embedding_bytes = network_nbytes(modules[tier.layout.embedding]) if store.embedding else 0
    heads, lora_modules, adapter_bytes = _serve_adapters(network, adapters, float32)
    streams = arm_class(arm).streams
    if not streams:
        experts = sum(store.num_experts * slot_nbytes(tensors, float32) for tensors in store.tensors.values())
        check_memory(f"arm {arm}", base_bytes + adapter_bytes + experts, "choose one that streams")
    if needs_float32():
        _slice_mixers(tier, modules)
    running = Running()
    gates = _wrap_blocks(tier, modules, running, ResidentSwitchGLU if not streams else StreamingSwitchGLU)
    embedding: Any = modules[tier.layout.embedding]
    if store.embedding:
        embedding = StreamedEmbedding(embedding, store, float32)
        network.update_modules(tree_unflatten([(tier.layout.embedding, embedding)]))
    widened, cast = widened_nbytes(network) if float32 else (0, 0)
    return Model(
        network=network,
        parts=Parts(tier, gates, heads, embedding),
        running=running,
        store=store,
        identity=identity,
        context_length=context_length,
        lora_modules=lora_modules,
        fixed=Fixed(
            float32=float32,
            resident_bytes=base_bytes - embedding_bytes,
            embedding_bytes=embedding_bytes,
            adapter_bytes=adapter_bytes,
            widened_bytes=widened + (heads.nbytes if heads and heads.packed else 0),
            cast_bytes=cast,
            io_threads=io_threads,
        ),
        arm=arm,
        context=context,
    )


def needs_float32() -> bool:
    """Whether the network must compute in float32; else everything stays as the files have it (Metal).

    mlx's CPU kernels accumulate bf16 and fp16 in the low precision: 5 % error per matmul, and slower (docs/parity.md 4).
    """
    return mx.default_device().type == mx.DeviceType.cpu


def _serve_adapters(network: nn.Module, adapters: Adapters, float32: bool) -> tuple[Heads | None, int, int]:
    """(heads, modules that carry a LoRA now, bytes that both take)."""
    before = network_nbytes(network)
    lora_modules = 0
    if adapters.lora is not None:
        halves = all(tensor.dtype == np.float16 for tensor in adapters.lora.tensors.values())
        dtype = mx.float16 if halves or not float32 else mx.float32  # cast beside float32 inputs, with the same bits
        lora_modules = apply_lora(network, adapters.lora.tensors, adapters.lora.tier.lora, dtype)
    adapter_bytes = network_nbytes(network) - before
    if adapters.prerouter is None:
        return None, lora_modules, adapter_bytes
    heads = Heads(adapters.tier, adapters.prerouter.tensors, packed=float32)
    return heads, lora_modules, adapter_bytes + heads.nbytes


def _wrap_blocks(tier: Tier, modules: Mapping[str, Any], running: Running, experts: type[Any]) -> dict[int, Gate]:
    """Replace gate and expert call of every MoE block; returns layer -> gate."""
    gates = {}
    for layer in tier.layout.moe_layers(tier.architecture):
        block_path, _, name = _experts_path(tier, layer).rpartition(".")
        block = modules[block_path]
        block[name] = experts(block[name], layer, running)
        gates[layer] = wrap_gate(block, layer, tier, running)
    return gates


def _slice_mixers(tier: Tier, modules: Mapping[str, Any]) -> None:
    """Have recurrent mixers take prompts in slices."""
    for layer in range(tier.architecture["num_hidden_layers"]):
        if tier.layout.kept(tier.architecture, layer).state:
            mixer = next(iter(tier.layout.layer_modules(tier.architecture, layer))).partition(".")[0]
            block = modules[tier.layout.layer_path(layer)]
            block[mixer] = SlicedMixer(block[mixer])


def _experts_path(tier: Tier, layer: int) -> str:
    return f"{tier.layout.layer_path(layer)}.{tier.layout.experts}"


def _expert_nbytes(tier: Tier, modules: Mapping[str, nn.Module]) -> int:
    layers = tier.layout.moe_layers(tier.architecture)
    return sum(network_nbytes(modules[_experts_path(tier, layer)]) for layer in layers)


def _check_supported(tier: Tier) -> None:
    if tier.router.kind == "softmax_topk" and tier.router.scaling != 1.0:
        raise Edge0Error(f"tier.router.scaling: {tier.router.scaling} isn't served for softmax_topk; it must be 1")


def _context_length(checkpoint: Checkpoint) -> int:
    value = checkpoint.text_config().get("max_position_embeddings")
    if type(value) is not int or value < 1:
        raise Edge0Error(
            f"{checkpoint.directory / 'config.json'}: max_position_embeddings: {value!r} must be the context length"
            " in tokens; copy config.json from the base again"
        )
    return value
