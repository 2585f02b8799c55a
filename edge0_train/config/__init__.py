"""Configuration: every setting is declared once (`fields.py`), every phase once (`phases.py`), every tier once (configs/tier).

    config = configure("phase=student_sft", "tier=nano", "optim.steps=20")

is what `python -m edge0_train phase=student_sft tier=nano optim.steps=20` runs with. Composing imports no torch.
"""

from edge0_train.config.checks import check_chain, check_order
from edge0_train.config.command import ONE_PROMPT, command, examples, fetch_teacher
from edge0_train.config.compose import asset, check_choices, configure, read_config, to_dict
from edge0_train.config.fields import (
    Base,
    Config,
    Export,
    Hardware,
    Heads,
    Inputs,
    Logger,
    OnPolicy,
    Optim,
    Sample,
    Teacher,
    Text,
    all_settings,
)
from edge0_train.config.phases import PHASE_NAMES, PHASES, STAGE_NAMES, PhaseFacts
from edge0_train.config.tiers import config_directory, user_tiers

__all__ = [
    "ONE_PROMPT",
    "PHASES",
    "PHASE_NAMES",
    "STAGE_NAMES",
    "Base",
    "Config",
    "Export",
    "Hardware",
    "Heads",
    "Inputs",
    "Logger",
    "OnPolicy",
    "Optim",
    "PhaseFacts",
    "Sample",
    "Teacher",
    "Text",
    "all_settings",
    "asset",
    "check_chain",
    "check_choices",
    "check_order",
    "command",
    "config_directory",
    "configure",
    "examples",
    "fetch_teacher",
    "read_config",
    "to_dict",
    "user_tiers",
]
