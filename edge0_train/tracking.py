"""Weights & Biases: which mode, checked before anything heavy; and one W&B run for a training however often it is resumed."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from accelerate import PartialState

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import read_json
from edge0_train.config import PHASES, Config, to_dict
from edge0_train.run import Run, write_json

MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
"""Values of W&B's own variable WANDB_MODE -> those of logger.wandb."""


def wandb_mode(config: Config) -> str:
    """logger.wandb, or what the variable WANDB_MODE says instead; disabled by either of them is disabled.

    Raises Edge0Error for a value of the variable that is unknown.
    """
    variable = os.environ.get("WANDB_MODE") or config.logger.wandb
    if variable not in MODES:
        raise Edge0Error(f"WANDB_MODE: {variable!r} is unknown; set it to one of {', '.join(MODES)}, or unset it")
    return "disabled" if config.logger.wandb == "disabled" else MODES[variable]


def check_wandb(configs: Sequence[Config]) -> None:
    """Raise Edge0Error when a training among `configs` is to be told to W&B online and nobody is logged in there."""
    trainings = [config for config in configs if PHASES[config.phase].trains and wandb_mode(config) == "online"]
    if not trainings or os.environ.get("RANK", "0") != "0" or not find_spec("wandb"):
        return
    import wandb

    try:
        wandb.login()
    except wandb.Error as error:
        raise Edge0Error(
            f"logger.wandb: W&B knows no key ({' '.join(str(error).split())}); run `wandb login`, or set logger.wandb=offline"
        ) from error


def start_wandb(run: Run) -> None:
    """Open the W&B run, the one of before when the training is resumed; without the package metrics.jsonl has everything."""
    mode = wandb_mode(run.config)
    if mode == "disabled" or not PartialState().is_main_process:
        return
    try:
        import wandb
    except ImportError:
        print("wandb is not installed: metrics go to metrics.jsonl only", file=sys.stderr)
        return
    logger = run.config.logger
    run.wandb = wandb.init(
        project=logger.project,
        name=f"{run.config.tier.name}-{run.config.phase}-{run.config.seed}",
        id=_run_id(run),
        resume="allow",
        dir=str(run.directory),
        mode=mode,  # type: ignore[arg-type]
        config=to_dict(run.config),
        settings=wandb.Settings(silent=True, console="off", disable_git=True),
    )
    run.wandb.define_metric("*", step_metric="step")


def _run_id(run: Run) -> str:
    """The id in the run directory's wandb.json, which the first session makes."""
    file = run.directory / "wandb.json"
    if not file.exists():
        write_json(file, {"id": secrets.token_hex(4)})
    found = read_json(file, "delete it: the rest of the training is then a W&B run of its own").get("id")
    if not isinstance(found, str) or not found:
        raise Edge0Error(f"{file}: has no id; delete it: the rest of the training is then a W&B run of its own")
    return found
