"""What Hydra finds in its groups `phase`, `tier`, `hardware` and their settings: the table of phases, and the files.

A tier file is the tier and, in its section `settings`, what was measured to be good for it:

    settings:
      like: nano                 # begins with that tier's settings (if wanted)
      all: {threads: 1}          # every phase
      student_sft:               # one phase; wins over `all`
        optim: {steps: 360}

Hydra's group `tier` gets the file without this section, its group `settings` gets `<phase>-<tier>` made from it, so that
precedence stays Hydra's own: the order of the defaults list in configs/train.yaml. Likewise for `hardware` (hardware.py), whose
settings are `hardware_settings/<hardware>/<phase>-<tier>`. The classes below are plugins of Hydra: a
source of configs that looks into tier files, and one that lets it look there before it looks at the files themselves.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import one_line, read_text, read_yaml
from edge0_train.config.hardware import read_hardware
from edge0_train.config.phases import PHASES
from edge0_train.config.sections import ALL, LIKE, check_section

SECTION = "settings"


def config_directory() -> Path:
    """Where the YAML files lie: inside the package in a wheel, at the top of a checkout."""
    packaged = Path(__file__).parents[1] / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "configs"


_user_directories: ContextVar[tuple[Path, ...]] = ContextVar("user_directories", default=())


@contextmanager
def user_tiers(*directories: Path) -> Iterator[None]:
    """Inside the block, Hydra also finds the tiers of these directories' folders `tier`; the project's own come first."""
    token = _user_directories.set(tuple(path.absolute() for path in directories))
    try:
        yield
    finally:
        _user_directories.reset(token)


def user_directories() -> tuple[Path, ...]:
    """The directories of the innermost `user_tiers`."""
    return _user_directories.get()


def tier_file(name: str, *directories: Path) -> Path | None:
    """The file of a tier in the first of the directories that has it."""
    files = (directory / "tier" / f"{name}.yaml" for directory in directories)
    return next((file for file in files if file.is_file()), None)


def load_yaml(file: Path) -> DictConfig:
    """A strict YAML file with numbers as Hydra reads them (1e-3 is one). Raises Edge0Error as `read_yaml`."""
    fix = "the files in configs are right"
    read_yaml(file, fix)
    try:
        found = OmegaConf.create(read_text(file))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise Edge0Error(f"{file}: not a configuration ({one_line(error)}); {fix}") from error
    assert isinstance(found, DictConfig)
    return found


def read_tier_file(file: Path) -> tuple[DictConfig, dict[str, Any]]:
    """(the tier, its section `settings`), as Hydra reads numbers. Raises Edge0Error: no YAML, or a section that is wrong."""
    tier = load_yaml(file)
    section = tier.pop(SECTION, None)
    found: Any = OmegaConf.to_container(section) if isinstance(section, DictConfig) else section or {}
    check_section(f"{file} {SECTION}", found)
    return tier, found


def tier_settings(phase: str, tier: str, *directories: Path) -> DictConfig | None:
    """What a tier says for a phase: of the tier that it is `like`, then `all`, then the phase's own; None: nothing."""
    parts: list[Any] = []
    seen: list[str] = []
    name: str | None = tier
    while name:
        file = tier_file(name, *directories)
        if file is None or name in seen:
            if not seen:
                return None
            raise Edge0Error(
                f"{tier_file(seen[-1], *directories)} {SECTION}.{LIKE}: {name!r} is no other tier; name one that has a file"
            )
        seen.append(name)
        _, section = read_tier_file(file)
        parts += [section[key] for key in (phase, ALL) if section.get(key)]
        name = section.get(LIKE)
    merged = OmegaConf.merge(*reversed(parts)) if parts else None
    assert merged is None or isinstance(merged, DictConfig)
    return merged


OF_HARDWARE = "hardware_settings"
GROUPS = ("phase", "settings", "tier", "hardware", OF_HARDWARE)


