"""Memory budgets by what they hold."""

import itertools

from edge0_runtime.activations import pass_bytes
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.model import Model
from edge0_runtime.plan import PREFILL_CHUNKS


def budget_for(model: Model, slots: int, *, widened: bool = False) -> int:
    """Bytes in which exactly that many experts fit, for a model as it is loaded or for one that is `widened` already."""
    was, model.widened = model.widened, widened
    try:
        return _budget_for(model, slots)
    finally:
        model.widened = was


def _budget_for(model: Model, slots: int) -> int:
    full = model.plan_for(None)
    if slots == full.experts:
        return full.budget_bytes + (0 if model.widened else model.fixed.widened_bytes)
    known = full.resident_bytes + full.adapter_bytes + full.context_bytes + (2 * slots + 1) * full.slot_nbytes // 2
    more = range(slots // 32 + 2)  # what wide prompts take of the experts' memory
    for chunk, extra in itertools.product(PREFILL_CHUNKS, more):
        budget = (
            known
            + extra * full.slot_nbytes
            + pass_bytes(model.tier, chunk, full.context, 0 if model.widened else model.fixed.cast_bytes)
        )
        try:
            if model.plan_for(budget).slots == slots:
                return budget
        except Edge0Error:
            continue
    raise AssertionError(f"no budget holds exactly {slots} experts")
