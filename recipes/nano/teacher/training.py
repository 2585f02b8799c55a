"""How a nano teacher is trained: stages of task rows, completion-only loss, experts kept in even use.

Shapes: B rows, T tokens, P kinds of rows in a step.
"""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edge0_runtime.contract.tier import Tier
from edge0_train.base.families import cpu_options
from edge0_train.data.tasks import problems
from recipes.nano.teacher.families import FAMILIES
from recipes.nano.teacher.optimiser import build_optimisers, lr_factor
from recipes.nano.teacher.rows import encode_rows

EXPERTS = "grouped_mm"  # of transformers: 0.65 s per step of nano here, 0.70 s by its loop over experts


@dataclass(frozen=True)
class Stage:
    """A schedule of its own, warm-up to decay.

    buckets: task names -> rows of every step; each bucket is a forward pass, so that short rows are not padded to long
    ones, and counts the same in the loss. rate: of the peak learning rates.
    """

    steps: int
    buckets: dict[tuple[str, ...], int]
    rate: float = 1.0

    @property
    def tasks(self) -> tuple[str, ...]:
        """Of all buckets, in their order."""
        return tuple(task for tasks in self.buckets for task in tasks)

    def __str__(self) -> str:
        return " + ".join(f"{rows} of {', '.join(tasks)}" for tasks, rows in self.buckets.items())


def losses(
    tier: Tier, model: PreTrainedModel, ids_BT: torch.Tensor, mask_BT: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean cross-entropy of the assistant's tokens (nats), and the two numbers of `Family.balance`."""
    options = cpu_options(tier.family)
    out = model(ids_BT, attention_mask=mask_BT, use_cache=False, output_router_logits=True, **options)
    cross_entropy = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
    return cross_entropy, *FAMILIES[tier.family].balance(tier, model, out.router_logits, mask_BT)


def train(
    tier: Tier, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stage: Stage, seed: int
) -> dict[str, float]:
    """Train in place; returns the last losses (means over buckets) and the cost in wall and CPU seconds."""
    steps, optimisers = stage.steps, build_optimisers(model)
    peaks = [optimiser.param_groups[0]["lr"] * stage.rate for optimiser in optimisers]
    data = {tasks: problems("train", seed, steps * rows, tasks) for tasks, rows in stage.buckets.items()}
    wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
    recent: list[list[tuple[float, float]]] = []  # of the last 50 steps: (cross-entropy, balance) of each bucket
    model.set_experts_implementation(EXPERTS)
    model.train()
    for step in range(steps):
        parts = []
        for tasks, rows in stage.buckets.items():
            batch = encode_rows(tokenizer, data[tasks][step * rows : (step + 1) * rows])
            cross_entropy, penalty, balance = losses(tier, model, *batch)
            ((cross_entropy + penalty) / len(stage.buckets)).backward()
            tokens += int(batch[1].sum())
            parts.append((cross_entropy.item(), balance))
        for optimiser, peak in zip(optimisers, peaks, strict=True):
            optimiser.param_groups[0]["lr"] = peak * lr_factor(step, steps)
            optimiser.step()
            optimiser.zero_grad()
        recent = [*recent[-49:], parts]
        loss_P, balance_P = torch.tensor(recent, dtype=torch.float64).mean(0).unbind(-1)
        if (step + 1) % 50 == 0 or step + 1 == steps:
            seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
            eta = seconds / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1}/{steps} loss {' '.join(f'{loss:.4f}' for loss in loss_P)} "
                f"balance {balance_P.mean():.3f} "
                f"tokens/s {tokens / seconds:.0f} (per CPU s {tokens / cpu_seconds:.0f}) eta {eta:.0f} s",
                flush=True,
            )
    return {
        "loss": loss_P.mean().item(),
        "balance": balance_P.mean().item(),
        "tokens": tokens,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
    }
