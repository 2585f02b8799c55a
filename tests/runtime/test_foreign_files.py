"""A model directory is a stranger's: what it holds in place of a small file is told in one sentence before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.cli import main
from edge0_runtime.contract.model_files import OBJECTS
from edge0_runtime.engine import Engine

Refusal = Callable[..., str]
ADAPTER = "lora_edge0_tiny.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def own_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """A model directory whose files may be damaged."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


@pytest.fixture
def refusal(own_dir: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """refusal() -> the sentence with which `generate` ends, exit code 2."""

    def call(*flags: str) -> str:
        code = main(["generate", str(own_dir), "--prompt-ids", "5,6", "--max-tokens", "1", *flags])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "") and "Traceback" not in err
        assert "experts are read" not in err, "told before anything large is read"
        return err

    return call


def change(path: Path, **fields: Any) -> None:
    """Other values in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("generation_config.json", {"eos_token_id": [[1]]}, "eos_token_id: [[1]] must be a token id or a list of them"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id: -1 must be"),
        ("generation_config.json", {"eos_token_id": True}, "eos_token_id: True must be"),
        ("generation_config.json", {"top_k": 1.5}, "top_k: 1.5 must be a whole number"),
        ("generation_config.json", {"top_k": -1}, "top_k: -1 must be"),
        ("generation_config.json", {"top_p": 0}, "top_p: 0 must be larger than 0"),
        ("generation_config.json", {"temperature": "hot"}, "temperature: 'hot' must be"),
        ("generation_config.json", {"temperature": True}, "temperature: True must be"),
        ("generation_config.json", {"temperature": -0.1}, "temperature: -0.1 must be"),
        ("generation_config.json", {"temperature": 1e39}, "temperature: 1e+39 must be at least 0 and at most 1e+30"),
        ("generation_config.json", {"min_p": 2}, "min_p: 2 must be"),
        ("config.json", {"eos_token_id": {"a": 1}}, "config.json: values that cannot be served:"),
        ("tokenizer_config.json", {"tokenizer_class": 5}, "its tokenizer can't be loaded"),
    ],
)
def test_a_field_that_is_used_is_checked_when_loading(own_dir, refusal, name, fields, words):
    change(own_dir / name, **fields)
    sentence = refusal()
    assert words in sentence and str(own_dir) in sentence


@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"])
def test_more_special_tokens_than_any_tokenizer_has_are_refused(own_dir, refusal, name):
    tokens = (
        {str(n): {"content": f"<|{n}|>"} for n in range(10_001)} if name.endswith("decoder") else list(range(10_001))
    )
    change(own_dir / "tokenizer_config.json", **{name: tokens})
    assert f"{own_dir / 'tokenizer_config.json'}: '{name}': 10,001 entries, more than 10,000" in refusal()


def test_two_billion_layers_are_refused_and_never_made(own_dir, refusal):
    """transformers makes a list of as many kinds of layers to find out a tokenizer's class, and as many labels."""
    config = json.loads((own_dir / "config.json").read_text())
    change(own_dir / "config.json", num_labels=2**31, text_config=config["text_config"] | {"num_hidden_layers": 2**31})
    assert "num_hidden_layers: tier tiny has 4, config.json has 2147483648" in refusal()


@pytest.mark.parametrize("fields", [{"rope_theta": None}, {"partial_rotary_factor": 7}])
def test_a_field_that_only_a_pass_uses_is_refused_before_one(own_dir, refusal, fields):
    config = json.loads((own_dir / "config.json").read_text())
    text = config["text_config"]
    change(own_dir / "config.json", text_config=text | {"rope_parameters": text["rope_parameters"] | fields})
    assert "rope_parameters." in refusal(), "the adapters were trained on another one"
    assert "mlx-lm can't load this checkpoint" in refusal("--allow-mismatch")


