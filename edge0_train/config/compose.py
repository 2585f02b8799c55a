"""From words on a command line to a `Config`: Hydra composes, `read_config` reads and checks."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.fields import check_fields
from edge0_runtime.contract.files import shown
from edge0_runtime.contract.tier import Tier
from edge0_train.config.checks import check
from edge0_train.config.fields import Config, all_settings, groups
from edge0_train.config.grammar import in_one_sentence, no_such_setting, unreadable
from edge0_train.config.phases import PHASES
from edge0_train.config.tiers import config_directory, load_yaml, user_tiers


def asset(name: str) -> str:
    """Path of a file or directory that comes with the package (`${asset:nano-teacher}` in the YAML)."""
    return str(Path(__file__).parents[1] / "assets" / name)


OmegaConf.register_new_resolver("asset", asset, replace=True)


def configure(*overrides: str, config_dir: str | Path | None = None) -> Config:
    """The configuration that `python -m edge0_train [--config-dir DIR] <overrides>` makes, for recipes, notebooks and tests.

        config = configure("phase=student_sft", "tier=nano", "root=/tmp/run", "optim.steps=20")

    Args:
        overrides: as on the command line: `phase=...`, `tier=...`, `a.b=c`, `+x=1`, `~x`, `experiment=...`.
        config_dir: a folder with tiers (`tier/<name>.yaml`) and experiments of your own.

    Raises:
        Edge0Error: a setting that is unknown, missing or wrong; names field, value and fix.
    """
    own = [] if config_dir is None else [Path(config_dir).absolute()]
    check_choices(overrides, own)
    search = [f"hydra.searchpath=[{', '.join(f'file://{path}' for path in own)}]"] * bool(own)
    with (
        _no_hydra(),
        user_tiers(*own),
        in_one_sentence(),
        initialize_config_dir(str(config_directory()), version_base=None),
    ):
        composed = compose("train", [*overrides, *search])
    return read_config(composed)


@contextmanager
def _no_hydra() -> Iterator[None]:
    """Inside the block nothing has been initialised: Hydra refuses a second time, as in a run that configures another."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def check_choices(words: Sequence[str], own: Sequence[Path] = ()) -> None:
    """A choice or a setting that is unknown as one sentence with what was meant (Hydra's own message has twelve lines).

    An optional group (`experiment`) is checked as the others are: Hydra passes over a file that isn't there.

    Args:
        words: of the command line; flags and their values are left to Hydra.
        own: the user's directories, whose groups have files too.
    """
    for word in words:
        if word.startswith("-") or "=" not in word or Path(word) in own:
            continue
        try:
            override = OverridesParser.create().parse_override(word)
        except (HydraException, RecursionError, ValueError) as error:
            raise Edge0Error(unreadable(word, error)) from error
        name = override.key_or_group
        if name in GROUPS:
            for one in _check_choice(name, override, choices_of(name, *own)):
                for file in (place / name / f"{one}.yaml" for place in own):
                    if file.is_file():
                        load_yaml(file)  # Hydra would read it in its own way
        elif not _is_setting(name):
            raise Edge0Error(no_such_setting(name))


def _is_setting(name: str) -> bool:
    """A setting, a group of them, a field of the tier (which checks its own), or Hydra's business."""
    return name in {*all_settings(), *groups()} or name.partition(".")[0] in ("tier", "hydra") or "/" in name


GROUPS = ("phase", "tier", "hardware", "experiment")


def choices_of(group: str, *own: Path) -> list[str]:
    """The names that one may choose in a group of Hydra's, the user's own among them."""
    if group == "phase":
        return sorted([*PHASES, "all"])
    folders = [place / group for place in (config_directory(), *own)]
    return sorted({file.relative_to(at).with_suffix("").as_posix() for at in folders for file in at.rglob("*.yaml")})


def _check_choice(group: str, override: Override, known: Sequence[str]) -> list[str]:
    """The names that were chosen, all of them known."""
    value = override.value()
    chosen = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    names = ["" if one is None else str(one) for one in chosen]
    for one in names:
        if not one:
            raise Edge0Error(f"{group}: empty; choose one of {', '.join(known)}, or leave it out")
        if one not in known:
            near = difflib.get_close_matches(one, known, n=1)
            meant = f"did you mean {near[0]}? It is" if near else "choose"
            raise Edge0Error(f"{group}: {one!r} is unknown; {meant} one of {', '.join(known)}")
    if override.is_add() and not isinstance(value, list):
        raise Edge0Error(f"+{group}={value}: the group is there already; write {group}={value}")
    return names


def read_config(composed: Any) -> Config:
    """Resolve and check a composed configuration. Raises Edge0Error naming field, value and fix."""
    missing = sorted(_unset(OmegaConf.to_container(composed)))
    if missing:
        raise Edge0Error(f"{', '.join(missing)}: not set; give a value on the command line, e.g. {missing[0]}=...")
    try:
        data = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise Edge0Error(f"configuration: {str(error).splitlines()[0]}") from error
    assert isinstance(data, dict)
    config: Config = _build(Config, {key: value for key, value in data.items() if key != "hydra"}, "")
    check(config)
    return config


def _unset(data: Any, where: str = "") -> Iterator[str]:
    """Keys whose value is `???` (OmegaConf's own function stumbles over interpolations of such a key)."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _unset(value, f"{where}{key}.")
        elif value == "???":
            yield f"{where}{key}"


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data, for the run directory's resolved config."""
    return dataclasses.asdict(dataclasses.replace(config, tier=None)) | {"tier": config.tier.to_dict()}  # type: ignore[arg-type]


def _build(cls: Any, data: Any, where: str) -> Any:
    if cls is Tier:
        return Tier.from_dict(data)
    if not isinstance(data, Mapping):
        raise Edge0Error(f"{where}: {shown(data)} is not a group of fields")
    hints = typing.get_type_hints(cls)
    check_fields(where or "config", cls, data)
    names = [f.name for f in dataclasses.fields(cls)]
    return cls(**{name: _value(hints[name], data[name], f"{where}.{name}".lstrip(".")) for name in names})


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise Edge0Error(f"{where}: {shown(value)} is too large; lower it") from error
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    expected = hint if isinstance(hint, (type, types.UnionType)) else object
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise Edge0Error(f"{where}: {shown(value)} is not of type {getattr(hint, '__name__', hint)}")
    return value
