"""From a configuration to a student: what the settings of the base change, and what they must not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import input_path
from edge0_train.build import Student, build_student
from edge0_train.data.rows import Batch, collate
from edge0_train.objectives import completion_loss, lora_parameters, mean_loss
from edge0_train.student import Decoding, generate
from tests.train.conftest import Make, task_rows


def student(make_config: Make, *overrides: str) -> Student:
    config = make_config("student_sft", *overrides)
    return build_student(config, prerouter=input_path(config, "prerouter"), new_lora=True)


def gradients(made: Student, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = completion_loss(made.path, batch)
    loss.backward()
    parameters = lora_parameters(made.path)
    return loss.detach(), {name: p.grad for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("pack_length", [0, 96])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(make_config, pack_length):
    batch = collate(task_rows("train", 4), 0, pack_length=pack_length)
    (want, wanted), (got, gotten) = (
        gradients(student(make_config, f"base.gradient_checkpointing={flag}"), batch) for flag in ("false", "true")
    )
    assert torch.equal(want, got) and wanted.keys() == gotten.keys() and len(wanted) == 2 * 62
    for name, value in wanted.items():
        torch.testing.assert_close(gotten[name], value, rtol=1e-6, atol=1e-6 * float(value.abs().max() + 1e-12))


def test_gradient_checkpointing_computes_every_layer_twice(make_config):
    made = student(make_config, "base.gradient_checkpointing=true")
    calls: list[int] = []
    for number, layer in enumerate(made.path.model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(lambda _, __, n=number: calls.append(n))
    gradients(made, collate(task_rows("train", 2), 0))
    assert sorted(calls) == sorted([*range(8)] * 2)
    assert not any(layer.mlp.training for layer in made.path.model.model.layers)


def test_gradient_checkpointing_leaves_generation_and_evaluation_alone(make_config):
    """A cache and a recomputed layer exclude each other: without gradients the layers must run as they are."""
    outcomes = []
    for flag in ("false", "true"):
        made = student(make_config, f"base.gradient_checkpointing={flag}")
        rows = task_rows("eval", 3)
        done = generate(made.path, [r.prompt_ids for r in rows], Decoding(12), end_ids=made.chat.end_ids, pad_id=0)
        outcomes.append((done, mean_loss(made.path, [collate(rows, 0)])))
    assert outcomes[0] == outcomes[1]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(make_config, tmp_path):
    """Of padding alone it is enough: an embedding has no row for it."""
    base = Path(shutil.copytree(make_config("student_sft").base.directory, tmp_path / "base"))
    file = base / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "<|one more|>"}))
    with pytest.raises(
        Edge0Error, match=r"base\.directory: the tokenizer of .* has 385 ids, but tier nano a vocabulary of"
    ):
        student(make_config, f"base.directory={base}")
