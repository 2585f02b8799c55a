"""Teacher text: what is dropped is counted, either backend gives the same kind of rows, collapse stops the phase."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file, save_file

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import Config
from edge0_train.data.complete import PathWriter
from edge0_train.data.rows import TextRow, distinct, read_data, read_rows
from edge0_train.phases.teacher_text import teacher_text
from edge0_train.run import Run, open_run
from tests.tiny_models import TEACHER
from tests.train.conftest import Make
from tests.train.edited_teachers import padded

END = 2
SMALL = ("sample.prompts=40", "sample.eval_prompts=20", "sample.batch=16", "sample.max_new_tokens=8")


@dataclass
class FakeVllm:
    """Stands for the module `vllm`: echoes the prompt's last ids, ends as told, and remembers what it was asked."""

    finish_reason: str = "stop"
    leaves_end_in: bool = True
    repeat: int | None = None
    __spec__: ClassVar[ModuleSpec] = ModuleSpec("vllm", None)

    def __post_init__(self) -> None:
        self.engines: list[dict[str, Any]] = []
        self.calls: list[tuple[list[Any], list[Any]]] = []

    def SamplingParams(self, **settings: Any) -> SimpleNamespace:
        return SimpleNamespace(**settings)

    def LLM(self, **settings: Any) -> FakeVllm:
        self.engines.append(settings)
        return self

    def generate(self, prompts: Sequence[Any], settings: Sequence[Any], use_tqdm: bool) -> list[Any]:
        self.calls.append((list(prompts), list(settings)))
        outputs = []
        for prompt, setting in zip(prompts, settings, strict=True):
            ids = [self.repeat] * 8 if self.repeat else prompt["prompt_token_ids"][-6:]
            end = setting.stop_token_ids[0]
            if self.finish_reason == "stop" and self.leaves_end_in:
                ids = [*ids, end]
            outputs.append(SimpleNamespace(token_ids=ids, finish_reason=self.finish_reason, stop_reason=end))
        return [SimpleNamespace(outputs=[output]) for output in outputs]


def run_phase(config: Config) -> tuple[dict[str, Any], Path]:
    run = open_run(config)
    return run.finish(teacher_text(config, run)), run.directory


@pytest.fixture
def text_config(make_config: Make, tmp_path: Path):
    return lambda *overrides: make_config("teacher_text", f"run_dir={tmp_path / 'run'}", *SMALL, *overrides)


