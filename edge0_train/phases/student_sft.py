"""phase=student_sft: the recovery LoRA on teacher text with prerouting on, completion-only cross-entropy (docs/method.md 2.2).

python -m edge0_train phase=student_sft tier=35b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import PartialState

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.provenance import DataSource
from edge0_train.adapters import input_path, write_output
from edge0_train.build import Student, build_student, check_text, sketch_student
from edge0_train.config import Config
from edge0_train.data.rows import IGNORE, Batch, TextRow, micro_batches, read_data, shuffled
from edge0_train.loop import Backward, Problem, train
from edge0_train.losses import chunked, cross_entropy, routing_divergence
from edge0_train.plan import Rows, training_plan
from edge0_train.report import print_plan
from edge0_train.run import Run
from edge0_train.student import PrerouterHeads, RoutingPass, Sampling, StudentPath, generate, lora_tensors

HELD_OUT_ROWS = 64
"""Held-out rows for the loss that is logged during training, and that optim.patience goes by."""
SAMPLES, SAMPLE_TOKENS = 8, 256
"""Held-out prompts that the trained student completes for samples.jsonl, and the most tokens it may take."""


def student_sft(config: Config, run: Run) -> dict[str, Any]:
    """Train the LoRA on the student path, and with `heads.joint_lr` the heads too; the base stays frozen.

    A head's gradient comes through the mixing weights of the experts that it chose. With `optim.patience`, what is exported are
    the values of the best held-out loss, not the last ones.
    """
    tier, optim, joint = config.tier, config.optim, config.heads.joint_lr > 0
    if config.dry_run:
        sketch = sketch_student(config, lora=True, heads=True)
        print_plan(config, _plan(config, sketch, Rows.planned(config)))
        return {}
    data, dropped = read_data(config.text.rows, config.text.max_length)
    student = build_student(
        config, prerouter=input_path(config, "prerouter"), lora=input_path(config, "lora"), new_lora=True
    )
    check_text(config, student, data)
    path, pad_id, device, heads = student.path, student.chat.pad_id, student.path.model.device, student.path.heads
    if heads is None:
        raise Edge0Error("inputs.prerouter: empty; the student path needs heads: name the file of phase=head_distill")
    trainable, head_parameters = lora_parameters(path), joint_parameters(config, heads)
    print_plan(config, _plan(config, path, Rows.of_data(data, dropped)))
    pack = config.text.pack_length
    order = shuffled(len(data.train), optim.rows, config.seed)
    held_rows = data.held_out[:HELD_OUT_ROWS]
    held_out = micro_batches(held_rows, np.arange(len(held_rows)), optim.micro_rows, pad_id, device)

    def loss(batch: Batch, backward: Backward) -> dict[str, float]:
        value, said = sft_loss(path, batch, config.heads.predictability)
        backward(value)
        return said

    result = train(
        run,
        optim,
        Problem(
            trainable | head_parameters,
            window=lambda step: micro_batches(data.train, order(step), optim.micro_rows, pad_id, device, pack),
            loss=loss,
            evaluate=lambda step: {"held_out_loss": mean_loss(path, held_out)},
            rates=dict.fromkeys(head_parameters, config.heads.joint_lr),
            watch="held_out_loss",
        ),
    )
    if PartialState().is_main_process:
        run.write_samples(greedy_samples(config, student, data.held_out[:SAMPLES]))
    source = DataSource(data.card["fingerprint"], len(data.train))
    parents = {"prerouter": student.prerouter, "lora": student.lora}
    assert student.prerouter
    served_with = student.prerouter.sha256
    if joint:
        served_with = write_output(config, "prerouter", heads.tensors(), student.base, result, source, parents)
    write_output(
        config,
        "lora",
        lora_tensors(path.model, tier),
        student.base,
        result,
        source,
        parents,
        prerouter_sha256=served_with,
    )
    return {**result, "dropped": dropped}


def _plan(config: Config, path: StudentPath, rows: Rows) -> dict[str, str]:
    """The phase's plan; `path` may be on the meta device."""
    assert path.heads
    trainable = lora_parameters(path) | joint_parameters(config, path.heads)
    joint = config.heads.joint_lr
    facts = training_plan(config, path, trainable, rows, through_base=True)
    return facts | {
        "heads": (f"trained at {joint} of the rate" if joint else "frozen") + describe_predictability(config)
    }


