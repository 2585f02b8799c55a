"""What a person mistypes: choices of groups, names of settings, numbers that no setting has."""

from __future__ import annotations

import dataclasses
import string
from collections import defaultdict

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import all_settings, configure
from edge0_train.config.command import quoted
from edge0_train.data.counts import Rows
from edge0_train.fit import shortfalls
from edge0_train.machine import limits
from edge0_train.memory import Sketches, phase_need


def error_of(*overrides: str) -> str:
    with pytest.raises(Edge0Error) as error:
        configure(*overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("experiment=papr", ["experiment: 'papr' is unknown; did you mean paper?", "predictable"]),
        ("+experiment=papr", ["'papr' is unknown; did you mean paper?"]),
        ("experiment=[paper,predictabel]", ["'predictabel' is unknown; did you mean predictable?"]),
        ("experiment=paper,papr", ["'papr' is unknown"]),
        ("experiment=", ["experiment: empty; choose one of", "paper", "or leave it out"]),
        ("experiment=null", ["experiment: empty"]),
        ("+experiment=paper", ["the group is there already; write experiment=paper"]),
        ("hardware=1x80g", ["hardware: '1x80g' is unknown; did you mean 1x80gb?", "1x24gb"]),
        ("tier=nanoo", ["tier: 'nanoo' is unknown; did you mean nano?"]),
        ("phase=head_destill", ["did you mean head_distill?"]),
    ],
)
def test_every_groups_choice_is_checked_with_what_was_meant(override, words):
    message = error_of(override)
    assert all(word in message for word in words), message


def test_experiments_can_be_combined():
    made = configure("experiment=[paper,predictable]")
    assert (made.heads.joint_lr, made.heads.predictability) == (0, 0.01)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("learning_rate", "optim.lr"),
        ("optim.lrr", "optim.lr"),
        ("lr", "optim.lr"),
        ("thread", "threads"),
        ("base.gradient_checkpoint", "base.gradient_checkpointing"),
        ("text.prompt", "text.prompts"),
    ],
)
@pytest.mark.parametrize("plus", ["", "+", "++", "~"])
def test_an_unknown_setting_names_the_one_that_was_meant(wrong, meant, plus):
    """And the advice works: that setting is one."""
    message = error_of(f"{plus}{wrong}=1")
    assert message.startswith(f"{wrong}: no such setting; did you mean {meant}?"), message
    assert meant in all_settings()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=inf", "optim.lr: inf is not finite"),
        ("optim.clip=nan", "optim.clip: nan is not finite"),
        ("optim.clip=-1", "optim.clip: -1.0 is below 0"),
        ("optim.weight_decay=inf", "optim.weight_decay: inf"),
        ("heads.joint_lr=nan", "heads.joint_lr: nan"),
        ("heads.predictability=inf", "heads.predictability: inf"),
        ("sample.max_growth=inf", "sample.max_growth: inf"),
        ("sample.max_truncated=7", "sample.max_truncated: 7.0 is above 1"),
        ("sample.temperature=1e-39", "sample.temperature: 1e-39 lies between 0 and 0.01; 0 is greedy"),
        ("text.max_length=-5", "text.max_length: -5 is below 2"),
        ("text.max_length=1", "text.max_length: 1 is below 2"),
        ("text.pack_length=99999999", "text.pack_length: 99999999 is above 1048576"),
        ("root=", "root: empty"),
        ("root=' '", "root: empty"),
        ("run_dir=", "run_dir: empty"),
        ("base.directory=", "base.directory: empty"),
        ("export.directory=", "export.directory: empty"),
        ("logger.project=", "logger.project: empty"),
        ("threads=100000", "threads: 100000 is above 1024"),
        ("seed=4294967296", "seed: 4294967296 is above 4294967295"),
        ("optim.steps=99999999999", "optim.steps: 99999999999 is above 1000000000"),
        ("optim.lr=1e30", "optim.lr: 1e+30 is above 1000000000"),
        ("base.device=gpu", "base.device: 'gpu' is unknown; choose cuda, cuda:N or cpu"),
        ("export.trace_top=999", "export.trace_top: 999 is larger than the vocabulary of 384"),
        ("chain=[]", "chain: empty"),
        ("chain=[quantize,foo]", "chain: 'foo' is unknown"),
        ("chain=[quantize,quantize]", "chain: quantize more than once"),
        ("chain=[export,quantize]", "write chain=[quantize,export]"),
        ("root=a=b", "root=a=b: cannot be read"),
    ],
)
def test_a_value_that_no_run_can_have_is_refused(override, words):
    assert words in error_of(override)


def test_on_policys_arithmetic_is_checked_when_it_is_composed():
    message = error_of("phase=on_policy", "on_policy.rounds=4", "optim.steps=6")
    assert message == "optim.steps: 6 is not a multiple of on_policy.rounds=4; take e.g. optim.steps=8"
    assert configure("phase=on_policy", "on_policy.rounds=4", message.rpartition(" ")[2]).optim.steps == 8


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.text(string.printable.strip() + " ", min_size=1, max_size=12).filter(str.strip))
def test_quoting_gives_a_path_back(value):
    assert OverridesParser.create().parse_override(f"root={quoted(value)}").value() == value


KINDS = {
    "int": st.integers(-(2**70), 2**70) | st.integers(-2, 70),
    "float": st.floats() | st.floats(-0.5, 2.0),
    "bool": st.booleans() | st.just(7),
    "str": st.sampled_from(
        ["", " ", "x", "cpu", "cuda", "auto", "kl", "packed", "host", "float32", "a b", "tasks", "[1]"]
    ),
    "tuple[str, ...]": st.lists(st.sampled_from(["quantize", "export", "on_policy", "x"]), max_size=3),
}
TYPES = {name: str(field.type) for name, field in [
    *((f.name, f) for f in dataclasses.fields(type(configure()))),
    *((f"{group}.{f.name}", f) for group in ("hardware", "base", "teacher", "text", "sample", "optim", "heads", "on_policy",
      "inputs", "export", "logger") for f in dataclasses.fields(type(getattr(configure(), group)))),
]}  # fmt: skip


SKETCHES: dict[str, Sketches] = defaultdict(dict)
"""Shapes do not depend on settings of memory, which are what is drawn here."""


@st.composite
def override(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(sorted(all_settings())))
    value = draw(KINDS[TYPES[name]])
    if isinstance(value, list):
        return f"{name}=[{','.join(value)}]"
    return f"{name}={quoted(value) if isinstance(value, str) else str(value).lower()}"


@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    phase=st.sampled_from(["quantize", "head_distill", "student_sft", "on_policy", "evaluate", "export"]),
    overrides=st.lists(override(), min_size=1, max_size=3),
)
def test_any_values_are_refused_in_a_sentence_or_can_be_planned(phase, overrides):
    try:
        config = configure(f"phase={phase}", "tier=nano", *overrides)
    except Edge0Error as refusal:
        config = None
        sentence = str(refusal)
    if config is None:
        assert "\n" not in sentence
        return
    need = phase_need(config, Rows(48, 12, 40.0, 20.0, 60, {}), SKETCHES[phase])
    assert "GiB" in need.describe() and min((*need.device.values(), *need.host.values()), default=0) >= 0
    assert isinstance(shortfalls(config, need, limits(config)), list)
