"""`--multirun`: every combination of `setting=a,b` is a run in a directory of its own, and a table compares them.

Hydra's parser reads the sweep; its launcher is not used, since a directory here belongs to the run (`edge0_train.run`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from edge0_runtime.contract.edge import held
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import PHASES, config_directory, user_tiers
from edge0_train.config.grammar import in_one_sentence
from edge0_train.report import table
from edge0_train.run import read_summary

Step = Callable[[DictConfig, Sequence[str]], object]
VOLATILE = ("seconds", "peak_rss_mib", "tokens_per_second")
"""Numbers of a summary that say nothing about the settings."""
COLUMNS = 8
MOST_JOBS = 1000


@dataclass(frozen=True)
class Job:
    """One combination: what it sets, its overrides, and where its summary will be."""

    name: str
    overrides: tuple[str, ...]
    composed: DictConfig
    directory: Path


def sweep(arguments: Sequence[str], own: Sequence[Path], check: Step, run: Step) -> None:
    """`check(composed, overrides)` for every combination of `arguments`, then `run` for each, then the table.

    With resume=true the finished ones are passed over.

    Args:
        own: the user's configuration directories, which are not among `arguments`.
    """
    flags = [argument for argument in arguments if argument.startswith("-")]
    if flags:
        raise Edge0Error(f"--multirun: cannot be combined with {' '.join(flags)}; leave one of them away")
    search = [f"hydra.searchpath=[{', '.join(f'file://{path.absolute()}' for path in own)}]"] * bool(own)
    with user_tiers(*own), initialize_config_dir(str(config_directory()), version_base=None):
        with in_one_sentence(), held():
            jobs = plan_jobs(list(combinations([*arguments, *search])))
        for job in jobs:
            check(job.composed, job.overrides)
        for job in jobs:
            print(f"{job.name or 'run'}: {job.directory}", flush=True)
            run(job.composed, job.overrides)
    print(compared({job.name: read_summary(job.directory) or {} for job in jobs}))


def combinations(overrides: Sequence[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """({swept setting: its value}, all overrides) of every combination, the last setting varying fastest."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    swept = [one for one in parsed if one.is_sweep_override()]
    fixed = [str(one.input_line) for one in parsed if not one.is_sweep_override()]
    names = [one.get_key_element() for one in swept]
    choices = [list(itertools.islice(one.sweep_string_iterator(), MOST_JOBS + 1)) for one in swept]
    if math.prod(map(len, choices)) > MOST_JOBS:
        raise Edge0Error(f"--multirun: more than {MOST_JOBS:,} combinations; give fewer values")
    for values in itertools.product(*choices):
        chosen = dict(zip(names, values, strict=True))
        yield chosen, [*fixed, *(f"{name}={value}" for name, value in chosen.items())]


def plan_jobs(found: Sequence[tuple[Mapping[str, str], Sequence[str]]]) -> list[Job]:
    """Jobs whose directories differ: where the settings alone would give two of them the same one, its values are added."""
    composed = [compose("train", list(overrides)) for _, overrides in found]
    places = ["root" if one.phase == "all" else "run_dir" for one in composed]
    clash = len({(place, one[place]) for place, one in zip(places, composed, strict=True)}) < len(composed)
    jobs = []
    for (chosen, overrides), one, place in zip(found, composed, places, strict=True):
        if clash:
            suffix = "".join(f"-{_as_name(f'{key}-{value}')}" for key, value in chosen.items() if key != "phase")
            quoted = f"{one[place]}{suffix}".replace("'", r"\'")
            overrides = [*overrides, f"{place}='{quoted}'"]
            one = compose("train", list(overrides))
        last = next((name for name in reversed(one.chain) if PHASES[name].trains), one.chain[-1])
        directory = Path(one.root) / last if one.phase == "all" else Path(one.run_dir)
        jobs.append(Job(" ".join(f"{key}={value}" for key, value in chosen.items()), tuple(overrides), one, directory))
    if len({job.directory for job in jobs}) < len(jobs):
        raise Edge0Error("--multirun: two jobs would share a directory; name a setting's values so that they differ")
    return jobs


def compared(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """A row a job: the numbers of its summary that are not the same in all of them."""
    numbers = {name: dict(_numbers(summary)) for name, summary in summaries.items()}
    every = dict.fromkeys(key for found in numbers.values() for key in found)
    columns = [key for key in every if len({found.get(key) for found in numbers.values()}) > 1][:COLUMNS]
    return table(["job", *columns], [[name, *(found.get(key) for key in columns)] for name, found in numbers.items()])


def _numbers(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in summary.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key not in VOLATILE:
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping) and not prefix:
            yield from _numbers(value, f"{key}.")


def _as_name(text: str) -> str:
    """Part of a file name that needs no quotes on a command line."""
    return re.sub(r"[^\w.+-]", "-", text)
