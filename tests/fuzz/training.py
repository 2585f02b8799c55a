"""Training's commands, and the directory of a small finished training that they are given: one more command is one more row."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from pathlib import Path

import yaml
from datasets import Dataset

from edge0_train.cli import run_phase
from edge0_train.config import configure
from edge0_train.data import tasks
from edge0_train.propose import propose
from recipes.bring_your_own_moe.tiny import tiny_flat
from tests.fuzz.commands import Command

ALL = {
    "threads": 1,
    "base": {"dtype": "float32", "device": "cpu"},
    "teacher": {"directory": "teacher"},
    "text": {"prompts": "prompts/rows.jsonl", "max_length": 64, "max_dropped": 0.5},
    "sample": {
        "prompts": 48,
        "eval_prompts": 4,
        "max_new_tokens": 8,
        "max_truncated": 1.0,
        "max_repetitive": 1.0,
        "max_growth": 100.0,
    },
    "optim": {"steps": 2, "rows": 8, "micro_rows": 8, "lr": 3e-3},
    "on_policy": {"rounds": 1, "top_k": 8},
    "export": {"trace_prompts": 1, "trace_tokens": 2, "trace_top": 4},
    "logger": {"wandb": "disabled", "every": 1, "checkpoint_every": 1},
}
SETTINGS = {
    "all": ALL,
    "head_distill": {
        "optim": {"steps": 60},
        "logger": {"every": 20, "checkpoint_every": 20},
    },  # they must beat the baselines
}
CHAIN = ("quantize", "teacher_text", "head_distill", "student_sft", "export")


def training_directory(directory: Path) -> None:
    """A tier of one's own, its tiny random teacher, prompts in every form, and a chain of phases, finished and interrupted."""
    teacher = tiny_flat(directory / "teacher", "olmoe", num_hidden_layers=4)
    tier = propose(teacher, name="own").tier.to_dict() | {"token_aware": True, "settings": SETTINGS}
    for group, content in (("tier", tier), ("experiment", {"optim": {"steps": 1}})):
        file = directory / "mine" / group / "own.yaml"
        file.parent.mkdir(parents=True)
        header = "# @package _global_\n" * (group == "experiment")
        file.write_text(header + yaml.safe_dump(content))
    _write_prompts(directory / "prompts")
    with contextlib.chdir(directory):  # a run remembers its settings, and it is copied
        for phase in CHAIN:
            run_phase(configure(f"phase={phase}", "tier=own", "root=run", config_dir="mine"))
        for phase in ("teacher_text", "student_sft"):
            shutil.copytree(f"run/{phase}", f"stopped/{phase}")
            Path(f"stopped/{phase}/done.json").unlink()
            for file in (
                *Path(f"stopped/{phase}").glob("*.safetensors"),
                *Path(f"stopped/{phase}").rglob("step-*2.safetensors"),
            ):
                file.unlink()
            config = Path(f"stopped/{phase}/config.yaml")
            config.write_text(config.read_text().replace(f"run_dir: run/{phase}", f"run_dir: stopped/{phase}"))


def _write_prompts(directory: Path) -> None:
    directory.mkdir()
    rows = [{"messages": tasks.messages(problem), "task": problem.task} for problem in tasks.problems("train", 0, 80)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "rows.jsonl").write_text(lines)
    (directory / "rows.json").write_text(json.dumps(rows))
    (directory / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    data = Dataset.from_list(rows)
    data.to_parquet(str(directory / "rows.parquet"))
    data.save_to_disk(str(directory / "saved"))


TRAIN = "edge0_train.cli:main"
OWN = "--config-dir mine tier=own root=run"
BASE, TEXT, HEADS, LORA = "run/base", "run/teacher_text", "run/head_distill", "run/student_sft"
TIER, NEW_BASE = "mine/tier", "new-base"


def _row(arguments: str, *damaged: str, writes: tuple[str, ...] = ()) -> Command:
    return Command(TRAIN, arguments, training_directory, damaged=damaged, writes=writes)


PROMPTS = ("rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.parquet", "saved")
READS = {
    "quantize": ("teacher", TIER),
    "teacher_text": ("teacher", "prompts", BASE, TIER),
    "head_distill": (BASE, TEXT, TIER),
    "head_refine": (BASE, TEXT, HEADS, TIER),
    "student_sft": (BASE, TEXT, HEADS, TIER),
    "on_policy": ("teacher", "prompts", BASE, LORA, TIER),
    "evaluate": ("teacher", BASE, TEXT, HEADS, LORA),
    "export": (BASE, TEXT, LORA, TIER),
}
"""{phase: what it reads}."""
TRAINING = (
    *(_row(f"{OWN} phase={phase} run_dir=new dry_run=true base.directory={NEW_BASE if phase == 'quantize' else BASE}", *reads)
      for phase, reads in READS.items()),
    _row(f"{OWN} phase=all resume=true dry_run=true", "run", "teacher", "mine"),
    *(_row(f"{OWN} phase=teacher_text run_dir=new sample.prompts=2 sample.eval_prompts=1 text.prompts=prompts/{name}",
           f"prompts/{name}", writes=("new",)) for name in PROMPTS),
    _row(f"{OWN} phase=teacher_text run_dir=new sample.prompts=2 sample.eval_prompts=1", "teacher", writes=("new",)),
    _row(f"{OWN} phase=teacher_text run_dir=stopped/teacher_text resume=true", "stopped/teacher_text",
         writes=("stopped/teacher_text",)),
    _row(f"{OWN} phase=student_sft run_dir=stopped/student_sft resume=true", "stopped/student_sft",
         writes=("stopped/student_sft",)),
    _row(f"{OWN} phase=student_sft resume=true", LORA, writes=(LORA,)),
    _row(f"{OWN} phase=all resume=true", "run", writes=("run",)),
    _row(f"{OWN} phase=head_distill run_dir=new", BASE, TEXT, writes=("new",)),
    _row(f"{OWN} phase=head_refine run_dir=new optim.steps=1", HEADS, writes=("new",)),
    _row(f"{OWN} phase=student_sft run_dir=new optim.steps=1 inputs.prerouter={LORA} inputs.lora={LORA}", LORA,
         writes=("new",)),
    _row(f"{OWN} phase=on_policy run_dir=new optim.steps=1", "prompts/rows.jsonl", "teacher", LORA, writes=("new",)),
    _row(f"{OWN} phase=evaluate run_dir=new sample.eval_prompts=1", HEADS, LORA, "teacher", writes=("new",)),
    _row(f"{OWN} phase=export run_dir=new export.directory=new-model", BASE, TEXT, LORA, writes=("new", "new-model")),
    _row(f"{OWN} phase=export run_dir=new export.directory=run/model", "run/model", writes=("new", "run/model")),
    _row(f"{OWN} phase=quantize run_dir=new base.directory={NEW_BASE}", "teacher", writes=("new", NEW_BASE)),
    _row("inspect base=teacher out=proposed", "teacher", writes=("proposed",)),
    _row("inspect base=run/base", BASE),
    _row(f"{OWN} phase=export experiment=own run_dir=new dry_run=true", "mine"),
    _row("settings --markdown", "mine"),
    _row(f"doctor {OWN}", "mine", "teacher", BASE, TEXT),
)  # fmt: skip
