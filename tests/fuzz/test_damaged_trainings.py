"""Training's half of test_damaged_trees.py: a command reads a damaged part of a finished training; and strange command lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.commands import Command
from tests.fuzz.damage import DAMAGES, Damage, copy_tree
from tests.fuzz.driver import TREES, Worker, problems
from tests.fuzz.overrides import PHASE, WORDS
from tests.fuzz.training import OWN, TRAIN, TRAINING, training_directory

FUZZ = settings(
    max_examples=max(1, TREES * 4 // 10),
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(TRAIN)
    yield made
    made.close()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A copy of the finished training at every call, at one place."""
    folder = tmp_path_factory.mktemp("training")
    training_directory(folder / "good")
    return lambda: copy_tree(folder / "good", folder / "damaged")


@pytest.mark.parametrize("command", TRAINING, ids=lambda command: command.arguments.replace(OWN, "").strip()[:60])
def test_a_whole_training_is_served_by_every_command(
    command: Command, fresh: Callable[[], Path], worker: Worker
) -> None:
    assert problems(worker, command, fresh()) == []
    assert worker.code == 0


def test_a_damaged_training_is_served_or_refused_in_one_sentence(fresh: Callable[[], Path], worker: Worker) -> None:
    @FUZZ
    @given(st.sampled_from(TRAINING), st.lists(DAMAGES, min_size=1, max_size=3))
    def check(command: Command, damages: list[Damage]) -> None:
        tree = fresh()
        for damage in damages:
            damage.apply(tree, command.damaged)
        found = problems(worker, command, tree)
        assert not found, f"{command.arguments}\n{damages}\n{found}"

    check()


def test_a_strange_command_line_is_served_or_refused_in_one_sentence(fresh: Callable[[], Path], worker: Worker) -> None:
    tree = fresh()

    @FUZZ
    @given(PHASE, st.lists(WORDS, min_size=1, max_size=3))
    def check(phase: str, words: list[str]) -> None:
        plan = Command(TRAIN, f"{OWN} phase={phase} resume=true dry_run=true", training_directory)
        found = problems(worker, plan, tree, words)
        assert not found, f"{plan.arguments} {words!r}\n{found}"

    check()