def test_an_infinite_number_is_no_temperature(own_dir, refusal):
    (own_dir / "generation_config.json").write_text('{"temperature": 1e400}')
    assert "temperature: inf must be" in refusal()


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("text", ["[]", "{", "\ufeff{}", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000])
def test_a_file_of_json_that_a_library_opens_is_a_strict_object(own_dir, refusal, name, text):
    (own_dir / name).write_text(text)
    assert f"{own_dir / name}: not " in refusal()


NAMES = (
    *OBJECTS,
    INDEX,
    ADAPTER,
    "model.safetensors",
    "chat_template.jinja",
    "merges.txt",
    "tokenizer.model",
    "qwen.tiktoken",
)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)  # a socket's path has at most 108 bytes
        server.bind(path.name)
        os.fchdir(here)
        os.close(here)


@pytest.mark.parametrize(
    "make",
    [_fifo, _socket, Path.mkdir, lambda path: path.symlink_to(path.name), lambda path: path.symlink_to("/dev/zero")],
    ids=["fifo", "socket", "directory", "loop", "device"],
)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_refused_and_never_opened(own_dir, refusal, name, make):
    (own_dir / name).unlink(missing_ok=True)
    make(own_dir / name)
    assert str(own_dir / name) in refusal()


def test_one_of_several_templates_is_checked_too(own_dir, refusal):
    (own_dir / "additional_chat_templates").mkdir()
    os.mkfifo(own_dir / "additional_chat_templates" / "tool_use.jinja")
    assert "tool_use.jinja: not a regular file" in refusal()


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX]
)
def test_a_file_of_two_gigabytes_is_refused_unread(own_dir, refusal, name):
    (own_dir / name).write_bytes(b"")
    os.truncate(own_dir / name, 2 << 30)
    assert f"{own_dir / name}: has 2,147,483,648 bytes, more than" in refusal()


def test_inspect_reads_no_more_of_a_template_than_one_can_have(own_dir, capsys):
    os.truncate(own_dir / "chat_template.jinja", 2 << 30)
    assert main(["inspect", str(own_dir)]) == 2
    assert "chat_template.jinja: has 2,147,483,648 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1/0 }}", "chat template: fails with ZeroDivisionError: division by zero"),
        ("{% for %}", "chat template: fails with TemplateSyntaxError"),
        ("{{ messages[7].content }}", "chat template: fails with UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template: fails with SecurityError"),
    ],
)
def test_a_template_that_fails_on_one_question_is_told_when_loading(own_dir, refusal, template, words):
    (own_dir / "chat_template.jinja").write_text(template)
    assert words in refusal()


def test_without_the_template_raw_text_is_served_as_the_error_says(own_dir, refusal):
    (own_dir / "chat_template.jinja").write_text("{{ 1/0 }}")
    assert "remove it and use `edge0_runtime generate`" in refusal()
    (own_dir / "chat_template.jinja").unlink()
    assert main(["generate", str(own_dir), "--prompt", "1+1", "--max-tokens", "1"]) == 0


def test_a_template_that_wants_a_system_turn_first_is_served(own_dir):
    (own_dir / "chat_template.jinja").write_text("{{ raise_exception('begin with a system message') }}")
    Engine.load(own_dir).close()


@pytest.mark.parametrize("fields", [{"tool_parser_type": "nothing"}, {"chat_template_type": "nothing"}])
def test_settings_of_tools_that_are_not_served_do_no_harm(own_dir, fields):
    change(own_dir / "tokenizer_config.json", **fields)
    Engine.load(own_dir).close()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("known", [True, False])
def test_code_in_the_directory_is_never_run(own_dir, capsys, name, known):
    """Neither where the class is known without it, nor where it isn't."""
    (own_dir / "evil.py").write_text(f"open({str(own_dir / 'ran')!r}, 'w')\nclass Evil: pass\n")
    change(own_dir / name, auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"})
    if not known:
        change(own_dir / "tokenizer_config.json", tokenizer_class="Evil")
    code = main(["generate", str(own_dir), "--prompt-ids", "5,6", "--max-tokens", "1"])
    assert code in (0, 2) and "Traceback" not in capsys.readouterr().err
    assert not (own_dir / "ran").exists()
