"""Provenance: how an adapter was made, as it travels in the file. Strict when written and when read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import shown

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Teacher:
    """The model that text or scores came from: its public id (or directory) and revision."""

    id: str
    revision: str

    def __post_init__(self) -> None:
        _texts("provenance.teacher", self, "id", "revision")


@dataclass(frozen=True)
class DataSource:
    """The training data: a fingerprint of its content and its number of rows."""

    fingerprint: str
    rows: int

    def __post_init__(self) -> None:
        _texts("provenance.data", self, "fingerprint")
        _counts("provenance.data", self, "rows")


@dataclass(frozen=True)
class PhaseRecord:
    """One training run in the chain that made the adapter.

    Attributes:
        phase: the phase's name. run_id: its run's.
        parents: {what: sha256} of the artifacts it started from.
        seed, steps, tokens, rows: of the run; tokens and rows are those trained on.
        metrics: final metrics, finite numbers.
        time: when it ended, ISO 8601 with time zone.
    """

    phase: str
    run_id: str
    parents: Mapping[str, str]
    seed: int
    steps: int
    tokens: int
    rows: int
    metrics: Mapping[str, float]
    time: str

    def __post_init__(self) -> None:
        where = f"provenance.phases ({shown(self.phase)})"
        _texts(where, self, "phase", "run_id")
        _counts(where, self, "seed", "steps", "tokens", "rows")
        _times(where, self, "time")
        if not _maps_names_to(_is_sha256, self.parents):
            raise Edge0Error(f"{where}: parents: {shown(self.parents)} must map names to sha256 hashes")
        if not _maps_names_to(_is_finite, self.metrics):
            raise Edge0Error(f"{where}: metrics: {shown(self.metrics)} must map names to finite numbers")


@dataclass(frozen=True)
class Provenance:
    """How an adapter was made.

    Attributes:
        tool_version, commit: of edge0_train; a dirty tree's commit says so.
        phases: the chain of runs, first to last.
        base_fingerprint: `Checkpoint.fingerprint()` of the base that it was trained on, and is bound to.
        tokenizer_hash, template_hash: of the base's directory; no template is None.
        teacher: who wrote the rows that were trained on, or scored them; None where no teacher took part.
        data: None where the run made its own text.
        prerouter_sha256: LoRA only: hash of the prerouter file it was trained with; None if trained without
            heads.
        created: when the file was made, ISO 8601 with time zone.
        base_config: `mathematical_fields` of the base's config.json: {field: value}. None in files from before it was recorded.
    """

    tool_version: str
    commit: str
    phases: tuple[PhaseRecord, ...]
    base_fingerprint: str
    tokenizer_hash: str
    template_hash: str | None
    teacher: Teacher | None
    data: DataSource | None
    prerouter_sha256: str | None
    created: str
    base_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _texts("provenance", self, "tool_version", "commit")
        _times("provenance", self, "created")
        for field, ok in (
            (
                "phases",
                isinstance(self.phases, tuple) and all(isinstance(phase, PhaseRecord) for phase in self.phases),
            ),
            ("teacher", self.teacher is None or isinstance(self.teacher, Teacher)),
            ("data", self.data is None or isinstance(self.data, DataSource)),
            ("base_config", self.base_config is None or _maps_names_to(_is_json, self.base_config)),
        ):
            if not ok:
                raise Edge0Error(f"provenance.{field}: {shown(getattr(self, field))} is not of the record's types")
        for field in ("base_fingerprint", "tokenizer_hash", "template_hash", "prerouter_sha256"):
            value = getattr(self, field)
            optional = field in ("template_hash", "prerouter_sha256")
            if not (_is_sha256(value) or (optional and value is None)):
                raise Edge0Error(
                    f"provenance.{field}: {shown(value)} is not a sha256 (64 hexadecimal digits)"
                    + " or null" * optional
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` reads it back."""
        return dataclasses.asdict(self) | {
            "base_config": None if self.base_config is None else dict(self.base_config),
            "phases": [
                dataclasses.asdict(phase) | {"parents": dict(phase.parents), "metrics": dict(phase.metrics)}
                for phase in self.phases
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        """Read a record: every field must be there, base_config aside, and no other. Raises Edge0Error naming field and value."""
        fields = _fields("provenance", cls, data)
        if not isinstance(fields["phases"], list):
            raise Edge0Error(f"provenance.phases: {shown(fields['phases'])} is not a list")
        fields["phases"] = tuple(PhaseRecord(**_fields("provenance.phases", PhaseRecord, p)) for p in fields["phases"])
        if fields["teacher"] is not None:
            fields["teacher"] = Teacher(**_fields("provenance.teacher", Teacher, fields["teacher"]))
        if fields["data"] is not None:
            fields["data"] = DataSource(**_fields("provenance.data", DataSource, fields["data"]))
        return cls(**fields)


def _fields(where: str, cls: type, data: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(cls)]
    later = {field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
    if not isinstance(data, Mapping) or set(data) | later != set(names):
        raise Edge0Error(f"{where}: must have exactly the fields {', '.join(names)}; it is {shown(data)}")
    return dict(data)


def _texts(where: str, record: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(record, field)
        if not isinstance(value, str) or not value:
            raise Edge0Error(f"{where}.{field}: {shown(value)} is not a text")


def _counts(where: str, record: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(record, field)
        if type(value) is not int or value < 0:
            raise Edge0Error(f"{where}.{field}: {shown(value)} is not a whole number of at least 0")


def _times(where: str, record: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(record, field)
        try:
            zone = datetime.fromisoformat(value).tzinfo
        except (TypeError, ValueError):
            zone = None
        if zone is None:
            raise Edge0Error(f"{where}.{field}: {shown(value)} is not an ISO 8601 time with time zone")


def _maps_names_to(test: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and test(item) for name, item in value.items())


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_json(value: Any) -> bool:
    """A value that JSON holds, in numbers that compare."""
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str) or type(value) is bool or _is_finite(value)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