def prompts_file(path: Path, questions: list[str]) -> str:
    rows = [{"messages": [{"role": "user", "content": text}], "answer": text[-1]} for text in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- backends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves_end_in", [True, False])
def test_vllm_gets_ids_and_gives_rows(text_config, monkeypatch, leaves_end_in):
    fake = FakeVllm(leaves_end_in=leaves_end_in)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    config = text_config("sample.backend=vllm", "sample.temperature=0.7", "sample.top_p=0.9")
    summary, directory = run_phase(config)
    data, dropped = read_data(directory, 64)
    assert not dropped and summary["card"]["train"]["finish_reasons"] == {"stop": len(data.train)}
    for row in (*data.train, *data.held_out):
        assert row.completion_ids[:-1] == row.prompt_ids[-6:] and row.answer and row.task
    assert len({row.completion_ids[-1] for row in data.train}) == 1
    engine = fake.engines[0]
    assert len(fake.engines) == 1 and engine["model"] == config.teacher.directory and engine["dtype"] == "float32"
    assert engine["generation_config"] == "vllm" and engine["max_model_len"] == 64 + 8
    settings = [setting for _, part in fake.calls for setting in part]
    assert {(s.temperature, s.top_p, s.max_tokens) for s in settings} == {(0.7, 0.9, 8)}
    assert len({s.seed for s in settings}) == len(settings) == 60
    assert all(isinstance(i, int) for prompts, _ in fake.calls for p in prompts for i in p["prompt_token_ids"])


def test_vllm_writes_no_id_beyond_the_tiers_vocabulary(text_config, tmp_path, monkeypatch):
    for directory, allowed in ((TEACHER, None), (padded(tmp_path / "teacher"), [*range(384)])):
        fake = FakeVllm()
        monkeypatch.setitem(sys.modules, "vllm", fake)
        run_phase(
            text_config(
                "sample.backend=vllm", f"teacher.directory={directory}", f"run_dir={tmp_path / directory.parent.name}"
            )
        )
        settings = [setting for _, part in fake.calls for setting in part]
        assert settings and all(setting.allowed_token_ids == allowed for setting in settings)


def test_vllm_marks_what_was_cut(text_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm(finish_reason="length"))
    _, directory = run_phase(text_config("sample.backend=vllm", "sample.max_truncated=1"))
    assert {row.finish_reason for row in read_rows(directory / "train.jsonl")} == {"length"}


def test_vllm_that_aborts_is_an_error(text_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm(finish_reason="abort"))
    with pytest.raises(Edge0Error, match=r"sample\.backend: .*'abort'"):
        run_phase(text_config("sample.backend=vllm"))


def test_without_vllm_the_fix_is_said(text_config, monkeypatch):
    """Before a teacher of tens of GB is hashed."""
    monkeypatch.setattr("edge0_train.phases.teacher_text.identify_teacher", lambda _: pytest.fail("hashed first"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Edge0Error, match=r"sample\.backend: vllm cannot be imported.*sample\.backend=transformers"):
        run_phase(text_config("sample.backend=vllm"))


def test_transformers_rows_do_not_depend_on_who_else_is_written(text_config, make_config, tmp_path):
    """Every shard has a seed of its own: a stopped run that goes on ends with the same rows."""
    config = text_config("sample.max_truncated=1")
    _, directory = run_phase(config)
    again = make_config("teacher_text", f"run_dir={tmp_path / 'again'}", *SMALL, "sample.max_truncated=1")
    shutil.copytree(directory / "shards", tmp_path / "again" / "shards")
    for shard in sorted((tmp_path / "again" / "shards").iterdir())[::2]:
        shard.unlink()
    run_again = Run(Path(again.run_dir), again)
    teacher_text(again, run_again)
    for name in ("train.jsonl", "held_out.jsonl", "samples.jsonl"):
        assert (directory / name).read_bytes() == (run_again.directory / name).read_bytes()


# -- what is dropped ---------------------------------------------------------------------------------------------------


def test_exact_duplicates_are_dropped_and_counted(text_config, monkeypatch):
    """Nano prompts repeat, and this teacher always says the same."""
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm())
    config = text_config("sample.backend=vllm", "sample.prompts=3000", "sample.batch=3000")
    summary, directory = run_phase(config)
    shards = [row for shard in (directory / "shards").glob("train-*") for row in read_rows(shard)]
    rows = read_rows(directory / "train.jsonl")
    assert len(shards) == 3000 and len(rows) == len({(r.prompt_ids, r.completion_ids) for r in shards}) < 3000
    card = json.loads((directory / "card.json").read_text())
    assert card["duplicate_rows"]["train"] == 3000 - len(rows) and card == summary["card"]
    assert card["health"]["train"]["rows"] == 3000


def test_distinct_keeps_the_first_and_the_order():
    a, b, c = (TextRow((1,), (n,), "stop", task) for n, task in ((1, "x"), (2, "y"), (1, "z")))
    other = TextRow((2,), (1,), "stop")
    assert distinct([a, b, c, other, b]) == [a, b, other] and distinct([]) == []


def test_prompts_without_room_for_an_answer_are_dropped_before_they_are_written(text_config, tmp_path, capsys):
    questions = [f"Question {n}?" for n in range(200)] + [f"{'long ' * 30}{n}?" for n in range(20)]
    source = prompts_file(tmp_path / "q.jsonl", questions)
    config = text_config(
        f"text.prompts={source}",
        "sample.prompts=400",
        "sample.eval_prompts=60",
        "sample.batch=300",
        "sample.max_truncated=1",
    )
    too_long = "prompt not below text.max_length=64"
    summary, directory = run_phase(config)
    assert summary["card"]["dropped_prompts"] == {too_long: 20} and summary["card"]["rows_read"] == 220
    assert summary["card"]["dropped_at"] == {too_long: [f"line {n}" for n in range(201, 206)]}
    done = json.loads((directory / "done.json").read_text())
    assert done["card"] == json.loads((directory / "card.json").read_text()) == summary["card"]
    plan = " ".join(capsys.readouterr().out.split())
    assert f"(dropped of 220 rows read (9.1%): 20 {too_long} (line 201, line 202, " in plan
    shards = [row for shard in (directory / "shards").iterdir() for row in read_rows(shard)]
    assert len(shards) == 200 and all(len(row.prompt_ids) < 64 for row in shards)


def test_rows_that_cannot_be_used_stop_the_phase_above_the_share_that_is_set(text_config, tmp_path):
    file = tmp_path / "q.jsonl"
    prompts_file(file, [f"Question {n}?" for n in range(100)])
    with file.open("a") as lines:
        lines.write(
            '{"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]}\n' * 1 + "{\n" * 9
        )
    config = text_config(
        f"text.prompts={file}", "text.max_dropped=0.05", "sample.prompts=200", "sample.eval_prompts=50"
    )
    with pytest.raises(
        Edge0Error, match=r"text\.max_dropped: 10 of 110 rows .*\(9\.1%\).*9 not strict JSON \(line 102"
    ):
        run_phase(config)


def test_only_long_prompts_is_an_error(text_config, tmp_path):
    source = prompts_file(tmp_path / "q.jsonl", [f"{'long ' * 30}{n}?" for n in range(60)])
    with pytest.raises(
        Edge0Error, match=r"text\.max_length: no train prompt is shorter than 64 tokens \(\d+ .*raise it"
    ):
        run_phase(text_config(f"text.prompts={source}"))


# -- resume ------------------------------------------------------------------------------------------------------------


def test_a_stopped_run_continues_with_the_missing_shards_and_ends_with_the_same_rows(
    text_config, tmp_path, monkeypatch
):
    """Temperature 1: every shard has a seed of its own, whichever were written before."""

    class Killed(Exception):
        pass

    write = PathWriter.__call__
    settings = ("sample.temperature=1", "sample.max_truncated=1", f"run_dir={tmp_path / 'stopped'}")
    seen: list[int] = []

    def dies(self: PathWriter, prompts: Any, seed: int) -> Any:
        if len(seen) == 3:  # both shards of the held-out side and one of the train side are there
            raise Killed
        seen.append(seed)
        return write(self, prompts, seed)

    monkeypatch.setattr(PathWriter, "__call__", dies)
    with pytest.raises(Killed):
        run_phase(text_config(*settings))
    resumed: list[int] = []

    def counted(self: PathWriter, prompts: Any, seed: int) -> Any:
        resumed.append(seed)
        return write(self, prompts, seed)

    monkeypatch.setattr(PathWriter, "__call__", counted)
    _, directory = run_phase(text_config(*settings, "resume=true"))
    assert len(resumed) == 2 and not set(resumed) & set(seen)
    _, straight = run_phase(text_config(*settings, f"run_dir={tmp_path / 'straight'}"))
    for name in ("train.jsonl", "held_out.jsonl", "card.json"):
        assert (directory / name).read_bytes() == (straight / name).read_bytes()


# -- what stops --------------------------------------------------------------------------------------------------------


def test_a_teacher_that_never_ends_stops_the_phase(text_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm(finish_reason="length"))
    config = text_config("sample.backend=vllm")
    with pytest.raises(Edge0Error, match=r"sample\.max_truncated: 100% of 20 completions \(teacher, held_out\)"):
        run_phase(config)
    assert not (Path(config.run_dir) / "train.jsonl").exists()


def test_a_teacher_that_repeats_itself_stops_the_phase(text_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm(repeat=99))
    with pytest.raises(Edge0Error, match=r"sample\.max_repetitive: 100% "):
        run_phase(text_config("sample.backend=vllm"))


def test_another_tokenizer_is_refused_by_either_backend(text_config, tmp_path, monkeypatch):
    other = tmp_path / "teacher"
    shutil.copytree(TEACHER, other)
    content = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(content, indent=3))
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm())
    for backend in ("transformers", "vllm"):
        with pytest.raises(Edge0Error, match=r"teacher\.directory: tokenizer\.json .* is not the base's"):
            run_phase(
                text_config(f"teacher.directory={other}", f"sample.backend={backend}", f"run_dir={tmp_path / backend}")
            )


