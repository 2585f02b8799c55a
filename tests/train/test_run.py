"""The run directory: whose it is, what it says, and what a full disk leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from edge0_runtime.contract.code_version import code_commit
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from edge0_train.config import Config, configure, read_config
from edge0_train.loop import train
from edge0_train.run import Run, open_run
from tests.train.toy_loop import OPTIM, Toy, run_in, same

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configure(f"root={tmp_path}/root", "phase=student_sft")


def begun(config: Config) -> Run:
    """A run in which something has happened, stopped."""
    with open_run(config) as run:
        run.log(1, {"loss": 1.0})
    return run


def resumed(config: Config, **changes: object) -> Config:
    return dataclasses.replace(config, resume=True, **changes)  # type: ignore[arg-type]


# -- whose directory ---------------------------------------------------------------------------------------------------


def test_a_new_run_writes_what_it_is(config):
    run = open_run(config)
    assert run.directory == Path(config.run_dir) and not run.is_done
    assert sorted(p.name for p in run.directory.iterdir()) == ["config.yaml", "environment.json", "lock"]
    assert read_config(OmegaConf.load(run.directory / "config.yaml")) == config


def test_environment_names_command_versions_and_code(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["edge0_train", "phase=student_sft", "optim.lr=1"])
    run = open_run(config)
    found = json.loads((run.directory / "environment.json").read_text())
    assert found["command"] == ["edge0_train", "phase=student_sft", "optim.lr=1"]
    assert (
        found["packages"]["torch"] == torch.__version__.split("+")[0] or found["packages"]["torch"] == torch.__version__
    )
    assert {"transformers", "peft", "accelerate", "safetensors"} <= set(found["packages"])
    assert "absent" not in (found["packages"]["transformers"], found["packages"]["peft"])
    assert found["python"] == ".".join(map(str, sys.version_info[:3])) and "cores" in found["machine"]
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode == 0:
        assert found["commit"].removesuffix("-dirty") == head.stdout.strip()
        assert found["commit"].endswith("-dirty") == bool(found["diff"])
    else:
        assert code_commit() == "unknown"


def test_an_existing_run_is_not_touched_without_resume(config):
    begun(config)
    before = {p.name: p.read_bytes() for p in Path(config.run_dir).iterdir()}
    with pytest.raises(Edge0Error, match=r"run_dir: .*student_sft exists already.*resume=true"):
        open_run(config)
    assert {p.name: p.read_bytes() for p in Path(config.run_dir).iterdir()} == before


def test_resume_takes_up_the_same_settings(config):
    begun(config)
    other = dataclasses.replace(config.logger, every=1, checkpoint_every=1, wandb="disabled")
    run = open_run(resumed(config, logger=other, threads=4))  # how it is watched may change
    assert run.directory == Path(config.run_dir)
    assert yaml.safe_load((run.directory / "config.yaml").read_text())["resume"] is False  # as it began


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("optim", "lr", 0.5),
        ("optim", "rows", 7),
        ("text", "rows", "elsewhere"),
        ("tier", "k", 2),
        ("tier", "owners", (2, 3, 4, 5, 6)),
        ("", "seed", 9),
    ],
)
def test_resume_with_another_setting_names_it(config, part, field, value):
    begun(config)
    if part:
        changed = resumed(config, **{part: dataclasses.replace(getattr(config, part), **{field: value})})
    else:
        changed = resumed(config, **{field: value})
    with pytest.raises(Edge0Error, match=rf"resume: .*{part}\.?{field}: saved .*, now ") as error:
        open_run(changed)
    assert "\n" not in str(error.value)


def test_resume_of_nothing_starts_a_run(config):
    assert (open_run(resumed(config)).directory / "config.yaml").exists()


class Fails(Exception):
    pass


@pytest.mark.parametrize("how", [Fails, KeyboardInterrupt, SystemExit, MemoryError])
def test_a_run_in_which_nothing_happened_leaves_its_name_free(config, how):
    with contextlib.suppress(how), open_run(config) as run:
        run.record_inputs({"base": None, "teacher": {"name": "t"}})
        (run.directory / "wandb/offline-run").mkdir(parents=True)
        (run.directory / "wandb/offline-run/a.wandb").write_text("x")
        run.checkpoints.mkdir()
        raise how
    assert not run.directory.exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_was_killed_before_anything_happened_begins_anew(config, resume):
    """kill -9 while the teacher is loading: the corrected command must not be refused."""
    run = open_run(config)
    run.record_inputs({"base": None, "teacher": {"name": "wrong"}})
    (run.directory / ".inputs.json.12-0123abcd.tmp").write_text("{")
    corrected = dataclasses.replace(config, resume=resume, seed=9)
    with open_run(corrected) as run:
        run.record_inputs({"base": None, "teacher": {"name": "right"}})
        assert "seed: 9" in (run.directory / "config.yaml").read_text()
        run.log(1, {"loss": 1.0})


@pytest.mark.parametrize("name", ["checkpoints/step-00000001.safetensors", "thesis.tex", "shards/train-0.jsonl"])
def test_a_run_in_which_something_happened_stays(config, name):
    with contextlib.suppress(Fails), open_run(config) as run:
        (run.directory / name).parent.mkdir(exist_ok=True)
        (run.directory / name).write_text("x")
        raise Fails
    assert (run.directory / name).read_text() == "x" and (run.directory / "config.yaml").exists()


@pytest.mark.parametrize("name", ["config.yaml", "wandb/run", "inputs.json"])
def test_a_foreign_directory_with_familiar_names_is_left_alone(config, name):
    file = Path(config.run_dir) / name
    file.parent.mkdir(parents=True)
    file.write_text("x")
    with pytest.raises(Edge0Error, match="is no run directory"):
        open_run(config)
    assert file.read_text() == "x" and not (Path(config.run_dir) / "lock").exists()


def test_a_directory_that_cannot_be_filled_is_not_left_behind(config, monkeypatch):
    """A disk that is full before the first file."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "environment.json")

    monkeypatch.setattr("edge0_train.run.write_json", full)
    with pytest.raises(Edge0Error, match=r"environment\.json: No space left on device .*free space"):
        open_run(config)
    assert not Path(config.run_dir).exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_foreign_directory_is_left_alone(config, resume):
    directory = Path(config.run_dir)
    directory.mkdir(parents=True)
    (directory / "thesis.tex").write_text("years of work")
    with pytest.raises(Edge0Error, match=r"run_dir: .*not empty and is no run directory"):
        open_run(dataclasses.replace(config, resume=resume))
    assert [p.name for p in directory.iterdir()] == ["thesis.tex"]


