"""phase=export: the model directory that the runtime serves: int4 base, two adapters, reference traces.

    python -m edge0_train phase=export tier=nano
    python -m edge0_train phase=export tier=nano inputs.prerouter=runs/a inputs.lora=runs/b export.directory=models/mine

Settings: inputs.prerouter and inputs.lora (auto: the newest of the chain), export.* (directory, trace_prompts, trace_tokens,
trace_top).
Expected on nano (2.4 s): `model/`, which `python -m edge0_runtime verify` finds to serve what was trained.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind, read_adapter
from edge0_runtime.contract.base_config import config_differences
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.checkpoint import BaseIdentity, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace, raise_problems
from edge0_runtime.contract.public_runtime import upstream_base_problems, upstream_problems
from edge0_runtime.contract.traces import PromptTrace, ReferenceTrace, write_trace
from edge0_train.adapters import describe_inputs, input_path, read_input
from edge0_train.build import Student, build_student, in_float32
from edge0_train.config import Config
from edge0_train.data.counts import Rows
from edge0_train.data.rows import text_of
from edge0_train.plan import memory_plan
from edge0_train.report import print_plan
from edge0_train.run import Run, remove_temporary
from edge0_train.student import Decoding, StudentPath, generate
from edge0_train.student.generate import StepRecord


def export(config: Config, run: Run) -> dict[str, Any]:
    """Write `export.directory`; an existing one with the same base gets new adapters and nothing else.

    The reference traces come from the adapters as they are in the files (F16), so that `edge0_runtime verify` compares what is
    served with what was exported. They are computed in float32 whatever `base.dtype` trained in: in bf16 rounding alone routes
    otherwise every few tokens. Where that is another dtype the base stays packed, which takes no more memory than in training.
    """
    tier, target = config.tier, Path(config.export.directory)
    print_plan(
        config,
        {"model": str(target), "inputs": describe_inputs(config), **memory_plan(config, Rows.unwritten(config))},
    )
    if config.dry_run:
        return {}
    adapters: dict[Kind, Adapter | None] = {kind: read_input(config, kind, input_path(config, kind)) for kind in KINDS}
    missing = [f"inputs.{kind}" for kind, adapter in adapters.items() if adapter is None]
    if missing:
        raise Edge0Error(f"{', '.join(missing)}: empty; an export needs both adapters: name the run directories")
    exact = in_float32(config)
    student = build_student(exact, prerouter=input_path(config, "prerouter"), lora=input_path(config, "lora"))
    trace = reference_trace(exact, student)
    _place_base(Path(config.base.directory), target, student.base.identity)
    remove_temporary(target)
    exported = Checkpoint.open(target)
    problems = {"base": upstream_base_problems(exported, tier)}
    for kind, adapter in adapters.items():
        assert adapter
        with atomic_replace(target / tier.file_name(kind)) as temporary:
            shutil.copyfile(adapter.path, temporary)
        read = read_adapter(target / tier.file_name(kind), kind)
        if read.sha256 != adapter.sha256:
            raise Edge0Error(f"{read.path}: reads back as {read.sha256}, written was {adapter.sha256}; check the disk")
        problems[kind] = upstream_problems(read)
    check_binding(exported.identity(), adapters["prerouter"], adapters["lora"])
    write_trace(target / tier.file_name("verify"), trace, tier)
    for name, reasons in problems.items():
        verdict = "not loadable upstream: " + "; ".join(reasons) if reasons else "loads in the public runtime"
        print(f"  {name}: {verdict}")
    print(f"exported to {target}")
    return {"directory": str(target), "sha256": {k: a.sha256 for k, a in adapters.items() if a}, "upstream": problems}


def _place_base(base: Path, target: Path, identity: BaseIdentity) -> None:
    """Hard-link (else copy) the base's files into `target`, unless that base is there already."""
    if target.exists():
        there, ours = Checkpoint.open(target), Checkpoint.open(base)
        found = there.identity()
        if found.fingerprint != identity.fingerprint:
            raise Edge0Error(
                f"export.directory: {target} holds another base ({found.fingerprint[:12]}, not"
                f" {identity.fingerprint[:12]}); choose another"
            )
        raise_problems(
            f"export.directory: {target} holds the base with another config.json",
            config_differences(identity.config, found.config),
            "put base.directory's config.json there, or choose another",
        )
        others = {
            "tokenizer.json": (there.tokenizer_hash(), ours.tokenizer_hash()),
            "chat template": (there.template_hash(), ours.template_hash()),
        }
        raise_problems(
            f"export.directory: {target} holds the base with other files",
            [f"{name} is not that of {base}" for name, (one, other) in others.items() if one != other],
            "put base.directory's there, or choose another",
        )
        return
    temporary = target.with_name(target.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for file in sorted(base.iterdir()):
            if file.is_file():
                try:
                    os.link(file, temporary / file.name)
                except OSError:
                    shutil.copy2(file, temporary / file.name)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after the rename there is nothing to remove


def reference_trace(config: Config, student: Student) -> ReferenceTrace:
    """What the student does on held-out prompts, to be replayed by `edge0_runtime verify`."""
    want = config.export
    data, _ = text_of(config)
    prompts = [row.prompt_ids for row in data.held_out[: want.trace_prompts]]
    traces = prompt_traces(
        student.path, prompts, tokens=want.trace_tokens, top=want.trace_top, pad_id=student.chat.pad_id
    )
    assert student.prerouter and student.lora
    return ReferenceTrace(
        tier=config.tier.name,
        base_fingerprint=student.base.fingerprint,
        prerouter_sha256=student.prerouter.sha256,
        lora_sha256=student.lora.sha256,
        compute_dtype=config.base.dtype,
        prompts=tuple(traces),
    )


def prompt_traces(
    path: StudentPath, prompts: Sequence[Sequence[int]], *, tokens: int, top: int, pad_id: int
) -> list[PromptTrace]:
    """Greedy continuations of `tokens` tokens on the incremental student path, with routed sets and `top` logits per step."""
    tier = path.tier
    layers = tier.layout.moe_layers(tier.architecture)
    prompt_experts: list[torch.Tensor] = []
    experts: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    logits: list[tuple[torch.Tensor, torch.Tensor]] = []

    def observe(record: StepRecord) -> None:
        executed_BTLK = torch.stack([record.routing.executed[layer] for layer in layers], 2).sort(-1).values
        if record.step == 0:
            prompt_experts.extend(executed_BTLK)
        experts.append(executed_BTLK[:, -1])
        if record.routing.own:
            chosen_BOK = torch.stack([record.routing.own[owner][:, -1] for owner in tier.owners], 1)
            own.append(chosen_BOK.sort(-1).values)
        logits.append(tuple(record.logits_BV.topk(top, dim=-1)))  # type: ignore[arg-type]

    # end_ids: past the end token too, since the comparison wants length
    completions = generate(path, prompts, Decoding(tokens), end_ids=(), pad_id=pad_id, observe=observe)
    experts_BTLK = torch.stack(experts, 1).cpu().numpy().astype(np.int32)
    values_BTN = torch.stack([values for values, _ in logits], 1).cpu().numpy()
    ids_BTN = torch.stack([ids for _, ids in logits], 1).cpu().numpy().astype(np.int32)
    own_BTOK = torch.stack(own, 1).cpu().numpy().astype(np.int32) if own else None
    return [
        PromptTrace(
            np.array(prompt, np.int32),
            np.array(done.ids, np.int32),
            experts_BTLK[row],
            ids_BTN[row],
            values_BTN[row],
            prompt_experts[row][-len(prompt) :].cpu().numpy().astype(np.int32),  # behind the padding
            None if own_BTOK is None else own_BTOK[row],
        )
        for row, (prompt, done) in enumerate(zip(prompts, completions, strict=True))
    ]
