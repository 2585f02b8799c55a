"""Every field of a config.json that may change what a base computes is compared, and named."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.contract.base_config import WITHOUT_EFFECT, config_differences, mathematical_fields

ASSETS = Path(__file__).parents[2] / "edge0_train" / "assets"
QUANTISED = {"group_size": 64, "bits": 4, "mode": "affine", "mlp.gate": {"group_size": 64, "bits": 8}}


def config_of(teacher: str) -> dict[str, Any]:
    return json.loads((ASSETS / teacher / "config.json").read_text()) | {"quantization": dict(QUANTISED)}


def places(fields: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield from places(value, (*path, name)) if isinstance(value, dict) else [(*path, name)]


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any = "changed") -> dict[str, Any]:
    made = copy.deepcopy(config)
    inside = made
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    return made


@pytest.mark.parametrize("teacher", ["nano-teacher", "nano-ling-teacher"])
def test_any_field_counts_but_those_known_to_have_no_effect(teacher: str) -> None:
    config = config_of(teacher)
    before = mathematical_fields(config)
    text = ("text_config",) if "text_config" in config else ()
    for path in places(config):
        differences = config_differences(before, mathematical_fields(changed(config, path)))
        below = path[len(text) :] if path[: len(text)] == text else ()
        counts = path in [("quantization", name) for name in ("group_size", "bits", "mode")]
        counts = counts or bool(below and below[0] not in WITHOUT_EFFECT)
        assert len(differences) == counts, path
        if counts:
            assert differences[0].startswith(".".join(path if path[0] == "quantization" else below))


@pytest.mark.parametrize(
    "field",
    [
        "rope_theta", "rms_norm_eps", "head_dim", "rope_scaling", "partial_rotary_factor", "norm_topk_prob",
        "routed_scaling_factor", "sliding_window", "tie_word_embeddings", "n_group", "kda_lower_bound", "hidden_act",
        "attention_bias", "a_field_of_next_year",
    ],
)  # fmt: skip
def test_a_field_that_appears_counts(field: str) -> None:
    before = config_of("nano-teacher")
    before["text_config"].pop(field, None)
    after = changed(before, ("text_config", field), 7)
    said = config_differences(mathematical_fields(before), mathematical_fields(after))
    assert said == [f"{field} was absent in its config.json and is 7"]


def test_what_is_written_otherwise_is_the_same() -> None:
    """A null and an absent field, the order, 1e4 and 10000."""
    config = config_of("nano-ling-teacher")
    other = dict(reversed(changed(config, ("rope_theta",), 10000).items())) | {"rope_scaling": None}
    assert config_differences(mathematical_fields(config), mathematical_fields(other)) == []


def test_the_record_is_plain_json_without_the_modules_of_a_large_model() -> None:
    config = config_of("nano-teacher")
    fields = mathematical_fields(config)
    assert fields["rope_parameters.rope_theta"] == 1e4 and fields["quantization.bits"] == 4
    assert not any("mlp.gate" in name for name in fields)
    assert json.loads(json.dumps(fields)) == fields
    assert mathematical_fields({"quantization": "int4", "text_config": "x"}) == {"text_config": "x"}  # foreign
