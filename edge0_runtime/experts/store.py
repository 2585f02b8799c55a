"""Experts as byte ranges of the checkpoint's own files, and rows of its embedding.

A layer's routed experts are nine stacked tensors (three projections, each weight, scales and biases); expert
e is the e-th slice of each, so one expert is nine byte ranges. This module knows files and bytes and nothing
of MLX.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import PROJECTIONS, QUANTISED_PARTS
from edge0_runtime.contract.tier import Tier

Buffer = Any  # what `os.preadv` fills: writable bytes (a memoryview, a uint8 array)
FLOATS = ("BF16", "F16", "F32")
DTYPES = {"weight": ("U32",), "scales": FLOATS, "biases": FLOATS}  # of MLX's affine quantisation
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertTensor:
    """Where one of a layer's stacked expert tensors lies, and what one expert's slice of it looks like.

    Attributes:
        projection: gate_proj, up_proj or down_proj. part: weight, scales or biases.
        dtype: safetensors' name (U32, BF16, ...). shape: of one expert's slice.
        path: the file. start: absolute offset of expert 0 in bytes. nbytes: of one expert's slice.

    A tensor of the embedding is one of these too: its projection is `embedding`, its slices are rows.
    """

    projection: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int


class LastWrite(NamedTuple):
    """What a write to an open file changes. Not its ctime: being renamed or deleted changes that too."""

    size: int
    ns: int

    @classmethod
    def of(cls, file: int) -> LastWrite:
        """What the file descriptor's file says now. Raises OSError if it can't be asked."""
        found = os.fstat(file)
        return cls(found.st_size, found.st_mtime_ns)

    def __str__(self) -> str:
        return f"{self.size} bytes, last written {datetime.datetime.fromtimestamp(self.ns / 1e9)}"


class ExpertStore:
    """Reads single experts; files are opened once and stay open, so a renamed or deleted file does no harm.

    One that is written to does: what was read before and what is read afterwards are experts of two models.

    Attributes:
        tensors: layer -> the layer's expert tensors. num_experts: experts per layer.
        embedding: tensors of the token embedding, packed or not; empty where no rows can be read: the file has another form, or
            the output layer needs the whole table too. vocabulary: its rows.
        failed: reading failed, or `check` did, since `trust`.
    """

    def __init__(
        self,
        tensors: Mapping[int, tuple[ExpertTensor, ...]],
        num_experts: int,
        is_same_base: Callable[[], bool] = lambda: True,
        embedding: tuple[ExpertTensor, ...] = (),
        vocabulary: int = 0,
    ) -> None:
        """`is_same_base`: whether the files are still the base that was opened, after one was written to."""
        self.tensors = dict(tensors)
        self._is_same_base = is_same_base
        self.num_experts = num_experts
        self.embedding, self.vocabulary = embedding, vocabulary
        self._files: dict[Path, int] = {}
        try:
            every = (*self.tensors.values(), embedding)
            for path in sorted({tensor.path for tensors in every for tensor in tensors}):
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if hasattr(
                    os, "posix_fadvise"
                ):  # what follows an expert is another one, seldom the next that is needed
                    os.posix_fadvise(self._files[path], 0, 0, os.POSIX_FADV_RANDOM)
            self.trust()
        except OSError as error:
            self.close()
            raise Edge0Error(f"{error.filename}: can't be opened: {error.strerror}") from error

    @classmethod
    def open(cls, checkpoint: Checkpoint, tier: Tier, fingerprint: str | None = None) -> ExpertStore:
        """The experts of all MoE layers; `fingerprint` is the checkpoint's, if it is known already.

        Raises one Edge0Error listing every expert tensor that is missing, misshapen or of a wrong dtype.
        """
        offenders: list[str] = []
        tensors = {
            layer: tuple(_locate(checkpoint, tier, layer, offenders))
            for layer in tier.layout.moe_layers(tier.architecture)
        }
        if offenders:
            raise Edge0Error(
                f"experts: {'; '.join(offenders)}; serving needs an int4 MLX checkpoint with stacked experts"
            )
        opened = fingerprint or checkpoint.fingerprint()
        return cls(
            tensors,
            tier.num_experts,
            lambda: checkpoint.fingerprint() == opened,
            tuple(_locate_embedding(checkpoint, tier)),
            tier.architecture["vocab_size"],
        )

    def expert_nbytes(self, layer: int) -> int:
        """Bytes of one expert of `layer`."""
        return sum(tensor.nbytes for tensor in self.tensors[layer])

    @property
    def total_nbytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.num_experts * sum(self.expert_nbytes(layer) for layer in self.tensors)

    def read(
        self,
        layer: int,
        first: int,
        buffers: Sequence[Sequence[Buffer]],
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Read experts that follow each other; may be called by several threads at once.

        Args:
            layer: whose experts. first: the lowest of their indices.
            buffers: for each tensor of the layer, in order, writable bytes for every expert: `nbytes` each. An
                expert's nine ranges lie far apart in the files, but neighbours touch: one call per tensor reads all.
            between: called before each range.

        Raises Edge0Error naming file, offset, wanted and got when the disk or the file fails; the buffers'
        contents are then undefined.
        """
        for tensor, parts in zip(self.tensors[layer], buffers, strict=True):
            between()
            self._read(tensor, tensor.start + first * tensor.nbytes, parts)

    def read_rows(self, tensor: ExpertTensor, first: int, buffer: Buffer) -> None:
        """Fill `buffer` with rows of a tensor of the embedding from `first` on. Raises Edge0Error like `read`."""
        self._read(tensor, tensor.start + first * tensor.nbytes, [buffer])

    def _read(self, tensor: ExpertTensor, offset: int, parts: Sequence[Buffer]) -> None:
        if tensor.path not in self._files:
            raise Edge0Error(f"{tensor.path}: the expert store is closed; load the engine again")
        got, wanted, reason = 0, sum(map(len, parts)), "the file was truncated or replaced; restore it"
        left = list(parts)
        try:
            # Positional reads, since several threads may read one file.
            while left and (count := os.preadv(self._files[tensor.path], left, offset + got)):
                got += count
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
        except OSError as error:
            reason = f"{error.strerror}; check the disk"
        if got < wanted:
            self.failed = True
            raise Edge0Error(
                f"{tensor.path}: reading {tensor.projection}.{tensor.part} at offset {offset} failed:"
                f" wanted {wanted} bytes, got {got}: {reason}"
            )

    # -- files that are written to ---------------------------------------------------------------------------

    def trust(self) -> None:
        """What the files hold now is what they should."""
        self._trusted = {path: LastWrite.of(file) for path, file in self._files.items()}
        self.failed = False

    def written(self) -> str | None:
        """Which file was written to since `trust` and what is seen of it, or None."""
        for path, file in self._files.items():
            now, then = LastWrite.of(file), self._trusted[path]
            if now != then:
                return f"{path}: written to while it is served: {now}; it was {then}"
        return None

    def check(self) -> None:
        """Raise Edge0Error naming file and change where one was written to since `trust`."""
        if written := self.written():
            self.failed = True
            raise Edge0Error(f"{written}. Restore it if its weights are others, then try again")

    def recover(self) -> bool:
        """After a failure, go on with the files as they are now.

        Returns whether one was written to: what was read of them is to be forgotten then. Raises Edge0Error if they aren't
        the base's any more, as far as its fingerprint tells.
        """
        written = self.written()
        if written and not self._is_same_base():
            raise Edge0Error(f"{written}. It is another base now: restore it, or load the engine again")
        if written:
            log.warning("%s. Both ends of each tensor are the loaded base's: its experts are read again", written)
        self.trust()
        return written is not None

    def close(self) -> None:
        """Close the files; may be called again."""
        while self._files:
            os.close(self._files.popitem()[1])


