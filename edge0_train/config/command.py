"""A configuration as the command line that makes it, for the advice in messages."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from edge0_runtime.contract.base_config import flat
from edge0_runtime.contract.tier import Tier, read_tier
from edge0_train.config.fields import Config, all_settings, value_of
from edge0_train.config.phases import PHASES
from edge0_train.config.tiers import config_directory, load_yaml, tier_file, tier_settings, user_directories

ALIKE = ("hardware.name", "root", "base.directory", "base.device", "base.dtype")
"""What all phases of a training must have alike."""
READ = {
    "text": ("text.rows",),
    "teacher": ("teacher.directory",),
    "source": ("teacher.directory", "base.source"),
    "prompts": ("text.prompts",),
}
"""{what a phase reads: the settings that say where it is}"""
PUBLIC = ("35b", "8b")
"""Tiers whose teacher scripts/fetch_models.py knows."""
ONE_PROMPT = '{"messages": [{"role": "user", "content": "Hi"}]}'


def fetch_teacher(tier: Tier, directory: str) -> str:
    """How to come by a tier's teacher: a command for the public ones, a description for those of others."""
    if tier.name in PUBLIC:
        return f"`python scripts/fetch_models.py teacher-{tier.name} {shlex.quote(directory)}` downloads the teacher"
    return f"give the original of {tier.model} in transformers' layout"


def examples(tier: Tier) -> dict[str, tuple[str, str]]:
    """{setting without a default: (an assignment, how to come by what it names)}."""
    directory = f"models/{tier.model}"
    teacher = (f"teacher.directory={quoted(directory)}", fetch_teacher(tier, directory))
    prompts = ("text.prompts=prompts.jsonl", f"a line of prompts.jsonl: {ONE_PROMPT}")
    return {"base.source": teacher, "teacher.directory": teacher, "text.prompts": prompts}


def command(config: Config, phase: str, *more: str) -> str:
    """The whole command line of another phase of `config`'s training, ready to be pasted; `more` are overrides that win."""
    given = {override.partition("=")[0] for override in more}
    usual = _usual(config, phase)
    words = [f"phase={phase}", f"tier={config.tier.name}", *_changed(config.tier)]
    for name in (*ALIKE, *(setting for what in PHASES[phase].reads for setting in READ.get(what, ()))):
        value = value_of(config, name)
        if value and value != usual(name) and name not in given:
            words.append(f"{name.removesuffix('.name')}={quoted(value)}")
    if phase == "teacher_text" and config.text.rows != usual("text.rows"):
        words.append(f"run_dir={quoted(config.text.rows)}")
    own = [] if tier_file(config.tier.name, config_directory()) else [str(place) for place in user_directories()][:1]
    flags = [word for place in own for word in ("--config-dir", place)]
    return shlex.join(["python", "-m", "edge0_train", *flags, *words, *more])


def _changed(tier: Tier) -> list[str]:
    """What a tier has otherwise than its file, as overrides."""
    file = tier_file(tier.name, config_directory(), *user_directories())
    if file is None:
        return []
    written, usual = load_yaml(file), flat(read_tier(str(file)).to_dict())
    words = []
    for name, value in flat(tier.to_dict()).items():
        if value == usual.get(name):
            continue
        if isinstance(OmegaConf.select(written, name), DictConfig):  # a run of layers
            words += [f"tier.{name}.first={value[0]}", f"tier.{name}.last={value[-1]}"]
        else:
            words.append(f"tier.{name}={quoted(value) if isinstance(value, str) else json.dumps(value)}")
    return words


def quoted(value: str) -> str:
    """A value in Hydra's grammar: as it is if it has plain characters only, else in quotes."""
    if re.fullmatch(r"[A-Za-z/.~][\w./~-]*", value, re.ASCII) and _is_word(value):
        return value
    escaped = re.sub(r'(\\*)"', lambda found: found[1] * 2 + r"\"", value)
    return '"' + re.sub(r"(\\+)$", lambda found: found[1] * 2, escaped) + '"'


def _is_word(value: str) -> bool:
    """Not what Hydra would read as a number, a truth value or nothing."""
    return (
        value.lower() not in ("null", "true", "false", "inf", "nan")
        and re.search("[A-Za-z/]{2}|^[A-Za-z]$", value) is not None
    )


def _usual(config: Config, phase: str) -> Callable[[str], str]:
    """Values that need not be said, since the tier or the map of all settings gives them."""
    of_tier = tier_settings(phase, config.tier.name, config_directory(), *user_directories()) or OmegaConf.create()

    def usual(name: str) -> str:
        default = OmegaConf.select(of_tier, name)
        if default is None:
            default = all_settings()[name].default
        known = {"root": config.root, "tier.name": config.tier.name, "teacher.directory": config.teacher.directory}
        for placeholder, value in known.items():
            default = default.replace(f"${{{placeholder}}}", value)
        return str(default)

    return usual
