"""What Hydra refuses of a command line, as one sentence with a fix that works."""

from __future__ import annotations

import re

from hydra.errors import OverrideParseException

from edge0_runtime.contract.files import unquoted
from edge0_train.config.fields import nearest_setting


def hydra_sentence(error: BaseException) -> str:
    """An exception of Hydra or OmegaConf in one sentence; Hydra's own advice, to append what is unknown with +, leads nowhere."""
    if isinstance(error, OverrideParseException):
        return unreadable(error.override, error)
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
