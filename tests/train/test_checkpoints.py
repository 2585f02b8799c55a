"""Checkpoint files: few are kept, a damaged one is told from a foreign one, and an older one takes its place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.checkpoint import KEEP, Damaged, checkpoints, load_checkpoint, save_checkpoint
from edge0_train.loop import train
from tests.train.toy_loop import OPTIM, Toy, metrics, run_in, same


def trained(directory: Path) -> Path:
    """checkpoints/ of a run that saved after every step."""
    run = run_in(directory, checkpoint_every=1)
    train(run, OPTIM, Toy().objective())
    return run.checkpoints


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    assert KEEP == 2
    directory = trained(tmp_path / "run")
    assert [p.name for p in sorted(directory.iterdir())] == ["step-00000005.safetensors", "step-00000006.safetensors"]


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zeros(file: Path) -> None:
    """Header and length are right; what a power cut can leave of the rest."""
    whole = file.read_bytes()
    file.write_bytes(whole[:-512] + bytes(512))


@pytest.mark.parametrize("damage", [cut_short, empty, zeros])
def test_from_a_damaged_checkpoint_the_older_one_goes_on(tmp_path, capsys, damage):
    """It says so, the rows of the step that is done again are not there twice, and the end is the same to the bit."""
    straight, run = Toy(), run_in(tmp_path / "run", checkpoint_every=1)
    train(run, OPTIM, straight.objective())
    rows = metrics(run)
    damage(checkpoints(run.checkpoints)[-1])
    capsys.readouterr()
    toy, again = Toy(), run_in(tmp_path / "run", resume=True, checkpoint_every=1)
    train(again, OPTIM, toy.objective())
    said = capsys.readouterr().err
    assert "step-00000006.safetensors: damaged" in said and "resuming from step-00000005.safetensors instead" in said
    assert toy.calls == 3 and same(toy.values(), straight.values()) and metrics(again) == rows
    train(run_in(tmp_path / "run", resume=True), OPTIM, Toy().objective())
    assert "damaged" not in capsys.readouterr().err


def test_a_damaged_later_checkpoint_does_not_push_out_a_whole_one(tmp_path):
    run = run_in(tmp_path / "run", checkpoint_every=1)
    train(run, OPTIM, Toy().objective())
    empty(checkpoints(run.checkpoints)[-1])
    toy = Toy()
    save_checkpoint(run.checkpoints, 5, 0, toy.parameters, torch.optim.AdamW(toy.model.parameters()))
    save_checkpoint(run.checkpoints, 5, 0, toy.parameters, torch.optim.AdamW(toy.model.parameters()))
    assert [p.name for p in checkpoints(run.checkpoints)] == ["step-00000005.safetensors"]


def test_where_all_are_damaged_it_is_said_and_what_is_advised_works(tmp_path):
    directory = trained(tmp_path / "run")
    for file in checkpoints(directory):
        empty(file)
    toy = Toy()
    before = toy.values()
    with pytest.raises(
        Edge0Error, match=r"step-00000006.*step-00000005.*: no checkpoint is left.*delete (.*) to begin"
    ) as error:
        train(run_in(tmp_path / "run", resume=True), OPTIM, toy.objective())
    assert same(toy.values(), before) and "\n" not in str(error.value) and f"delete {directory} to" in str(error.value)
    shutil.rmtree(directory)
    straight = Toy()
    train(run_in(tmp_path / "straight"), OPTIM, straight.objective())
    train(run_in(tmp_path / "run", resume=True), OPTIM, toy.objective())
    assert same(toy.values(), straight.values())
    assert metrics(run_in(tmp_path / "run")) == metrics(run_in(tmp_path / "straight"))


def test_a_checkpoint_of_before_the_checksum_is_read(tmp_path):
    file = checkpoints(trained(tmp_path / "run"))[-1]
    save_file(load_file(str(file)), str(file), metadata={"step": "6", "tokens": "3"})
    toy = Toy()
    assert load_checkpoint(file, toy.parameters, torch.optim.AdamW(toy.model.parameters())) == (6, 3)


OTHER_TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "stranger": lambda tensors: tensors | {"value:other": torch.zeros(1)},
    "lacking": lambda tensors: {k: v for k, v in tensors.items() if k != "value:0.bias"},
    "shape": lambda tensors: tensors | {"value:0.bias": torch.zeros(7)},
}


@pytest.mark.parametrize("change", OTHER_TENSORS.values(), ids=OTHER_TENSORS)
def test_a_checkpoint_of_other_tensors_is_refused(tmp_path, change):
    file = checkpoints(trained(tmp_path / "run"))[-1]
    save_file(change(load_file(str(file))), str(file), metadata={"step": "6", "tokens": "0"})
    toy = Toy()
    before = toy.values()
    with pytest.raises(Edge0Error, match=file.name) as error:
        load_checkpoint(file, toy.parameters, torch.optim.AdamW(toy.model.parameters()))
    assert not isinstance(error.value, Damaged) and same(toy.values(), before)  # an older one would be no better


def test_a_checkpoint_without_a_step_is_refused(tmp_path):
    file = checkpoints(trained(tmp_path / "run"))[-1]
    save_file(load_file(str(file)), str(file))
    toy = Toy()
    with pytest.raises(Edge0Error, match=file.name):
        load_checkpoint(file, toy.parameters, torch.optim.AdamW(toy.model.parameters()))


def test_files_that_are_no_checkpoints_are_left_alone(tmp_path):
    directory = trained(tmp_path / "run")
    for name in ("step-9.safetensors", ".step-00000009.safetensors.12-ab.tmp", "notes.txt"):
        (directory / name).write_text("x")
    toy = Toy()
    save_checkpoint(directory, 7, 0, toy.parameters, torch.optim.AdamW(toy.model.parameters()))
    assert len(list(directory.iterdir())) == KEEP + 3
    assert [p.name for p in checkpoints(directory)][-1] == "step-00000007.safetensors"
