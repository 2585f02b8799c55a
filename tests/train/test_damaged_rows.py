"""Damaged files of prompts and rows: whatever is in them, only an Edge0Error may come out."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.data.chat import Chat
from edge0_train.data.prompts import Limit, load_prompts
from edge0_train.data.rows import TextRow, read_data, write_data
from tests.tiny_models import TEACHER

FUZZ = settings(deadline=None, max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
ROW = {
    "messages": [{"role": "user", "content": "Add 1 and 2."}],
    "conversations": [{"from": "human", "value": "Add 1 and 2."}],
    "prompt": "Add 1 and 2.",
    "tools": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}],
    "system": "Be brief.",
    "task": "add",
    "answer": "3",
}
NAMES = st.sampled_from([*ROW, "role", "content", "from", "value", "tool_calls", "name", "type", "text", "function"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from(
        ["user", "system", "assistant", "tool", "developer", "text", "<|im_end|>", "\x1b[2J", "\ud800", ""]
    )
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=4)
)
PROMPT_ROWS = st.dictionaries(NAMES, JSON, max_size=4) | JSON
BYTES = st.binary(max_size=40) | st.sampled_from(
    [b"", b"\x00", b"[", b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b"NaN", b"[" * 5000]
)


def text(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def only_our_error() -> Iterator[None]:
    """Nothing is raised in the block, or an Edge0Error that a terminal can show."""
    message = "fine"
    try:
        yield
    except Edge0Error as error:
        message = str(error)
    assert message.replace("\n", "").isprintable() and len(message) < 20_000


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(TEACHER)


@FUZZ
@given(
    lines=st.lists(PROMPT_ROWS.map(text) | BYTES, max_size=6), form=st.sampled_from([".jsonl", ".json", ".jsonl.gz"])
)
def test_prompts_of_any_lines(chat: Chat, lines: list[bytes], form: str) -> None:
    good = [text({"messages": [{"role": "user", "content": f"Add {n} and 2."}]}) for n in range(30)]
    limit = Limit(64, lambda prompt: len(chat.prompt_ids(prompt)), chat.ignored_fields)
    with TemporaryDirectory() as directory:
        file = Path(directory) / f"q{form}"
        content = b"\n".join([*good, *lines])
        file.write_bytes(gzip.compress(content, 1) if form.endswith(".gz") else content)
        with only_our_error():
            prompts = load_prompts(str(file), train=99, held_out=99, seed=0, limit=limit)
            found = len(prompts.train) + len(prompts.held_out)
            assert found >= 30 and all(chat.prompt_ids(prompt) for prompt in prompts.train)
            rest = sum(line.count(b"\n") + 1 for line in lines)
            assert found + sum(prompts.dropped.values()) <= 30 + rest
            json.dumps(prompts.to_dict())


@FUZZ
@given(values=st.lists(PROMPT_ROWS, max_size=4), cut=st.integers(0, 60), column=NAMES | st.just(""))
def test_prompts_of_any_array(values: list[Any], cut: int, column: str) -> None:
    with TemporaryDirectory() as directory:
        file = Path(directory) / "q.json"
        whole = b"[" + b",".join(map(text, values)) + b"]"
        file.write_bytes(whole[: len(whole) - cut] if cut % 3 == 0 else whole)
        with only_our_error():
            load_prompts(str(file), train=9, held_out=9, seed=0, column=column)


ROWS = [TextRow((1, 2, n), (3, 2), "stop", "add", str(n)) for n in range(4)]
FIELDS = st.sampled_from(["prompt_ids", "completion_ids", "finish_reason", "task", "answer", "more"])
IDS = st.lists(st.integers(-1, 400) | st.booleans() | st.floats() | st.none() | st.just(2**70), max_size=4)
TEXT_ROWS = st.dictionaries(FIELDS, IDS | st.sampled_from(["stop", "length", "", "abort"]) | JSON, max_size=6) | JSON


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rows")
    write_data(directory, ROWS, ROWS, {"teacher": {"id": "t", "revision": "r"}})
    return directory


@FUZZ
@given(
    name=st.sampled_from(["train.jsonl", "held_out.jsonl", "card.json"]),
    content=st.lists(TEXT_ROWS.map(text) | BYTES, max_size=3).map(b"\n".join),
    whole=st.booleans(),
)
def test_rows_of_any_files(written: Path, name: str, content: bytes, whole: bool) -> None:
    with TemporaryDirectory() as directory:
        shutil.copytree(written, directory, dirs_exist_ok=True)
        file = Path(directory) / name
        file.write_bytes(content if whole else file.read_bytes() + content)
        with only_our_error():
            data, _ = read_data(directory, 64, 384)
            assert data.train == data.held_out == ROWS  # what was not refused is what was written
            assert data.source.rows == 4 and data.teacher.id


@FUZZ
@given(field=st.sampled_from(["fingerprint", "tokenizer_sha256", "template_sha256", "teacher"]), value=JSON)
def test_cards_with_any_field(written: Path, field: str, value: Any) -> None:
    with TemporaryDirectory() as directory:
        shutil.copytree(written, directory, dirs_exist_ok=True)
        card = json.loads((written / "card.json").read_text())
        (Path(directory) / "card.json").write_bytes(text(card | {field: value}))
        with only_our_error():
            data, _ = read_data(directory, 64, 384)
            assert isinstance(data.teacher.id, str) and isinstance(data.source.fingerprint, str)
