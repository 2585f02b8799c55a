"""The command line: `python -m edge0_train phase=<name> tier=<name> [setting=value ...]`, and its subcommands.

Hydra composes, the configuration is checked, the run directory opened, the phase done. Nothing here imports torch before
`main` has said how its threads wait.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from edge0_runtime.contract.edge import DEBUG, PROBLEM, Stopped, held, mute_stdout, run_command
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import (
    PHASES,
    Config,
    check_chain,
    check_choices,
    check_order,
    config_directory,
    read_config,
    user_tiers,
)
from edge0_train.config.grammar import check_flags, hydra_sentence, in_one_sentence
from edge0_train.foreign import foreign

if TYPE_CHECKING:  # they import torch
    from edge0_train.phases import Phase
    from edge0_train.run import Run

EXAMPLES = """\
  python -m edge0_train phase=all tier=nano
  python -m edge0_train phase=head_distill tier=35b teacher.directory=/models/Qwen3.6-35B-A3B dry_run=true
  python -m edge0_train inspect base=models/OLMoE-1B-7B out=mine
"""
MULTIRUN = ("--multirun", "-m", "hydra.mode=MULTIRUN")
KEPT = "{} keeps what was finished: resume=true continues it; for other settings delete it, or choose another run_dir"
CONFIG_DIR = ("--config-dir", "-cd")


def main() -> None:
    """Entry point; exits with the codes of `edge0_runtime.contract.edge`, and returns when all is done."""
    # Two spinning OpenMP threads beside a busy neighbour slow torch ten-fold; must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints several lines and exits itself
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG]
    code = run_command(lambda: _command(arguments), debug=DEBUG in sys.argv[1:], explain=(_explain,))
    if code:
        sys.exit(code)


def _command(arguments: list[str]) -> int | None:
    """What the command line asks for; a training's exit code is given when it is stopped."""
    if not arguments:
        print(help_page(), file=sys.stderr)
        return PROBLEM
    if arguments in (["--help"], ["-h"]):
        print(help_page())
    elif "phase=inspect" in arguments:
        inspect(arguments)
    elif arguments[0] in SUBCOMMANDS:
        SUBCOMMANDS[arguments[0]](arguments[1:])
    else:
        _train(arguments)
    return None


def _train(arguments: list[str]) -> None:
    """Compose and run; a stop says how to continue."""
    own = own_config_directories(arguments)
    check_choices(arguments, own)
    try:
        if set(arguments) & set(MULTIRUN):
            from edge0_train.sweep import sweep

            sweep(_without_flags(arguments), own, _configs, _run)
        else:
            check_flags(arguments)
            sys.argv[1:] = arguments  # Hydra reads them there
            with user_tiers(*own), in_one_sentence(), held() as composed:
                _main_of_hydra(composed)()
    except _OutOfHydra as passed:
        raise passed.error from None
    except (KeyboardInterrupt, Stopped) as stop:
        number, what = (stop.number, str(stop)) if isinstance(stop, Stopped) else (signal.SIGINT, "stopped by Ctrl-C")
        command = shlex.join(["python", "-m", "edge0_train", *(a for a in arguments if not a.startswith("resume="))])
        raise Stopped(number, f"{what}; continue with: {command} resume=true") from stop


