"""The served model: mlx-lm's network on the int4 base; experts streamed, routing predicted, LoRA unmerged.

The mathematics is mlx-lm's. In every MoE block two submodules are replaced, the gate and the expert call, and
nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
from mlx_lm.models.cache import make_prompt_cache

from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind, check_binding, find_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier, builtin_tier
from edge0_runtime.experts.cache import ExpertCache
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.experts.streaming import StreamingSwitchGLU
from edge0_runtime.gates import prerouted
from edge0_runtime.lora import apply_lora
from edge0_runtime.network import load_network
from edge0_runtime.prerouter import Prerouter
from edge0_runtime.routing import RoutingLog

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


class ServedModel:
    """The network of one model directory and the state of the one sequence that it is processing.

    Attributes:
        tier: what is served. lora_modules: how many modules carry a LoRA.
        fingerprint, prerouter_sha256, lora_sha256: of the base and the served files (None for one that isn't
            served).
        vocab_size, context_length: limits of a request, in ids and tokens.
        store, cache: the experts on disk and in memory. prerouter: None when layers keep their own gates.
        log: what the last forward pass routed to.
    """

    def __init__(self, checkpoint: Checkpoint, fingerprint: str, adapters: Adapters, budget_bytes: int | None) -> None:
        """`fingerprint` is the checkpoint's. `budget_bytes` is for the expert cache.

        Without a budget it takes a quarter of the machine's memory, or what all experts need if that is less.
        """
        tier = adapters.tier
        _check_supported(tier)
        self.tier = tier
        self.vocab_size: int = tier.architecture["vocab_size"]  # equal to config.json's, checked in `build`
        self.context_length = _context_length(checkpoint)
        self.fingerprint = fingerprint
        self.prerouter_sha256, self.lora_sha256 = (
            None if adapter is None else adapter.sha256 for adapter in (adapters.prerouter, adapters.lora)
        )
        self.store = ExpertStore.open(checkpoint, tier)
        try:
            budget = _default_budget(self.store) if budget_bytes is None else budget_bytes
            self.cache = ExpertCache(self.store, budget)
            self.log = RoutingLog()
            # mlx's CPU kernels accumulate bf16 and fp16 in the low precision: 5 % error per matmul, and
            # slower (docs/parity.md 4). On Metal everything stays as the files have it.
            on_cpu = mx.default_device().type == mx.DeviceType.cpu
            self._network = load_network(checkpoint.directory, tier.layout, float32=on_cpu)
            self._embed = dict(self._network.named_modules())[tier.layout.embedding]
            adapter_dtype = mx.float32 if on_cpu else mx.float16
            heads = adapters.prerouter
            self.prerouter = None if heads is None else Prerouter(tier, heads.tensors, adapter_dtype)
            self._wrap_blocks()
            if on_cpu:
                self._network.set_dtype(mx.float32)
            lora = adapters.lora
            self.lora_modules = 0
            if lora is not None:
                self.lora_modules = apply_lora(self._network, lora.tensors, lora.tier.lora, adapter_dtype)
            _evaluate(self._network)
        except BaseException:
            self.store.close()
            raise
        self.start()

    def _wrap_blocks(self) -> None:
        layout = self.tier.layout
        modules = dict(self._network.named_modules())
        for layer in layout.moe_layers(self.tier.architecture):
            path, _, experts = f"{layout.layer_path(layer)}.{layout.experts}".rpartition(".")
            block = modules[path]
            block[experts] = StreamingSwitchGLU(block[experts], layer, self.cache, self.log)
            prerouted(block, layer, self.tier, self.prerouter, self.log)

    # -- one sequence ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new sequence; nothing of the last one remains."""
        self._kv = make_prompt_cache(self._network)
        self._step = 0
        self._predicted_for: mx.array | None = None  # the token that the next step's predictions are for
        self._predictions: mx.array | None = None
        self.log.clear()
        if self.prerouter is not None:
            self.prerouter.reset()

    def prefill(self, token_ids: Sequence[int], *, last: bool) -> mx.array | None:
        """Process a chunk of the prompt.

        Returns:
            Logits [vocabulary] after the chunk's last token when `last`, not evaluated yet; else None, and
            the chunk is done.
        """
        if self.prerouter is not None:
            self.prerouter.begin_prefill()
        logits = self._forward(token_ids)
        if last:
            return logits
        mx.eval([entry.state for entry in self._kv])
        mx.clear_cache()  # a chunk's stacks have odd sizes that the allocator would keep
        return None

    def decode(self, token_id: int) -> mx.array:
        """Process one generated token: logits [vocabulary] for the next, not evaluated yet.

        The step's predictions are those of `predict` if that was told this very token, else they are made here.
        """
        if self._predicted_for is None or self._predicted_for.item() != token_id:
            self.predict(mx.array(token_id))
        if self.prerouter is not None:
            self.prerouter.begin_decode(self._step)
        self._step += 1
        return self._forward([token_id])

    def predict(self, token: mx.array) -> None:
        """Run all heads for the step that will process `token`, a scalar id that may not be evaluated yet.

        To be called as soon as the token is chosen; `pending` then has what to evaluate together with it.
        """
        self._predicted_for = token
        if self.prerouter is not None:
            self._predictions = self.prerouter.predict(self._embed(token[None])[0])

    def executed(self) -> np.ndarray:
        """Experts of the last token processed: [MoE layers, K], sorted."""
        return np.stack([np.sort(self.log.executed[layer][-1]) for layer in sorted(self.log.executed)])

    def pending(self) -> list[mx.array]:
        """Predictions for the next step: to be evaluated together with its token."""
        return [] if self._predictions is None else [self._predictions]

    def _forward(self, token_ids: Sequence[int]) -> mx.array:
        self._predicted_for = None
        logits_1TV = self._network(mx.array([list(token_ids)]), cache=self._kv)
        if self.prerouter is not None:
            self.prerouter.advance(self.log.executed)
        return logits_1TV[0, -1]

    def close(self) -> None:
        """Close the files of the experts."""
        self.store.close()


def build(
    directory: Path,
    *,
    prerouter: bool,
    lora: bool,
    budget_bytes: int | None,
    allow_mismatch: bool,
    tier_name: str | None,
) -> ServedModel:
    """Check a model directory strictly, then load it. Bindings that can't be checked are logged as warnings."""
    checkpoint = Checkpoint.open(directory)
    adapters = find_adapters(directory, prerouter=prerouter, lora=lora, tier_name=tier_name)
    checkpoint.check_architecture(adapters.tier)
    fingerprint = checkpoint.fingerprint()
    for note in check_binding(fingerprint, adapters.prerouter, adapters.lora, allow_mismatch):
        log.warning("%s", note)
    return ServedModel(checkpoint, fingerprint, adapters, budget_bytes)


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


def _default_budget(store: ExpertStore) -> int:
    return min(store.total_nbytes, psutil.virtual_memory().total // 4)


def _evaluate(network: nn.Module) -> None:
    """Read all resident arrays now, parameters or not: a lazy array belongs to the thread that made it."""
    for module in network.modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])