def test_an_empty_directory_is_taken(config):
    Path(config.run_dir).mkdir(parents=True)
    assert open_run(config).directory.is_dir()


def test_a_file_in_the_place_of_the_directory_is_an_error(config):
    Path(config.run_dir).parent.mkdir(parents=True)
    Path(config.run_dir).write_text("x")
    with pytest.raises(Edge0Error, match="run_dir"):
        open_run(config)


def test_a_finished_run_says_so(config):
    run = open_run(config)
    summary = run.finish({"loss": 1.5})
    assert summary["phase"] == "student_sft" and summary["loss"] == 1.5 and summary["seconds"] >= 0
    assert run.is_done and json.loads((run.directory / "done.json").read_text()) == summary
    assert open_run(resumed(config)).is_done


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_rows_of_lost_steps_are_forgotten(config):
    run = open_run(config)
    for step in (2, 4, 6, 8):
        run.log(step, {"loss": 1 / step})
    run.forget_after(5)
    run.log(6, {"loss": 0.5})
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 2, "loss": 0.5}, {"step": 4, "loss": 0.25}, {"step": 6, "loss": 0.5}]


def test_forgetting_without_metrics_is_fine(config):
    run = open_run(config)
    run.forget_after(5)
    assert not (run.directory / "metrics.jsonl").exists()


# -- samples and inputs ------------------------------------------------------------------------------------------------

