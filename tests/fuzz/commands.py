"""The commands that read a directory of a stranger's, and the trees that they are given: one more command is one more row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.own_trace import write_own_trace
from tests.random_adapters import write_adapters
from tests.runtime.conftest import TIER, write_base


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        program: `module:function`, called in a process of its own with the arguments in `sys.argv`; returns its exit code.
        arguments: `{tree}` stands for the directory, which is the working directory too.
        tree: writes an undamaged one.
        plain: what it prints has no control characters; a model's own text may.
        damaged: the parts of the tree that the command reads.
        writes: the parts that are its own output; it changes nothing else.
    """

    program: str
    arguments: str
    tree: Callable[[Path], None]
    plain: bool = True
    damaged: tuple[str, ...] = ("",)
    writes: tuple[str, ...] = ()


def model_directory(directory: Path) -> None:
    """A tiny random model with its adapters, a reference trace, and its tier as a file."""
    directory.mkdir()
    write_base(directory)
    write_adapters(directory, TIER)
    write_own_trace(directory, directory / TIER.file_name("verify"))
    (directory / "tier.yaml").write_text(yaml.safe_dump(TIER.to_dict()))


RUNTIME = "edge0_runtime.cli:main"
COMMANDS = (
    Command(RUNTIME, "inspect {tree}", model_directory),
    Command(RUNTIME, "inspect {tree} --json", model_directory),
    Command(RUNTIME, "tiers {tree}/tier.yaml", model_directory),
    Command(RUNTIME, "doctor {tree} --read-mib 0.01", model_directory),
    Command(RUNTIME, "generate {tree} --prompt 12+34= --max-tokens 2", model_directory, plain=False),
    Command(
        RUNTIME,
        "generate {tree} --no-prerouter --no-lora --prompt-ids 5,6 --max-tokens 2",
        model_directory,
        plain=False,
    ),
    Command(RUNTIME, "chat {tree} --prompt 12+34= --max-tokens 2", model_directory, plain=False),
    Command(RUNTIME, "verify {tree}", model_directory),
    Command(RUNTIME, "bench {tree} --prompt 12+34= --max-tokens 2", model_directory),
    Command(RUNTIME, "serve {tree} --port 0", model_directory),
)
