"""The one optimizer loop of all phases.

A step is a window of micro-batches. Its loss is the sum over all valid tokens divided by the window's GLOBAL count of valid
tokens, over micro-batches and ranks, so that 1x8 = 2x4 = 8x1 rows and one rank = two ranks. Every rank sees the whole window
and takes its share of the micro-batches; gradients are summed over ranks once a step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.best import EarlyStop
from edge0_train.checkpoint import checkpoints, load_checkpoint, load_newest, save_checkpoint
from edge0_train.config import Optim
from edge0_train.report import progress
from edge0_train.run import Run, by_rank_0
from edge0_train.stopping import Interrupted, heard_anywhere, leave, polled


class MicroBatch(Protocol):
    """What the loop knows of a micro-batch: how many tokens its loss is summed over, and how many it processes."""

    @property
    def valid(self) -> int:
        """Tokens, or other units, that the loss is summed over: what the step's sum is divided by."""
        ...

    @property
    def tokens(self) -> int:
        """Inputs that a forward pass runs over, padding left out: what throughput counts."""
        ...


Backward = Callable[[torch.Tensor], None]
"""Takes a summed loss, or a part of it: adds its value to the step's, and its gradients (over the valid count) to `.grad`."""


@dataclass(frozen=True)
class Objective:
    """What a phase gives to the loop: what trains, on which windows, by which loss (`edge0_train.objectives`).

    Attributes:
        trainable: {name: parameter}; only these get optimizer state.
        window: step -> the micro-batches of that step, the same on every rank and in every call.
        loss: (micro-batch, backward) -> further sums to log; each is divided by the valid count as well. It hands its summed
            loss to `backward`, whole or in independent parts, so that one part's graph is held at a time.
        evaluate: step -> metrics to log every `logger.every` steps; None: nothing.
        rates: {name: multiple of the learning rate} where it is not 1.
        watch: the metric of `evaluate`, the smaller the better, by which `optim.patience` stops; "": never.
    """

    trainable: Mapping[str, nn.Parameter]
    window: Callable[[int], Sequence[Any]]
    loss: Callable[[Any, Backward], dict[str, float]]
    evaluate: Callable[[int], dict[str, float]] | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    watch: str = ""


def train(run: Run, optim: Optim, objective: Objective) -> dict[str, Any]:
    """Run steps up to `optim.steps`, from the newest checkpoint if there is one; returns the summary.

    With `optim.patience` and a watched metric, training may end earlier, and the trainables end with the best evaluation's
    values; the summary then has `best_step`, and that evaluation's value of the metric.

    Raises Edge0Error at the first sign that training would be meaningless (non-finite loss, no valid token, a trainable
    tensor without gradient), `Interrupted` after a signal and the checkpoint of the step at hand.
    """
    state = PartialState()
    optimizer = _optimizer(objective, optim)
    start, tokens_before, last = _resume(run, objective, optimizer)
    early = _early_stop(run, optim, objective)
    done, tokens_done, began = start, 0, time.perf_counter()
    bar = progress(range(start, optim.steps), run.config.phase, initial=start, total=optim.steps)
    with polled() as stopped:
        for step in bar:
            if early and early.exhausted:  # resumed after the stop, before the export
                break
            try:
                metrics = _step(objective, optim, optimizer, step, state)
            except Interrupted:  # while the step's window was made: the steps before it are to be kept
                if done > start:
                    _save(run, objective, optimizer, early, done, tokens_before + tokens_done, state)
                raise
            tokens_done += metrics.pop("tokens")
            done = step + 1
            rate = tokens_done / (time.perf_counter() - began)
            bar.set_postfix(loss=f"{metrics['loss']:.4f}", tokens_s=f"{rate:.0f}", refresh=False)
            if done % run.config.logger.every == 0 or done == optim.steps:
                last = _metric_row(objective, optim, step, metrics, rate)
                if early:
                    early.see(done, last[objective.watch])
                if state.is_main_process:
                    run.log(done, last)
            finished = done == optim.steps or bool(early and early.exhausted)
            # On all ranks or on none; and asked once: a signal between saving and leaving would leave without saving.
            heard = heard_anywhere(stopped())
            if done % run.config.logger.checkpoint_every == 0 or finished or heard:
                _save(run, objective, optimizer, early, done, tokens_before + tokens_done, state)
            leave(heard, f"step {done} of {optim.steps} is done and kept")
    if early:
        last = {**last, **_keep_best(early, done)}
    return {"steps": done, "tokens": tokens_before + tokens_done, **last}


