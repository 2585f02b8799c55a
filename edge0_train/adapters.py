"""The adapter files that phases hand to each other: finding the inputs, writing the output with its lineage."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState

from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind, read_adapter, write_adapter
from edge0_runtime.contract.binding import tier_differences
from edge0_runtime.contract.checkpoint import BaseIdentity, Checkpoint
from edge0_runtime.contract.code_version import code_commit, tool_version
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import sha256_file
from edge0_runtime.contract.provenance import DataSource, PhaseRecord, Provenance, Teacher
from edge0_train.config import PHASES, Config


@dataclass(frozen=True)
class BaseInfo:
    """The base that adapters are bound to, and its tokenizer."""

    identity: BaseIdentity
    tokenizer_hash: str
    template_hash: str | None

    @property
    def fingerprint(self) -> str:
        """`Checkpoint.fingerprint()`."""
        return self.identity.fingerprint


def base_info(config: Config) -> BaseInfo:
    """Fingerprint and tokenizer of `base.directory`. Raises Edge0Error when it is not the tier's base."""
    checkpoint = Checkpoint.open(Path(config.base.directory))
    checkpoint.check_architecture(config.tier)
    return BaseInfo(checkpoint.identity(), checkpoint.tokenizer_hash(), checkpoint.template_hash())


def input_path(config: Config, kind: Kind) -> str:
    """`inputs.<kind>`, with `auto` resolved: the newest file of that kind that the phases before this one wrote below root.

    An empty string means none. Raises Edge0Error when `auto` finds nothing.
    """
    value: str = getattr(config.inputs, kind)
    if value != "auto":
        return value
    before = config.chain[: config.chain.index(config.phase)] if config.phase in config.chain else config.chain
    for phase in reversed(before):
        path = Path(config.root) / phase / config.tier.file_name(kind)
        if path.is_file():
            return str(path)
    raise Edge0Error(
        f"inputs.{kind}: no phase before {config.phase} has written {config.tier.file_name(kind)} below {config.root};"
        f" run those phases ({', '.join(before)}) or name a file"
    )


def describe_inputs(config: Config) -> str:
    """Which adapters a phase starts from, for its plan; one that no phase has written yet is no error in a dry run."""
    found = []
    for kind in KINDS:
        try:
            found.append(f"{kind} {input_path(config, kind) or 'none'}")
        except Edge0Error:
            found.append(f"{kind} auto (not written yet)")
    return "\n".join(found)


def read_input(config: Config, kind: Kind, value: str) -> Adapter | None:
    """The adapter at `value`: a file, or a run directory that holds the tier's or a single one; None for an empty value."""
    if not value:
        return None
    path = Path(value)
    if path.is_dir():
        theirs = sorted(path.glob(f"{kind}_edge0_*.safetensors"))
        path = path / config.tier.file_name(kind)
        if not path.is_file() and len(theirs) == 1:
            path = theirs[0]
    if not path.is_file():
        raise Edge0Error(f"inputs.{kind}: {path} does not exist; run the phase that writes it, or set inputs.{kind}")
    adapter = read_adapter(path, kind, fallback_tier=config.tier)
    differing = tier_differences(kind, adapter.tier, config.tier)
    if PHASES[config.phase].goes_on:  # it trains the file for the routing that it is to have from now on
        differing = [one for one in differing if one[0] != "name" and not one[0].startswith("router.sticky.")]
    if differing:
        listed = ", ".join(f"tier.{name} is {theirs} there and {ours} here" for name, theirs, ours in differing)
        raise Edge0Error(
            f"inputs.{kind}: {path} was trained for another tier: {listed};"
            " give this run the same values, or run the phase that writes the file again"
        )
    return adapter


def write_output(
    config: Config,
    kind: Kind,
    tensors: Mapping[str, np.ndarray],
    base: BaseInfo,
    result: Mapping[str, Any],
    data: DataSource,
    parents: Mapping[str, Adapter | None],
    prerouter_sha256: str | None = None,
    teacher: Teacher | None = None,
) -> str:
    """Write this phase's adapter into its run directory, with the chain of phases that led to it; returns its sha256.

    Args:
        result: the loop's summary: its steps, tokens and final numbers go into the chain.
        teacher: who wrote the rows or scored them; not who was configured.
        prerouter_sha256: binds a LoRA to the heads that it is to be served with.
    """
    path = Path(config.run_dir) / config.tier.file_name(kind)
    state = PartialState()
    if state.is_main_process:
        provenance = _provenance(config, base, result, data, parents, prerouter_sha256, teacher)
        write_adapter(path, kind, config.tier, tensors, provenance)
    state.wait_for_everyone()
    return sha256_file(path)


def _provenance(
    config: Config,
    base: BaseInfo,
    result: Mapping[str, Any],
    data: DataSource,
    parents: Mapping[str, Adapter | None],
    prerouter_sha256: str | None,
    teacher: Teacher | None,
) -> Provenance:
    """The record of `write_output`'s arguments."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    chain: dict[str, PhaseRecord] = {}
    for parent in parents.values():
        if parent and parent.provenance:
            chain |= {record.run_id: record for record in parent.provenance.phases}
    this = PhaseRecord(
        phase=config.phase,
        run_id=f"{Path(config.root).name}/{Path(config.run_dir).name}",  # no absolute path leaves the machine
        parents={name: parent.sha256 for name, parent in parents.items() if parent},
        seed=config.seed,
        steps=result["steps"],
        tokens=result["tokens"],
        rows=config.optim.rows * result["steps"],
        metrics={name: value for name, value in result.items() if isinstance(value, float)},
        time=now,
    )
    return Provenance(
        tool_version=tool_version(),
        commit=code_commit(),
        phases=(*chain.values(), this),
        base_fingerprint=base.fingerprint,
        tokenizer_hash=base.tokenizer_hash,
        template_hash=base.template_hash,
        teacher=teacher,
        data=data,
        prerouter_sha256=prerouter_sha256,
        created=now,
        base_config=base.identity.config,
    )


def hash_files(paths: Sequence[Path]) -> str:
    """sha256 over names and contents of files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}:{sha256_file(path)}\n".encode())
    return digest.hexdigest()
