"""What Hydra refuses of a command line, as one sentence with a fix that works."""

from __future__ import annotations

import difflib
import re

from hydra.errors import OverrideParseException

from edge0_runtime.contract.files import shown
from edge0_train.config.fields import all_settings

SEE = "`python -m edge0_train settings` lists all"


def hydra_sentence(error: BaseException) -> str:
    """An exception of Hydra or OmegaConf in one sentence; Hydra's own advice, to append what is unknown with +, leads nowhere."""
    if isinstance(error, OverrideParseException):
        reason = shown(str(error).partition("\n")[0])[1:-1]
        return f"{shown(error.override)}: cannot be read ({reason}); quote a value with special characters: 'name=\"value\"'"
    text = " ".join(str(error).split())
    unknown = re.match(r"Could not (?:override|delete)[^']*'([^']+)'", text)
    if not unknown:
        return text
    name = unknown[1]
    group, _, last = name.rpartition(".")
    same = [known for known in all_settings() if known.rpartition(".")[2] == last]
    near = same or difflib.get_close_matches(name, all_settings(), 1, cutoff=0.8)
    siblings = [known.removeprefix(f"{group}.") for known in all_settings() if group and known.startswith(f"{group}.")]
    hint = f"did you mean {near[0]}?" if near else f"{group} has {', '.join(siblings)}" if siblings else SEE
    return f"{name}: there is no such setting; {hint}"
