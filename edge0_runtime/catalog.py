"""Models by name on one base: `base`, `+prerouter` and `+both` side by side, or the adapters of two trainings.

    models = {"base": Entry(directory, Serving(prerouter=False, lora=False)), "both": Entry(directory)}
    with Catalog.load(models) as catalog:
        catalog["both"].generate(...)

The rule is one base for all: its tensors and one pool of experts are in memory once, and each name answers bit for bit as an
`Engine` that was loaded alone. A name whose directory holds another base is refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from edge0_runtime.contract.base_config import config_differences
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine, read_language
from edge0_runtime.experts.reader import IO_THREADS
from edge0_runtime.loading import context_length_of, load_models
from edge0_runtime.plan import Keeping, budget_of
from edge0_runtime.prefix.folder import folder_of
from edge0_runtime.prefix.store import Prefixes
from edge0_runtime.serving import Serving

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A model directory, and how it is served; its adapters are its own unless `serving` names others."""

    directory: Path
    serving: Serving = field(default_factory=Serving)


class Catalog(Mapping[str, Engine]):
    """Loaded engines by name, in the order in which they were named; one request at a time runs on all of them together.

    Attributes:
        default: the name that serves a request which says none: the first.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        """Of engines that share their memory, or of one."""
        self._engines = dict(engines)
        self.default = next(iter(self._engines))

    @classmethod
    def load(
        cls,
        entries: Mapping[str, Entry],
        *,
        memory_budget: float | None = None,
        context: int | None = None,
        kv_bits: int | None = None,
        prefix_cache: float | None = 0.0,
        cache_dir: Path | None = None,
        cache_dir_limit: float = 8.0,
        io_threads: int = IO_THREADS,
        allow_mismatch: bool = False,
        chat_template: Path | None = None,
    ) -> Catalog:
        """Load at least one entry; the other arguments are those of `Engine.load`, for all together.

        `chat_template`: a file whose template takes the place of the models' own.

        An entry under the empty name is called after its tier, `edge0-<tier>`.

        Raises Edge0Error where a directory can't be served, or holds another base than the first one.
        """
        keeping, folder = Keeping.of(context, kv_bits, prefix_cache), folder_of(cache_dir, cache_dir_limit)
        directories = dict.fromkeys(entry.directory for entry in entries.values())
        checkpoints = {directory: Checkpoint.open(directory) for directory in directories}
        first, *others = checkpoints.values()
        for other in others:
            _check_same_base(first, other)
        languages = {
            directory: read_language(checkpoint, chat_template) for directory, checkpoint in checkpoints.items()
        }
        servings = [
            replace(entry.serving, adapters=entry.serving.adapters or entry.directory) for entry in entries.values()
        ]
        models = load_models(
            first,
            servings,
            budget_bytes=budget_of(memory_budget),
            keeping=keeping,
            io_threads=io_threads,
            allow_mismatch=allow_mismatch,
            float32=False,
        )
        busy, prefixes = threading.Lock(), Prefixes(models[0], folder)
        engines = {}
        for (name, entry), model in zip(entries.items(), models, strict=True):
            engine = Engine(entry.directory, model, *languages[entry.directory], busy=busy, prefixes=prefixes)
            engine.context_length = context_length_of(checkpoints[entry.directory])
            name = name or f"edge0-{model.tier.name}"
            engines[name] = engine
            log.info("%s: %s", name, engine.plan())
        return cls(engines)

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def close(self) -> None:
        """Close the base's files; none of the engines can be used afterwards."""
        for engine in self._engines.values():
            engine.close()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_same_base(first: Checkpoint, other: Checkpoint) -> None:
    one, two = first.identity(), other.identity()
    if one.fingerprint != two.fingerprint or config_differences(one.config, two.config):
        raise Edge0Error(
            f"--model: {other.directory} holds another base than {first.directory}, and a server has one base in memory; serve it"
            " by a second one, on another --port"
        )
