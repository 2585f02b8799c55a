"""Rows of token ids (prompt + completion) on disk and in batches.

A completion keeps the very ids that the model generated: nothing is decoded and tokenised again on the way to training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import raise_problems, read_json, read_json_lines, sha256_file, shown
from edge0_runtime.contract.provenance import DataSource, Teacher
from edge0_train.config import Config
from edge0_train.run import write_json, write_text

IGNORE = -100
FINISH_REASONS = ("stop", "length")
AGAIN = "delete done.json of that run and continue it with resume=true: from its shards everything is written again"
FIX = f"delete the file, and {AGAIN}"


@dataclass(frozen=True)
class TextRow:
    """One prompt with its completion, as ids; the completion ends with the end token when finish_reason is stop."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    finish_reason: str
    task: str = ""
    answer: str = ""

    @property
    def length(self) -> int:
        """Tokens of prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class TextData:
    """The rows of a teacher_text run: train and held-out, with the data card."""

    train: list[TextRow]
    held_out: list[TextRow]
    card: dict[str, Any]

    @property
    def source(self) -> DataSource:
        """What an adapter's provenance says of the rows that it was trained on."""
        return DataSource(self.card["fingerprint"], len(self.train))

    @property
    def teacher(self) -> Teacher:
        """Who wrote the rows, as their card says; cards of old do not."""
        return Teacher(**self.card.get("teacher", {"id": "unknown", "revision": "unknown"}))


def distinct(rows: Sequence[TextRow]) -> list[TextRow]:
    """The first of every set of rows with the same prompt and completion, in order."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], TextRow] = {}
    for row in rows:
        first.setdefault((row.prompt_ids, row.completion_ids), row)
    return list(first.values())


def write_rows(path: Path, rows: Sequence[TextRow]) -> None:
    """JSON lines, one row each, atomically."""
    write_text(path, "".join(json.dumps(asdict(row)) + "\n" for row in rows))


def read_rows(path: Path, vocabulary: int | None = None) -> list[TextRow]:
    """Read rows; raises Edge0Error naming file and line when one is not a row, or has an id that `vocabulary` doesn't reach."""
    if not path.is_file():
        raise Edge0Error(
            f"text.rows: {path} does not exist; run phase=teacher_text first or set text.rows to its directory"
        )
    return [_row(data, f"{path}, line {number}", vocabulary) for number, data in read_json_lines(path, FIX)]


def _row(data: Any, where: str, vocabulary: int | None) -> TextRow:
    names = {field.name for field in dataclasses.fields(TextRow)}
    if not isinstance(data, dict) or not {"prompt_ids", "completion_ids", "finish_reason"} <= data.keys() <= names:
        raise Edge0Error(f"{where}: not a text row but {shown(data)}; {FIX}")
    for name in ("prompt_ids", "completion_ids"):
        ids = data[name]
        if not isinstance(ids, list) or set(map(type, ids)) - {int} or min(ids, default=0) < 0:
            raise Edge0Error(f"{where}: {name}: {shown(ids)} is no list of token ids; {FIX}")
        if vocabulary is not None and max(ids, default=0) >= vocabulary:
            raise Edge0Error(
                f"{where}: {name}: id {shown(max(ids))} is outside the tier's vocabulary of {vocabulary}; {FIX}, with a"
                " teacher of the tier"
            )
        data[name] = tuple(ids)
    if data["finish_reason"] not in FINISH_REASONS:
        raise Edge0Error(f"{where}: finish_reason: {shown(data['finish_reason'])} is not stop or length; {FIX}")
    for name in ("task", "answer"):
        if not isinstance(data.get(name, ""), str):
            raise Edge0Error(f"{where}: {name}: {shown(data[name])} is no text; {FIX}")
    return TextRow(**data)


