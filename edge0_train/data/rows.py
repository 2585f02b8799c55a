"""Rows of token ids (prompt + completion) on disk and in batches.

A completion keeps the very ids that the model generated: nothing is decoded and tokenised again on the way to training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import read_json, sha256_file
from edge0_train.run import write_json, write_text

IGNORE = -100
AGAIN = "delete done.json of that run and continue it with resume=true: from its shards everything is written again"


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


def distinct(rows: Sequence[TextRow]) -> list[TextRow]:
    """The first of every set of rows with the same prompt and completion, in order."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], TextRow] = {}
    for row in rows:
        first.setdefault((row.prompt_ids, row.completion_ids), row)
    return list(first.values())


def write_rows(path: Path, rows: Sequence[TextRow]) -> None:
    """JSON lines, one row each, atomically."""
    write_text(path, "".join(json.dumps(asdict(row)) + "\n" for row in rows))


def read_rows(path: Path) -> list[TextRow]:
    """Read rows; raises Edge0Error naming file and line when one is not a row."""
    if not path.is_file():
        raise Edge0Error(
            f"text.rows: {path} does not exist; run phase=teacher_text first or set text.rows to its directory"
        )
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            data = json.loads(line)
            rows.append(TextRow(tuple(data.pop("prompt_ids")), tuple(data.pop("completion_ids")), **data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Edge0Error(
                f"{path}, line {number}: not a text row ({error}); delete the file, and {AGAIN}"
            ) from error
    return rows


def write_data(directory: Path, train: list[TextRow], held_out: list[TextRow], extra: dict[str, Any]) -> dict[str, Any]:
    """Write both sides and `card.json`: counts, lengths, finish reasons, fingerprint; returns the card."""
    for name, rows in (("train", train), ("held_out", held_out)):
        write_rows(directory / f"{name}.jsonl", rows)
    card = {name: _describe(rows) for name, rows in (("train", train), ("held_out", held_out))} | extra
    card["fingerprint"] = _fingerprint(directory)
    write_json(directory / "card.json", card)
    return card


def read_data(directory: str | Path, max_length: int) -> tuple[TextData, dict[str, int]]:
    """The rows of a teacher_text directory that training can use, and how many were dropped for what reason.

    Raises Edge0Error when a file is missing or changed since the card was written, or nothing is left.
    """
    directory = Path(directory)
    sides = {name: read_rows(directory / f"{name}.jsonl") for name in ("train", "held_out")}
    if not (directory / "card.json").is_file():
        raise Edge0Error(f"text.rows: {directory} has no card.json; {AGAIN}")
    card = read_json(directory / "card.json", AGAIN)
    if card.get("fingerprint") != _fingerprint(directory):
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
