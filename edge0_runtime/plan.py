"""What a memory budget buys: how many experts fit, and what a token will then cost the disk.

The budget is for everything that MLX's allocator holds: resident weights, adapters, keys and values of a context, a
prompt chunk's activations, and the slots that experts are read into.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from edge0_runtime.activations import KV_STEP, context_bytes, pass_bytes, token_bytes
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.machine import memory_limit_bytes
from edge0_runtime.contract.tier import Tier
from edge0_runtime.experts.pool import slot_nbytes
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.units import figures, size

GIB = 2**30
# Share of a layer's experts that the next token needs again, for the estimate (docs/method.md 3.2).
REPEATED = 0.25
# Prompt tokens per forward pass: the most whose activations take no more than this share of what experts could have.
PREFILL_CHUNKS = (512, 256, 128, 64, 32)
PASS_SHARE = 0.25
DEFAULT_CONTEXT = 4096  # tokens of prompt and answer that keys and values are reserved for
PREFIX_SHARE = 1 / 8  # of the budget, that snapshots of conversations may take where nobody says how much
# Prompt tokens that go through the layers together: as many whole chunks as have hidden states in this share of it. Each doubling
# halves what a long prompt reads, and decoding wants the memory.
WIDTH_SHARE = 1 / 32
# mlx's sorted gather gave wrong rows above this many (mlx issue 3856).
MAX_GATHERED_ROWS = 32768


@dataclass(frozen=True)
class Keeping:
    """What is to be kept of sequences.

    Attributes:
        context: tokens of prompt and answer that memory is reserved for; None: DEFAULT_CONTEXT, or the model's if that is less.
        kv_bits: of each number of keys and values; None: as they are computed.
        prefix_bytes: for snapshots of conversations; None: PREFIX_SHARE of the budget.
    """

    context: int | None = None
    kv_bits: int | None = None
    prefix_bytes: int | None = 0

    @classmethod
    def of(cls, context: int | None, kv_bits: int | None, prefix_cache: float | None) -> Keeping:
        """As a user says it, `prefix_cache` in GiB. Raises Edge0Error where a number has no meaning."""
        if context is not None and context < 1:
            raise Edge0Error(f"context: {context} must be at least 1")
        if prefix_cache is not None and not (math.isfinite(prefix_cache) and prefix_cache >= 0):
            raise Edge0Error(f"prefix_cache: {prefix_cache!r} must be a number of GiB, 0 for none")
        return cls(context, kv_bits, None if prefix_cache is None else int(prefix_cache * GIB))


DEFAULT_KEEPING = Keeping()


@dataclass(frozen=True)
class Plan:
    """Bytes in memory and bytes per token.

    Attributes:
        budget_bytes: what was asked for, or the default.
        resident_bytes: of the base without its routed experts, as they are in memory. adapter_bytes: heads and LoRA.
        embedding_bytes: of a token embedding whose rows may be read as tokens need them; 0 where it is part of the base for good.
        embedding_held: it is in memory all the same.
        widened_bytes: what packed weights take more since they are held in float32.
        context: tokens that keys and values are reserved for. context_bytes: of them, and of recurrent states. token_bytes: of
            one more token's. kv_bits: of each number, where they are quantised.
        prefix_bytes: for snapshots of conversations, from which requests go on that begin alike.
        prefill_chunk: prompt tokens per forward pass.
        prefill_width: prompt tokens that go through the layers together, chunk by chunk, so that a layer's experts are read once.
        workspace_bytes: activations of a chunk, and the hidden states of a width.
        expert_nbytes: of the largest expert on disk. slot_nbytes: of its slot in memory.
        slots: how many experts are held. experts: how many there are.
        step_experts: how many a token needs. predicted_experts: those of them that are known a token ahead.
        disk_bytes_per_second: measured with the engine's own reads; None where all experts are held, or where
            reads past the page cache aren't possible.
    """

    budget_bytes: int
    resident_bytes: int
    embedding_bytes: int
    embedding_held: bool
    adapter_bytes: int
    widened_bytes: int
    context: int
    context_bytes: int
    token_bytes: int
    prefill_chunk: int
    prefill_width: int
    workspace_bytes: int
    expert_nbytes: int
    slot_nbytes: int
    slots: int
    experts: int
    step_experts: int
    predicted_experts: int
    disk_bytes_per_second: float | None = None
    kv_bits: int | None = None
    prefix_bytes: int = 0

    @property
    def base_bytes(self) -> int:
        """Of the base in memory, without experts."""
        return self.resident_bytes + self.widened_bytes + self.embedding_held * self.embedding_bytes

    @property
    def fixed_bytes(self) -> int:
        """What is needed before the first expert."""
        return self.base_bytes + self.adapter_bytes + self.context_bytes + self.prefix_bytes + self.workspace_bytes

    @property
    def full(self) -> bool:
        """All experts are held: they are read once."""
        return self.slots == self.experts

    @property
    def bytes_per_token(self) -> int:
        """Expected reads: everything if a step's experts don't fit, else what doesn't repeat; an upper estimate."""
        if self.full:
            return 0
        repeated = REPEATED if self.slots >= self.step_experts else 0.0
        return round(self.step_experts * self.expert_nbytes * (1 - repeated))

    @property
    def floor_ms_per_token(self) -> float | None:
        """What the disk needs for them if nothing else took time."""
        return None if self.disk_bytes_per_second is None else 1e3 * self.bytes_per_token / self.disk_bytes_per_second

    def text(self) -> str:
        """For the user, before anything large is read."""
        prefixes = f" prefix cache {size(self.prefix_bytes)}," if self.prefix_bytes else ""
        quantised = f" in {self.kv_bits} bits" if self.kv_bits else ""
        lines = [
            f"memory budget {size(self.budget_bytes)}: base {size(self.base_bytes)}, adapters {size(self.adapter_bytes)}, context"
            f" {size(self.context_bytes)},{prefixes} activations {size(self.workspace_bytes)} (prompts by"
            f" {self.prefill_chunk} tokens), experts {size(self.slots * self.slot_nbytes)}",
            f"the context holds {self.context} tokens{quantised}; 1,000 more take {size(1000 * self.token_bytes)}, or"
            f" {figures(1000 * self.token_bytes / self.slot_nbytes)} experts",
            f"{self.slots} of {self.experts} experts fit ({size(self.expert_nbytes)} each);"
            f" a token needs {self.step_experts}, {self.predicted_experts} of them known a token ahead",
        ]
        if self.full:
            return "\n".join([*lines, "all experts are read now, none while generating"])
        rows = (
            f"; rows of the embedding ({size(self.embedding_bytes)}) stay on the disk" if self.embedding_bytes else ""
        )
        lines.append(f"expected reads {size(self.bytes_per_token)} a token{rows}")
        if self.disk_bytes_per_second is not None:
            lines.append(
                f"disk {size(self.disk_bytes_per_second)}/s at this read size: at least"
                f" {figures(self.floor_ms_per_token, ' ms')} a token from a cold disk"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self) | {"bytes_per_token": self.bytes_per_token, "floor_ms_per_token": self.floor_ms_per_token}


