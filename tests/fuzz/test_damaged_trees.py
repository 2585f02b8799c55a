"""Whatever a stranger's directory holds, a command does its work or says in one sentence why it can't; it never hangs or breaks.

    EDGE0_FUZZ_TREES=2000 python -m pytest -n0 -o faulthandler_timeout=0 tests/fuzz

makes as many trees instead of 100, each damaged once or a few times: 60 in 100 for the runtime, which runs all commands on each,
40 for training (test_damaged_trainings.py), which runs one. What fails is a list of `Damage`, made as small as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.commands import COMMANDS, Command
from tests.fuzz.damage import DAMAGES, Damage, copy_tree
from tests.fuzz.driver import TREES, Worker, problems

BUILDERS = list(dict.fromkeys(command.tree for command in COMMANDS))


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Worker]]:
    """One for each program."""
    made = {command.program: Worker(command.program) for command in COMMANDS}
    yield made
    for worker in made.values():
        worker.close()


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_a_damaged_tree_is_served_or_refused_in_one_sentence(
    build: Callable[[Path], None], workers: dict[str, Worker], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(build.__name__)
    good = folder / "good"
    build(good)
    commands = [command for command in COMMANDS if command.tree is build]

    @settings(
        max_examples=max(1, TREES * 6 // 10),
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.lists(DAMAGES, min_size=1, max_size=3))
    def check(damages: list[Damage]) -> None:
        tree = copy_tree(good, folder / "damaged")
        for damage in damages:
            damage.apply(tree)
        found = {
            command.arguments: wrong
            for command in commands
            if (wrong := problems(workers[command.program], command, tree))
        }
        assert not found, f"{damages}\n{found}"

    check()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.arguments)
def test_an_undamaged_tree_is_served(command: Command, workers: dict[str, Worker], tmp_path: Path) -> None:
    command.tree(tmp_path / "tree")
    assert not problems(workers[command.program], command, tmp_path / "tree")
    assert workers[command.program].code == 0
