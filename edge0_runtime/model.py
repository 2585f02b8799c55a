"""A loaded model: its network, the experts in memory, and the arm that says how it is served. It knows no sequence."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn

from edge0_runtime.arms import Arm, Parts, arm_class
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.machine import memory_limit_bytes
from edge0_runtime.contract.tier import Tier
from edge0_runtime.embedding import StreamedEmbedding
from edge0_runtime.experts.memory import ExpertMemory
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.experts.streaming import StreamingSwitchGLU
from edge0_runtime.heads import Heads
from edge0_runtime.host.disk import disk_speed
from edge0_runtime.layers import Layers
from edge0_runtime.network import to_float32
from edge0_runtime.plan import PREFIX_SHARE, Keeping, Plan, largest_chunk, make_plan
from edge0_runtime.step import Running

PROBE_BYTES = 64 * 2**20  # read at load to say what the disk gives
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Fingerprint of the base; sha256 of the served adapter files, None for one that isn't served."""

    fingerprint: str
    prerouter_sha256: str | None
    lora_sha256: str | None


@dataclass(frozen=True)
class Fixed:
    """What no request changes.

    Attributes:
        float32: the network computes in it. io_threads: threads that read experts.
        resident_bytes: of the base without its routed experts, as they are in memory. adapter_bytes: heads and LoRA.
        embedding_bytes: of an embedding whose rows may stay on the disk, not counted in the base.
        widened_bytes: what all that is packed takes more in float32 (`Model.widen`).
        cast_bytes: of the largest cast for one call.
    """

    float32: bool
    resident_bytes: int
    embedding_bytes: int
    adapter_bytes: int
    widened_bytes: int
    cast_bytes: int
    io_threads: int