def describe_predictability(config: Config) -> str:
    """For the plan's line about heads; empty when off."""
    weight = config.heads.predictability
    return f"; loss + {weight} x KL(router || head), summed over {len(config.tier.consumers)} layers" if weight else ""


def joint_parameters(config: Config, heads: PrerouterHeads) -> dict[str, torch.nn.Parameter]:
    """With `heads.joint_lr`: the parameters of all heads whose output routes, made trainable; else none."""
    if not config.heads.joint_lr:
        return {}
    used = tuple(f"layers.{consumer - 1}." for consumer in config.tier.consumers)
    parameters = {name: p for name, p in heads.named_parameters() if name.startswith(used)}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    return parameters


def lora_parameters(path: StudentPath) -> dict[str, torch.nn.Parameter]:
    """The trainable LoRA factors by name."""
    return {name: p for name, p in path.model.named_parameters() if "lora_" in name and p.requires_grad}


def completion_loss(path: StudentPath, batch: Batch) -> torch.Tensor:
    """Summed cross-entropy of the completions' tokens on the student path."""
    return sft_loss(path, batch)[0]


def sft_loss(path: StudentPath, batch: Batch, predictability: float = 0.0) -> tuple[torch.Tensor, dict[str, float]]:
    """`completion_loss` with the routing's predictability weighed in, and what is to be logged beside it."""
    routing = student_routing(path, batch, predictability)
    output = path.hidden(batch.input_ids_BT, routing, use_cache=False)
    at_BT = batch.labels_BT != IGNORE
    value = chunked(cross_entropy, output.last_hidden_state[at_BT], path.model.lm_head, batch.labels_BT[at_BT])
    return weigh_predictability(path, routing, predictability, value, {})


def student_routing(path: StudentPath, batch: Batch, predictability: float) -> RoutingPass:
    """The batch's pass on the student path; with a weight, one that `weigh_predictability` can use."""
    routing = path.predicted(batch.decoded_BT, batch.start_BT)
    routing.keep_logits = predictability > 0
    return routing


def weigh_predictability(
    path: StudentPath, routing: RoutingPass, weight: float, loss: torch.Tensor, said: dict[str, float]
) -> tuple[torch.Tensor, dict[str, float]]:
    """(loss + weight * `routing_divergence`, `said` with both parts); as they are when the weight is 0.

    Both are sums that the loop divides by the window's labels: the weight is against a label's loss, and no cut of the window
    changes it.
    """
    if not weight:
        return loss, said
    divergence = routing_divergence(path, routing)
    parts = {"loss_alone": float(loss.detach()), "routing_kl": float(divergence.detach())}
    return loss + weight * divergence, said | parts


def greedy_samples(config: Config, student: Student, rows: Sequence[TextRow]) -> list[dict[str, str]]:
    """The student's greedy completions of the rows' prompts, as text."""
    completions = generate(
        student.path,
        [row.prompt_ids for row in rows],
        Sampling(min(config.sample.max_new_tokens, SAMPLE_TOKENS)),
        end_ids=student.chat.end_ids,
        pad_id=student.chat.pad_id,
    )
    return [
        student.chat.shown(replace(row, completion_ids=done.ids, finish_reason=done.finish_reason))
        for row, done in zip(rows, completions, strict=True)
    ]


@torch.no_grad()
def mean_loss(path: StudentPath, batches: Sequence[Batch]) -> float:
    """Mean held-out cross-entropy per completion token."""
    return sum(float(completion_loss(path, batch)) for batch in batches) / sum(batch.valid for batch in batches)