def _explain(error: BaseException) -> str | None:
    """The sentences for what Hydra, torch and others raise."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return hydra_sentence(error)
    return None if isinstance(error, Edge0Error) else foreign(error)


def help_page() -> str:
    """What `--help` prints."""
    width = max(map(len, (*PHASES, *SUBCOMMANDS)))
    phases = {"all": "the whole chain", **{name: facts.sentence for name, facts in PHASES.items()}}
    commands = {name: _summary(command) for name, command in SUBCOMMANDS.items()}
    return "\n".join(
        [
            "usage: python -m edge0_train [--config-dir DIR] phase=PHASE tier=TIER [setting=value ...]",
            *(f"       python -m edge0_train {name} ..." for name in SUBCOMMANDS),
            "",
            "Trains prerouter heads and a recovery LoRA for a streamed mixture-of-experts model, phase by phase.",
            *("", "phases:", *(f"  {name:<{width}}  {sentence}" for name, sentence in phases.items())),
            *(
                "",
                "subcommands (each has a --help):",
                *(f"  {name:<{width}}  {text}" for name, text in commands.items()),
            ),
            *("", "examples:", EXAMPLES),
            "dry_run=true prints a phase's plan and stops; --cfg job prints its settings; --hydra-help tells Hydra's own flags.",
        ]
    )


def _summary(command: Callable[[Sequence[str]], None]) -> str:
    """A subcommand's help: its docstring's first line, without the full stop."""
    return (command.__doc__ or "").splitlines()[0].removesuffix(".")


def inspect(arguments: Sequence[str]) -> None:
    """a tier for a model of your own, from its config.json."""
    from edge0_train.propose import inspect_command

    inspect_command(arguments)


def settings(arguments: Sequence[str]) -> None:
    """all settings with their defaults, as configs/train.yaml or (--markdown) as a page."""
    from edge0_train.config.pages import settings_markdown, settings_yaml

    pages: dict[tuple[str, ...], Callable[[], str]] = {
        (): settings_yaml,
        ("--markdown",): settings_markdown,
        ("--help",): lambda: f"usage: python -m edge0_train settings [--markdown]\n\n{_summary(settings)}\n",
    }
    if tuple(arguments) not in pages:
        raise Edge0Error(f"settings: {' '.join(arguments)!r} is unknown; it takes --markdown, or nothing")
    print(pages[tuple(arguments)](), end="")


def doctor(arguments: Sequence[str]) -> None:
    """what this machine has and lacks for each phase of a tier, and about how long each takes."""
    from edge0_train.doctor import doctor_command

    doctor_command(arguments)


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"inspect": inspect, "settings": settings, "doctor": doctor}
"""{first word: function of the others}; a docstring's first line is the command's help."""


class _OutOfHydra(BaseException):
    """Carries an exception out of Hydra, which would print lines of its own about an `Exception`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _main_of_hydra(begin: Callable[[], None]) -> Callable[[], Any]:
    """Hydra's entry: it composes, `begin` is called, the phases run."""

    def task(composed: DictConfig) -> None:
        begin()
        try:
            _run(composed, list(HydraConfig.get().overrides.task))
        except Exception as error:
            raise _OutOfHydra(error) from error

    entry = hydra.main(version_base=None, config_path=str(config_directory()), config_name="train")(task)
    return cast(Callable[[], Any], entry)


def _configs(composed: DictConfig, overrides: Sequence[str]) -> list[Config]:
    """The checked configurations of the phases that a command line asks for."""
    return chain_configs(composed.chain, overrides) if composed.phase == "all" else [_read(composed)]


def _run(composed: DictConfig, overrides: Sequence[str]) -> None:
    try:
        if composed.phase == "all":
            run_chain(composed.chain, overrides)
        else:
            run_phase(_read(composed))
    except BrokenPipeError as error:
        mute_stdout()
        raise Edge0Error(
            "stdout: nobody reads it any more; send it to a file, and continue with resume=true"
        ) from error


def chain_configs(chain: Sequence[str], overrides: Sequence[str]) -> list[Config]:
    """The checked configuration of every phase of a chain, and whether they go together."""
    kept = [override for override in overrides if not override.startswith("phase=")]
    with held():
        configs = [read_config(compose("train", [*kept, f"phase={name}"])) for name in check_order(chain)]
    check_chain(configs)
    return configs