class TierSource(ConfigSource):
    """The groups that one directory's files make; a file is read once in a source's life."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        self._node = functools.cache(self._read)

    @staticmethod
    def scheme() -> str:
        """What Hydra's search path writes before a directory of this kind."""
        return "edge0"

    def available(self) -> bool:
        """Always: a source needs nothing but files."""
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        """The node of `<group>/<name>`; a tier's lands in `tier`, the others at the top. Raises ConfigLoadError."""
        node = self._node(config_path.removesuffix(".yaml"))
        if node is None:
            raise ConfigLoadError(f"{config_path}: not in {self.path}")
        package = None if config_path.startswith("tier/") else "_global_"
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", copy.deepcopy(node), {"package": package})

    def is_group(self, config_path: str) -> bool:
        """The root and the groups are there even where a directory has no file for them."""
        group, _, name = config_path.rstrip("/").partition("/")
        return group in ("", *GROUPS) and (not name or (group == OF_HARDWARE and "/" not in name))

    def is_config(self, config_path: str) -> bool:
        """Whether this directory can make the node."""
        return self._node(config_path.removesuffix(".yaml")) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Names below a group, as Hydra's completion and error messages show them."""
        group = config_path.rstrip("/")
        if results_filter == (ObjectType.CONFIG if group == "" else ObjectType.GROUP):
            return []
        tiers, machines = (
            sorted(file.stem for file in (Path(self.path) / group).glob("*.yaml")) for group in ("tier", "hardware")
        )
        pairs = [f"{phase}-{tier}" for tier in tiers for phase in PHASES]
        return {
            "": [*GROUPS],
            "phase": [*PHASES, "all"],
            "tier": tiers,
            "hardware": machines,
            OF_HARDWARE: machines,
            "settings": [pair for pair in pairs if self.is_config(f"settings/{pair}")],
        }[group]

    def _read(self, config_path: str) -> DictConfig | None:
        group, _, name = config_path.partition("/")
        if group == "phase":
            return _phase(name)
        if group in ("hardware", OF_HARDWARE):
            return self._read_hardware(group, name)
        phase, _, tier = name.partition("-") if group == "settings" else ("", "", name)
        file = tier_file(tier, Path(self.path)) if group in GROUPS else None
        if file is None:
            return None
        if group == "settings":
            return tier_settings(phase, tier, Path(self.path), config_directory(), *_user_directories.get())
        node, _ = read_tier_file(file)
        # tier.head=... and tier.router.sticky.bias=2 need no +, though the file may lack them; `Tier.from_dict` knows the fields.
        for part in (node.get("router"), node):
            if isinstance(part, DictConfig):
                OmegaConf.set_struct(part, False)
        return node

    def _read_hardware(self, group: str, path: str) -> DictConfig | None:
        name, _, pair = path.partition("/")
        file = Path(self.path) / "hardware" / f"{name}.yaml"
        if not file.is_file():
            return None
        found = read_hardware(file)
        if group == "hardware":
            return OmegaConf.create({"hardware": {"name": name, **dataclasses.asdict(found.machine)}})
        phase, _, tier = pair.partition("-")
        return found.settings_for(phase, tier)


def _phase(name: str) -> DictConfig | None:
    """A phase's node: its name and its own defaults."""
    if name not in (*PHASES, "all"):
        return None
    node = OmegaConf.create({"phase": name})
    for setting, value in PHASES[name].defaults.items() if name in PHASES else ():
        OmegaConf.update(node, setting, value)
    return node


class TierSearchPath(SearchPathPlugin):
    """Lets Hydra look into tier files with `TierSource` first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Users' directories before the built-in one, all before Hydra's own."""
        for directory in reversed((config_directory(), *_user_directories.get())):
            search_path.prepend("edge0_train", f"{TierSource.scheme()}://{directory}")


for plugin in (TierSource, TierSearchPath):
    Plugins.instance().register(plugin)
