"""The nano chain in-process, two steps a phase, and an oracle of what each phase should have computed.

The oracle shares no line with phases, objectives, loop and measurements: the student is `tests/reference_path.py`, one token at
a time, with the LoRA added to the base's weights; the teacher is transformers' model as it is; losses are written out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edge0_runtime.contract.artifacts import Adapter, Kind, read_adapter
from edge0_runtime.contract.provenance import DataSource
from edge0_train.base import load_teacher, transformers_module
from edge0_train.base.load import load_base
from edge0_train.cli import run_phase
from edge0_train.config import Config, configure
from edge0_train.data.rows import TextRow, shuffled, write_data
from edge0_train.measure import head_report
from edge0_train.student import PrerouterHeads
from tests.reference_path import Reference
from tests.train.conftest import Make, task_rows

SEED, ROWS, STEPS, RATE, WARMUP, JOINT, CLIP = 3, 3, 2, 2e-2, 4, 0.25, 0.1
SETTINGS = (
    "tier=nano", f"seed={SEED}", f"optim.rows={ROWS}", "optim.micro_rows=2", f"optim.steps={STEPS}", f"optim.lr={RATE}",
    f"optim.warmup={WARMUP}", f"optim.clip={CLIP}", f"heads.joint_lr={JOINT}", "logger.wandb=disabled", "logger.every=1",
    "logger.checkpoint_every=1", "on_policy.rounds=2", "on_policy.top_k=8", "sample.prompts=6", "sample.eval_prompts=2",
    "sample.batch=3", "sample.max_new_tokens=8", "sample.max_truncated=1", "sample.max_repetitive=1", "sample.temperature=0",
    "export.trace_prompts=2", "export.trace_tokens=6", "threads=1",
)  # fmt: skip
ON_POLICY_RATE = 0.2
"""So high that the second round's student writes something else than the first one's."""
BEFORE = {
    "head_distill": (),
    "head_refine": ("head_distill",),
    "student_sft": ("head_distill", "head_refine"),
    "on_policy": ("head_distill", "head_refine", "student_sft"),
    "evaluate": ("head_distill", "head_refine", "student_sft", "on_policy"),
    "export": ("head_distill", "head_refine", "student_sft", "on_policy"),
}


@dataclass(frozen=True)
class Ran:
    """A phase that has run."""

    config: Config
    summary: dict[str, Any]

    @property
    def directory(self) -> Path:
        return Path(self.config.run_dir)

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    def adapter(self, kind: Kind) -> Adapter:
        return read_adapter(self.directory / self.config.tier.file_name(kind), kind)

    def state(self, step: int) -> dict[str, torch.Tensor]:
        """The checkpoint after that step, in float32: `value:<name>`, `exp_avg:<name>`, ..."""
        return load_file(str(self.directory / f"checkpoints/step-{step:08d}.safetensors"))

    def values(self, step: int) -> dict[str, torch.Tensor]:
        """The trainables after that step."""
        found = {name.partition(":"): value for name, value in self.state(step).items()}
        return {name: value for (part, _, name), value in found.items() if part == "value"}


class Chain:
    """Phases below one root, each run once, those before it first; text rows are the tasks' own solutions.

    `rates`: learning rates of phases that are not RATE.
    """

    def __init__(self, make_config: Make, root: Path, **rates: float) -> None:
        self.rates = {"on_policy": ON_POLICY_RATE, **rates}
        self.root, self.base = root, make_config("head_distill").base.directory
        self.train, self.held_out = short_rows("train", 8), short_rows("eval", 3)
        (root / "text").mkdir()
        card = write_data(root / "text", self.train, self.held_out, {})
        self.source = DataSource(card["fingerprint"], len(self.train))
        self.done: dict[str, Ran] = {}

    def config(self, phase: str, *overrides: str) -> Config:
        where = (f"root={self.root}", f"base.directory={self.base}", f"text.rows={self.root / 'text'}")
        own = (f"optim.lr={self.rates[phase]}",) if phase in self.rates else ()
        return configure(f"phase={phase}", *where, *SETTINGS, *own, *overrides)

    def run(self, phase: str, *overrides: str) -> Ran:
        """A phase as on the command line; with overrides it runs beside the chain, in a `run_dir` that they name."""
        if not overrides and phase in self.done:
            return self.done[phase]
        for before in BEFORE.get(phase, ()):
            self.run(before)
        config = self.config(phase, *overrides)
        with pytest.MonkeyPatch.context() as patch:  # two steps are too few for it
            patch.setattr(head_report, "check_beats_baselines", lambda *_: None)
            summary = run_phase(config)
        assert summary is not None
        ran = Ran(config, summary)
        if not overrides:
            self.done[phase] = ran
        return ran

    def window(self, step: int) -> list[TextRow]:
        """The train rows of a step."""
        return [self.train[i] for i in shuffled(len(self.train), ROWS, SEED)(step)]


def short_rows(split: str, count: int) -> list[TextRow]:
    """Ends of the tasks' prompts and beginnings of their solutions: the oracle runs once a token."""
    rows = [
        TextRow(r.prompt_ids[-7:], r.completion_ids[: 6 + n % 5], "length", r.task, r.answer)
        for n, r in enumerate(task_rows(split, 20 * count))
    ]
    found = list(dict.fromkeys(rows))[:count]
    assert len(found) == count
    return found


