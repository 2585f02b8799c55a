"""Which adapters may be served together, and on which base."""

from __future__ import annotations

import dataclasses

import pytest

from edge0_runtime.contract import BaseIdentity, Lora, check_binding, read_adapter
from edge0_runtime.contract.binding import tier_differences
from tests.contract.adapters import BASE, CONFIG, IDENTITY, KINDS, OTHER, refusal, without_contract

ELSEWHERE = BaseIdentity(OTHER, CONFIG)


def test_files_made_together_bind_without_a_note(pair):
    prerouter, lora = pair
    assert check_binding(IDENTITY, prerouter, lora) == []
    for some in ((prerouter, None), (None, lora), (None, None)):
        assert check_binding(IDENTITY, *some) == []


def test_another_base_is_refused_with_both_values_and_the_flag(pair):
    text = refusal(check_binding, ELSEWHERE, *pair, allow_mismatch=False)
    assert text.count(BASE) == text.count(OTHER) == 2  # for both files
    assert "--allow-mismatch" in text
    assert len(check_binding(ELSEWHERE, *pair, allow_mismatch=True)) == 2


@pytest.mark.parametrize("trained_with", [OTHER, None])
def test_another_prerouter_or_none_is_refused_with_both_values(pair, written, trained_with):
    prerouter, _ = pair
    lora = read_adapter(written("lora", prerouter_sha256=trained_with), "lora")
    text = refusal(check_binding, IDENTITY, prerouter, lora, allow_mismatch=False)
    assert (trained_with or "no prerouter") in text
    assert prerouter.sha256 in text
    assert "--allow-mismatch" in text
    (note,) = check_binding(IDENTITY, prerouter, lora, allow_mismatch=True)
    assert note.startswith("--allow-mismatch: ")


def test_adapters_of_two_tiers_are_refused_even_with_the_flag(pair, nano):
    prerouter, lora = pair
    other = dataclasses.replace(lora, tier=dataclasses.replace(nano, k=8))
    assert "k: 4 and 8" in refusal(check_binding, IDENTITY, prerouter, other, allow_mismatch=True)
    other = dataclasses.replace(lora, tier=dataclasses.replace(nano, token_aware=True))
    assert "token_aware: False and True" in refusal(check_binding, IDENTITY, prerouter, other, allow_mismatch=True)


def test_a_lora_of_another_rank_may_serve_with_the_same_heads(pair, nano):
    prerouter, lora = pair
    other = dataclasses.replace(lora, tier=dataclasses.replace(nano, lora=Lora(8, 16, nano.lora.targets)))
    assert check_binding(IDENTITY, prerouter, other) == []


def test_files_without_a_contract_are_served_with_a_note(tmp_path, tensors, nano):
    adapters = [read_adapter(without_contract(tmp_path / k, tensors, k, {}), k, nano) for k in KINDS]
    notes = check_binding(IDENTITY, *adapters)
    assert len(notes) == 2
    assert all("cannot be checked" in note for note in notes)


def test_a_changed_field_of_the_bases_config_is_refused_by_name_and_with_both_values(pair):
    theta = BaseIdentity(BASE, CONFIG | {"rope_parameters.rope_theta": 1e5})
    text = refusal(check_binding, theta, *pair, allow_mismatch=False)
    assert (
        text.count("rope_parameters.rope_theta was 10000.0 in its config.json and is 100000.0") == 2
    )  # for both files
    assert "rms_norm_eps" not in text and "--allow-mismatch" in text
    assert len(check_binding(theta, *pair, allow_mismatch=True)) == 2
    for config, says in (
        (CONFIG | {"sliding_window": 128}, "sliding_window was absent in its config.json and is 128"),
        (
            {"rms_norm_eps": 1e-6},
            "layer_types was ['linear_attention', 'full_attention'] in its config.json and is absent",
        ),
        (CONFIG | {"\x1b[31m": "\x1b" * 999}, "'\\x1b[31m' was absent in its config.json and is '\\x1b\\x1b"),
    ):
        text = refusal(check_binding, BaseIdentity(BASE, config), *pair)
        assert says in text and "\x1b" not in text and len(text) < 2000


def test_adapters_from_before_the_config_was_recorded_are_served_and_it_is_said_once(pair, written):
    old = [read_adapter(written(kind, base_config=None), kind) for kind in KINDS]
    old[1] = read_adapter(written("lora", base_config=None, prerouter_sha256=old[0].sha256), "lora")
    (note,) = check_binding(IDENTITY, *old)
    assert "rope_theta" in note and all(str(adapter.path) in note for adapter in old)
    assert (
        BASE not in refusal(check_binding, ELSEWHERE, *old).partition("trained for base")[0]
    )  # the fingerprint still binds


def test_without_a_flag_none_is_offered(pair):
    """In training, which has no --allow-mismatch."""
    text = refusal(check_binding, ELSEWHERE, *pair)
    assert "--allow-mismatch" not in text and "inputs.prerouter" in text


def test_heads_do_not_depend_on_the_loras_layout_and_a_lora_does(nano):
    other = dataclasses.replace(nano, lora=Lora(8, 16, nano.lora.targets))
    assert tier_differences("prerouter", nano, other) == []
    assert tier_differences("lora", nano, other) == [("lora.r", 16, 8), ("lora.alpha", 32.0, 16)]
    deeper = dataclasses.replace(nano, architecture=dict(nano.architecture) | {"hidden_size": 128})
    assert tier_differences("prerouter", nano, deeper) == [("architecture.hidden_size", 64, 128)]