def write_data(directory: Path, train: list[TextRow], held_out: list[TextRow], extra: dict[str, Any]) -> dict[str, Any]:
    """Write both sides and `card.json`: counts, lengths, finish reasons, fingerprint; returns the card."""
    for name, rows in (("train", train), ("held_out", held_out)):
        write_rows(directory / f"{name}.jsonl", rows)
    card = {name: _describe(rows) for name, rows in (("train", train), ("held_out", held_out))} | extra
    card["fingerprint"] = _fingerprint(directory)
    write_json(directory / "card.json", card)
    return card


def text_of(config: Config) -> tuple[TextData, dict[str, int]]:
    """`read_data` of `text.rows`, within `text.max_length` and the tier's vocabulary."""
    return read_data(config.text.rows, config.text.max_length, config.tier.architecture["vocab_size"])


def read_data(directory: str | Path, max_length: int, vocabulary: int | None = None) -> tuple[TextData, dict[str, int]]:
    """The rows of a teacher_text directory that training can use, and how many were dropped for what reason.

    Raises Edge0Error when a file is missing, damaged or changed since the card was written, or nothing is left.
    """
    directory = Path(directory)
    sides = {name: read_rows(directory / f"{name}.jsonl", vocabulary) for name in ("train", "held_out")}
    card = read_card(directory)
    if card["fingerprint"] != _fingerprint(directory):
        raise Edge0Error(f"text.rows: {directory} was changed after its card was written; {AGAIN}")
    dropped: dict[str, int] = {}
    for name, rows in sides.items():
        kept = []
        for row in rows:
            reason = _unusable(row, max_length)
            if reason:
                dropped[reason] = dropped.get(reason, 0) + 1
            else:
                kept.append(row)
        if not kept:
            raise Edge0Error(
                f"text.rows: no {name} row of {directory} is usable (dropped: {dropped}); raise text.max_length"
            )
        sides[name] = kept
    return TextData(sides["train"], sides["held_out"], card), dropped


def read_card(directory: str | Path) -> dict[str, Any]:
    """The data card of a teacher_text directory. Raises Edge0Error when it is missing or damaged."""
    path = Path(directory) / "card.json"
    if not path.is_file():
        fix = AGAIN if path.parent.is_dir() else "run phase=teacher_text first, or set text.rows to its directory"
        raise Edge0Error(f"text.rows: {directory} has no card.json; {fix}")
    card = read_json(path, FIX)
    hashes = ("fingerprint", "tokenizer_sha256", "template_sha256")
    wrong = [
        f"{key}: {shown(card[key])} is no sha256" for key in hashes if key in card and not _is_hash(key, card[key])
    ]
    if "fingerprint" not in card:
        wrong.append("fingerprint: missing")
    teacher = card.get("teacher", {"id": "?", "revision": "?"})
    named = isinstance(teacher, dict) and teacher.keys() == {"id", "revision"}
    if not named or not all(isinstance(value, str) and value for value in teacher.values()):
        wrong.append(f"teacher: {shown(teacher)} is not an id and a revision")
    raise_problems(f"{path}: damaged", wrong, FIX)
    return card


def _is_hash(key: str, value: Any) -> bool:
    none_is_one = key == "template_sha256"  # of a tokenizer without a template
    return (value is None and none_is_one) or (
        isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
    )


def _unusable(row: TextRow, max_length: int) -> str:
    if not row.prompt_ids or not row.completion_ids:
        return "empty prompt or completion"
    return f"longer than text.max_length={max_length}" if row.length > max_length else ""


def _describe(rows: Sequence[TextRow]) -> dict[str, Any]:
    completions = np.array([len(row.completion_ids) for row in rows])
    reasons = [row.finish_reason for row in rows]
    return {
        "rows": len(rows),
        "prompt_tokens": int(sum(len(row.prompt_ids) for row in rows)),
        "completion_tokens": int(completions.sum()),
        "completion_length": {"mean": round(float(completions.mean()), 1), "max": int(completions.max())},
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }


