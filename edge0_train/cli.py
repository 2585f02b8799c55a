"""`python -m edge0_train phase=<name> tier=<name> [setting=value ...]`: compose, validate, open the run, do the phase.

python -m edge0_train phase=all tier=nano
python -m edge0_train phase=inspect base=models/OLMoE-1B-7B out=mine
python -m edge0_train phase=head_distill tier=35b teacher.directory=/models/Qwen3.6-35B-A3B text.prompts=prompts.jsonl
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import config_directory, read_config

GROUPS = ("phase", "tier")
TRAINING = ("head_distill", "head_refine", "student_sft", "on_policy")
RECORDED = ("teacher_text", *TRAINING)
"""Phases whose run directory says in inputs.json what they were made from."""
ALONE = ("quantize", "evaluate", "export")
"""Phases that are one process's work: the other ranks wait."""


def main() -> None:
    """Entry point. Exit codes: 0 done or stopped with a checkpoint, 2 a problem that the user can act on."""
    if len(sys.argv) == 1:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints several lines and exits itself
    try:
        if "phase=inspect" in sys.argv[1:]:
            from edge0_train.propose import inspect_command

            inspect_command(sys.argv[1:])
            return
        _check_choices(sys.argv[1:])
        _hydra_main()
    except Edge0Error as error:
        _fail(error)
    except HydraException as error:
        _fail(Edge0Error(" ".join(str(error).split())))


@hydra.main(version_base=None, config_path=str(config_directory()), config_name="train")
def _hydra_main(composed: DictConfig) -> None:
    # Two spinning OpenMP threads beside a busy neighbour slow torch ten-fold; must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        if composed.phase == "all":
            run_chain(list(composed.chain), list(HydraConfig.get().overrides.task))
        else:
            run_phase(composed)
    except Edge0Error as error:
        _fail(error)


def run_chain(chain: Sequence[str], overrides: Sequence[str]) -> None:
    """All phases in order; with resume=true the finished ones are passed over and the interrupted one continues."""
    kept = [override for override in overrides if not override.startswith("phase=")]
    began = time.time()
    for name in chain:
        run_phase(compose("train", [*kept, f"phase={name}"]))
    print(f"phase=all: done in {time.time() - began:.0f} s")


def run_phase(composed: Any) -> dict[str, Any] | None:
    """One phase in its run directory; None when it was interrupted or is done already."""
    if isinstance(composed, DictConfig):
        with open_dict(composed):
            composed.pop("hydra", None)
    config = read_config(composed)

    from accelerate import PartialState

    from edge0_train.build import input_identity
    from edge0_train.loop import Interrupted
    from edge0_train.phases import PHASES
    from edge0_train.run import Run, open_run, start_wandb

    set_up_torch(config.threads, config.base.device)
    _quiet_transformers(config.base.device)
    if config.dry_run:
        PHASES[config.phase](config, Run(Path(config.run_dir), config))
        return None
    state = PartialState(cpu=config.base.device == "cpu")  # else accelerate takes ranks on CPUs for single processes
    if not state.is_main_process:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (plans and tables are said once, by rank 0)
    run = open_run(config)
    if run.is_done:
        print(f"{config.phase}: done already in {run.directory}")
        return None
    print(f"{config.phase}:", flush=True)
    if config.phase in TRAINING:
        start_wandb(run)
    summary = None
    try:
        if config.phase in RECORDED:
            run.record_inputs(input_identity(config))
        if config.phase not in ALONE or state.is_main_process:
            summary = run.finish(PHASES[config.phase](config, run))
            print(f"{config.phase}: done in {summary['seconds']} s", flush=True)
    except Edge0Error:
        if state.is_main_process:
            run.discard_if_unused()
        raise
    except Interrupted as stop:
        print(stop)
        sys.exit(0)
    state.wait_for_everyone()
    return summary


def set_up_torch(threads: int, device: str) -> None:
    """CPU threads, and on a CPU the same bits in every run: with two threads, backward of an indexing adds in any order."""
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(device == "cpu", warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time


def _quiet_transformers(device: str) -> None:
    """No loading bars; on a CPU also no hints about CUDA kernels that cannot be had there."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if device == "cpu":
        logging.set_verbosity_error()


def _check_choices(arguments: Sequence[str]) -> None:
    """A group's unknown choice as one sentence (Hydra's own message has twelve lines).

    The user's own tiers lie in the folder `tier` of Hydra's --config-dir.
    """
    places = [config_directory(), *map(Path, _own_config_directories(arguments))]
    for argument in arguments:
        group, _, value = argument.partition("=")
        if group in GROUPS:
            known = sorted(path.stem for place in places for path in (place / group).glob("*.yaml"))
            unknown = [choice for choice in value.split(",") if choice not in known]
            if unknown:
                raise Edge0Error(f"{group}: {', '.join(unknown)!r} is unknown; choose one of {', '.join(known)}")


def _own_config_directories(arguments: Sequence[str]) -> list[str]:
    """The values of --config-dir (-cd), in either of its two forms."""
    flags = ("--config-dir", "-cd")
    pairs = [one.partition("=") for one in arguments]
    joined = [value for flag, _, value in pairs if flag in flags and value]
    return joined + [value for flag, value in itertools.pairwise(arguments) if flag in flags]


def _fail(error: Edge0Error) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
