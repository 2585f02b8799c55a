"""A reference trace that the engine itself makes: what `verify` replays where no training wrote one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.files import sha256_file
from edge0_runtime.contract.traces import PromptTrace, ReferenceTrace, write_trace
from edge0_runtime.engine import Engine


def write_own_trace(directory: Path, target: Path, wrong: bool = False) -> None:
    """A reference made by the engine itself; a wrong one claims the second most likely token at the start."""
    with Engine.load(directory) as engine:
        steps = list(engine.generate([5, 6, 7], max_tokens=4, ignore_eos=True, trace=True))
    top = [np.argsort(-step.logits)[:8] for step in steps]
    values = [step.logits[ids] for step, ids in zip(steps, top, strict=True)]
    if wrong:
        top[0][:2] = top[0][1::-1]
    prompt = PromptTrace(
        np.array([5, 6, 7], np.int32),
        np.array([ids[0] for ids in top], np.int32),
        np.stack([step.experts for step in steps]).astype(np.int32),
        np.stack(top).astype(np.int32),
        np.stack(values).astype(np.float32),
    )
    hashes = [sha256_file(directory / f"{kind}_edge0_tiny.safetensors") for kind in ("prerouter", "lora")]
    write_trace(target, ReferenceTrace("tiny", Checkpoint.open(directory).fingerprint(), *hashes, "float32", (prompt,)))
