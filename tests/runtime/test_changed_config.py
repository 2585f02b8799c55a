"""A base whose config.json was edited serves other text from the same tensors: refused by the field's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.cli import main
from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.base_config import WITHOUT_EFFECT
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.strict_safetensors import read_header, write_atomic
from edge0_runtime.engine import Engine
from edge0_runtime.inspection import inspect

PROMPT = [5, 6, 7, 8, 9, 10, 11]
Edited = Callable[..., Path]


@pytest.fixture
def edited(tiny_dir: Path, tmp_path: Path) -> Edited:
    """edited(change) -> a copy of the tiny directory whose text config was changed in place."""

    def make(change: Callable[[dict[str, Any]], object]) -> Path:
        directory = tmp_path / "edited"
        shutil.copytree(tiny_dir, directory)
        config = json.loads((directory / "config.json").read_text())
        change(config["text_config"])
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return make


def ten_times_theta(text: dict[str, Any]) -> None:
    text["rope_parameters"]["rope_theta"] *= 10


def older(directory: Path) -> None:
    """Both adapters as they were written before they recorded the base's config.json."""
    hashes = {}
    for kind in ("prerouter", "lora"):
        path = directory / f"{kind}_edge0_tiny.safetensors"
        metadata = dict(read_header(path).metadata)
        document = json.loads(metadata["edge0"])
        del document["provenance"]["base_config"]
        document["provenance"]["prerouter_sha256"] = hashes.get("prerouter")
        write_atomic(path, read_adapter(path, kind).tensors, metadata | {"edge0": json.dumps(document)})  # type: ignore[arg-type]
        hashes[kind] = read_adapter(path, kind).sha256  # type: ignore[arg-type]


def tokens(directory: Path, **flags: Any) -> list[int]:
    with Engine.load(directory, **flags) as engine:
        return [step.token for step in engine.generate(PROMPT, max_tokens=24, ignore_eos=True)]


def test_a_changed_field_is_refused_at_load_by_name(tiny_dir: Path, edited: Edited) -> None:
    directory = edited(ten_times_theta)
    with pytest.raises(Edge0Error) as error:
        Engine.load(directory)
    assert "rope_parameters.rope_theta was 10000.0 in its config.json and is 100000.0" in str(error.value)
    assert tokens(directory, allow_mismatch=True) != tokens(tiny_dir)  # what it is about


def test_inspect_and_verify_name_it_too(edited: Edited, capsys: pytest.CaptureFixture[str]) -> None:
    directory = edited(ten_times_theta)
    (problem,) = inspect(directory)["problems"]
    assert "rope_parameters.rope_theta was 10000.0" in problem
    assert main(["inspect", str(directory)]) == 0
    assert "belong together: no" in capsys.readouterr().out
    (directory / "verify_edge0_tiny.safetensors").touch()
    assert main(["verify", str(directory)]) == 2
    assert "rope_parameters.rope_theta was 10000.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [("rms_norm_eps", 1e-3), ("norm_topk_prob", False), ("attention_bias", True), ("sliding_window", 8)],
)
def test_any_field_that_may_count_is_refused(edited: Edited, field: str, value: Any) -> None:
    directory = edited(lambda text: text.update({field: value}))
    with pytest.raises(Edge0Error, match=field):
        Engine.load(directory)


def test_fields_without_effect_may_change(tiny_dir: Path, edited: Edited) -> None:
    """All at once: not a token differs."""
    changes = {
        "initializer_range": 0.5, "router_aux_loss_coef": 0.9, "attention_dropout": 0.5, "output_router_logits": True,
        "use_cache": False, "max_position_embeddings": 300, "bos_token_id": 7, "pad_token_id": 5, "eos_token_id": 9,
        "dtype": "float16", "torch_dtype": "float16", "num_nextn_predict_layers": 1, "transformers_version": "9",
    }  # fmt: skip
    assert changes.keys() < WITHOUT_EFFECT
    directory = edited(lambda text: text.update(changes))
    assert tokens(directory) == tokens(tiny_dir)


def test_older_adapters_are_served_and_it_is_said_once(
    tiny_dir: Path, edited: Edited, caplog: pytest.LogCaptureFixture
) -> None:
    directory = edited(lambda text: None)
    older(directory)
    assert tokens(directory) == tokens(tiny_dir)
    assert caplog.text.count("rope_theta") == 1
    data = inspect(directory)
    assert data["problems"] == [] and len(data["unchecked"]) == 1 and "cannot be told" in data["unchecked"][0]
