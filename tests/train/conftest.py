"""A nano training that needs no training: int4 base, task rows as teacher text, warm-started heads; phases run in-process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edge0_runtime.contract.provenance import DataSource
from edge0_train.adapters import base_info, write_output
from edge0_train.base.load import load_base
from edge0_train.base.quantize_model import quantize_checkpoint
from edge0_train.config import Config, configure
from edge0_train.data import tasks
from edge0_train.data.chat import Chat
from edge0_train.data.conversations import Prompt
from edge0_train.data.rows import TextRow, write_data
from edge0_train.student import PrerouterHeads, StudentPath, add_lora
from tests.reference_path import LING, TIER, Models
from tests.tiny_models import TEACHER
from tests.twins import TWINS

Make = Callable[..., Config]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Whatever a phase that ran in this process before has set."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def make_config(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Configuration of a nano phase below a root that holds base, teacher text and heads; overrides as on the command line."""
    root = tmp_path_factory.mktemp("nano")

    def make(phase: str, *overrides: str) -> Config:
        return configure(f"phase={phase}", f"root={root}", "logger.wandb=disabled", *overrides)

    config = make("head_distill")
    quantize_checkpoint(Path(config.base.source), Path(config.base.directory), config.tier)
    (root / "teacher_text").mkdir()
    write_data(root / "teacher_text", task_rows("train", 48), task_rows("eval", 12), {})
    (root / "head_distill").mkdir()
    heads = PrerouterHeads(config.tier)
    path = StudentPath(load_base(config.base.directory, config.tier)[0], config.tier)
    heads.warm_start(lambda layer: path.router(layer).weight)
    for head in heads.layers.values():
        torch.nn.init.normal_(head.fc2.weight, std=1e-3)  # an all-zero tensor is not written
    result = {"steps": 1, "tokens": 1}
    write_output(config, "prerouter", heads.tensors(), base_info(config), result, DataSource("0" * 64, 1), {})
    return make


def task_rows(split: str, count: int) -> list[TextRow]:
    """Rows of the nano tasks with their own solutions as completions."""
    chat = Chat(TEACHER)
    rows = []
    for problem in tasks.problems(split, 0, count):
        ids = chat.prompt_ids(Prompt(tuple(tasks.messages(problem)), problem.task, problem.answer))
        done = tuple(chat.tokenizer.encode(problem.completion, add_special_tokens=False)) + chat.end_ids[:1]
        rows.append(TextRow(ids, done, "stop", problem.task, problem.answer))
    return rows


# -- the student path's models


@pytest.fixture(scope="module")
def bases() -> Models:
    """Of Ling's seeds 0 is ill-conditioned: a delta rule's output near zero before its norm (float error 1e-4)."""
    return {tier.family: TWINS[tier.family].random(tier, seed=seed) for tier, seed in ((TIER, 0), (LING, 1))}


@pytest.fixture(scope="module")
def base(bases: Models) -> torch.nn.Module:
    return bases[TIER.family]


@pytest.fixture(scope="module")
def adapted(bases: Models) -> Models:
    """The bases with a LoRA whose B is not zero."""
    models = {tier.family: add_lora(copy.deepcopy(bases[tier.family]), tier) for tier in (TIER, LING)}
    torch.manual_seed(1)
    for model in models.values():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return models