def run_chain(chain: Sequence[str], overrides: Sequence[str]) -> None:
    """All phases in order; with resume=true the finished ones are passed over and the interrupted one continues.

    All are read before the first one starts: what is wrong with the last one is not said hours later.
    """
    from edge0_train.inputs import check_chain_inputs
    from edge0_train.tracking import check_wandb

    began = time.time()
    configs = chain_configs(chain, overrides)
    if configs[0].dry_run:
        plan_phases(configs)
        return
    check_wandb(configs)
    check_chain_inputs(configs)
    for config in configs:
        run_phase(config)
    print(f"phase=all: done in {time.time() - began:.0f} s")


def run_phase(config: Config) -> dict[str, Any] | None:
    """One phase in its run directory; None when it is done already there, or on a rank that is not needed."""
    from accelerate import PartialState

    from edge0_train.inputs import check_inputs
    from edge0_train.phases import phase_function
    from edge0_train.run import is_unused, open_run
    from edge0_train.tracking import start_wandb

    phase = phase_function(config.phase)
    set_up_torch(config.threads, config.base.device)
    _quiet_transformers(config.base.device)
    if config.dry_run:
        plan_phases([config])
        return None
    check_inputs(config)
    state = PartialState(cpu=config.base.device == "cpu")  # else accelerate takes ranks on CPUs for single processes
    if not state.is_main_process:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (plans and tables are said once, by rank 0)
    with open_run(config) as run:
        if run.is_done:
            print(f"{config.phase}: done already in {run.directory}")
            return None
        print(f"{config.phase}:", flush=True)
        if PHASES[config.phase].trains:
            start_wandb(run)
        try:
            summary = _do_phase(phase, config, run, is_main=state.is_main_process)
        except Edge0Error as error:  # most advise another setting, which this directory would refuse
            if is_unused(run.directory) or "resume=true" in str(error) or "run_dir" in str(error):
                raise
            raise Edge0Error(f"{error}; {KEPT.format(run.directory)}") from error
        state.wait_for_everyone()
    return summary


def plan_phases(configs: Sequence[Config]) -> None:
    """A dry run of one phase or of a chain: the plans, then everything that would stop them."""
    from edge0_train.inputs import check_chain_inputs
    from edge0_train.phases import phase_function
    from edge0_train.run import Run

    try:
        for config in configs:
            set_up_torch(config.threads, config.base.device)
            _quiet_transformers(config.base.device)
            phase_function(config.phase)(config, Run(Path(config.run_dir), config))
    except Edge0Error:
        check_chain_inputs(configs)  # what is missing says more than what the plan could not be made from
        raise
    check_chain_inputs(configs)


def _read(composed: DictConfig) -> Config:
    """The settings, from what Hydra's own entry composed: its node is no setting."""
    with held():
        with open_dict(composed):
            composed.pop("hydra", None)
        return read_config(composed)


def _do_phase(phase: Phase, config: Config, run: Run, is_main: bool) -> dict[str, Any] | None:
    """The phase in its open run: inputs recorded, done, finished. None on a rank that a phase done alone leaves out."""
    from edge0_train.build import input_identity

    facts = PHASES[config.phase]
    if facts.records_inputs:
        run.record_inputs(input_identity(config))
    if facts.alone and not is_main:
        return None
    summary = run.finish(phase(config, run))
    print(f"{config.phase}: done in {summary['seconds']} s", flush=True)
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


def own_config_directories(arguments: Sequence[str]) -> list[Path]:
    """The values of --config-dir (-cd), in either of its two forms."""
    pairs = [one.partition("=") for one in arguments]
    joined = [value for flag, _, value in pairs if flag in CONFIG_DIR and value]
    return [Path(value) for value in joined + [v for flag, v in itertools.pairwise(arguments) if flag in CONFIG_DIR]]


def _without_flags(arguments: Sequence[str]) -> list[str]:
    """What is left for a sweep: neither the flag itself nor --config-dir with its value."""
    after_flag = [value for flag, value in itertools.pairwise(arguments) if flag in CONFIG_DIR]
    flags = (*MULTIRUN, *CONFIG_DIR, *after_flag)
    return [one for one in arguments if one not in flags and one.partition("=")[0] not in CONFIG_DIR]
