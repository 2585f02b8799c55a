"""What doctor is asked about: a model directory, a tier by name, or a repository on the Hub; and which tier it is served by."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from edge0_runtime import hub
from edge0_runtime.arms import DEFAULT
from edge0_runtime.contract.artifacts import KINDS, Adapter, find_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Sticky, Tier, builtin_tier, builtin_tier_names, read_tier
from edge0_runtime.experts.reader import IO_THREADS
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.loading import build_model, needs_float32
from edge0_runtime.measure.outline import outline_of_tier, write_outline
from edge0_runtime.model import Identity, Model
from edge0_runtime.plan import Keeping
from edge0_runtime.serving import Adapters


@dataclass(frozen=True)
class Subject:
    """What is asked about: its checkpoint, whose tensors may be holes, and its tier."""

    source: Literal["directory", "tier", "hub"]
    checkpoint: Checkpoint
    tier: Tier

    def model(self, context: int | None = None) -> Model:
        """With heads and LoRA of the tier, whether they are there yet or not; nothing of the base is read. To be closed."""
        tier = self.tier
        prerouter, lora = (
            Adapter(kind, Path(), tier, _zeros(shapes), None, "", False)
            for kind, shapes in zip(KINDS, (tier.head_tensors(), tier.lora_tensors()), strict=True)
        )
        store = ExpertStore.open(self.checkpoint, tier)
        try:
            return build_model(
                self.checkpoint, Adapters(tier, prerouter, lora), Identity("", None, None), store,
                arm=DEFAULT, io_threads=IO_THREADS, float32=needs_float32(), keeping=Keeping(context),
            )  # fmt: skip
        except BaseException:
            store.close()
            raise


@contextlib.contextmanager
def open_subject(
    what: str, tier_name: str | None, k: int | None, sticky: Sticky | None, adapters: str | None = None
) -> Iterator[Subject]:
    """Find out what `what` is.

    Args:
        what: a directory, a built-in tier or a tier's YAML file, or a Hub id, `ORG/NAME` or `ORG/NAME@REVISION`.
        tier_name: which adapter files, or the tier of a base without any, as for `read_tier`.
        k, sticky: asked about in place of the tier's own.
        adapters: a directory or Hub id of the adapter files, where they don't lie beside the base.

    Raises Edge0Error: it is none of these, or not the base of its tier.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory, tier = Path(folder), None
        source: Literal["directory", "tier", "hub"] = "tier"
        named = what in builtin_tier_names() or what.endswith(".yaml")
        if named and tier_name is not None and not Path(what).is_dir():
            raise Edge0Error(
                f"tier: {what} is a tier already, so --tier {tier_name} has no meaning; leave one of them out"
            )
        if Path(what).is_dir():
            source, directory = "directory", Path(what)
        elif named:
            tier = read_tier(what)
            write_outline(directory, outline_of_tier(tier))
        elif found := hub.ID.fullmatch(what):
            from edge0_runtime.measure.hub import outline_of_hub  # with its libraries, which nothing else needs

            source = "hub"
            outline_of_hub(found[1], found[2], directory)
        else:
            raise Edge0Error(
                f"{what}: neither a directory, nor a tier ({', '.join(builtin_tier_names())}), nor a Hub id like ORG/NAME"
            )
        if adapters is not None and source == "tier":
            raise Edge0Error(f"adapters: {what} is a tier and names none; leave out --adapters {adapters}")
        checkpoint = Checkpoint.open(directory)
        tier = tier or _tier(checkpoint, what, tier_name, adapters)
        checkpoint.check_architecture(tier)
        yield Subject(source, checkpoint, changed(tier, k, sticky))


def _tier(checkpoint: Checkpoint, what: str, name: str | None, adapters: str | None) -> Tier:
    """By the adapter files, by name, or the built-in one of this base."""
    with tempfile.TemporaryDirectory() as folder:
        directory = checkpoint.directory if adapters is None else Path(adapters)
        if not directory.exists() and (found := hub.ID.fullmatch(str(adapters))):
            from edge0_runtime.measure.hub import outline_of_hub

            directory = Path(folder)
            outline_of_hub(found[1], found[2], directory)
        for kind in KINDS:
            if (adapter := find_adapter(directory, kind, name)) is not None:
                return adapter.tier
    if adapters is not None:
        raise Edge0Error(f"--adapters {adapters}: no adapter file of {f'tier {name}' if name else 'a tier'} is there")
    if name is not None:
        return read_tier(name)
    for builtin in map(builtin_tier, builtin_tier_names()):
        if not checkpoint.differences(builtin):
            return builtin
    raise Edge0Error(
        f"{what}: no adapter file there names a tier, and it is the base of none of {', '.join(builtin_tier_names())}; give a"
        " tier's file with --tier FILE.yaml (`python -m edge0_train inspect base=DIR out=mine` proposes one)"
    )


def changed(tier: Tier, k: int | None, sticky: Sticky | None) -> Tier:
    """The tier with these in place of its own, where given. Raises Edge0Error where its router can't."""
    data = tier.to_dict()
    if k is not None:
        data["k"] = k
    if sticky is not None:
        data["router"]["sticky"] = dataclasses.asdict(sticky)
    return Tier.from_dict(data)


def _zeros(shapes: Mapping[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    return {key: np.zeros(shape, np.float16) for key, shape in shapes.items()}
