"""Batched generation with a cache that routes exactly as serving does.

Prompts of different lengths are padded on the LEFT, so that all rows share one timeline: the prompt is one pass with the
layers' own gates, and decode step s is the same step for every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from edge0_train.student.path import PrerouterState, RoutingPass, StudentPath


@dataclass(frozen=True)
class Decoding:
    """temperature 0 is greedy; at temperature 1 tokens follow the model's own distribution (no top-k)."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Completion:
    """Generated ids, the end token included when the row ended by itself; finish_reason is stop or length."""

    ids: tuple[int, ...]
    finish_reason: str


@dataclass
class StepRecord:
    """What `observe` sees after every step: the logits [B, V] and the pass that made them (step 0 is the prompt)."""

    step: int
    logits_BV: torch.Tensor
    routing: RoutingPass


@torch.no_grad()
def generate(
    path: StudentPath,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    end_ids: Sequence[int],
    pad_id: int,
    native_k: int | None = None,
    generator: torch.Generator | None = None,
    observe: Callable[[StepRecord], None] | None = None,
) -> list[Completion]:
    """Complete every prompt.

    Args:
        path: the student (or any base in a StudentPath).
        prompts: token ids, each at least one.
        end_ids: a row stops after any of these; empty: every row runs to max_new_tokens.
        native_k: None: the tier's timeline with predicted routing. A number: own gates with that K throughout.
        generator: source of randomness when temperature > 0.
        observe: called with a `StepRecord` after every step (reference traces).
    """
    device = path.model.device
    lengths = [len(prompt) for prompt in prompts]
    if not prompts or min(lengths) < 1:
        raise ValueError("prompts: every prompt needs at least one token")
    width = max(lengths)
    ids_BT = torch.full((len(prompts), width), pad_id, device=device)
    mask_BT = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        mask_BT[row, width - len(prompt) :] = 1
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp_min(0)

    state = None if native_k else PrerouterState()
    ends = torch.tensor(list(end_ids), dtype=torch.long, device=device)
    done_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    generated: list[torch.Tensor] = []
    step_ids, step_positions, cache = ids_BT, positions_BT, None
    for step in range(decoding.max_new_tokens):
        routing = _routing(path, step, mask_BT, state, native_k)
        output = path.hidden(
            step_ids, routing, attention_mask=mask_BT, position_ids=step_positions, cache=cache, use_cache=True
        )
        cache = output.cache
        logits_BV = path.model.lm_head(output.last_hidden_state[:, -1]).float()
        if observe:
            observe(StepRecord(step, logits_BV, routing))
        token_B = torch.where(done_B, pad_id, _sample(logits_BV, decoding, generator))
        generated.append(token_B)
        done_B = done_B | torch.isin(token_B, ends)
        if done_B.all():
            break
        step_ids, step_positions = token_B[:, None], step_positions[:, -1:] + 1
        mask_BT = torch.cat([mask_BT, torch.ones_like(mask_BT[:, :1])], dim=1)
    return [_completion(row, set(end_ids)) for row in torch.stack(generated, 1).tolist()]


def _routing(
    path: StudentPath, step: int, mask_BT: torch.Tensor, state: PrerouterState | None, native_k: int | None
) -> RoutingPass:
    """Step 0 is the prompt: own gates at the served K. Step 1 is the first decode step (timeline.py)."""
    if native_k:
        return path.native(native_k)
    rows, width = (mask_BT.shape[0], mask_BT.shape[1] if step == 0 else 1)
    gate_rule = path.tier.first_token == "gate"
    by_head = step > 1 or (step == 1 and not gate_rule)
    valid_BT = torch.full((rows, width), by_head, device=mask_BT.device)
    if not gate_rule:
        # A left-padded row's first real token has no predecessor: its padding must not count as one.
        before_BT = torch.cat([torch.zeros_like(mask_BT[:, :1]), mask_BT[:, :-1]], dim=1).bool()
        valid_BT = before_BT[:, -width:]
    return RoutingPass(
        k=path.tier.k,
        predicted_BT=torch.full((rows, width), by_head, device=mask_BT.device),
        previous_valid_BT=valid_BT,
        begin_BT=mask_BT.cumsum(-1) * mask_BT == 1 if step == 0 else None,
        state=state,
    )


def _sample(logits_BV: torch.Tensor, decoding: Decoding, generator: torch.Generator | None) -> torch.Tensor:
    if decoding.temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV = (logits_BV / decoding.temperature).softmax(-1)
    if decoding.top_p < 1:
        sorted_BV, order_BV = probabilities_BV.sort(-1, descending=True)
        outside_BV = sorted_BV.cumsum(-1) - sorted_BV >= decoding.top_p
        probabilities_BV = probabilities_BV.scatter(-1, order_BV, sorted_BV.masked_fill(outside_BV, 0.0))
    return torch.multinomial(probabilities_BV, 1, generator=generator)[:, 0]


def _completion(row: list[int], ends: set[int]) -> Completion:
    for position, token in enumerate(row):
        if token in ends:
            return Completion(tuple(row[: position + 1]), "stop")
    return Completion(tuple(row), "length")