def make_plan(
    tier: Tier,
    store: ExpertStore,
    *,
    budget_bytes: int | None,
    resident_bytes: int,
    adapter_bytes: int,
    predicted_layers: int,
    float32: bool,
    embedding_bytes: int = 0,
    widened_bytes: int = 0,
    cast_bytes: int = 0,
    longest: int = DEFAULT_CONTEXT,
    keeping: Keeping = DEFAULT_KEEPING,
    memory_bytes: int | None = None,
) -> Plan:
    """How many experts a budget holds.

    Args:
        budget_bytes: None takes a quarter of the memory there is, or what all experts need if that is less.
        resident_bytes, adapter_bytes: as they will be in memory.
        predicted_layers: layers whose routing is known a token ahead.
        float32: the network computes in it, and slots hold scales and biases in it.
        embedding_bytes: of an embedding whose rows may stay on the disk; it is held where all experts are.
        widened_bytes: what packed weights take more in float32; they get it where all experts are held and it is there.
        cast_bytes: of the largest weights that are cast for one call where they stay packed.
        longest: the model's context. keeping: what memory is reserved for; a share of the budget is less where no expert would
            fit beside it.
        memory_bytes: of the machine that it is for; None: this one's.

    Raises Edge0Error if not even one expert fits.
    """
    memory_bytes = memory_limit_bytes() if memory_bytes is None else memory_bytes
    context = min(longest, DEFAULT_CONTEXT if keeping.context is None else keeping.context)
    kv_bits, prefix_bytes = keeping.kv_bits, keeping.prefix_bytes
    layers = len(store.tensors)
    one_slot = max(slot_nbytes(tensors, float32) for tensors in store.tensors.values())
    experts = store.num_experts * layers
    kept, float_bytes = context_bytes(tier, context, float32=float32, kv_bits=kv_bits), 4 if float32 else 2
    known = resident_bytes + adapter_bytes + kept + (prefix_bytes or 0)
    chunks = [chunk for chunk in PREFILL_CHUNKS if chunk <= largest_chunk(tier)]
    passes = {chunk: pass_bytes(tier, chunk, context, cast_bytes) for chunk in chunks}
    least = known + passes[chunks[-1]] + one_slot
    everything = known + embedding_bytes + experts * one_slot
    if budget_bytes is None:
        most = everything + widened_bytes + passes[chunks[0]]
        if prefix_bytes is None:
            most = math.ceil(most / (1 - PREFIX_SHARE))
        budget_bytes = min(most, max(memory_bytes // 4, least))
    if budget_bytes < least:
        snapshots = f", a prefix cache of {prefix_bytes / GIB:.6g} GiB" if prefix_bytes else ""
        raise Edge0Error(
            f"memory_budget: {budget_bytes / GIB:.6g} GiB hold no expert: base, adapters, activations{snapshots} and a context of"
            f" {context} tokens take {(least - one_slot) / GIB:.6g} GiB and an expert {one_slot / GIB:.6g} GiB, which is"
            f" {(least - budget_bytes) / GIB:.6g} too much; give at least {least / GIB:.6g}"
            + (", or a smaller context" if context > KV_STEP else "")
            + (", or a smaller prefix cache" if prefix_bytes else "")
        )
    if prefix_bytes is None:
        prefix_bytes = min(int(PREFIX_SHARE * budget_bytes), budget_bytes - least)
        known, everything = known + prefix_bytes, everything + prefix_bytes
    held = [(more, chunk) for more in (widened_bytes, 0) for chunk in chunks]
    held = [(more, chunk) for more, chunk in held if everything + more + passes[chunk] <= budget_bytes]
    if held:
        (widened, chunk), slots = held[0], experts
        width, workspace = chunk, passes[chunk]
    else:
        # A step that is built before its token is known needs the whole embedding, so without it never all experts are held.
        most, room = experts - bool(embedding_bytes), budget_bytes - known
        chunk = next((chunk for chunk in chunks if passes[chunk] <= room * PASS_SHARE), chunks[-1])
        behind = int(WIDTH_SHARE * (room - passes[chunk] - one_slot)) // (tier.hidden_size * float_bytes)
        width = chunk + min(behind, max(0, context - chunk) + chunk - 1) // chunk * chunk  # no wider than the context
        workspace = passes[chunk] + (width - chunk) * tier.hidden_size * float_bytes
        widened, slots = 0, min(most, (room - workspace) // one_slot)
    plan = Plan(
        budget_bytes=budget_bytes,
        resident_bytes=resident_bytes,
        embedding_bytes=embedding_bytes,
        embedding_held=bool(held),
        adapter_bytes=adapter_bytes,
        widened_bytes=widened,
        context=context,
        context_bytes=kept,
        token_bytes=token_bytes(tier, float32=float32, kv_bits=kv_bits),
        prefill_chunk=chunk,
        prefill_width=width,
        workspace_bytes=workspace,
        expert_nbytes=max(store.expert_nbytes(layer) for layer in store.tensors),
        slot_nbytes=one_slot,
        slots=slots,
        experts=experts,
        step_experts=layers * tier.k,
        predicted_experts=predicted_layers * tier.k,
        kv_bits=kv_bits,
        prefix_bytes=prefix_bytes,
    )
    check_memory("memory_budget", plan.fixed_bytes + slots * one_slot, "give less", memory_bytes)
    return plan


def check_memory(field: str, needed_bytes: int, fix: str, memory_bytes: int | None = None) -> None:
    """Raises Edge0Error, naming `field` and `fix`, if the machine or this process's control group has less memory."""
    limit = memory_limit_bytes() if memory_bytes is None else memory_bytes
    if needed_bytes > limit:
        raise Edge0Error(
            f"{field}: {size(needed_bytes)} are needed and this machine or control group has {size(limit)}; {fix}"
        )


def budget_of(memory_budget: float | None) -> int | None:
    """A memory budget in GiB as bytes; None stays None. Raises Edge0Error where it is no number above 0."""
    if memory_budget is None:
        return None
    if not (math.isfinite(memory_budget) and memory_budget > 0):
        raise Edge0Error(f"memory_budget: {memory_budget!r} must be a number of GiB larger than 0")
    return int(memory_budget * GIB)


def largest_chunk(tier: Tier) -> int:
    """The most prompt tokens in a forward pass."""
    return next(chunk for chunk in PREFILL_CHUNKS if chunk * tier.k <= MAX_GATHERED_ROWS)
