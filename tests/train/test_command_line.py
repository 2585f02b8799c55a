"""The command line around Hydra: help, subcommands, the user's own tiers, and what is set before torch is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from edge0_train import cli
from edge0_train.config import PHASES, config_directory
from edge0_train.config.pages import settings_markdown, settings_yaml
from tests.tiny_models import TEACHER
from tests.train.command_line import exit_code

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """(exit code, stdout, stderr) of the command line, in this process."""

    monkeypatch.chdir(tmp_path)  # Hydra's --multirun leaves a multirun.yaml

    def run(*arguments: str) -> tuple[object, str, str]:
        return exit_code(monkeypatch, *arguments), *capsys.readouterr()

    return run


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_a_short_page_of_our_own(command, flag):
    code, page, _ = command(flag)
    assert code == 0 and len(page.splitlines()) < 40 and "Hydra" in page and "powered by" not in page
    for name, facts in PHASES.items():
        assert f"  {name} " in page and facts.sentence in page
    assert all(f"edge0_train {name}" in page for name in cli.SUBCOMMANDS)
    assert cli.EXAMPLES in page
    assert command() == (2, "", page), "without a word, the same page says what is missing"


def test_help_beside_other_words_stays_hydras(command):
    code, page, _ = command("phase=quantize", "--help")
    assert code == 0 and "phase: all, evaluate, export" in page and "head_distill-nano-ling" in page


def test_settings_prints_the_map_and_the_page(command):
    assert command("settings") == (0, settings_yaml(), "")
    assert command("settings", "--markdown") == (0, settings_markdown(), "")
    assert command("settings", "--help")[1].startswith("usage: python -m edge0_train settings [--markdown]")
    code, _, error = command("settings", "optim")
    assert code == 2 and error == "error: settings: 'optim' is unknown; it takes --markdown, or nothing\n"


def test_inspect_is_a_subcommand_and_still_a_phase(command):
    code, printed, _ = command("inspect", f"base={TEACHER}", "name=own")
    assert code == 0 and "name: own" in printed
    assert command("phase=inspect", f"base={TEACHER}", "name=own") == (0, printed, "")
    assert command("inspect", "--help")[1].startswith("usage: python -m edge0_train inspect base=DIR")
    assert command("inspect", "tier=nano")[2].startswith("error: inspect: tier; it takes base=DIR")


def test_settings_of_the_users_own_tier_reach_hydra(command, tmp_path):
    """Through --config-dir, shown by Hydra itself, over several runs too."""
    data = yaml.safe_load((config_directory() / "tier/nano.yaml").read_text(encoding="utf-8"))
    data |= {"name": "own", "settings": {"all": {"threads": 3}, "export": {"export": {"trace_top": 5}}}}
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier/own.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    where = ("--config-dir", str(tmp_path), "phase=export")
    code, shown, _ = command(*where, "tier=own", "--cfg", "job")
    composed = yaml.safe_load(shown)
    assert code == 0 and (composed["threads"], composed["export"]["trace_top"]) == (3, 5)
    assert "settings" not in composed["tier"] and composed["tier"]["router"] == {"kind": "softmax_topk"}
    where = ("--config-dir", str(tmp_path), "phase=quantize", f"teacher.directory={TEACHER}")
    code, plans, _ = command(*where, "tier=own,nano", f"root={tmp_path / 'root'}", "dry_run=true", "--multirun")
    assert code == 0 and "quantize, tier own" in plans and "quantize, tier nano" in plans


def test_a_chain_is_read_whole_before_it_starts(command, tmp_path):
    """What only the second phase reads is missing: the first one does not begin."""
    code, output, error = command(
        "phase=all", "tier=8b", f"root={tmp_path / 'root'}", f"teacher.directory={TEACHER}", "base.device=cpu"
    )
    assert (
        code == 2 and not output and error.startswith("error: text.prompts: not set, but phase=teacher_text reads it")
    )
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "start",
    ["runpy.run_module('edge0_train', run_name='__main__')", "from edge0_train.cli import main; main()"],
    ids=["python -m", "console script"],
)
def test_how_threads_wait_is_said_before_torch_is_imported(start, tmp_path):
    """libgomp reads OMP_WAIT_POLICY when it is loaded."""
    code = f"""
import os, runpy, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("policy:", os.environ.get("OMP_WAIT_POLICY"))
            raise KeyboardInterrupt  # seen enough
sys.meta_path.insert(0, Watch())
sys.argv = ["edge0_train", "phase=quantize", "tier=nano", "dry_run=true", {f"root={tmp_path}"!r}]
try:
    {start}
except KeyboardInterrupt:
    pass
"""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["policy:", "PASSIVE"], done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--resolve"], "the command line: makes no configuration (The --resolve flag can only be used"),
        (["--cfg=job", "--info"], "the command line: makes no configuration (Only one of"),
        (["--cfg=jobs"], "argument --cfg/-c: invalid choice: 'jobs'"),
        (["--cfg", "job", "optim.lr=1"], "optim.lr=1: cannot be read there; write all settings beside each other"),
        (["--\x1b"], r"--\x1b: cannot be read there"),
        (["tier.owners.first="], "the command line: makes no configuration (invalid literal for int()"),
        (["optim.lr=" + "9" * 400], "optim.lr: 99999"),
        (["optim.lr=" + "9" * 5000], "optim.lr=99999"),
        (["-m", "seed=range(1,100000000)"], "--multirun: more than 1,000 combinations; give fewer values"),
    ],
)
def test_what_hydra_cannot_use_is_one_sentence(command, tmp_path, words, says):
    owners = {"owners": [1, 2], "consumers": [2, 3]}
    (tmp_path / "mine/tier").mkdir(parents=True)
    nano = yaml.safe_load((config_directory() / "tier/nano.yaml").read_text())
    (tmp_path / "mine/tier/own.yaml").write_text(yaml.safe_dump(nano | owners))
    code, _, error = command("--config-dir=mine", "phase=export", "tier=own", "dry_run=true", *words)
    assert code == 2 and error.startswith(f"error: {says}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"optim: \xff", "not UTF-8 text (byte 7)"),
        (b"x: " + b"[" * 900 + b"]" * 900, "not plain YAML (nested too deeply)"),
        (b"x: &a [1]\ny: [*a, *a]", "not plain YAML (aliases are not supported)"),
        (b"x: ${", "not a configuration (no viable alternative"),
        (b"[]", "not a YAML mapping"),
    ],
    ids=["not UTF-8", "deep", "aliases", "half an interpolation", "a list"],
)
@pytest.mark.parametrize("group", ["tier", "experiment"])
def test_a_damaged_file_of_ones_own_is_named(command, tmp_path, group, content, says):
    (tmp_path / "mine" / group).mkdir(parents=True)
    (tmp_path / "mine" / group / "own.yaml").write_bytes(content)
    code, _, error = command("--config-dir", "mine", "phase=export", "dry_run=true", f"{group}=own")
    assert code == 2 and says in error and f"mine/{group}/own.yaml: " in error and error.count("\n") == 1
