"""What a phase must find before it starts, looked at in the order in which it is made; what is missing comes with its command.

    check_inputs(config)                # raises one Edge0Error that lists everything

Nothing large is read: names, headers, cards. A dry run makes the same checks, after its plan.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.checkpoint import SHARD_PATTERN, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import base_info, input_path, read_input
from edge0_train.base.load import parameter_shapes
from edge0_train.base.shards import check_new
from edge0_train.base.weights import MlxWeights
from edge0_train.build import check_card, sketch_student
from edge0_train.checkpoint import KEEP
from edge0_train.config import ONE_PROMPT, PHASES, Config, command, examples, fetch_teacher
from edge0_train.data.counts import Rows
from edge0_train.data.prompts import Prompts, load_prompts
from edge0_train.data.rows import read_card
from edge0_train.data.sources import READ
from edge0_train.fit import with_settings, would_fit
from edge0_train.losses import ON_POLICY_LOSSES
from edge0_train.machine import disk_free, gpus, has_gpu, limits
from edge0_train.memory import GIB, phase_need
from edge0_train.run import is_unused
from edge0_train.teacher import check_teacher

FILES = (*READ, ".gz")
KEPT_STATES = KEEP + 1
"""Checkpoints of a training that lie on the disk at one time, the one being written among them."""


def check_inputs(config: Config) -> None:
    """Raise Edge0Error that lists what the phase would not find, in order, with the commands that make it."""
    if _is_first_rank():
        _raise(config, missing_inputs(config))


def check_chain_inputs(configs: Sequence[Config]) -> None:
    """`check_inputs` of all phases of a chain before the first one starts; what one writes, later ones will find.

    Prompts are counted, and every run directory must be free (or be continued).
    """
    made: set[str] = set()
    for config in configs if _is_first_rank() else ():
        problems = missing_inputs(config, made)
        if not _is_done(config):
            problems += [*_run_directory(config), *_told(_enough_prompts, config)]
        _raise(config, problems)
        made.update(PHASES[config.phase].writes)


def missing_inputs(config: Config, made: Collection[str] = ()) -> list[str]:
    """A sentence for everything that the phase would not find; `made`: what earlier phases of its chain will have written."""
    if _is_done(config):
        return []
    wanted = [name for name in PHASES[config.phase].reads if name not in made]
    checks = [_origin(*wanted), *(CHECKS[name] for name in wanted)]
    checks += [_binding(*(kind for kind in KINDS if kind in wanted)), _memory, _disk]
    return [*dict.fromkeys(problem for check in checks for problem in _told(check, config))]


def _raise(config: Config, problems: Sequence[str]) -> None:
    if len(problems) == 1:
        raise Edge0Error(problems[0])
    if problems:
        listed = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise Edge0Error(f"phase={config.phase} tier={config.tier.name} cannot start; mend in this order:{listed}")


Check = Callable[[Config], Iterator[str]]


def _told(check: Check, config: Config) -> list[str]:
    """What a check finds, one line each; what it raises is one finding."""
    try:
        return list(check(config))
    except Edge0Error as error:
        return [str(error).replace("\n", "\n    ")]


def _is_done(config: Config) -> bool:
    return config.resume and (Path(config.run_dir) / "done.json").is_file()


def _elsewhere(config: Config) -> bool:
    """A plan for another machine: this one's device and memory say nothing."""
    return config.dry_run and bool(config.hardware.name)


def _device(config: Config) -> Iterator[str]:
    name = config.base.device
    if name == "cpu" or _elsewhere(config) or has_gpu(name):
        return
    if not gpus():
        why = "was built without CUDA" if torch.version.cuda is None else "finds no GPU"
        yield (
            f"base.device: {name}, but torch {torch.__version__} {why} here;"
            " take a machine with a GPU, or base.device=cpu base.dtype=float32"
        )
    else:
        yield f"base.device: {name}, but the last GPU here is cuda:{gpus() - 1}; take base.device=cuda:{gpus() - 1}"


def _writer(config: Config) -> Iterator[str]:
    if config.sample.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        yield "sample.backend: vllm is not installed; `pip install vllm`, or sample.backend=transformers"


def _loss(config: Config) -> Iterator[str]:
    sample, loss = config.sample, config.on_policy.loss
    if ON_POLICY_LOSSES[loss].own_samples and (sample.temperature, sample.top_p) != (1.0, 1.0):
        yield (
            f"sample: temperature {sample.temperature} and top_p {sample.top_p}; on_policy.loss={loss} estimates"
            " with what the student itself would write: set both to 1"
        )


