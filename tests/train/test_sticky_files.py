"""Adapters of a sticky tier: files of their own names, for which plain heads are a start; advice that keeps the rule."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from edge0_runtime.contract import builtin_tier
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Sticky, Tier
from edge0_train.adapters import read_input
from edge0_train.config import configure
from edge0_train.config.command import command
from edge0_train.propose import propose
from tests.train.real_configs import REAL

STICKY = ("tier.router.sticky.bias=2", "tier.router.sticky.window=3")


def test_the_public_runtime_finds_no_file_of_its_name() -> None:
    tier = configure("phase=head_distill", "tier=35b", *STICKY).tier
    assert tier.router.sticky == Sticky(2.0, 3)
    assert tier.file_name("lora") == "lora_edge0_35b-sticky.safetensors"
    assert builtin_tier("35b").file_name("lora") == "lora_edge0_35b.safetensors"


@pytest.mark.parametrize("phase", ["head_refine", "student_sft"])
def test_plain_heads_are_a_start_where_they_are_trained_on(make_config, phase: str) -> None:
    config = make_config(phase, *STICKY)
    adapter = read_input(config, "prerouter", str(Path(config.root) / "head_distill"))
    assert adapter and adapter.tier == make_config(phase).tier


@pytest.mark.parametrize("phase", ["on_policy", "export", "evaluate"])
def test_plain_heads_are_refused_where_they_are_used_as_they_are(make_config, phase: str) -> None:
    config = make_config(phase, *STICKY, "teacher.directory=x", "text.prompts=tasks")
    with pytest.raises(Edge0Error, match=r"another tier: tier\.router\.sticky\.bias is 0\.0 there and 2\.0 here"):
        read_input(config, "prerouter", str(Path(config.root) / "head_distill"))


def test_another_k_is_refused_everywhere(make_config) -> None:
    config = make_config("student_sft", *STICKY, "tier.k=2")
    with pytest.raises(Edge0Error, match=r"another tier: tier\.k is 4 there and 2 here; give"):
        read_input(config, "prerouter", str(Path(config.root) / "head_distill"))


def test_advised_commands_have_the_tier_as_it_was_given() -> None:
    """Else the phase that they run would train for another rule."""
    changed = (*STICKY, "tier.k=2", "tier.lora.targets=[self_attn.q_proj]", "tier.consumers.last=5")
    config = configure("phase=student_sft", "tier=nano", *changed)
    advised = command(config, "head_refine")
    words = shlex.split(advised)[3:]
    assert configure(*words).tier == config.tier
    assert command(configure("phase=student_sft", "tier=nano"), "head_refine").split()[3:] == [
        "phase=head_refine",
        "tier=nano",
    ]


@pytest.mark.parametrize(
    ("sticky", "reason"),
    [
        (("bias=2",), "bias 2 and window 0 must both be 0"),
        (("window=2",), "bias 0 and window 2 must both be 0"),
        (("bias=2", "window=65"), r"a window in 1\.\.64"),
        (("bias=-1", "window=2"), "-1 is not a number larger than 0"),
        (("bias=2", "window=2.5"), "2.5 is not a whole number"),
        (("bias=2", "window=2", "reach=1"), "fields unknown: reach"),
    ],
)
def test_what_makes_no_sense_is_refused(sticky: tuple[str, ...], reason: str) -> None:
    with pytest.raises(Edge0Error, match=rf"tier\.router\.sticky.*{reason}"):
        configure("phase=head_distill", "tier=nano", *(f"tier.router.sticky.{one}" for one in sticky))


def test_a_wider_mass_and_stickiness_exclude_each_other() -> None:
    with pytest.raises(Edge0Error, match=r"router\.mass_k = 8; set one of both to 0"):
        configure("phase=head_distill", "tier=nano", *STICKY, "tier.router.mass_k=8")


def test_a_block_that_does_not_renormalise_has_no_stickiness(tmp_path: Path) -> None:
    """Its weights come from the logits that choose, all of them."""
    (tmp_path / "config.json").write_text(json.dumps(REAL["OLMoE-1B-7B-0924"]))
    tier = propose(tmp_path, name="olmoe").tier
    assert not tier.router.renormalise
    with pytest.raises(Edge0Error, match=r"tier\.router\.sticky: .*renormalise = true"):
        Tier.from_dict(tier.to_dict() | {"router": tier.to_dict()["router"] | {"sticky": {"bias": 2.0, "window": 2}}})
