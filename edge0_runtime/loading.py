"""From a model directory to a `Model`: checked strictly, then loaded.

The mathematics is mlx-lm's. In every MoE block two submodules are replaced, the gate and the expert call, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from edge0_runtime.arms import Parts, arm_class
from edge0_runtime.contract.checkpoint import BaseIdentity, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier
from edge0_runtime.embedding import StreamedEmbedding
from edge0_runtime.experts.pool import slot_nbytes
from edge0_runtime.experts.reader import MAX_IO_THREADS
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.experts.streaming import ResidentSwitchGLU, StreamingSwitchGLU
from edge0_runtime.gates import Gate, wrap_gate
from edge0_runtime.heads import Heads
from edge0_runtime.lora import apply_lora
from edge0_runtime.model import Fixed, Identity, Model
from edge0_runtime.network import (
    check_kv_bits,
    evaluate,
    load_network,
    network_nbytes,
    share_base,
    take_slices,
    to_float32,
    widened_nbytes,
)
from edge0_runtime.plan import DEFAULT_KEEPING, Keeping, check_memory
from edge0_runtime.serving import Adapters, Serving, find_checked_adapters
from edge0_runtime.sharing import follow, lead
from edge0_runtime.step import Running

log = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint,
    serving: Serving,
    *,
    budget_bytes: int | None,
    io_threads: int,
    allow_mismatch: bool,
    float32: bool,
    keeping: Keeping = DEFAULT_KEEPING,
) -> Model:
    """Load a model directory; the arguments are those of `Engine.load`, the budget in bytes.

    The directory's other files are to be checked before (`check_library_files`).

    Bindings that can't be checked are logged as warnings. Raises Edge0Error before anything large is read.
    """
    (model,) = load_models(
        checkpoint, [serving], budget_bytes=budget_bytes, io_threads=io_threads, allow_mismatch=allow_mismatch,
        float32=float32, keeping=keeping,
    )  # fmt: skip
    return model


def load_models(
    checkpoint: Checkpoint,
    servings: Sequence[Serving],
    *,
    budget_bytes: int | None,
    io_threads: int,
    allow_mismatch: bool,
    float32: bool,
    keeping: Keeping = DEFAULT_KEEPING,
) -> list[Model]:
    """One base served in several ways, as `load_model` would serve it in each: its tensors and the experts are in memory once.

    One sequence at a time may run on all of them together. Closing one closes all.
    """
    if not 1 <= io_threads <= MAX_IO_THREADS:
        raise Edge0Error(f"io_threads: {io_threads} must be between 1 and {MAX_IO_THREADS}")
    if keeping.kv_bits is not None:
        log.warning("kv_bits: keys and values of %d bits aren't what was trained with", keeping.kv_bits)
    arms = [serving.arm_name for serving in servings]
    if len({arm_class(arm).streams for arm in arms}) > 1:
        raise Edge0Error(
            f"arm: {', '.join(dict.fromkeys(arms))}: one holds all experts and another streams them; they share no memory, so"
            " serve them by servers of their own"
        )
    base = checkpoint.identity()
    adapters = [
        find_checked_adapters(checkpoint, base, serving, arm, allow_mismatch)
        for serving, arm in zip(servings, arms, strict=True)
    ]
    store = ExpertStore.open(checkpoint, adapters[0].tier, base.fingerprint)
    models: dict[int, Model] = {}
    with contextlib.ExitStack() as undo:
        undo.callback(store.close)
        # The most experts a token need the shortest prompt chunks, and the plan is the first one's.
        for index in sorted(range(len(servings)), key=lambda index: -adapters[index].tier.k):
            models[index] = build_model(
                checkpoint, adapters[index], _identity(base, adapters[index]), store, arm=arms[index], keeping=keeping,
                io_threads=io_threads, float32=float32 or needs_float32(), built=list(models.values()),
            )  # fmt: skip
            models[index].adapters_dir = servings[index].adapters
        leader, *followers = models.values()
        undo.callback(leader.close)
        lead(leader, followers)
        if leader.arm.streams:
            leader.resize(budget_bytes)
        else:
            leader.hold_embedding(True)
            leader.widen()
        follow(leader, followers)
        for model in models.values():
            evaluate(model.network)
        undo.pop_all()
    return [models[index] for index in range(len(servings))]


def _identity(base: BaseIdentity, adapters: Adapters) -> Identity:
    return Identity(base.fingerprint, *(None if a is None else a.sha256 for a in (adapters.prerouter, adapters.lora)))


def build_model(
    checkpoint: Checkpoint,
    adapters: Adapters,
    identity: Identity,
    store: ExpertStore,
    *,
    arm: str,
    io_threads: int,
    float32: bool,
    keeping: Keeping = DEFAULT_KEEPING,
    built: Sequence[Model] = (),
) -> Model:
    """A model that knows what it needs (`Model.plan_for`); nothing of the base is read yet.

    Of models that are `built` for the same base it takes that, and the adapters that it has in common with one.
    """
    tier = adapters.tier
    context_length = context_length_of(checkpoint)
    network = load_network(checkpoint.directory, tier.layout, float32=float32)
    check_kv_bits(network, keeping.kv_bits)
    modules = dict(network.named_modules())
    if float32:
        to_float32(network, packed_too=False)
    if built:
        share_base(modules, built[0].base)
    base_bytes = network_nbytes(network) - _expert_nbytes(tier, modules)
    embedding_bytes = network_nbytes(modules[tier.layout.embedding]) if store.embedding else 0
    heads, lora_modules, adapter_bytes = _serve_adapters(network, adapters, float32, identity, built)
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
        embedding = built[0].parts.embed if built else StreamedEmbedding(embedding, store, float32)
        network.update_modules(tree_unflatten([(tier.layout.embedding, embedding)]))
    widened, cast = widened_nbytes(network) if float32 else (0, 0)
    return Model(
        network=network,
        base=modules,
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
        keeping=keeping,
    )


def needs_float32() -> bool:
    """Whether the network must compute in float32; else everything stays as the files have it (Metal).

    mlx's CPU kernels accumulate bf16 and fp16 in the low precision: 5 % error per matmul, and slower (docs/parity.md 4).
    """
    return mx.default_device().type == mx.DeviceType.cpu


def _serve_adapters(
    network: nn.Module, adapters: Adapters, float32: bool, identity: Identity, built: Sequence[Model]
) -> tuple[Heads | None, int, int]:
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
    same = (other.heads for other in built if other.identity.prerouter_sha256 == identity.prerouter_sha256)
    heads = next(same, None) or Heads(adapters.tier, adapters.prerouter.tensors, packed=float32)
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
            take_slices(modules[f"{tier.layout.layer_path(layer)}.{mixer}"])


def _experts_path(tier: Tier, layer: int) -> str:
    return f"{tier.layout.layer_path(layer)}.{tier.layout.experts}"


def _expert_nbytes(tier: Tier, modules: Mapping[str, nn.Module]) -> int:
    layers = tier.layout.moe_layers(tier.architecture)
    return sum(network_nbytes(modules[_experts_path(tier, layer)]) for layer in layers)


def context_length_of(checkpoint: Checkpoint) -> int:
    """By config.json. Raises Edge0Error where it says none."""
    value = checkpoint.text_config().get("max_position_embeddings")
    if type(value) is not int or value < 1:
        raise Edge0Error(
            f"{checkpoint.directory / 'config.json'}: max_position_embeddings: {value!r} must be the context length"
            " in tokens; copy config.json from the base again"
        )
    return value