SAMPLES = [
    {"prompt": "1+1?", "completion": "2 \u2028 #2", "answer": "2"},
    {"prompt": "né", "completion": "", "answer": ""},
]


def test_samples_are_a_file_and_a_table(config, monkeypatch):
    run = open_run(config)
    run.write_samples(SAMPLES)
    lines = (run.directory / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line) for line in lines] == SAMPLES
    logged: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Table=lambda columns, data: (columns, data)))
    run.wandb = SimpleNamespace(log=logged.append)
    run.write_samples(SAMPLES)
    run.write_samples([])
    assert logged == [{"samples": (["prompt", "completion", "answer"], [list(s.values()) for s in SAMPLES])}]


def test_limits_on_generated_rows_may_change_on_resume(config):
    """A run that a gate has stopped must be able to go on with another limit; what it generates may not change."""
    begun(config)
    open_run(resumed(config, sample=dataclasses.replace(config.sample, max_truncated=1.0, max_growth=9.0)))
    open_run(
        resumed(config, teacher=dataclasses.replace(config.teacher, resident=False))
    )  # where it lies, not what it says
    with pytest.raises(Edge0Error, match=r"resume: .*sample\.temperature"):
        open_run(resumed(config, sample=dataclasses.replace(config.sample, temperature=0.5)))


# -- a full disk -------------------------------------------------------------------------------------------------------

FILLED = """
import resource, signal, sys
from pathlib import Path
import torch
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.checkpoint import save_checkpoint

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
weight = torch.nn.Parameter(torch.full((100, 100), 7.0))
try:
    save_checkpoint(Path(sys.argv[1]), 2, 0, {"weight": weight}, torch.optim.AdamW([weight]))
except Edge0Error as error:
    print(f"Edge0Error: {error}")
except BaseException as error:
    print(f"{type(error)}: {error}")
"""


def saved(directory: Path) -> torch.nn.Parameter:
    """The parameter of a checkpoint at step 1, with optimizer state."""
    weight = torch.nn.Parameter(torch.arange(10_000.0).view(100, 100))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    save_checkpoint(directory, 1, 0, {"weight": weight}, optimizer)
    return weight


def test_a_full_disk_keeps_the_older_checkpoint_and_says_so(tmp_path):
    """A limit on file sizes stands for the full disk: the write fails in the middle."""
    weight = saved(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FILLED, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.safetensors"]  # no rubbish either
    restored = torch.nn.Parameter(torch.zeros(100, 100))
    assert load_checkpoint(checkpoints(tmp_path)[0], {"weight": restored}, torch.optim.AdamW([restored])) == (1, 0)
    assert torch.equal(restored, weight)
    assert done.stdout.startswith("Edge0Error: "), (done.returncode, done.stdout + done.stderr[-800:])
    assert "step-00000002.safetensors" in done.stdout and "room" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full, of Linux")
def test_metrics_that_find_no_room_are_one_sentence(config):
    run = open_run(config)
    (run.directory / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(Edge0Error, match=r"metrics\.jsonl: cannot be written \(No space left.*resume=true"):
        run.log(1, {"loss": 1.0})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of three pages."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs Linux and root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_small_disk_fills_up_and_the_run_continues_once_there_is_room(small_disk, tmp_path):
    """Metrics and two checkpoints fit, the third does not; what is there is whole, and the resumed run is the undisturbed one."""
    straight, toy = Toy(), Toy()
    train(run_in(tmp_path / "straight", checkpoint_every=1), OPTIM, straight.objective())
    with pytest.raises(Edge0Error, match=r"step-00000003\.safetensors: no room to write.*free space"):
        train(run_in(small_disk / "run", checkpoint_every=1), OPTIM, toy.objective())
    kept = checkpoints(small_disk / "run" / "checkpoints")
    assert [path.name for path in kept] == ["step-00000001.safetensors", "step-00000002.safetensors"]
    assert sorted(kept[0].parent.iterdir()) == kept  # no rubbish
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    again = Toy()
    train(run_in(small_disk / "run", resume=True, checkpoint_every=1), OPTIM, again.objective())
    assert same(again.values(), straight.values())
