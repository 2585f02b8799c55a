"""What Hydra refuses of a command line, as one sentence with a fix that works."""

from __future__ import annotations

import re

from hydra.errors import OverrideParseException

from edge0_runtime.contract.files import shown
from edge0_train.config.fields import nearest_setting


def hydra_sentence(error: BaseException) -> str:
    """An exception of Hydra or OmegaConf in one sentence; Hydra's own advice, to append what is unknown with +, leads nowhere."""
    if isinstance(error, OverrideParseException):
        reason = shown(str(error).partition("\n")[0])[1:-1]
        return f"{shown(error.override)}: cannot be read ({reason}); quote a value with special characters: 'name=\"value\"'"
    text = " ".join(str(error).split())
    unknown = re.match(r"Could not (?:override|delete)[^']*'([^']+)'", text)
    if not unknown:
        return text
    return no_such_setting(unknown[1])


def no_such_setting(name: str) -> str:
    """The sentence for a setting that nothing declares, with the one that was most likely meant."""
    return (
        f"{shown(name)[1:-1]}: no such setting; did you mean {nearest_setting(name)}?"
        " `python -m edge0_train settings` has all"
    )