def _origin(*wanted: str) -> Check:
    """Base and text are made from the teacher: where they are wanted and there is none, fetching that comes first."""

    def check(config: Config) -> Iterator[str]:
        teacher = config.teacher.directory or f"models/{config.tier.model}"
        made_from = {
            "base": (config.base.directory, config.base.source or teacher),
            "text": (config.text.rows, teacher),
        }
        origins = [origin for name, (made, origin) in made_from.items() if name in wanted and not Path(made).exists()]
        for origin in origins if "teacher" not in PHASES[config.phase].reads else ():
            if not Path(origin).is_dir():
                yield f"the teacher: {origin} does not exist; {fetch_teacher(config.tier, origin)}"

    return check


def _teacher(config: Config) -> Iterator[str]:
    missing = list(_model("teacher.directory", config.teacher.directory, config))
    if not missing:
        check_teacher(config)
    yield from missing


def _source(config: Config) -> Iterator[str]:
    yield from _model("base.source", config.base.source, config)


def _model(name: str, directory: str, config: Config) -> Iterator[str]:
    """A directory in transformers' layout: config.json and safetensors."""
    place = Path(directory)
    if not place.is_dir():
        yield f"{name}: {directory} does not exist; {fetch_teacher(config.tier, directory)}"
    elif not (place / "config.json").is_file():
        yield f"{name}: {directory} has no config.json; {fetch_teacher(config.tier, directory)}"
    elif not any(place.glob(SHARD_PATTERN)):
        other = ", ".join(sorted(path.name for path in place.glob("*.bin"))[:3])
        yield (
            f"{name}: {directory} has no {SHARD_PATTERN}{f' (only {other})' * bool(other)};"
            f" {fetch_teacher(config.tier, directory)}"
        )


def _new_base(config: Config) -> Iterator[str]:
    if not config.resume:  # a killed run may have left its base, which phase=quantize then compares
        check_new(Path(config.base.directory))
    yield from ()


def _base(config: Config) -> Iterator[str]:
    if Path(config.base.directory).is_dir():
        base_info(config)
        model = sketch_student(with_settings(config, {"base.storage": "bf16"}), lora=False, heads=False).model
        MlxWeights.open(Checkpoint.open(config.base.directory), config.tier.layout, parameter_shapes(model))
        return
    make = command(config, "quantize", *_unless_set(config, "teacher.directory"))
    yield f"base.directory: {config.base.directory} does not exist; `{make}` makes it"


def _text(config: Config) -> Iterator[str]:
    if not (Path(config.text.rows) / "card.json").is_file():
        make = command(config, "teacher_text", *_unless_set(config, "teacher.directory", "text.prompts"))
        yield f"text.rows: {config.text.rows} has no card.json; `{make}` writes the rows"
        return
    card = read_card(config.text.rows)
    if Path(config.base.directory).is_dir():
        check_card(config, card, base_info(config))


def _prompts(config: Config) -> Iterator[str]:
    source = config.text.prompts
    if source.partition(":")[0] == "tasks":
        _load_prompts(config, 1)
    elif source.endswith(FILES) and not Path(source).is_file():
        yield f"text.prompts: {source} does not exist; write it, with lines such as {ONE_PROMPT}"


def _load_prompts(config: Config, train: int, held_out: int = 1) -> Prompts:
    """As many as the phase reads, so that the same share of rows is unusable; their lengths would take tokenising them."""
    text = config.text
    return load_prompts(
        text.prompts,
        train=train,
        held_out=held_out,
        seed=config.seed,
        split=text.split,
        column=text.column,
        max_dropped=text.max_dropped,
    )


def _enough_prompts(config: Config) -> Iterator[str]:
    """Of a file; generated tasks never end, and a dataset by name is not at hand."""
    if "prompts" not in PHASES[config.phase].reads or not Path(config.text.prompts).is_file():
        return
    if config.phase != "on_policy":  # which takes what it finds
        _load_prompts(config, config.sample.prompts, config.sample.eval_prompts)
        return
    want = config.optim.rows * config.optim.steps
    found = len(_load_prompts(config, want).train)
    if found < want:
        yield (
            f"text.prompts: {config.text.prompts} has {found} prompts to train on, phase={config.phase} takes"
            f" optim.steps x optim.rows = {want}; lower optim.steps or optim.rows"
        )


