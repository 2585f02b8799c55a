"""Snapshots of sequences by what they have processed, within a part of the memory budget; the least recently used goes first.

A snapshot's key is a hash of the model, of how it is served and of every pass so far. So only a prompt that begins with the very
same passes finds it, and going on from there gives the bits that the whole prompt gives.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from importlib.metadata import version

import mlx.core as mx
import numpy as np

from edge0_runtime.activations import state_bytes, token_bytes
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.model import Model
from edge0_runtime.prefix.cuts import Prompt
from edge0_runtime.prefix.folder import Folder
from edge0_runtime.sequence import Sequence
from edge0_runtime.snapshot import Snapshot, rows_nbytes

FORMAT = 1  # of what a key stands for; another one where the same passes lead to other snapshots


class Prefixes:
    """Snapshots of a model's sequences, and of those that share its memory; on the disk too, if there is a folder for them.

    Attributes:
        folder: None: memory only. nbytes: what all snapshots in memory take.
    """

    def __init__(self, model: Model, folder: Folder | None = None) -> None:
        """Empty; it may take `Model.prefix_bytes`. Raises Edge0Error where that is nothing, and there is a folder."""
        if folder is not None and not model.prefix_bytes:
            raise Edge0Error(
                "cache_dir: snapshots are taken in memory first, and it has no room; give a larger prefix_cache"
            )
        self._model, self.folder = model, folder  # its plan is that of all
        self.nbytes = 0
        self._snapshots: dict[bytes, Snapshot] = {}  # the least recently used first
        self._unsaved: set[bytes] = set()
        self._hits = self._tokens = self._evictions = 0

    def resume(self, sequence: Sequence, prompt: Prompt) -> None:
        """Put a sequence that hasn't begun behind the longest beginning of the prompt that is known, if any is."""
        if not self._snapshots and self.folder is None:
            return
        for key in reversed(_keys(sequence.model, prompt).values()):
            snapshot = self._snapshots.pop(key, None) or self._from_folder(key, sequence.model)
            if snapshot is None:
                continue
            self._snapshots[key] = snapshot  # the most recently used now
            self._evict(0)
            sequence.restore(snapshot)
            self._hits += 1
            self._tokens += snapshot.tokens
            return

    def to_keep(self, sequence: Sequence, prompt: Prompt) -> set[int]:
        """Cuts of the prompt, behind where the sequence stands, at which snapshots are to be taken.

        There is room for them afterwards.
        """
        start = sequence.tokens
        chosen: list[int] = []
        for place in prompt.worthwhile():
            if place > start and _bytes_of(sequence.model, [*chosen, place], 0) <= self._model.prefix_bytes:
                chosen.append(place)
        self._evict(_bytes_of(sequence.model, chosen, start) if chosen else 0)
        return set(chosen)

    def add(self, sequence: Sequence, prompt: Prompt, snapshots: Iterable[Snapshot]) -> None:
        """Keep snapshots that were taken of the sequence at cuts of the prompt."""
        keys = _keys(sequence.model, prompt)
        for snapshot in snapshots:
            self._snapshots[keys[snapshot.tokens]] = snapshot
            self._unsaved.add(keys[snapshot.tokens])
        self._evict(0)

    def save(self) -> None:
        """Have what is new written to the folder while the next request runs."""
        if self.folder is not None:
            new = {key.hex(): snapshot for key, snapshot in self._snapshots.items() if key in self._unsaved}
            self.folder.save(new)
        self._unsaved.clear()

    def clear(self) -> None:
        """Forget all that is in memory."""
        self._snapshots.clear()
        self.nbytes = 0

    def stats(self) -> dict[str, int]:
        """Counters since loading, and what is held now."""
        return {
            "prefix_hits": self._hits,
            "prefix_tokens": self._tokens,
            "prefix_evictions": self._evictions,
            "prefix_snapshots": len(self._snapshots),
            "prefix_bytes": self.nbytes,
        }

    def close(self) -> None:
        """Wait until everything is written."""
        self.clear()
        if self.folder is not None:
            self.folder.close()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _from_folder(self, key: bytes, model: Model) -> Snapshot | None:
        """If it is there, and there is room for it."""
        nbytes = None if self.folder is None else self.folder.nbytes(key.hex())
        if self.folder is None or nbytes is None or nbytes > self._model.prefix_bytes:
            return None
        self._evict(nbytes)
        return self.folder.load(key.hex(), model.arm.features_of)

    def _evict(self, needed: int) -> None:
        """Make room for so many bytes; the last of a conversation's snapshots takes its rows with it."""
        self.nbytes = self._held()
        while self._snapshots and self.nbytes + needed > self._model.prefix_bytes:
            if self.folder is not None:
                self.folder.wait()  # what is being written stays in memory
            del self._snapshots[next(iter(self._snapshots))]
            self._evictions += 1
            self.nbytes = self._held()

    def _held(self) -> int:
        kept = self._snapshots.values()
        return rows_nbytes(kept) + sum(snapshot.own_nbytes for snapshot in kept)


def _keys(model: Model, prompt: Prompt) -> dict[int, bytes]:
    """Cut -> key of what lies before it."""
    keys, key = {}, _identity(model)
    for cut, ids in zip(prompt.cuts, prompt.passes(), strict=True):
        key = keys[cut] = hashlib.sha256(key + np.array(ids, "<u4").tobytes()).digest()
    return keys


def _identity(model: Model) -> bytes:
    """Of what snapshots depend on beside the passes. The chat template is nothing of it: it has become tokens."""
    files = model.identity  # where they lie is nothing of it
    identity = {
        "format": FORMAT,
        "model": [files.fingerprint, files.prerouter_sha256, files.lora_sha256],
        "tier": model.tier.to_dict(),
        "arm": model.arm_name,
        "float32": model.fixed.float32,
        "kv_bits": model.keeping.kv_bits,
        "versions": _versions(),
        "device": [str(mx.default_device()), platform.system(), platform.machine()],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(version(name) for name in ("mlx", "mlx-lm"))


def _bytes_of(model: Model, places: Ids[int], start: int) -> int:
    """What snapshots at these cuts take, with the rows of all tokens from `start` on."""
    tier, float32 = model.tier, model.fixed.float32
    rows = token_bytes(tier, max(places) - start, float32=float32, kv_bits=model.keeping.kv_bits)
    return rows + len(places) * state_bytes(tier, float32=float32)
