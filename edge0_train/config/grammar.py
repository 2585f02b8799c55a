"""What Hydra refuses of a command line, as one sentence with a fix that works."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import yaml
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import one_line, unquoted
from edge0_train.config.fields import nearest_setting


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Inside the block, what Hydra raises of a command line or of a configuration's file is an Edge0Error."""
    try:
        yield
    except Edge0Error:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        raise Edge0Error(hydra_sentence(error)) from error


def check_flags(words: Sequence[str]) -> None:
    """Raise Edge0Error for a flag that Hydra has not; it would print how it is used in ten lines."""
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        _, rest = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise Edge0Error(f"{one_line(error)}; `python -m edge0_train --hydra-help` has all flags") from error
    if rest:
        raise Edge0Error(
            f"{unquoted(rest[0])}: cannot be read there; write all settings beside each other, before or behind the flags;"
            " `python -m edge0_train --hydra-help` has all flags"
        )


def hydra_sentence(error: BaseException) -> str:
    """An exception of Hydra or OmegaConf in one sentence; Hydra's own advice, to append what is unknown with +, leads nowhere."""
    if isinstance(error, OverrideParseException):
        return unreadable(error.override, error)
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return f"the command line: makes no configuration ({one_line(error)}); `python -m edge0_train --help` shows examples"
    text = " ".join(str(error).split())
    unknown = re.match(r"Could not (?:override|delete)[^']*'([^']+)'", text)
    if not unknown:
        return text
    return no_such_setting(unknown[1])


def unreadable(word: str, error: BaseException) -> str:
    """The sentence for a word that Hydra's grammar does not take."""
    reason = unquoted(str(error).partition("\n")[0])
    return f"{unquoted(word)}: cannot be read ({reason}); quote a value with special characters: 'name=\"value\"'"


def no_such_setting(name: str) -> str:
    """The sentence for a setting that nothing declares, with the one that was most likely meant."""
    return (
        f"{unquoted(name)}: no such setting; did you mean {nearest_setting(name)}?"
        " `python -m edge0_train settings` has all"
    )
