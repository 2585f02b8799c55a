"""The command line itself: help, Tab, settings of other programs, models by name; nothing here loads a model."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import yaml

from edge0_runtime.cli import COMMANDS, main
from edge0_runtime.cli.launch import TOOLS
from edge0_runtime.cli.models import Named, named

SLOW = ("mlx", "mlx_lm", "transformers", "tokenizers", "fastapi", "uvicorn", "pydantic", "huggingface_hub", "jinja2", "psutil",
        "torch", "argcomplete", "httpx")  # fmt: skip
NAMES = [module.__name__.rpartition(".")[2] for module in COMMANDS]

# -- help and Tab ------------------------------------------------------------------------------------------------------


def test_help_tab_and_what_reads_no_model_import_no_slow_library():
    script = (
        "import sys; from edge0_runtime.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print(sorted({{name.partition('.')[0] for name in sys.modules}} & set({SLOW})), file=sys.stderr)"
    )
    for arguments in (["--help"], ["serve", "--help"], ["tiers"], ["launch", "zed", "--model", "x"]):
        command = [sys.executable, "-c", script, *arguments]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stderr == "[]\n", arguments


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_with_examples_that_are_understood(name, capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and "examples:" in out
    (module,) = [module for module in COMMANDS if module.__name__.endswith(f".{name}")]
    ran: list[argparse.Namespace] = []
    monkeypatch.setattr(module, "run", lambda args: ran.append(args))
    lines = re.findall(r"edge0_runtime ([^|>#)\n]*)", module.EXAMPLES)
    for line in lines:
        assert main(shlex.split(line)) == 0
    assert len(ran) == len(lines) >= 2 or name == "tiers"


def test_the_help_says_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "Exit codes: 0 done; 1 measured and found wanting; 2 something you can act on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ser", "serve"),
        ("serve --ali", "--alias"),
        ("generate x --arm look", "lookahead"),
        ("launch open", "openai"),
    ],
)
def test_tab_completes_commands_options_and_choices(line, offered, tmp_path):
    line, file = f"edge0_runtime {line}", tmp_path / "offered"
    environment = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(file), "_ARGCOMPLETE_SHELL": "bash",
    }  # fmt: skip
    command = [sys.executable, "-m", "edge0_runtime"]
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    assert offered in file.read_text().replace(" ", "").split("\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_what_a_shell_needs(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "_ARGCOMPLETE" in capsys.readouterr().out


def test_bash_takes_what_completion_prints(capsys):
    main(["completion", "bash"])
    script = capsys.readouterr().out + "\ncomplete -p edge0_runtime"
    told = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout
    assert told.startswith("complete ")


# -- launch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[str, list[str | None]]]:
    """(URL of a server whose second model is `b/c`, the Authorization of every request)."""
    seen: list[str | None] = []

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            found = self.path == "/v1/models" and seen[-1] != "Bearer wrong"
            body = json.dumps({"object": "list", "data": [{"id": "mine"}, {"id": "other"}]}).encode()
            self.send_response(200 if found else 401 if seen[-1] == "Bearer wrong" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Models)
    Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_address[1]}", seen
    http.shutdown()
    http.server_close()


@pytest.mark.parametrize("tool", TOOLS)
def test_every_program_gets_the_servers_address_and_its_model(tool, server, capsys, monkeypatch):
    monkeypatch.setenv("EDGE0_API_KEY", "a-secret")
    url, seen = server
    assert main(["launch", tool, "--url", f"{url}/v1/", "--json"]) == 0
    out = capsys.readouterr().out
    data = json.loads(out)
    assert (data["model"] == "mine" and "mine" in data["settings"]) or tool == "open-webui"
    assert url in data["settings"] and data["base_url"] == f"{url}/v1" and "/v1/v1" not in out
    assert seen == ["Bearer a-secret"] and "a-secret" not in out
    assert main(["launch", tool, "--url", url, "--model", "mine"]) == 0
    assert capsys.readouterr().out.endswith(data["settings"] + "\n")


def test_settings_have_the_form_that_the_programs_read(capsys, monkeypatch):
    monkeypatch.delenv("EDGE0_API_KEY", raising=False)

    def settings(tool: str) -> str:
        assert main(["launch", tool, "--model", "m", "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["settings"])

    for tool in ("openai", "anthropic", "langchain", "litellm"):
        ast.parse(settings(tool))
    assert yaml.safe_load(settings("llm"))[0]["api_base"] == "http://127.0.0.1:8080/v1"
    assert yaml.safe_load(settings("continue"))[0]["apiBase"] == "http://127.0.0.1:8080/v1"
    zed = json.loads("{" + settings("zed") + "}")["language_models"]["openai_compatible"]["edge0"]
    assert zed["api_url"] == "http://127.0.0.1:8080/v1" and zed["available_models"][0]["name"] == "m"
    assert "none-needed" in settings("openai")


def test_launch_alone_lists_the_programs(capsys):
    assert main(["launch"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TOOLS)


def test_a_server_that_does_not_answer_is_a_sentence(server, capsys, monkeypatch):
    url, _ = server
    assert main(["launch", "aider", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server says there what it serves" in capsys.readouterr().err
    assert main(["launch", "aider", "--url", f"{url}/elsewhere"]) == 2
    assert "answers /v1/models with 404; is it another program's server?" in capsys.readouterr().err
    monkeypatch.setenv("EDGE0_API_KEY", "wrong")
    assert main(["launch", "aider", "--url", url]) == 2
    assert "answers /v1/models with 401; set EDGE0_API_KEY to its API key" in capsys.readouterr().err
    for wrong in ("127.0.0.1:8080", "file:///etc/passwd", "http://x:99999"):
        assert main(["launch", "aider", "--url", wrong]) == 2
        assert "is no address of a server; write it like http://127.0.0.1:8080" in capsys.readouterr().err


# -- models by name ----------------------------------------------------------------------------------------------------


def test_a_model_option_says_everything_of_one_name():
    assert named("a=dir") == Named("a", "dir")
    full = named("a b=org/name@main,no-prerouter,no-lora,arm=on_demand,adapters=other/dir,tier=nano")
    assert full == Named("a b", "org/name@main", False, False, "on_demand", "other/dir", "nano")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "'a' is not NAME=DIR"),
        ("=dir", "is not NAME=DIR"),
        ("a=", "is not NAME=DIR"),
        ("a/b=dir", "'a/b': a model's name is printable, not empty, and has no slash"),
        ("a\n=dir", "a model's name is printable"),
        ("a=dir,no-heads", "'no-heads' is no option; the form is NAME=DIR"),
        ("a=dir,arm=", "'arm=' is no option"),
        ("a=dir,arm=fast", "arm 'fast' is unknown; choose of prerouter"),
    ],
)
def test_a_model_option_that_is_none_says_so(text, words):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(words)):
        named(text)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "MODEL_DIR: missing; give a model directory, or --model NAME=DIR"),
        (("dir", "--model", "a=dir"), "MODEL_DIR: dir stands beside --model; name it too: --model NAME=dir"),
        (("--model", "a=x", "--model", "a=y"), "--model: a is named twice; give each model a name of its own"),
        (
            ("--model", "a=x", "--no-lora", "--alias", "b"),
            "--alias, --no-lora: of which --model? Say it in that option",
        ),
    ],
)
def test_serve_says_which_models_it_cannot_mean(arguments, sentence, capsys):
    assert main(["serve", "--port", "0", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
