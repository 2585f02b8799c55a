"""phase=student_sft: the recovery LoRA on teacher text with prerouting on, completion-only cross-entropy (method.md 2.2).

python -m edge0_train phase=student_sft tier=35b
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.provenance import DataSource
from edge0_train.adapters import input_path, write_output
from edge0_train.build import build_student
from edge0_train.config import Config
from edge0_train.data.rows import IGNORE, Batch, collate, micro_batches, read_data, shuffled
from edge0_train.loop import Problem, train
from edge0_train.losses import chunked, cross_entropy
from edge0_train.report import print_plan
from edge0_train.run import Run
from edge0_train.student import StudentPath, lora_tensors

HELD_OUT_ROWS = 64
"""Held-out rows for the loss that is logged during training."""


def student_sft(config: Config, run: Run) -> dict[str, Any]:
    """Train the LoRA on the student path, and with `heads.joint_lr` the heads too; the base stays frozen.

    A head's gradient comes through the mixing weights of the experts that it chose.
    """
    tier, optim, joint = config.tier, config.optim, config.heads.joint_lr > 0
    data, dropped = read_data(config.text.rows, config.text.max_length)
    student = build_student(
        config, prerouter=input_path(config, "prerouter"), lora=input_path(config, "lora"), new_lora=True
    )
    path, pad_id, device, heads = student.path, student.chat.pad_id, student.path.model.device, student.path.heads
    if heads is None:
        raise Edge0Error("inputs.prerouter: empty; the student path needs heads: name the file of phase=head_distill")
    trainable = lora_parameters(path)
    head_parameters: dict[str, torch.nn.Parameter] = {}
    if joint:
        used = {f"layers.{consumer - 1}." for consumer in tier.consumers}
        head_parameters = {n: p for n, p in heads.named_parameters() if n.startswith(tuple(used))}
        for parameter in head_parameters.values():
            parameter.requires_grad_(True)
    print_plan(
        config,
        {
            "rows": f"{len(data.train)} train, {len(data.held_out)} held out (dropped: {dropped or 'none'})",
            "LoRA": f"{len(tier.lora_modules())} modules, r={tier.lora.r}, alpha={tier.lora.alpha}",
            "heads": f"trained at {config.heads.joint_lr} of the rate" if joint else "frozen",
            "trainable": f"{sum(p.numel() for p in (trainable | head_parameters).values()):,} parameters",
            "step": f"{optim.rows} rows in micro-batches of {optim.micro_rows}, {optim.steps} steps",
        },
    )
    if config.dry_run:
        return {}
    pack = config.text.pack_length
    order = shuffled(len(data.train), optim.rows, config.seed)
    held_out = [collate(data.held_out[:HELD_OUT_ROWS], pad_id, device)]
    result = train(
        run,
        optim,
        Problem(
            trainable | head_parameters,
            window=lambda step: micro_batches(data.train, order(step), optim.micro_rows, pad_id, device, pack),
            loss=lambda batch: (completion_loss(path, batch), {}),
            evaluate=lambda step: {"held_out_loss": mean_loss(path, held_out)},
            rates=dict.fromkeys(head_parameters, config.heads.joint_lr),
        ),
    )
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


def lora_parameters(path: StudentPath) -> dict[str, torch.nn.Parameter]:
    """The trainable LoRA factors by name."""
    return {name: p for name, p in path.model.named_parameters() if "lora_" in name and p.requires_grad}


def completion_loss(path: StudentPath, batch: Batch) -> torch.Tensor:
    """Summed cross-entropy of the completions' tokens on the student path."""
    output = path.hidden(batch.input_ids_BT, path.predicted(batch.decoded_BT, batch.start_BT), use_cache=False)
    at_BT = batch.labels_BT != IGNORE
    return chunked(cross_entropy, output.last_hidden_state[at_BT], path.model.lm_head, batch.labels_BT[at_BT])


@torch.no_grad()
def mean_loss(path: StudentPath, batches: Sequence[Batch]) -> float:
    """Mean held-out cross-entropy per completion token."""
    return sum(float(completion_loss(path, batch)) for batch in batches) / sum(batch.valid for batch in batches)