def _prerouter(config: Config) -> Iterator[str]:
    yield from _adapter(config, "prerouter", "head_distill")


def _lora(config: Config) -> Iterator[str]:
    if config.inputs.lora or config.phase != "student_sft":  # which makes a new one
        yield from _adapter(config, "lora", "student_sft")


def _adapter(config: Config, kind: Kind, maker: str) -> Iterator[str]:
    value = getattr(config.inputs, kind)
    if not value:
        yield f"inputs.{kind}: empty, but phase={config.phase} goes on from it; leave it out, or name a run directory"
        return
    if value == "auto":
        try:
            value = input_path(config, kind)
        except Edge0Error:
            make = command(config, maker)
            yield f"inputs.{kind}: no phase before {config.phase} has written it below {config.root}; `{make}` does"
            return
    read_input(config, kind, value)


def _binding(*kinds: Kind) -> Check:
    """Whether the adapters that are there were made for the base and for each other."""

    def check(config: Config) -> Iterator[str]:
        found: dict[Kind, Adapter | None] = dict.fromkeys(KINDS)
        for kind in kinds:
            with contextlib.suppress(Edge0Error):  # told by `_adapter`
                found[kind] = read_input(config, kind, input_path(config, kind))
        if any(found.values()) and Path(config.base.directory).is_dir():
            check_binding(base_info(config).identity, found["prerouter"], found["lora"])
        yield from ()

    return check


def _any_heads(config: Config) -> Iterator[str]:
    name = config.tier.file_name("prerouter")
    if not any((Path(config.root) / phase / name).is_file() for phase in config.chain):
        yield f"root: no phase has written heads below {config.root}; `{command(config, 'head_distill')}` does"


CHECKS: dict[str, Check] = {
    "device": _device,
    "writer": _writer,
    "loss": _loss,
    "source": _source,
    "new base": _new_base,
    "teacher": _teacher,
    "base": _base,
    "text": _text,
    "prompts": _prompts,
    "prerouter": _prerouter,
    "lora": _lora,
    "heads below root": _any_heads,
}
"""{what a phase reads (`PhaseFacts.reads`): how that is looked at}."""


def _unless_set(config: Config, *names: str) -> list[str]:
    """Example assignments of those settings that have no value yet."""
    values = {"teacher.directory": config.teacher.directory, "text.prompts": config.text.prompts}
    return [examples(config.tier)[name][0] for name in names if not values[name]]


def _memory(config: Config) -> Iterator[str]:
    """Only what is certain: weights alone that are larger than the memory that they are to lie in."""
    if _elsewhere(config):
        return
    need, at_hand = phase_need(config, Rows.unwritten(config)), limits(config)
    there = at_hand.host if config.base.device == "cpu" else at_hand.device
    if there and need.weights > there:
        settings = would_fit(config, Rows.unwritten(config))
        fix = f"it would fit with {' '.join(settings)}" if settings else "take a larger machine"
        yield (
            f"memory: the weights alone have {need.weights / GIB:.1f} GiB, {at_hand.name} has {there / GIB:.1f}; {fix}"
        )


def _disk(config: Config) -> Iterator[str]:
    tier, place, size = config.tier, config.run_dir, 0
    if config.phase == "quantize" and Path(config.base.source).is_dir():
        packed = sketch_student(with_settings(config, {"base.storage": "packed"}), lora=False, heads=False).model
        place = config.base.directory
        size = sum(t.numel() * t.element_size() for t in (*packed.parameters(), *packed.buffers()))
    elif PHASES[config.phase].trains:
        shapes = [*tier.head_tensors().values(), *tier.lora_tensors().values()]
        size = KEPT_STATES * 12 * sum(rows * columns for rows, columns in shapes)  # float32 values and two moments
    if size > (free := disk_free(place)):
        yield (
            f"{place}: phase={config.phase} writes about {size / GIB:.1f} GiB there, {free / GIB:.1f} are free;"
            " free some, or choose another root"
        )


def _run_directory(config: Config) -> Iterator[str]:
    directory = Path(config.run_dir)
    unused = (directory / "lock").exists() and is_unused(directory)  # of a process killed before anything happened
    if not config.resume and not unused and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        yield f"run_dir: {directory} exists already; choose another run_dir or continue it with resume=true"


def _is_first_rank() -> bool:
    """One rank looks for all: another one might find what a phase of the first has just begun to write."""
    return os.environ.get("RANK", "0") == "0"