# -- the oracle --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What a model makes of one row.

    Attributes:
        logits_CV: at the completion's labels. experts: that ran at each of these inputs, by layer.
        pairs: the logits [E] of router and head, of every (predicted input, owner).
    """

    row: TextRow
    logits_CV: torch.Tensor
    experts: list[dict[int, set[int]]]
    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def loss(self) -> float:
        """Summed cross-entropy of the completion."""
        logp_CV = self.logits_CV.double().log_softmax(-1)
        return -sum(float(logp_CV[c, token]) for c, token in enumerate(self.row.completion_ids))


class Plain(Reference):
    """The int4 base with adapters; without heads every layer keeps its own gate.

    Args:
        heads: values by artifact key. lora: {module: (A, B)}, see `lora_of`. k: if it is not the tier's.
        watch: the heads predict beside the gates, which route.
    """

    def __init__(
        self,
        config: Config,
        heads: Mapping[str, Any] | None = None,
        lora: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
        k: int | None = None,
        watch: bool = False,
    ) -> None:
        tier = dataclasses.replace(config.tier, k=k or config.tier.k)
        model, _ = load_base(config.base.directory, tier, dtype=torch.float32)
        for name, (a, b) in (lora or {}).items():
            model.get_submodule(name).weight.data += tier.lora.alpha / tier.lora.r * (b.float() @ a.float())
        made = PrerouterHeads(tier)
        if heads:
            made.load({name: np.asarray(value, np.float32) for name, value in heads.items()})
        self.own: dict[int, list[torch.Tensor]] = {}
        self.readings: dict[TextRow, Reading] = {}
        for n, layer in enumerate(model.model.layers):  # before the reference's own hook
            layer.mlp.gate.register_forward_hook(lambda _, __, out, n=n: self.own.setdefault(n, []).append(out[0][-1]))
        super().__init__(model, tier if heads and not watch else dataclasses.replace(tier, consumers=()), made)

    def read(self, row: TextRow) -> Reading:
        if row not in self.readings:
            self.readings[row] = self._read(row)
        return self.readings[row]

    @torch.no_grad()
    def _read(self, row: TextRow) -> Reading:
        ids, prompt = (row.prompt_ids + row.completion_ids)[:-1], len(row.prompt_ids)
        self.own.clear()
        hidden_TH, experts = self.run(ids, [t >= prompt for t in range(len(ids))])
        pairs = [
            (self.own[owner + 1][t].double(), self.head_logits[owner][t - 1].double())
            for t in range(len(ids))
            for owner in self.tier.owners
            if self.predicted[t]
        ]
        return Reading(row, self.model.lm_head(hidden_TH[prompt - 1 :]), experts[prompt - 1 :], pairs)

    def mean_pair(self, rows: Sequence[TextRow], term: Callable[[torch.Tensor, torch.Tensor], float]) -> float:
        """Mean of term(router's logits, head's logits) over predicted inputs and owners."""
        terms = [term(router_E, head_E) for row in rows for router_E, head_E in self.read(row).pairs]
        return sum(terms) / len(terms)

    def recall(self, rows: Sequence[TextRow]) -> float:
        """Share of the router's K experts that are among the head's K."""
        k = self.tier.k
        return self.mean_pair(rows, lambda r, h: len({*r.topk(k).indices.tolist()} & {*h.topk(k).indices.tolist()}) / k)

    def mean_loss(self, rows: Sequence[TextRow]) -> float:
        """Mean cross-entropy of the completions' tokens."""
        return sum(self.read(row).loss for row in rows) / sum(len(row.completion_ids) for row in rows)


class PlainTeacher:
    """transformers' model, as published."""

    def __init__(self, config: Config, k: int | None = None) -> None:
        self.model = load_teacher(config.teacher.directory, dtype=torch.float32)
        for layer in self.model.model.layers:
            layer.mlp.gate.top_k = k or layer.mlp.gate.top_k

    @torch.no_grad()
    def logits_CV(self, row: TextRow) -> torch.Tensor:
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        return self.model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(row.prompt_ids) - 1 :]

    def wrote(self, row: TextRow) -> bool:
        """Whether the row's completion is its greedy one."""
        return wrote(row, self.logits_CV(row))


def wrote(row: TextRow, logits_CV: torch.Tensor) -> bool:
    """Whether a completion is the greedy one of the model that has these logits on it."""
    return logits_CV.argmax(-1).tolist() == list(row.completion_ids)


def lora_of(adapter: Adapter) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{module: (A, B)} of a LoRA file."""
    tensors = {name: torch.from_numpy(np.asarray(value, np.float32)) for name, value in adapter.tensors.items()}
    paths = {name.rpartition(".")[0] for name in tensors}
    family = adapter.tier.family
    return {transformers_module(family, p): (tensors[f"{p}.lora_A"], tensors[f"{p}.lora_B"]) for p in paths}


def lora_in(values: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{module: (A, B)} among a checkpoint's values."""
    ends = (".lora_A.default.weight", ".lora_B.default.weight")
    names = {name.removesuffix(ends[0]) for name in values if name.endswith(ends[0])}
    return {name: (values[name + ends[0]], values[name + ends[1]]) for name in names}


def heads_in(values: Mapping[str, torch.Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """The heads among a checkpoint's values; those that do not train are `given`."""
    return {name: values.get(name, value) for name, value in given.items()}