def _fingerprint(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in ("train.jsonl", "held_out.jsonl"):
        digest.update(f"{name}:{sha256_file(directory / name)}\n".encode())
    return digest.hexdigest()


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Lines of one or several rows each, padded on the right (a causal model's real positions never see the padding).

    Attributes:
        input_ids_BT: all tokens but the last of each row.
        labels_BT: the next token where it belongs to the completion, IGNORE elsewhere.
        decoded_BT: bool; inputs that serving would process in decode steps (completion tokens).
        start_BT: bool; the first input of every row, and of the padding.
        rows: the rows themselves, in order.
        valid: number of labels. tokens: number of real input tokens.
    """

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    decoded_BT: torch.Tensor
    start_BT: torch.Tensor
    rows: tuple[TextRow, ...]
    valid: int
    tokens: int


def collate(rows: Sequence[TextRow], pad_id: int, device: torch.device | str = "cpu", pack_length: int = 0) -> Batch:
    """Batch of rows, each [prompt ; completion] shifted by one into inputs and labels.

    With `pack_length`, rows are packed in order into lines of at most that many inputs (a longer row gets a line of its own);
    otherwise every row is a line.
    """
    lines = pack(rows, pack_length)
    width = max(sum(row.length - 1 for row in line) for line in lines)
    ids = torch.full((len(lines), width), pad_id)
    labels = torch.full((len(lines), width), IGNORE)
    decoded = torch.zeros(len(lines), width, dtype=torch.bool)
    start = torch.zeros(len(lines), width, dtype=torch.bool)
    for i, line in enumerate(lines):
        at = 0
        for row in line:
            sequence = torch.tensor(row.prompt_ids + row.completion_ids)
            prompt, inputs = len(row.prompt_ids), row.length - 1
            ids[i, at : at + inputs] = sequence[:-1]
            labels[i, at + prompt - 1 : at + inputs] = sequence[prompt:]
            decoded[i, at + prompt : at + inputs] = True
            start[i, at] = True
            at += inputs
        if pack_length and at < width:
            start[i, at] = True
    return Batch(
        ids.to(device),
        labels.to(device),
        decoded.to(device),
        start.to(device),
        tuple(row for line in lines for row in line),
        valid=int((labels != IGNORE).sum()),
        tokens=sum(row.length - 1 for row in rows),
    )


def pack(rows: Sequence[TextRow], pack_length: int) -> list[list[TextRow]]:
    """Rows in lines of at most `pack_length` inputs, first fit in the given order; 0: one row a line."""
    if not pack_length:
        return [[row] for row in rows]
    lines: list[list[TextRow]] = []
    room: list[int] = []
    for row in rows:
        inputs = row.length - 1
        fit = next((i for i, free in enumerate(room) if free >= inputs), None)
        if fit is None:
            lines.append([row])
            room.append(pack_length - inputs)
        else:
            lines[fit].append(row)
            room[fit] -= inputs
    return lines


def shuffled(count: int, per_step: int, seed: int) -> Callable[[int], np.ndarray]:
    """step -> the `per_step` row indices of that step: epoch after epoch of fresh permutations, a pure function of step."""

    def epoch_order(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(count)

    def indices(step: int) -> np.ndarray:
        positions = np.arange(step * per_step, (step + 1) * per_step)
        orders = {epoch: epoch_order(epoch) for epoch in np.unique(positions // count).tolist()}
        return np.array([orders[p // count][p % count] for p in positions.tolist()])

    return indices


def micro_batches(
    rows: Sequence[TextRow],
    indices: np.ndarray,
    micro_rows: int,
    pad_id: int,
    device: torch.device | str,
    pack_length: int = 0,
) -> list[Batch]:
    """The window of one step, cut into micro-batches of `micro_rows` rows."""
    chosen = [rows[i] for i in indices]
    parts = [chosen[i : i + micro_rows] for i in range(0, len(chosen), micro_rows)]
    return [collate(part, pad_id, device, pack_length) for part in parts]
