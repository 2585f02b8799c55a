"""Whether a configuration makes sense: every setting by its own declaration, then what settings say about each other."""

from __future__ import annotations

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config.fields import Config, all_settings, value_of
from edge0_train.config.phases import PHASE_NAMES, PHASES


def check(config: Config) -> None:
    """Raise Edge0Error, naming field, value and fix, for the first thing that is wrong."""
    if config.phase not in PHASES:
        raise Edge0Error(f"phase: {config.phase!r} is unknown; choose one of {', '.join(PHASE_NAMES)}")
    for name, setting in all_settings().items():
        setting.check(name, value_of(config, name))
    for across in (_needs, _residency, _teacher_tokens):
        across(config)


def _needs(config: Config) -> None:
    """A phase asks for what it reads, and for nothing else."""
    missing = {name: all_settings()[name] for name in PHASES[config.phase].needs if not value_of(config, name)}
    if missing:
        examples = " ".join(setting.example for setting in missing.values())
        them = "it" if len(missing) == 1 else "them"
        raise Edge0Error(f"{', '.join(missing)}: not set, but phase={config.phase} reads {them}; give e.g. {examples}")


def _residency(config: Config) -> None:
    base = config.base
    if base.residency != "device" and base.storage != "packed":
        raise Edge0Error(f"base.residency: {base.residency} needs base.storage=packed (it is {base.storage}); set both")


def _teacher_tokens(config: Config) -> None:
    vocabulary = config.tier.architecture["vocab_size"]
    if config.on_policy.top_k > vocabulary:
        raise Edge0Error(
            f"on_policy.top_k: {config.on_policy.top_k} is larger than the vocabulary of {vocabulary};"
            " lower it (equal is the exact KL)"
        )
