"""The served model: mlx-lm's network on the int4 base; experts streamed, routing predicted, LoRA unmerged.

The mathematics is mlx-lm's. In every MoE block two submodules are replaced, the gate and the expert call, and
nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from edge0_runtime.arms import SameToken
from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind, find_adapter
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier, builtin_tier
from edge0_runtime.experts.memory import ExpertMemory
from edge0_runtime.experts.pool import slot_nbytes
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.experts.streaming import ResidentSwitchGLU, StreamingSwitchGLU
from edge0_runtime.gates import prerouted
from edge0_runtime.lora import apply_lora
from edge0_runtime.measure.disk import disk_speed
from edge0_runtime.network import evaluate, load_network, network_nbytes, to_float32
from edge0_runtime.plan import Plan, check_memory, make_plan
from edge0_runtime.prerouter import Predictor, Prerouter
from edge0_runtime.routing import RoutingLog, block_choice
from edge0_runtime.settings import Arm

# A prompt chunk that routes to each expert at least this often on average uses nearly all of them: exp(-2) = 14 %
# would be left out by uniform routing.
WHOLE_LAYER_USES = 2
PROBE_BYTES = 64 * 2**20  # read at load to say what the disk gives
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


@dataclass(frozen=True)
class Serving:
    """How a model is to be served; see `Engine.load`."""

    arm: Arm
    budget_bytes: int | None
    io_threads: int


class ServedModel:
    """The network of one model directory and the state of the one sequence that it is processing.

    Attributes:
        tier: what is served. lora_modules: how many modules carry a LoRA. serving: how.
        fingerprint, prerouter_sha256, lora_sha256: of the base and the served files (None for one that isn't
            served).
        vocab_size, context_length: limits of a request, in ids and tokens.
        store: the experts on disk. memory, plan: those in memory, and why so many; None where all are resident.
        prerouter: None without heads. predictor: what routes instead of the layers' own gates, if anything does.
        log: what the last forward pass routed to.
    """

    def __init__(self, checkpoint: Checkpoint, fingerprint: str, adapters: Adapters, serving: Serving) -> None:
        """`fingerprint` is the checkpoint's."""
        tier = adapters.tier
        _check_supported(tier)
        self.tier, self.serving = tier, serving
        self.vocab_size: int = tier.architecture["vocab_size"]  # equal to config.json's, checked in `build`
        self.context_length = _context_length(checkpoint)
        self.fingerprint = fingerprint
        self._checkpoint = checkpoint
        self.prerouter_sha256, self.lora_sha256 = (
            None if adapter is None else adapter.sha256 for adapter in (adapters.prerouter, adapters.lora)
        )
        self.log = RoutingLog()
        self.predictor: Predictor | None = None
        self.memory: ExpertMemory | None = None
        self.plan: Plan | None = None
        self.store = ExpertStore.open(checkpoint, tier)
        try:
            self._load(checkpoint.directory, adapters)
        except BaseException:
            self.close()
            raise
        self.start()

    def _load(self, directory: Path, adapters: Adapters) -> None:
        # mlx's CPU kernels accumulate bf16 and fp16 in the low precision: 5 % error per matmul, and
        # slower (docs/parity.md 4). On Metal everything stays as the files have it.
        self._float32 = mx.default_device().type == mx.DeviceType.cpu
        self._network = load_network(directory, self.tier.layout, float32=self._float32)
        self._modules = dict(self._network.named_modules())
        self._embed = self._modules[self.tier.layout.embedding]
        if self._float32:
            to_float32(self._network, packed_too=False)
        adapter_dtype = mx.float32 if self._float32 else mx.float16
        heads, lora = adapters.prerouter, adapters.lora
        self.prerouter = None if heads is None else Prerouter(self.tier, heads.tensors, adapter_dtype)
        network_bytes = network_nbytes(self._network)
        self.lora_modules = 0
        if lora is not None:
            self.lora_modules = apply_lora(self._network, lora.tensors, lora.tier.lora, adapter_dtype)
        adapter_bytes = network_nbytes(self._network) - network_bytes
        adapter_bytes += 0 if self.prerouter is None else self.prerouter.nbytes
        base_bytes = network_bytes - self._expert_nbytes()
        self._fixed = {"resident_bytes": base_bytes, "adapter_bytes": adapter_bytes}
        if self.serving.arm == "resident":
            self._check_resident()
        self._wrap_blocks()
        self.set_arm(self.serving.arm)
        if self.serving.arm != "resident":
            self.resize(self.serving.budget_bytes)
        if self._float32 and (self.plan is None or self.plan.full):  # memory isn't scarce
            before = network_nbytes(self._network)
            to_float32(self._network, packed_too=True)
            self._fixed["resident_bytes"] += network_nbytes(self._network) - before
        evaluate(self._network)

    def _check_resident(self) -> None:
        experts = sum(
            self.store.num_experts * slot_nbytes(tensors, self._float32) for tensors in self.store.tensors.values()
        )
        check_memory("arm resident", sum(self._fixed.values()) + experts, "choose one that streams")

    @property
    def _moe_layers(self) -> tuple[int, ...]:
        return self.tier.layout.moe_layers(self.tier.architecture)

    def _block(self, layer: int) -> Any:
        """The layer's MoE block."""
        return self._modules[self._experts_path(layer).rpartition(".")[0]]

    def _experts_path(self, layer: int) -> str:
        return f"{self.tier.layout.layer_path(layer)}.{self.tier.layout.experts}"

    def _expert_nbytes(self) -> int:
        return sum(network_nbytes(self._modules[self._experts_path(layer)]) for layer in self._moe_layers)

    def _wrap_blocks(self) -> None:
        name = self.tier.layout.experts.rpartition(".")[2]
        wrapper = ResidentSwitchGLU if self.serving.arm == "resident" else StreamingSwitchGLU
        for layer in self._moe_layers:
            block = self._block(layer)
            block[name] = wrapper(block[name], layer, self.log)
            prerouted(block, layer, self.tier, self.log)

    def set_arm(self, arm: Arm) -> None:
        """Route and read in this way from the next request on. Raises Edge0Error where this model can't."""
        if "resident" in (arm, self.serving.arm) and arm != self.serving.arm:
            raise Edge0Error(f"arm: {self.serving.arm} can't become {arm}; load the model again")
        if arm == "prerouter" and self.prerouter is None:
            raise Edge0Error("arm: prerouter needs the heads; load the model with them")
        self.predictor = self.prerouter if arm == "prerouter" else None
        if arm == "same_token":
            gates = {layer: self._block(layer).gate.own for layer in self.tier.consumers}
            self.predictor = SameToken(self.tier, gates, self._stage)
        for layer in self._moe_layers:
            self._block(layer).gate.follow(self.predictor)
        self.serving = dataclasses.replace(self.serving, arm=arm)
        self._set_look_ahead()

    def _set_look_ahead(self) -> None:
        """Whether layers on their own gates say what the next one may need: only where somebody reads it then."""
        wanted = self.serving.arm in ("prerouter", "lookahead") and not self.never_waits
        for layer, above in itertools.pairwise(self._moe_layers):
            self._block(layer).gate.look_ahead(self._block(above).gate.own_choice if wanted else None)

    def resize(self, budget_bytes: int | None) -> None:
        """Hold as many experts as fit into another budget; between requests only. Says the plan first."""
        experts = [module for module in self._network.modules() if isinstance(module, StreamingSwitchGLU)]
        if not experts:
            raise Edge0Error("memory_budget: arm resident holds all experts; it has no budget")
        if self.store.failed:
            self._trust_again()
        self.store.check()
        plan = make_plan(
            self.tier,
            self.store,
            budget_bytes=budget_bytes,
            predicted_layers=0 if self.prerouter is None else len(self.tier.consumers),
            float32=self._float32,
            **self._fixed,
        )
        if not plan.full:
            speed = disk_speed(self.store, threads=self.serving.io_threads, max_bytes=PROBE_BYTES)
            plan = dataclasses.replace(plan, disk_bytes_per_second=None if speed is None else speed.bytes_per_second)
        log.info("%s", plan.text())
        if self.memory is not None:
            self.memory.close()
        self.memory = None  # and with it the slots, before new ones are made
        for module in experts:
            module.detach()
        self.memory = ExpertMemory(
            self.store, self.serving.io_threads, plan.slots, self.tier.k, self._float32, self.log
        )
        for module in experts:
            module.attach(self.memory)
        self.plan = plan
        self._set_look_ahead()

    def recover(self) -> None:
        """Before a request: after one that the files of the experts failed, go on with these files as they are now.

        If they were written to, no expert that was read before is kept. Raises Edge0Error if they aren't the loaded base's any
        more, as far as its fingerprint tells.
        """
        if self.store.failed and not self.never_waits:
            self._trust_again()

    def _trust_again(self) -> None:
        if written := self.store.written():
            if self._checkpoint.fingerprint() != self.fingerprint:
                raise Edge0Error(f"{written}. It is another base now: restore it, or load the engine again")
            log.warning("%s. Both ends of each tensor are the loaded base's: its experts are read again", written)
            if self.memory is not None:
                self.memory.forget()
        self.store.trust()

    # -- one sequence ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new sequence; nothing of the last one remains, and nothing is being read for it."""
        self._kv = make_prompt_cache(self._network)
        self._step = 0
        self._logits: mx.array | None = None  # of the last pass, maybe not evaluated yet
        self._predicted_for: mx.array | None = None  # the token that the next step's predictions are for
        self._predictions: mx.array | None = None
        self._choices: mx.array | None = None
        self._read_ahead = False  # whether the next step's experts have been asked for
        if self.memory is not None:
            self.memory.abandon()
        self.log.clear()
        if self.predictor is not None:
            self.predictor.reset()

    def prefill(self, token_ids: Sequence[int], *, last: bool) -> mx.array | None:
        """Process a chunk of the prompt.

        Returns:
            Logits [vocabulary] after the chunk's last token when `last`, not evaluated yet; else None, and
            the chunk is done.
        """
        if self.predictor is not None:
            self.predictor.begin_prefill()
        whole = len(token_ids) * self.tier.k >= WHOLE_LAYER_USES * self.tier.num_experts
        logits = self._forward(mx.array(list(token_ids)), whole_layers=whole)
        if last:
            return logits
        self._logits = None  # nobody wants them, so they aren't computed
        del logits
        mx.eval([entry.state for entry in self._kv])
        self._check_files()
        self._settled()
        mx.clear_cache()  # a chunk's arrays have odd sizes that the allocator would keep
        return None

    def decode(self, token_id: int) -> mx.array:
        """Process one generated token: logits [vocabulary] for the next, not evaluated yet.

        The step's predictions are those of `predict` if that was told this very token, else they are made here.
        """
        if self._predicted_for is None or self._predicted_for.item() != token_id:
            self.predict(mx.array(token_id))
        if not self._read_ahead:
            self.flush()
        return self.decode_ahead(mx.array(token_id))

    @property
    def never_waits(self) -> bool:
        """Whether all experts are in memory for good, so that a step may be built before the last one is known."""
        return self.memory is None or all(pool.full for pool in self.memory.pools)

    def decode_ahead(self, token: mx.array) -> mx.array:
        """`decode` of the token that `predict` was told, which may not be evaluated yet where the model never waits."""
        if self.predictor is not None:
            self.predictor.begin_decode(self._step)
        self._step += 1
        return self._forward(token[None], whole_layers=False)

    def predict(self, token: mx.array) -> None:
        """Run all heads for the step that will process `token`, a scalar id that may not be evaluated yet.

        To be called as soon as the token is chosen; `flush` then evaluates both together.
        """
        self._predicted_for = token
        self._read_ahead = False
        self._predictions = self._choices = None
        if self.predictor is None:
            return
        embedding_D = self._embed(token[None])[0]
        self._predictions = self.predictor.predict(embedding_D)
        if self._predictions is not None:
            self._choices = block_choice(self.tier.router, self._predictions, self.tier.k, embedding_D.dtype)

    def flush(self, *arrays: mx.array) -> None:
        """A step's one evaluation: its logits, `arrays` that depend on them, and what `predict` built.

        The experts of the next step are then known, as far as they are predicted, and their reads begin.
        """
        built = (self._logits, self._predictions, self._choices)
        mx.eval(*arrays, *(array for array in built if array is not None))
        self._check_files()
        self._settled()
        self._read_ahead = True
        if self.memory is None:
            return
        if self._choices is not None:
            assert self.prerouter is not None  # nothing else predicts a step ahead
            consumers, choices_OK = self.tier.consumers, np.array(self._choices).astype(np.int64)
            self.memory.stage(consumers, choices_OK[: len(consumers)])
            self.memory.guess(self.prerouter.guessed, choices_OK[len(consumers) :])
        elif self.serving.arm == "history" and self.log.executed:
            self.memory.want(self._moe_layers, self.executed())

    def executed(self) -> np.ndarray:
        """Experts of the last token processed: [MoE layers, K], sorted."""
        executed = self.log.executed
        return np.stack([np.sort(np.array(executed[layer][-1]).astype(np.int64)) for layer in sorted(executed)])

    def pending(self) -> list[mx.array]:
        """Predictions for the next step, maybe not evaluated yet."""
        return [] if self._predictions is None else [self._predictions]

    def _forward(self, tokens_T: mx.array, *, whole_layers: bool) -> mx.array:
        if self._logits is not None and not self.never_waits:
            mx.eval(self._logits)  # their graph may have to compute from slots that this pass overwrites
        self._settled()
        self._predicted_for = None
        if self.memory is not None:
            self.memory.begin(whole_layers=whole_layers)
        logits_1TV = self._network(tokens_T[None], cache=self._kv)
        if self.predictor is not None:
            self.predictor.advance(self.log.executed)
        self._logits = logits_1TV[0, -1]
        return self._logits

    def _settled(self) -> None:
        if self.memory is not None:
            self.memory.settled()

    def _check_files(self) -> None:
        """A pass is computed; whatever of it was read came from the files as they were opened."""
        if not self.never_waits:
            self.store.check()

    def _stage(self, layers: list[int], experts_LK: np.ndarray) -> None:
        if self.memory is not None:
            self.memory.stage(layers, experts_LK)

    def close(self) -> None:
        """End the I/O threads and close the files of the experts."""
        if self.memory is not None:
            self.memory.close()
        self.store.close()


def build(
    directory: Path,
    *,
    prerouter: bool,
    lora: bool,
    serving: Serving,
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
    return ServedModel(checkpoint, fingerprint, adapters, serving)


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
