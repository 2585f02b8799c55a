"""Whether a configuration makes sense: every setting by its own declaration, then what settings say about each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import shown
from edge0_train.config.command import examples
from edge0_train.config.fields import Config, all_settings, value_of
from edge0_train.config.phases import PHASE_NAMES, PHASES

COOLEST = 0.01
"""The least temperature above 0: logits over less overflow, and what is drawn is the likeliest token anyway."""


def check(config: Config) -> None:
    """Raise Edge0Error, naming field, value and fix, for the first thing that is wrong."""
    if config.phase not in PHASES:
        raise Edge0Error(f"phase: {config.phase!r} is unknown; choose one of {', '.join(PHASE_NAMES)}")
    for name, setting in all_settings().items():
        setting.check(name, value_of(config, name))
    for across in (_chain, _needs, _device, _residency, _temperature, _on_policy, _vocabulary):
        across(config)


def check_order(chain: object) -> tuple[str, ...]:
    """The names of a chain. Raises Edge0Error unless they are phases, each once, in the order of `PHASES`."""
    if not isinstance(chain, Sequence) or isinstance(chain, str):
        raise Edge0Error(f"chain: {shown(chain)} is no list; write e.g. chain=[quantize,teacher_text]")
    if not chain:
        raise Edge0Error(f"chain: empty; name phases, or leave it out for the default ({', '.join(PHASE_NAMES)})")
    unknown = [name for name in chain if name not in PHASES]
    if unknown:
        raise Edge0Error(f"chain: {', '.join(map(shown, unknown))} is unknown; choose from {', '.join(PHASE_NAMES)}")
    twice = [name for name, count in Counter(chain).items() if count > 1]
    if twice:
        raise Edge0Error(f"chain: {', '.join(twice)} more than once; a chain runs a phase once: leave the others out")
    ordered = sorted(chain, key=PHASE_NAMES.index)
    if ordered != list(chain):
        raise Edge0Error(f"chain: a phase comes before one that it builds on; write chain=[{','.join(ordered)}]")
    return tuple(chain)


def check_chain(configs: Sequence[Config]) -> None:
    """Raise Edge0Error when the phases of one chain would write into the same place."""
    directories = Counter(config.run_dir for config in configs)
    shared = [directory for directory, count in directories.items() if count > 1]
    if shared:
        raise Edge0Error(
            f"run_dir: {shared[0]} is shared by {directories[shared[0]]} phases, but each has a directory of its own;"
            " leave it out, and say with root=DIR where they lie"
        )


def _chain(config: Config) -> None:
    check_order(config.chain)


def _needs(config: Config) -> None:
    """A phase asks for what it reads, and for nothing else."""
    missing = [name for name in PHASES[config.phase].needs if not value_of(config, name)]
    if missing:
        given = [examples(config.tier)[name] for name in missing]
        them = "it" if len(missing) == 1 else "them"
        raise Edge0Error(
            f"{', '.join(missing)}: not set, but phase={config.phase} reads {them};"
            f" give e.g. {' '.join(one for one, _ in given)} ({'; '.join(how for _, how in given)})"
        )


def _device(config: Config) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", config.base.device):
        raise Edge0Error(f"base.device: {shown(config.base.device)} is unknown; choose cuda, cuda:N or cpu")


def _residency(config: Config) -> None:
    base = config.base
    if base.residency != "device" and base.storage != "packed":
        raise Edge0Error(f"base.residency: {base.residency} needs base.storage=packed (it is {base.storage}); set both")


def _temperature(config: Config) -> None:
    if 0 < config.sample.temperature < COOLEST:
        raise Edge0Error(
            f"sample.temperature: {config.sample.temperature} lies between 0 and {COOLEST}; 0 is greedy, take that"
        )


def _on_policy(config: Config) -> None:
    if config.phase != "on_policy":
        return
    steps, rounds = config.optim.steps, config.on_policy.rounds
    if steps % rounds:
        nearest = max(rounds, round(steps / rounds) * rounds)
        raise Edge0Error(
            f"optim.steps: {steps} is not a multiple of on_policy.rounds={rounds}; take e.g. optim.steps={nearest}"
        )


def _vocabulary(config: Config) -> None:
    """The teacher's tokens and the logits of a trace are the largest of so many."""
    vocabulary = config.tier.architecture["vocab_size"]
    for name in ("on_policy.top_k", "export.trace_top"):
        if value_of(config, name) > vocabulary:
            exact = " (equal is the exact KL)" if name == "on_policy.top_k" else ""
            raise Edge0Error(
                f"{name}: {value_of(config, name)} is larger than the vocabulary of {vocabulary}; lower it{exact}"
            )
