"""All settings for readers: `configs/train.yaml`, which Hydra composes from, and a page in Markdown."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from edge0_train.config.fields import Config, groups, settings_of
from edge0_train.config.phases import PHASES

WIDTH, COLUMN = 120, 36
DEFAULT_TIER, DEFAULT_PHASE = "nano", "head_distill"
HEAD = f"""\
# The map of all settings. `python -m edge0_train phase=head_distill tier=35b optim.lr=1e-3`
# Later ones win: this file, the phase's own defaults (edge0_train/config/phases.py), the section `settings` of the tier's file
# (what was measured to be good for it), hardware=... (what fits a machine), experiment=..., the command line.
# Made by `python -m edge0_train settings` from the declarations in edge0_train/config/fields.py: change those.
defaults:
  - _self_
  - tier: {DEFAULT_TIER}
  - phase: {DEFAULT_PHASE}
  - optional settings: ${{phase}}-${{tier}}
  - optional hardware: null
  - optional hardware_settings: ${{hardware}}/${{phase}}-${{tier}}
  - optional experiment: null
  - override hydra/job_logging: disabled
  - override hydra/hydra_logging: disabled

hydra:                              # the run directory is ours: Hydra writes nothing and stays in the current folder
  output_subdir: null
  run: {{dir: .}}
  sweep: {{dir: ., subdir: .}}
"""


MARKDOWN_HEAD = """\
# Settings

`python -m edge0_train phase=PHASE tier=TIER [setting=value ...]`. A setting has the last of: the default below, the phase's own
default, what the section `settings` of `configs/tier/<tier>.yaml` says for all phases, then for this one, `hardware=...`,
`experiment=...`, the command line. `configure("phase=...", "setting=value")` of `edge0_train.config` makes the same configuration
in Python. Fields of the tier are overridden likewise (`tier.k=2`).
"""


def settings_yaml() -> str:
    """The text of `configs/train.yaml`."""
    lines = [HEAD, *_yaml_fields(Config, "")]
    for name, cls in groups().items():
        lines += ["", f"# {_first_line(cls)}", f"{name}:", *_yaml_fields(cls, "  ")]
    return "\n".join(lines) + "\n"


def _yaml_fields(cls: type[Any], indent: str) -> Iterator[str]:
    for name, setting in settings_of(cls):
        value = setting.default
        first = f"{indent}{name}:" if isinstance(value, tuple) else f"{indent}{name}: {_yaml(value)}"
        limits = f" [{setting.limits()}]" if setting.limits() and not isinstance(value, tuple) else ""
        comment, *more = textwrap.wrap(setting.sentence + limits, WIDTH - COLUMN - 2, break_on_hyphens=False)
        yield f"{first:<{COLUMN - 1}} # {comment}"
        yield from (f"{'':<{COLUMN - 1}} # {line}" for line in more)
        if isinstance(value, tuple):
            yield from (f"{indent}  - {item}" for item in value)


def _yaml(value: Any) -> str:
    """A value as YAML; the strings of defaults are plain words and interpolations."""
    return value if isinstance(value, str) and value else json.dumps(value)


def settings_markdown() -> str:
    """A page of every setting: a table a group, and what each phase has of its own."""
    parts = [MARKDOWN_HEAD, "## Of every run", "", *_markdown_table(Config, "")]
    for name, cls in groups().items():
        parts += ["", f"## `{name}`", "", _first_line(cls), "", *_markdown_table(cls, f"{name}.")]
    parts += [
        "",
        "## Phases",
        "",
        *_row("phase", "what it does", "asks for", "its own defaults"),
        "| --- | --- | --- | --- |",
    ]
    for name, facts in PHASES.items():
        own = ", ".join(f"`{key}={_yaml(value)}`" for key, value in facts.defaults.items())
        parts += _row(f"`{name}`", facts.sentence, ", ".join(f"`{need}`" for need in facts.needs), own)
    return "\n".join(parts) + "\n"


def _markdown_table(cls: type[Any], prefix: str) -> Iterator[str]:
    types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    yield from _row("setting", "default", "type", "values", "meaning")
    yield "| --- | --- | --- | --- | --- |"
    for name, setting in settings_of(cls):
        default = ", ".join(setting.default) if isinstance(setting.default, tuple) else _yaml(setting.default)
        yield from _row(f"`{prefix}{name}`", f"`{default}`", types[name], setting.limits(), setting.sentence)


def _row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _first_line(cls: type[Any]) -> str:
    return (cls.__doc__ or "").splitlines()[0]
