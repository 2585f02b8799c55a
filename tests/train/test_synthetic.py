"""Random checkpoints: exact layout, equal bytes for equal seeds, finite activations, the overlap that was asked for."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_runtime.engine import Engine
from edge0_train.base.load import load_base
from edge0_train.locality import misses
from edge0_train.synthetic import (
    calibrate,
    calibrate_loudness,
    overlapping_heads,
    shrink,
    simulated_overlap,
    with_sticky,
    write_adapters,
    write_base,
)
from tests.scripts_by_path import load_script

OVERLAP = 0.25


def small_tier(k: int = 4):
    """Nano with 16 layers: 14 of them predicted."""
    data = builtin_tier("nano").to_dict()
    data["architecture"] |= {"num_hidden_layers": 16}
    return builtin_tier("nano").from_dict(data | {"owners": [*range(1, 15)], "consumers": [*range(2, 15)], "k": k})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synthetic") / "model"
    write_base(directory, small_tier())
    write_adapters(directory, small_tier(), calibrate(small_tier(), OVERLAP, 0))
    return directory


def overlap(steps: list[np.ndarray]) -> np.ndarray:
    """[layers]: mean share of a layer's experts that the step before needed too; steps are [layers, K]."""
    pairs = itertools.pairwise(steps)
    return np.mean([[len({*a} & {*b}) / len(b) for a, b in zip(*pair, strict=True)] for pair in pairs], axis=0)


