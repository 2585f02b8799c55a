"""Exceptions of the libraries that training rests on, as sentences with a fix: what the user can act on."""

from __future__ import annotations

import errno

from edge0_runtime.contract.files import one_line

_NO_CUDA = (
    "Torch not compiled with CUDA",
    "no NVIDIA driver",
    "No CUDA GPUs are available",
    "CUDA driver initialization",
)
_NO_MEMORY = ("can't allocate memory", "not enough memory")
LESS_MEMORY = (
    "lower optim.micro_rows or sample.batch, or set base.storage=packed base.gradient_checkpointing=true; dry_run=true says what"
    " a phase needs"
)


def foreign(error: BaseException) -> str | None:
    """The sentence for a library's exception; None where it is not known, which makes it a fault."""
    text, library = one_line(error), type(error).__module__.partition(".")[0]
    if type(error).__name__ == "OutOfMemoryError" or any(said in text for said in _NO_MEMORY):
        return f"memory: {text}; {LESS_MEMORY}"
    if isinstance(error, (RuntimeError, AssertionError)) and any(said in text for said in _NO_CUDA):
        return f"base.device: cuda cannot be used here ({text}); set base.device=cpu base.dtype=float32"
    if type(error).__name__ == "SafetensorError":
        full = any(f"os error {number}" in text for number in (errno.ENOSPC, errno.EDQUOT))
        return f"safetensors: {text}; {'free space on that disk' if full else 'download or write the file again'}"
    if library == "wandb":
        return f"logger.wandb: {text}; run `wandb login`, or set logger.wandb=offline"
    if library in ("huggingface_hub", "datasets"):
        return f"{library}: {text}; give a file or directory that is on this machine"
    if type(error).__name__ == "DistBackendError":
        return f"ranks: {text}; another rank has stopped, and its own message says why: continue with resume=true"
    return None
