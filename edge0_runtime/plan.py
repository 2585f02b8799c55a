"""What a memory budget buys: how many experts fit, and what a token will then cost the disk.

The budget is for everything that MLX's allocator holds: resident weights, adapters, a prompt chunk's activations, and
the slots that experts are read into.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.machine import memory_limit_bytes
from edge0_runtime.contract.tier import Tier
from edge0_runtime.experts.pool import slot_nbytes
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.units import figures, size

GIB = 2**30
FLOAT_BYTES = 4
# Share of a layer's experts that the next token needs again, for the estimate (docs/method.md 3.2).
REPEATED = 0.25
PREFILL_CHUNK = 512
# mlx's sorted gather gave wrong rows above this many (mlx issue 3856).
MAX_GATHERED_ROWS = 32768


@dataclass(frozen=True)
class Plan:
    """Bytes in memory and bytes per token.

    Attributes:
        budget_bytes: what was asked for, or the default.
        resident_bytes: of the base without its routed experts, as they are in memory. adapter_bytes: heads and LoRA.
        embedding_bytes: of a token embedding that is held too; 0 where its rows are read as tokens need them, and where it is
            part of the base for good.
        prefill_chunk: prompt tokens per forward pass. workspace_bytes: activations of such a chunk.
        expert_nbytes: of the largest expert on disk. slot_nbytes: of its slot in memory.
        slots: how many experts are held. experts: how many there are.
        step_experts: how many a token needs. predicted_experts: those of them that are known a token ahead.
        disk_bytes_per_second: measured with the engine's own reads; None where all experts are held, or where
            reads past the page cache aren't possible.
    """

    budget_bytes: int
    resident_bytes: int
    embedding_bytes: int
    adapter_bytes: int
    prefill_chunk: int
    workspace_bytes: int
    expert_nbytes: int
    slot_nbytes: int
    slots: int
    experts: int
    step_experts: int
    predicted_experts: int
    disk_bytes_per_second: float | None = None

    @property
    def fixed_bytes(self) -> int:
        """What is needed before the first expert."""
        return self.resident_bytes + self.adapter_bytes + self.workspace_bytes

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
        lines = [
            f"memory budget {size(self.budget_bytes)}: base {size(self.resident_bytes)},"
            f" adapters {size(self.adapter_bytes)}, activations {size(self.workspace_bytes)},"
            f" experts {size(self.slots * self.slot_nbytes)}",
            f"{self.slots} of {self.experts} experts fit ({size(self.expert_nbytes)} each);"
            f" a token needs {self.step_experts}, {self.predicted_experts} of them known a token ahead",
        ]
        if self.full:
            return "\n".join([*lines, "all experts are read now, none while generating"])
        lines.append(f"expected reads {size(self.bytes_per_token)} a token")
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
    embedding_bytes: int = 0,
    predicted_layers: int,
    float32: bool,
    memory_bytes: int | None = None,
) -> Plan:
    """How many experts a budget holds.

    Args:
        budget_bytes: None takes a quarter of the memory there is, or what all experts need if that is less.
        resident_bytes, adapter_bytes: as they will be in memory.
        predicted_layers: layers whose routing is known a token ahead.
        float32: the network computes in it, and slots hold scales and biases in it.
        memory_bytes: of the machine that it is for; None: this one's.

    Raises Edge0Error if not even one expert fits.
    """
    memory_bytes = memory_limit_bytes() if memory_bytes is None else memory_bytes
    layers = len(store.tensors)
    expert_nbytes = max(store.expert_nbytes(layer) for layer in store.tensors)
    one_slot = max(slot_nbytes(tensors, float32) for tensors in store.tensors.values())
    experts = store.num_experts * layers
    chunk = prefill_chunk(tier)
    workspace = workspace_bytes(tier, chunk)
    fixed = resident_bytes + adapter_bytes + workspace
    if budget_bytes is None:
        budget_bytes = min(fixed + experts * one_slot, max(memory_bytes // 4, fixed + one_slot))
    slots = min(experts, (budget_bytes - fixed) // one_slot)
    if slots < 1:
        raise Edge0Error(
            f"memory_budget: {budget_bytes / GIB:.6g} GiB hold no expert: base, adapters and activations take"
            f" {fixed / GIB:.6g} GiB and an expert {one_slot / GIB:.6g} GiB;"
            f" give at least {(fixed + one_slot) / GIB:.6g}"
        )
    check_memory("memory_budget", fixed + slots * one_slot, "give less", memory_bytes)
    return Plan(
        budget_bytes=budget_bytes,
        resident_bytes=resident_bytes,
        embedding_bytes=0,
        adapter_bytes=adapter_bytes,
        prefill_chunk=chunk,
        workspace_bytes=workspace,
        expert_nbytes=expert_nbytes,
        slot_nbytes=one_slot,
        slots=slots,
        experts=experts,
        step_experts=layers * tier.k,
        predicted_experts=predicted_layers * tier.k,
    )


def check_memory(field: str, needed_bytes: int, fix: str, memory_bytes: int | None = None) -> None:
    """Raises Edge0Error, naming `field` and `fix`, if the machine or this process's control group has less memory."""
    limit = memory_limit_bytes() if memory_bytes is None else memory_bytes
    if needed_bytes > limit:
        raise Edge0Error(
            f"{field}: {size(needed_bytes)} are needed and this machine or control group has {size(limit)}; {fix}"
        )


def prefill_chunk(tier: Tier) -> int:
    """Prompt tokens per forward pass."""
    return min(PREFILL_CHUNK, MAX_GATHERED_ROWS // tier.k)


def workspace_bytes(tier: Tier, tokens: int) -> int:
    """What the activations of a chunk of `tokens` take at their peak, from the shapes of its largest arrays.

    Rows gathered for the experts dominate: their input sorted, the expert's two inner arrays and their product,
    its output and the weighted output.
    """
    hidden, inner = tier.hidden_size, tier.expert_width
    return FLOAT_BYTES * tokens * (tier.k * (3 * hidden + 3 * inner) + 16 * hidden)
