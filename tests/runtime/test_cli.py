"""The command line, in-process on a tiny model directory; as a process where signals and imports matter."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge0_runtime.cli import main
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.engine import Engine
from tests.own_trace import write_own_trace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(arguments) -> exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def json_of(result: tuple[int, str, str]) -> Any:
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


# -- tiers and inspect -------------------------------------------------------------------------------------


def test_tiers_gives_the_published_numbers_of_35b(run):
    _, text, _ = run("tiers", "35b")
    assert "heads 33, 138412032 B" in text
    assert "LoRA 310 pairs, 42332160 B" in text
    assert "layers.38.linear_init.weight [256, 2560]" in text
    assert "language_model.model.layers.3.self_attn.q_proj.lora_B [8192, 16]" in text
    data = json_of(run("tiers", "35b", "--json"))
    assert (data["heads"]["count"], len(data["heads"]["tensors"])) == (33, 99)
    assert (data["lora_file"]["pairs"], len(data["lora_file"]["tensors"])) == (310, 620)
    assert data["owners"] == list(range(6, 39)) and data["consumers"] == list(range(7, 39))


def test_tiers_gives_the_published_numbers_of_8b(run):
    data = json_of(run("tiers", "8b", "--json"))
    assert (data["heads"]["count"], data["heads"]["payload_bytes"]) == (16, 38_797_312)
    assert (data["lora_file"]["pairs"], data["lora_file"]["payload_bytes"]) == (153, 16_379_904)
    assert data["owners"] == list(range(7, 23)) and data["consumers"] == list(range(8, 24))
    rule = {"kind": "sigmoid_group", "n_group": 8, "topk_group": 4, "scaling": 2.5}
    assert data["router"] == rule | {"renormalise": True, "mass_k": 0, "sticky": {"bias": 0.0, "window": 0}}
    assert (data["feature_topk"], data["first_token"]) == ("teacher", "predicted")


def test_tiers_lists_all_and_knows_no_others(run):
    _, text, _ = run("tiers")
    names = [line.split(":")[0] for line in text.splitlines()]
    assert {"35b", "8b", "nano", "nano-ling"} <= set(names)
    assert [tier["name"] for tier in json_of(run("tiers", "--json"))] == names
    assert run("tiers", "36b") == (2, "", f"error: tier: '36b' is unknown; choose one of {', '.join(names)}\n")


def test_inspect_tells_contract_provenance_and_binding(run, tiny_dir):
    data = json_of(run("inspect", tiny_dir, "--json"))
    checkpoint = Checkpoint.open(tiny_dir)
    assert data["problems"] == []
    assert data["base"]["fingerprint"] == checkpoint.fingerprint()
    assert data["base"]["quantization"]["bits"] == 4
    assert 0 < data["base"]["expert_bytes"] < data["base"]["payload_bytes"]
    for kind in ("prerouter", "lora"):
        adapter = data[kind]
        assert adapter["tier"] == "tiny" and adapter["dtypes"] == ["F16"] and adapter["payload_bytes"] > 0
        assert adapter["provenance"]["base_fingerprint"] == checkpoint.fingerprint()
        assert any("tiny" in problem for problem in adapter["upstream_problems"])
    code, text, _ = run("inspect", tiny_dir)
    assert code == 0 and "belong together: yes" in text and checkpoint.fingerprint() in text


def test_inspect_shows_what_does_not_fit(run, tiny_dir, tmp_path):
    linked_copy(tiny_dir, tmp_path)
    (tmp_path / "lora_edge0_tiny.safetensors").unlink()
    data = json_of(run("inspect", tmp_path, "--json"))
    assert data["lora"] is None and data["problems"] == ["lora: no file"]
    code, text, _ = run("inspect", tmp_path)
    assert code == 0 and "belong together: no" in text
    assert run("inspect", tmp_path / "nowhere")[0] == 2


def test_tiers_and_inspect_need_no_mlx_and_no_server(tiny_dir):
    script = (
        "import sys; sys.modules |= dict.fromkeys(['mlx', 'mlx.core', 'mlx_lm', 'fastapi', 'uvicorn', 'torch']);"
        "from edge0_runtime.cli import main;"
        "sys.exit(main(['tiers']) or main(['tiers', '35b']) or main(['inspect', sys.argv[1]]))"
    )
    subprocess.run([sys.executable, "-c", script, tiny_dir], check=True, capture_output=True)


# -- generate ----------------------------------------------------------------------------------------------


def test_generate_is_repeatable_and_says_everything(run, tiny_dir):
    arguments = ("generate", tiny_dir, "--prompt", "12+34=", "--max-tokens", 8, "--ignore-eos")
    data = json_of(run(*arguments, "--json"))
    assert len(data["ids"]) == 8 and data["finish_reason"] == "length"
    prompt_tokens = len(data["prompt_ids"])
    assert data["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 8,
        "total_tokens": prompt_tokens + 8,
    }
    assert data["timings"]["total_s"] >= data["timings"]["first_token_s"] > 0
    ids = ",".join(map(str, data["prompt_ids"]))
    again = json_of(run("generate", tiny_dir, "--prompt-ids", ids, "--max-tokens", 8, "--ignore-eos", "--json"))
    assert again["ids"] == data["ids"]
    assert run(*arguments)[:2] == (0, data["text"] + "\n")


def test_generate_stops_at_an_end_token_and_keeps_it_out_of_the_text(run, tiny_dir, monkeypatch):
    arguments = ("generate", tiny_dir, "--prompt-ids", "5,6,7", "--max-tokens", 6, "--json")
    ids = json_of(run(*arguments, "--ignore-eos"))["ids"]
    end = next(n for n, token in enumerate(ids) if token not in ids[:n] and n > 0)
    load = Engine.load

    def with_other_end(*args: Any, **options: Any) -> Engine:
        engine = load(*args, **options)
        engine.eos_ids = frozenset({ids[end]})
        return engine

    monkeypatch.setattr(Engine, "load", with_other_end)
    data = json_of(run(*arguments))
    with load(tiny_dir) as engine:
        text = engine.tokenizer.decode(ids[:end], skip_special_tokens=True)
    assert (data["ids"], data["finish_reason"], data["text"]) == (ids[: end + 1], "stop", text)


def test_generate_samples_with_a_seed(run, tiny_dir):
    def ids(seed: int) -> list[int]:
        arguments = ("generate", tiny_dir, "--prompt-ids", "5,6", "--temperature", 1.5, "--ignore-eos", "--json")
        return json_of(run(*arguments, "--max-tokens", 12, "--seed", seed))["ids"]

    assert ids(1) == ids(1) != ids(2)


def test_trace_holds_the_experts_of_every_step_and_layer(run, tiny_dir, tmp_path):
    file = tmp_path / "trace.jsonl"
    data = json_of(
        run("generate", tiny_dir, "--prompt-ids", "5,6,7", "--max-tokens", 4, "--json", "--trace", file, "--ignore-eos")
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["token"] for line in lines] == [7, *data["ids"][:3]]
    for line in lines:
        assert list(line["experts"]) == ["0", "1", "2", "3"]
        assert all(len(ids) == 2 and ids == sorted(set(ids)) for ids in line["experts"].values())
    with Engine.load(tiny_dir) as engine:
        steps = list(engine.generate([5, 6, 7], max_tokens=4, ignore_eos=True, trace=True))
    assert [list(line["experts"].values()) for line in lines] == [step.experts.tolist() for step in steps]


@pytest.mark.parametrize("flag", ["--no-prerouter", "--no-lora"])
def test_an_adapter_can_be_left_out(run, tiny_dir, tmp_path, flag):
    kind = flag.removeprefix("--no-")
    arguments = ("--prompt-ids", "5,6,7", "--max-tokens", 8, "--ignore-eos", "--json")
    with_it = json_of(run("generate", tiny_dir, *arguments))
    without = json_of(run("generate", tiny_dir, *arguments, flag))
    assert with_it["ids"] != without["ids"]
    for path in tiny_dir.iterdir():
        if not path.name.startswith(kind):
            (tmp_path / path.name).symlink_to(path)
    assert json_of(run("generate", tmp_path, *arguments, flag))["ids"] == without["ids"]
    code, _, err = run("generate", tmp_path, *arguments)
    assert code == 2 and f"--no-{kind}" in err


def test_a_small_memory_budget_changes_nothing_but_speed(run, tiny_dir, budget):
    arguments = ("generate", tiny_dir, "--prompt-ids", "5,6,7", "--max-tokens", 8, "--ignore-eos", "--json")
    all_in = json_of(run(*arguments))["ids"]
    assert json_of(run(*arguments, "--memory-budget", budget(tiny_dir, 1)))["ids"] == all_in


# -- chat --------------------------------------------------------------------------------------------------


def test_chat_answers_one_prompt_in_the_template(run, tiny_dir):
    arguments = ("chat", tiny_dir, "--prompt", "1+1", "--temperature", 0, "--max-tokens", 6)
    data = json_of(run(*arguments, "--json"))
    with Engine.load(tiny_dir) as engine:
        assert engine.tokenizer.decode(data["prompt_ids"]).count("assistant") == 1
    assert run(*arguments)[1] == data["text"] + "\n"


def test_chat_is_a_conversation(run, tiny_dir, monkeypatch):
    said = iter(["1+1", "", "2+2"])
    seen: list[list[int]] = []
    generate = Engine.generate

    def listen(self: Engine, prompt_ids: list[int], **options: Any) -> Any:
        seen.append(list(prompt_ids))
        return generate(self, prompt_ids, **options)

    monkeypatch.setattr(Engine, "generate", listen)

    def end_of_file(_: str) -> str:
        text = next(said, None)
        if text is None:
            raise EOFError
        return text

    monkeypatch.setattr("builtins.input", end_of_file)
    code, _, _ = run("chat", tiny_dir, "--max-tokens", 4, "--seed", 1)
    assert code == 0 and len(seen) == 2  # an empty line is no turn
    assert seen[1][: len(seen[0])] == seen[0]


# -- verify and bench --------------------------------------------------------------------------------------


def linked_copy(directory: Path, target: Path) -> Path:
    for path in directory.iterdir():
        (target / path.name).symlink_to(path)
    return target


def test_verify_passes_or_fails_with_exit_code_1(run, tiny_dir, tmp_path):
    directory = linked_copy(tiny_dir, tmp_path)
    file = directory / "verify_edge0_tiny.safetensors"
    code, _, err = run("verify", directory)
    assert code == 2 and file.name in err
    write_own_trace(tiny_dir, file)
    code, text, _ = run("verify", directory)
    assert code == 0 and text.splitlines()[-1] == "PASS"
    assert json_of(run("verify", directory, "--json"))["ok"] is True
    write_own_trace(tiny_dir, file, wrong=True)
    code, text, _ = run("verify", directory)
    assert code == 1 and text.splitlines()[-1] == "FAIL" and "token 0 differs" in text
    assert run("verify", directory, "--json")[0] == 1


def test_bench_prints_one_row_per_prompt(run, tiny_dir):
    code, out, _ = run("bench", tiny_dir, "--prompt", "1+1", "--prompt", "2+2", "--max-tokens", 3, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["generated_tokens"] for row in rows] == [3, 3]
    code, out, _ = run("bench", tiny_dir, "--prompt", "1+1", "--prompt", "2+2", "--max-tokens", 3)
    assert code == 0 and out.count("tokens/s over 3 tokens") == 2


# -- errors and processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt-ids", "999999"), "token ids"),
        (("--prompt-ids", "5", "--max-tokens", "100000"), "context"),
        (("--prompt-ids", "5", "--temperature", "-1"), "temperature"),
        (("--prompt-ids", "5", "--memory-budget", "0"), "memory_budget"),
        (("--prompt-ids", "5", "--trace", "/nowhere/file"), "--trace"),
        (("--prompt", ""), "prompt"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, tiny_dir, arguments, words):
    code, out, err = run("generate", tiny_dir, *arguments)
    assert code == 2 and out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and words in last


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("generate", "x"),
        ("generate", "x", "--prompt-ids", "1,a"),
        ("dance",),
        ("bench", "x", "--rounds", "0"),
        ("doctor", "nano", "--context", "0"),
    ],
)
def test_arguments_that_make_no_command_end_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2 and "usage" in capsys.readouterr().err


def test_interrupting_ends_with_130(run, monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edge0_runtime.cli.tiers.builtin_tier_names", interrupted)
    assert run("tiers")[0] == 130


def test_serve_refuses_an_unusable_address_before_loading(run, tmp_path, monkeypatch):
    monkeypatch.delenv("EDGE0_API_KEY", raising=False)
    code, _, err = run("serve", tmp_path / "nowhere", "--host", "0.0.0.0")
    assert code == 2 and "EDGE0_API_KEY" in err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 99999):
            code, _, err = run("serve", tmp_path / "nowhere", "--port", port)
            assert code == 2 and err.startswith(f"error: --host localhost --port {port}: ")


def test_serve_answers_and_ends_cleanly_on_sigterm(tiny_dir):
    command = [sys.executable, "-m", "edge0_runtime", "serve", str(tiny_dir), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = iter(process.stderr.readline, "")
        plan = ""
        while "serving edge0-tiny at " not in (line := next(lines)):
            plan += line
        assert "memory budget" in plan
        url = line.split("serving edge0-tiny at ")[1].strip()
        body = {"messages": [{"role": "user", "content": "1+1"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()
        assert answer["model"] == "edge0-tiny" and answer["usage"]["completion_tokens"] <= 4
        process.send_signal(signal.SIGTERM)
        rest = "".join(lines)
        assert process.wait(60) == 0, rest
    assert "Traceback" not in rest
