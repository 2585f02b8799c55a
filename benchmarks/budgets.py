"""Memory budgets by what they hold."""

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.model import Model

MOST_SLOTS = 4000
"""Of room beyond the experts that is searched: activations of the widest prompts, in slots of the smallest models."""


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
    known = full.resident_bytes + full.adapter_bytes + full.context_bytes
    # A larger budget may give prompts more and experts less, so it is found by trying.
    for half in range(2 * slots + 1, 2 * (slots + MOST_SLOTS)):
        budget = known + half * full.slot_nbytes // 2
        try:
            if model.plan_for(budget).slots == slots:
                return budget
        except Edge0Error:
            continue
    raise AssertionError(f"no budget holds exactly {slots} experts")