def test_other_end_tokens_are_refused_by_either_backend(text_config, tmp_path, monkeypatch):
    """Same tokenizer, but the teacher ends its replies with another token than the student is to learn."""
    other = tmp_path / "teacher"
    shutil.copytree(TEACHER, other)
    generation = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [2, 5]}))
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm())
    for backend in ("transformers", "vllm"):
        with pytest.raises(Edge0Error, match=r"teacher\.directory: end tokens \(2, 5\) .* not the base's \(2,\)"):
            run_phase(
                text_config(f"teacher.directory={other}", f"sample.backend={backend}", f"run_dir={tmp_path / backend}")
            )


def test_a_teacher_with_nan_in_a_shard_is_named(text_config, tmp_path):
    other = tmp_path / "teacher"
    shutil.copytree(TEACHER, other)
    tensors = load_file(str(other / "model.safetensors"))
    name = next(name for name in tensors if "layers.3.mlp.gate.weight" in name)
    tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, str(other / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(Edge0Error, match=r"teacher\.directory: .*not finite in 1 tensors \(.*layers\.3\.mlp\.gate"):
        run_phase(text_config(f"teacher.directory={other}"))


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_few_rows_are_readable(text_config):
    _, directory = run_phase(text_config("sample.max_truncated=1"))
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    for sample in samples:
        assert sample.keys() == {"prompt", "completion", "answer", "task", "finish_reason"}
        assert sample["prompt"].startswith("<|im_start|>user\n") and sample["prompt"].endswith("assistant\n")
        assert sample["completion"] and sample["answer"]