def _locate(checkpoint: Checkpoint, tier: Tier, layer: int, offenders: list[str]) -> Iterator[ExpertTensor]:
    """The nine expert tensors of a layer; what is wrong with one is added to `offenders`."""
    for projection in PROJECTIONS:
        for part in QUANTISED_PARTS:
            names = tier.layout.expert_tensors(layer, projection, part)
            name = next((name for name in names if name in checkpoint.entries), names[0])
            if name not in checkpoint.entries:
                offenders.append(f"{name} is missing")
                continue
            header, entry = checkpoint.entries[name]
            if len(entry.shape) != 3 or entry.shape[0] != tier.num_experts:
                offenders.append(f"{name} has shape {list(entry.shape)}, not [{tier.num_experts}, out, in]")
                continue
            if entry.dtype not in DTYPES[part]:
                offenders.append(f"{name} has dtype {entry.dtype}, not {' or '.join(DTYPES[part])}")
                continue
            yield ExpertTensor(
                projection=projection,
                part=part,
                dtype=entry.dtype,
                shape=entry.shape[1:],
                path=header.path,
                start=entry.start,
                nbytes=(entry.end - entry.start) // tier.num_experts,
            )


def _locate_embedding(checkpoint: Checkpoint, tier: Tier) -> Iterator[ExpertTensor]:
    """The embedding's tensors, if its rows can be read one by one and nothing else needs the table."""
    if checkpoint.text_config().get("tie_word_embeddings"):
        return
    for part in QUANTISED_PARTS:
        found = checkpoint.entries.get(f"{tier.layout.embedding}.{part}")
        if found is None:
            return  # not packed: there is a weight alone
        header, entry = found
        rows = tier.architecture["vocab_size"]
        yield ExpertTensor(
            projection="embedding",
            part=part,
            dtype=entry.dtype,
            shape=entry.shape[1:],
            path=header.path,
            start=entry.start,
            nbytes=(entry.end - entry.start) // rows,
        )