def learning_rate(optim: Optim, step: int) -> float:
    """Linear warm-up over `warmup` steps, then constant, or a cosine down to a tenth."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - optim.warmup) / max(1, optim.steps - optim.warmup)
    return optim.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def _optimizer(objective: Objective, optim: Optim) -> torch.optim.Optimizer:
    """AdamW with a parameter group for each multiple of the learning rate, the largest first; `_step` sets the rates."""
    rates = {name: objective.rates.get(name, 1.0) for name in objective.trainable}
    groups = [
        {"params": [p for name, p in objective.trainable.items() if rates[name] == rate], "rate": rate}
        for rate in sorted(set(rates.values()), reverse=True)
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, weight_decay=optim.weight_decay)


def _step(
    objective: Objective, optim: Optim, optimizer: torch.optim.Optimizer, step: int, state: PartialState
) -> dict[str, Any]:
    """One optimizer step at its learning rate: its losses over the window's valid count, its gradient norm, its tokens."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(optim, step) * group["rate"]
    window = objective.window(step)
    valid = sum(micro.valid for micro in window)
    if valid == 0:
        raise Edge0Error(f"step {step}: no token of the window takes part in the loss; check the rows' completions")
    sums: dict[str, float] = {"loss": 0.0}

    def backward(loss: torch.Tensor) -> None:
        (loss / valid).backward()
        sums["loss"] += float(loss.detach()) / valid

    for micro in window[state.process_index :: state.num_processes]:
        for name, value in objective.loss(micro, backward).items():
            sums[name] = sums.get(name, 0.0) + value / valid
    if step == 0:
        _check_gradients(objective)
    parameters = list(objective.trainable.values())
    if state.num_processes > 1:
        sums = _sum_over_ranks(parameters, sums)
    norm = float(nn.utils.clip_grad_norm_(parameters, optim.clip if optim.clip > 0 else math.inf))
    if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
        raise Edge0Error(
            f"step {step}: loss {sums['loss']}, gradient norm {norm}; lower optim.lr ({optim.lr}) or look for NaN in the base"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {**sums, "gradient_norm": norm, "valid_tokens": valid, "tokens": sum(micro.tokens for micro in window)}


def _metric_row(
    objective: Objective, optim: Optim, step: int, metrics: dict[str, Any], tokens_per_second: float
) -> dict[str, Any]:
    """What metrics.jsonl says after a step: `metrics` of the step itself, and an evaluation if the objective has one."""
    if objective.evaluate:
        metrics = metrics | objective.evaluate(step + 1)
    return {**metrics, "lr": learning_rate(optim, step), "tokens_per_second": round(tokens_per_second, 1)}


def _save(
    run: Run,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    early: EarlyStop | None,
    done: int,
    tokens: int,
    state: PartialState,
) -> None:
    """A checkpoint after `done` steps, by rank 0 while the others wait; then evaluations before the best one may go."""
    if state.is_main_process:
        save_checkpoint(run.checkpoints, done, tokens, objective.trainable, optimizer)
        if early:
            early.forget_others(int(path.stem.removeprefix("step-")) for path in checkpoints(run.checkpoints))
    state.wait_for_everyone()


def _early_stop(run: Run, optim: Optim, objective: Objective) -> EarlyStop | None:
    """What watches the evaluations, those of earlier sessions included; None when nothing is watched."""
    if not (objective.watch and optim.patience):
        return None
    return EarlyStop(run.checkpoints, objective.watch, optim.patience, objective.trainable, run.metrics())


def _keep_best(early: EarlyStop, done: int) -> dict[str, Any]:
    """Put the best evaluation's values into the trainables; its metric and step, for the summary of `done` steps."""
    early.restore()
    best = early.best
    print(
        f"kept: the values of step {best.step} of {done}, which had the best {early.metric} ({best.value:.4f})",
        flush=True,
    )
    return {early.metric: best.value, "best_step": best.step}


def _check_gradients(objective: Objective) -> None:
    """A trainable tensor that no rank's loss reaches is a silent no-op: name it after the first backward."""
    mine = {name for name, parameter in objective.trainable.items() if parameter.grad is None}
    every = gather_object([mine])  # a rank without a micro-batch reaches nothing
    silent = sorted(set.intersection(*every))
    if silent:
        raise Edge0Error(f"trainable: {len(silent)} tensors have no gradient after step 1: {', '.join(silent[:5])}")


def _sum_over_ranks(parameters: list[nn.Parameter], sums: dict[str, float]) -> dict[str, float]:
    """One all-reduce for all gradients and metrics; a rank without a micro-batch adds zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
    torch.distributed.all_reduce(flat)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))  # type: ignore[union-attr]
    every = gather_object([sums])  # a rank without a micro-batch has fewer names
    return {name: sum(one.get(name, 0.0) for one in every) for name in sorted(set().union(*every))}


def _resume(run: Run, objective: Objective, optimizer: torch.optim.Optimizer) -> tuple[int, int, dict[str, Any]]:
    """(first step to do, tokens done before, the last metric row)."""
    if not run.config.resume:
        return 0, 0, {}
    chosen = by_rank_0(lambda: load_newest(run.checkpoints, objective.trainable, optimizer))
    step, tokens = load_checkpoint(chosen, objective.trainable, optimizer) if chosen else (0, 0)
    last = by_rank_0(lambda: run.forget_after(step))
    if chosen:
        print(f"resumed from {chosen.name}", file=sys.stderr)
    return step, tokens, last
