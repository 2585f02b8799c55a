"""Models by name at the command line: `--model NAME=DIR[,no-prerouter][,no-lora][,arm=ARM][,adapters=DIR][,tier=NAME]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from edge0_runtime.arms import ARMS
from edge0_runtime.cli.options import escape_libraries, shared_options
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.hub import adapters_of, directory_of

if TYPE_CHECKING:
    from edge0_runtime.catalog import Catalog

FORM = "NAME=DIR[,no-prerouter][,no-lora][,arm=ARM][,adapters=DIR][,tier=NAME]"
ALONE = {
    "--adapters": "adapters", "--tier": "tier", "--arm": "arm", "--alias": "alias",
    "--no-prerouter": "prerouter", "--no-lora": "lora",
}  # fmt: skip
"""Options that say how MODEL_DIR is served; a --model says it itself."""


class Named(NamedTuple):
    """One --model: its directory or repository, and how it is served; None is the default."""

    name: str
    directory: str
    prerouter: bool = True
    lora: bool = True
    arm: str | None = None
    adapters: str | None = None
    tier: str | None = None


def named(text: str) -> Named:
    """The argument of --model."""
    name, separator, rest = text.partition("=")
    directory, *options = rest.split(",")
    if not (name and separator and directory):
        raise argparse.ArgumentTypeError(f"{text!r} is not {FORM}")
    fields: dict[str, Any] = {}
    for option in options:
        field, _, value = option.partition("=")
        if option in ("no-prerouter", "no-lora"):
            fields[option.removeprefix("no-")] = False
        elif field in ("arm", "adapters", "tier") and value:
            fields[field] = value
        else:
            raise argparse.ArgumentTypeError(f"{text!r}: {option!r} is no option; the form is {FORM}")
    if fields.get("arm", ARMS[0]) not in ARMS:
        raise argparse.ArgumentTypeError(f"{text!r}: arm {fields['arm']!r} is unknown; choose of {', '.join(ARMS)}")
    return Named(model_name(name), directory, **fields)


def model_name(text: str) -> str:
    """A name that requests can ask for."""
    if not text.strip() or not text.isprintable() or "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r}: a model's name is printable, not empty, and has no slash")
    return text


def asked(args: argparse.Namespace) -> list[Named]:
    """What a command line asks for: its --model options, or MODEL_DIR alone, under `--alias` ("" if it has none).

    Raises Edge0Error where it asks for both, for neither, or twice for a name.
    """
    models: list[Named] = args.model or []
    if not models:
        if args.model_dir is None:
            raise Edge0Error(f"MODEL_DIR: missing; give a model directory, or --model {FORM}")
        return [Named(args.alias or "", args.model_dir, args.prerouter, args.lora, args.arm, args.adapters, args.tier)]
    if args.model_dir is not None:
        raise Edge0Error(
            f"MODEL_DIR: {args.model_dir} stands beside --model; name it too: --model NAME={args.model_dir}"
        )
    defaults = {"prerouter": True, "lora": True}
    if alone := [flag for flag, field in ALONE.items() if getattr(args, field) != defaults.get(field)]:
        raise Edge0Error(f"{', '.join(alone)}: of which --model? Say it in that option: --model {FORM}")
    names = [model.name for model in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Edge0Error(f"--model: {', '.join(twice)} is named twice; give each model a name of its own")
    return models


def load_catalog(args: argparse.Namespace, models: Sequence[Named]) -> Catalog:
    """The models that are `asked` for, by the engine's options; one without a name is called by its tier."""
    from edge0_runtime.catalog import Catalog, Entry
    from edge0_runtime.serving import Serving

    escape_libraries()
    entries = {}
    for model in models:
        adapters = None if model.adapters is None else adapters_of(model.adapters)
        serving = Serving(model.prerouter, model.lora, model.arm, adapters, model.tier)
        entries[model.name] = Entry(directory_of(model.directory), serving)
    return Catalog.load(entries, chat_template=args.chat_template, **shared_options(args))
