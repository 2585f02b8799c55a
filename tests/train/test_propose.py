"""phase=inspect: what it proposes loads, what it can't take it says, and --config-dir finds the user's tiers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from edge0_runtime import cli as runtime_cli
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier, builtin_tier, read_tier
from edge0_train import cli
from edge0_train.config import check_choices
from edge0_train.propose import inspect_command, propose
from edge0_train.synthetic import synthetic_config
from recipes.bring_your_own_moe.tiny import FLAT, tiny_flat
from tests.tiny_ling import ling_config
from tests.tiny_models import TEACHER
from tests.train.real_configs import PARAMETERS, REAL


def config_only(directory: Path, config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def test_a_public_tiers_own_config_gives_its_architecture_and_proportions(tmp_path):
    wanted = builtin_tier("35b")
    found = propose(config_only(tmp_path / "Qwen3.6-35B-A3B", synthetic_config(wanted)))
    tier = found.tier
    assert (tier.family, tier.architecture, tier.router, tier.k) == (
        "qwen3_5_moe",
        wanted.architecture,
        wanted.router,
        4,
    )
    assert (tier.consumers, tier.head_width) == (wanted.consumers, wanted.head_width)
    assert tier.owners == wanted.owners[:-1], "the last published head has no use"
    assert set(tier.lora.targets) == set(wanted.lora.targets) and (tier.lora.r, tier.lora.alpha) == (16, 32)
    assert tier.model == "Qwen3.6-35B-A3B" and tier.name == "qwen3.6-35b-a3b-k4"
    facts = "\n".join(found.facts.values())
    assert (
        "34,660,610,688, bf16 64.56 GiB" in facts and "18.17 GiB in 1,757 tensors, of which 16.88 GiB experts" in facts
    )
    assert "1,769,472 B; a token reads at most 0.264 GiB of 4 x 40 at K=4" in facts
    assert "32 heads 134,217,728 B, 310 LoRA pairs 42,332,160 B" in facts


def test_the_public_ling_gets_the_8bs_rules(tmp_path):
    wanted = builtin_tier("8b")
    tier = propose(config_only(tmp_path / wanted.model, synthetic_config(wanted)), name="8b").tier
    assert set(tier.lora.targets) == set(wanted.lora.targets)
    assert dataclasses.replace(tier, lora=wanted.lora) == wanted and tier.lora.r == wanted.lora.r


def test_a_small_ling_in_the_published_layout_gets_the_rules_of_nano_ling(tmp_path):
    wanted = builtin_tier("nano-ling")
    config = ling_config(**wanted.architecture, n_group=wanted.router.n_group, topk_group=wanted.router.topk_group)
    tier = propose(config_only(tmp_path / wanted.model, config), name=wanted.name).tier
    assert set(tier.lora.targets) == set(wanted.lora.targets)
    assert (tier.owners, tier.consumers) == (wanted.owners[1:], wanted.consumers[1:]), "2 of 8 layers are as 7 of 24"
    same = {name: getattr(wanted, name) for name in ("owners", "consumers", "lora")}
    assert dataclasses.replace(tier, **same) == wanted


@pytest.mark.parametrize("family", FLAT)
def test_a_proposal_is_a_tier_file(family, tmp_path):
    source = tiny_flat(tmp_path / family, family)
    proposal = propose(source, k=3, name="mine")
    assert Tier.from_dict(yaml.safe_load(proposal.yaml())) == proposal.tier
    assert (proposal.tier.k, proposal.tier.name) == (3, "mine")
    layout, arch = proposal.tier.layout, proposal.tier.architecture
    assert set(proposal.tier.lora.targets).isdisjoint(layout.spared)
    assert max(proposal.tier.consumers) == arch["num_hidden_layers"] - 2


def test_it_prints_or_writes_once(tmp_path, capsys):
    inspect_command(["phase=inspect", f"base={TEACHER}"])
    printed = capsys.readouterr().out
    inspect_command(["phase=inspect", f"base={TEACHER}", f"out={tmp_path}"])
    file = tmp_path / "tier/nano-teacher-k4.yaml"
    assert file.read_text() == printed[:-1] and "--config-dir" in capsys.readouterr().out
    with pytest.raises(Edge0Error, match=r"out: .*nano-teacher-k4.yaml exists"):
        inspect_command(["phase=inspect", f"base={TEACHER}", f"out={tmp_path}"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt_oss"},
            r"model_type: 'gpt_oss' is not supported; supported are .*olmoe.*transformers has model",
        ),
        (
            {"model_type": "nobodys"},
            r"transformers has no model of that name; mlx-lm has no model .* A family needs both",
        ),
        ({"hidden_size": 64}, "names no model_type"),
        ({"model_type": "olmoe", "num_hidden_layers": 2}, "of 2 layers none is left to predict"),
        ("[]", "not a JSON object"),
        ("{", "not strict JSON"),
        (FLAT["olmoe"] | {"model_type": "olmoe", "x": json.loads("[" * 900 + "]" * 900)}, "nested too deeply"),
    ],
)
def test_what_cannot_be_taken_is_said(config, message, tmp_path):
    with pytest.raises(Edge0Error, match=message):
        propose(config_only(tmp_path / "m", config))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "base is missing; it takes base=DIR"),
        (["base=x", "tier=nano"], "phase=inspect: tier; it takes base=DIR"),
        (["base=/nowhere"], "base: /nowhere has no config.json"),
        (["base=x", "k=many"], "k: 'many' is not a number"),
        ([f"base={TEACHER}", "k=99"], r"tier\.k: 99 is larger than the 32 experts"),
        ([f"base={TEACHER}", "name=a b"], r"tier\.name: 'a b'"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["edge0_train", "phase=inspect", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    with pytest.raises(Edge0Error, match=message):
        inspect_command(["phase=inspect", *arguments])


def test_a_tier_file_is_a_tier_for_the_other_commands_too(tmp_path, capsys, monkeypatch):
    inspect_command(["phase=inspect", f"base={TEACHER}", f"out={tmp_path}", "name=own"])
    file = tmp_path / "tier/own.yaml"
    assert runtime_cli.main(["tiers", str(file)]) == 0
    assert "heads 5, " in capsys.readouterr().out
    (tmp_path / "broken.yaml").write_text("a: [")
    for name, message in (("broken.yaml", "not plain YAML"), ("none.yaml", "No such file"), ("own", "unknown")):
        assert runtime_cli.main(["tiers", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(Edge0Error, match="not a YAML mapping but"):
        read_tier(str(tmp_path / "list.yaml"))


def test_tiers_of_the_users_own_folder_are_choices(tmp_path):
    inspect_command(["phase=inspect", f"base={TEACHER}", f"out={tmp_path}", "name=own"])
    for flags in ([f"--config-dir={tmp_path}"], ["--config-dir", str(tmp_path)], ["-cd", str(tmp_path)]):
        own = cli.own_config_directories(flags)
        check_choices([*flags, "tier=own"], own)
        check_choices([*flags, "tier=nano"], own)
    with pytest.raises(Edge0Error, match=r"tier: 'own' is unknown; choose one of 35b"):
        check_choices(["tier=own"])


@pytest.mark.parametrize("model", REAL)
def test_public_models_get_a_tier_of_their_size(model, tmp_path):
    """Their own config.json; layers, experts and names sum to the number of parameters that they are known by."""
    proposal = propose(config_only(tmp_path / model, REAL[model]))
    found = float(proposal.facts["parameters"].split(", bf16")[0].replace(",", ""))
    assert found == pytest.approx(PARAMETERS[model], rel=0.005)
    assert proposal.tier.base_k == REAL[model]["num_experts_per_tok"] and proposal.tier.k == proposal.tier.base_k // 2
    assert Tier.from_dict(yaml.safe_load(proposal.yaml())) == proposal.tier