def test_activations_stay_the_size_of_their_inputs(directory):
    """A deep model of finite, lively logits: not one constant next token."""
    model, _ = load_base(directory, small_tier())
    ids = torch.randint(3, 384, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    deviations = torch.tensor([float(hidden.std()) for hidden in out.hidden_states])
    assert deviations.isfinite().all() and deviations.min() > 0.5 and deviations.max() < 30
    assert len(set(out.logits[0].argmax(-1).tolist())) > 16


def test_served_neighbours_share_what_was_asked_for(directory):
    """Measured in the engine over 120 greedy tokens; layers 0, 1 and 15 keep their gates and have their own overlap."""
    with Engine.load(directory) as engine:
        steps = [step.experts for step in engine.generate([5, 6, 7], max_tokens=120, ignore_eos=True, trace=True)]
    shares = overlap([np.asarray(step) for step in steps[1:]])
    assert shares[2:15].mean() == pytest.approx(OVERLAP, abs=0.05)


def test_the_same_of_a_family_whose_gates_choose_themselves(tmp_path):
    """Ling: one-hots of the layers' own gates, experts in groups, the first step predicted already."""
    tier = builtin_tier("nano-ling")
    write_base(tmp_path / "ling", tier)
    write_adapters(tmp_path / "ling", tier, calibrate(tier, 0.42, 0))
    with Engine.load(tmp_path / "ling") as engine:
        steps = [step.experts for step in engine.generate([5, 6, 7], max_tokens=80, ignore_eos=True, trace=True)]
    moe = tier.layout.moe_layers(tier.architecture)
    assert overlap(steps[1:])[moe.index(2) :].mean() == pytest.approx(0.42, abs=0.05)


@pytest.fixture(scope="module")
def two_rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nano's shapes by the plain rule and by a sticky one that leaves half of the misses, on one base."""
    directory, tier = tmp_path_factory.mktemp("synthetic") / "nano", builtin_tier("nano")
    sticky, strength = with_sticky(tier, 2.0, 2), calibrate(tier, OVERLAP, 0)
    loudness = calibrate_loudness(tier, sticky, strength, 0.5, 0)
    write_base(directory, tier)
    for each in (tier, sticky):
        write_adapters(directory, each, strength, loudness=loudness)
    return directory


def test_a_sticky_rule_leaves_the_misses_that_were_asked_for(two_rules):
    """Measured in the engine over a random text, in an LRU of 2 K a layer."""
    text, found = np.random.default_rng(1).integers(3, 384, 300).tolist(), {}
    for name in ("nano", "nano-sticky"):
        with Engine.load(two_rules, tier_name=name) as engine:
            steps = np.stack([step.experts for step in engine.replay(text[:8], text[8:])])[2:]
        found[name] = np.mean([misses(steps[:, layer].tolist(), 8) for layer in range(2, 7)])
    assert found["nano-sticky"] / found["nano"] == pytest.approx(0.5, abs=0.05)


def test_a_sticky_twin_differs_in_its_rule_alone(two_rules):
    plain, sticky = (
        {kind: read_adapter(two_rules / tier.file_name(kind), kind) for kind in ("prerouter", "lora")}
        for tier in (builtin_tier("nano"), with_sticky(builtin_tier("nano"), 2.0, 2))
    )
    for kind, adapter in plain.items():
        assert adapter.tensors.keys() == sticky[kind].tensors.keys()
        assert all(np.array_equal(value, sticky[kind].tensors[key]) for key, value in adapter.tensors.items())
    changed = {
        "name": "nano-sticky",
        "router": plain["lora"].tier.to_dict()["router"] | {"sticky": {"bias": 2.0, "window": 2}},
    }
    assert sticky["lora"].tier.to_dict() == plain["lora"].tier.to_dict() | changed


def test_loudness_is_a_factor_of_the_logits():
    tier = builtin_tier("nano")
    quiet, loud = (overlapping_heads(tier, 1.0, 0, loudness) for loudness in (1.0, 2.0))
    for key, value in quiet.items():
        np.testing.assert_array_equal(loud[key], value if ".fc1." in key else 2 * value)


def test_misses_by_hand():
    assert misses([[1, 2], [2, 3], [4, 5], [2, 1]], held=3) == (2 + 1 + 2 + 2) / 4  # 2 went when 5 came, 1 before
    assert misses([[1, 2], [2, 3], [4, 5], [2, 1]], held=5) == (2 + 1 + 2 + 0) / 4


def test_a_rule_that_cannot_leave_so_few_misses_says_what_it_can():
    tier = builtin_tier("nano")
    with pytest.raises(Edge0Error, match=r"misses: 1.5 of the plain tier's cannot be had .* choose from 0\.\d+ to"):
        calibrate_loudness(tier, with_sticky(tier, 2.0, 2), 1.0, 1.5, 0)


def test_the_8b_has_its_published_bytes_of_routed_experts(tmp_path):
    write_base(tmp_path / "8b", builtin_tier("8b"), headers_only=True)
    entries = Checkpoint.open(tmp_path / "8b").entries
    assert sum(e.end - e.start for name, (_, e) in entries.items() if ".mlp.experts." in name) == 3_906_994_176


def test_a_stronger_image_shares_more_and_what_cannot_be_had_is_refused():
    tier = small_tier()
    chance = tier.k / tier.num_experts
    assert chance < simulated_overlap(tier, 0.0, 0) < OVERLAP
    assert 0 < calibrate(tier, OVERLAP, 0) < calibrate(tier, 0.4, 0) < calibrate(tier, 0.6, 0)
    with pytest.raises(Edge0Error, match=r"overlap: 0.01 cannot be had with K=4; choose from 0\.\d+ to"):
        calibrate(tier, 0.01, 0)


def test_equal_seeds_give_equal_tensors_whatever_the_depth(tmp_path):
    tier = builtin_tier("nano")
    for name, made, seed in (("a", tier, 0), ("b", shrink(tier, {"num_hidden_layers": 4}), 0), ("c", tier, 1)):
        write_base(tmp_path / name, made, seed=seed)
    a, b, c = (Checkpoint.open(tmp_path / name) for name in "abc")

    def data(checkpoint: Checkpoint, name: str) -> bytes:
        header, entry = checkpoint.entries[name]
        return header.path.read_bytes()[entry.start : entry.end]

    assert set(b.entries) < set(a.entries)
    assert all(data(a, name) == data(b, name) for name in b.entries)
    assert all(data(a, name) != data(c, name) for name in c.entries)


def test_adapters_are_bound_to_their_base(directory):
    heads = read_adapter(directory / small_tier().file_name("prerouter"), "prerouter")
    lora = read_adapter(directory / small_tier().file_name("lora"), "lora")
    assert heads.provenance and lora.provenance
    assert heads.provenance.base_fingerprint == Checkpoint.open(directory).fingerprint()
    assert lora.provenance.prerouter_sha256 == heads.sha256
    assert heads.tier == lora.tier == small_tier()


def test_shrinking_takes_layers_from_the_end():
    tier = shrink(builtin_tier("35b"), {"num_hidden_layers": 12, "num_experts": 64}, k=2)
    assert (tier.name, tier.k, tier.num_experts, tier.owners, tier.consumers) == (
        "35b-synthetic", 2, 64, (6, 7, 8, 9, 10), (7, 8, 9, 10),
    )  # fmt: skip
    assert overlapping_heads(tier, 1.0, 0).keys() == tier.head_tensors().keys()
    with pytest.raises(
        Edge0Error, match="num_hidden_layers: 8 leaves no layer of tier 35b to predict; it takes at least 9"
    ):
        shrink(builtin_tier("35b"), {"num_hidden_layers": 8})


def test_the_script_writes_a_directory_that_opens(tmp_path, monkeypatch, capsys):
    script = load_script("make_synthetic_checkpoint")
    monkeypatch.setattr(sys, "argv", ["x", "nano", str(tmp_path / "m"), "--experts", "16", "--overlap", "0.5"])
    script.main()
    assert "simulated overlap 0.5" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["x", "nano", str(tmp_path / "two"), "--sticky", "2,2"])
    script.main()
    assert "tier nano-synthetic-sticky: loudness" in capsys.readouterr().out
    with Engine.load(tmp_path / "two", tier_name="nano-synthetic-sticky") as engine:
        assert (engine.model.tier.router.sticky.bias, engine.model.tier.router.sticky.window) == (2.0, 2)
    monkeypatch.setattr(sys, "argv", ["x", "nano", str(tmp_path / "m"), "--experts", "16", "--overlap", "0.5"])
    assert Checkpoint.open(tmp_path / "m").text_config()["num_experts"] == 16
    with pytest.raises(SystemExit, match=r"error: output directory .* exists"):
        script.main()