class Model:
    """One model directory in memory; one sequence at a time may run on it (`sequence.Sequence`).

    Attributes:
        network: mlx-lm's, gates and expert calls wrapped. layers: its layers. parts: what arms use.
            running: which step the wrappers serve. base: the network's own modules by path, inside what wraps them.
        adapters_dir: where its adapter files were found; None: beside the base.
        shared: other models of the same base compute from the same memory (`sharing`).
        identity: of the files. context_length: tokens. keeping: what plans reserve memory for. lora_modules: how many modules
            carry a LoRA.
        store: the experts on disk. memory, plan: those in memory, and why so many; None where all are resident.
        arm, arm_name: how it is served. widened: what is packed is in float32, for good.
        dropped: routed experts since construction that weren't there to compute; anything but 0 is a bug.
        predicted_steps: decode steps since construction in which something was routed before its layer's turn.
    """

    def __init__(
        self,
        *,
        network: nn.Module,
        base: Mapping[str, nn.Module],
        parts: Parts,
        running: Running,
        store: ExpertStore,
        identity: Identity,
        context_length: int,
        lora_modules: int,
        fixed: Fixed,
        arm: str,
        keeping: Keeping,
    ) -> None:
        """Served by the arm of that name. Experts that stream are still to be given memory (`resize`)."""
        self.network, self.layers, self.base = network, Layers(network), base
        self.shared = False
        self.adapters_dir: Path | None = None
        self.parts, self.running = parts, running
        self.store, self.identity = store, identity
        self.context_length, self.lora_modules = context_length, lora_modules
        self.fixed, self.keeping = fixed, keeping
        self.memory: ExpertMemory | None = None
        self.plan: Plan | None = None
        self.widened = False
        self.dropped = self.predicted_steps = 0
        self._arms: dict[str, Arm] = {}  # made once: what one has learnt stays with it
        self._serve_by(arm)

    @property
    def tier(self) -> Tier:
        """What is served."""
        return self.parts.tier

    @property
    def heads(self) -> Heads | None:
        """The prerouter's; None if the model was loaded without."""
        return self.parts.heads

    @property
    def vocab_size(self) -> int:
        """Ids of a request lie below it."""
        size: int = self.tier.architecture["vocab_size"]  # equal to config.json's, checked at load
        return size

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens per forward pass."""
        return largest_chunk(self.tier) if self.plan is None else self.plan.prefill_chunk

    @property
    def prefill_width(self) -> int:
        """Prompt tokens that go through the layers together, chunk by chunk."""
        return self.prefill_chunk if self.plan is None else self.plan.prefill_width

    @property
    def prefix_bytes(self) -> int:
        """Memory for snapshots of conversations; without a plan, a share is one of what the budget would be by default."""
        if self.plan is not None:
            return self.plan.prefix_bytes
        wanted = self.keeping.prefix_bytes
        return int(PREFIX_SHARE * memory_limit_bytes() / 4) if wanted is None else wanted

    @property
    def never_waits(self) -> bool:
        """Whether all experts are in memory for good, so that a step may be built before the last one is known."""
        return self.memory is None or self.memory.full

    def set_arm(self, name: str) -> None:
        """Route and read in this way from the next sequence on. Raises Edge0Error where this model can't."""
        wanted = arm_class(name)
        if wanted.streams != self.arm.streams:
            raise Edge0Error(f"arm: {self.arm_name} can't become {name}; load the model again")
        if wanted.needs_heads and self.heads is None:
            raise Edge0Error(f"arm: {name} needs the heads; load the model with them")
        self._serve_by(name)

    def _serve_by(self, name: str) -> None:
        if name not in self._arms:
            self._arms[name] = arm_class(name)(self.parts)
        self.arm, self.arm_name = self._arms[name], name

    def resize(self, budget_bytes: int | None) -> None:
        """Hold as many experts as fit into another budget; between requests only. Says the plan first."""
        experts = self._streaming()
        if not experts:
            raise Edge0Error(f"memory_budget: arm {self.arm_name} holds all experts; it has no budget")
        if self.shared and self.plan is not None:
            raise Edge0Error("memory_budget: several models share it; start them again with another")
        self.recover()
        self.store.check()
        plan = self._measured(self.plan_for(budget_bytes))
        log.info("%s", plan.text())
        if self.memory is not None:
            self.memory.close()
        self.memory = None  # and with it the slots, before new ones are made
        for module in experts:
            module.detach()
        self.hold_embedding(plan.embedding_held)
        if plan.widened_bytes:
            self.widen()
        memory = ExpertMemory(self.store, self.fixed.io_threads, plan.slots, self.tier.k, self.fixed.float32)
        self.compute_from(memory, plan)

    def compute_from(self, memory: ExpertMemory, plan: Plan) -> None:
        """Take the experts from these slots, which were made by that plan."""
        for module in self._streaming():
            module.attach(memory)
        self.memory, self.plan = memory, plan

    def _streaming(self) -> list[StreamingSwitchGLU]:
        return [module for module in self.network.modules() if isinstance(module, StreamingSwitchGLU)]

    def plan_for(self, budget_bytes: int | None, memory_bytes: int | None = None, context: int | None = None) -> Plan:
        """What a budget buys on a machine of that much memory, this one by default, beside that context; reads nothing."""
        keeping = self.keeping if context is None else dataclasses.replace(self.keeping, context=context)
        return make_plan(
            self.tier,
            self.store,
            budget_bytes=budget_bytes,
            resident_bytes=self.fixed.resident_bytes + self.widened * self.fixed.widened_bytes,
            embedding_bytes=self.fixed.embedding_bytes,
            adapter_bytes=self.fixed.adapter_bytes,
            widened_bytes=self.fixed.widened_bytes if self.plan is None else 0,  # at load only: it can't be undone
            cast_bytes=0 if self.widened else self.fixed.cast_bytes,
            longest=self.context_length,
            keeping=keeping,
            predicted_layers=0 if self.heads is None else len(self.tier.consumers),
            float32=self.fixed.float32,
            memory_bytes=memory_bytes,
        )

    def _measured(self, plan: Plan) -> Plan:
        """With the disk's speed, where it counts."""
        if plan.full:
            return plan
        speed = disk_speed(self.store, threads=self.fixed.io_threads, max_bytes=PROBE_BYTES)
        return dataclasses.replace(plan, disk_bytes_per_second=None if speed is None else speed.bytes_per_second)

    def widen(self) -> None:
        """Cast what is packed to float32 once instead of in every call (`network.to_float32`): where memory isn't scarce."""
        if not self.fixed.float32 or self.widened:
            return
        to_float32(self.network, packed_too=True)
        if self.heads is not None:
            self.heads.widen()
        self.widened = True

    def recover(self) -> None:
        """After a request that the files of the experts failed, go on with these files as they are now.

        If they were written to, no expert that was read before is kept. Raises Edge0Error if they aren't the loaded base's any
        more, as far as its fingerprint tells.
        """
        if self.store.failed and self.store.recover():
            self.forget_experts()

    def forget_experts(self) -> None:
        """Hold no expert any more, unless all are there for good, and no row of the embedding."""
        if isinstance(self.parts.embed, StreamedEmbedding):
            self.parts.embed.forget()
        if self.memory is not None:
            self.memory.forget()

    def hold_embedding(self, held: bool) -> None:
        """Have the whole embedding in memory, or read its rows as tokens need them; no matter where it can't but be held."""
        if isinstance(self.parts.embed, StreamedEmbedding):
            if held:
                self.parts.embed.hold()
            else:
                self.parts.embed.release()

    def close(self) -> None:
        """End the I/O threads and close the files of the experts."""
        if self.memory is not None:
            self.memory.close()
        self.store.close()
