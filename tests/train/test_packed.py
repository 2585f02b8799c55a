"""A base kept in int4: the same values as a materialised one, in forward and in backward, wherever its codes lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import input_path
from edge0_train.base.load import load_base
from edge0_train.base.packed import PackedEmbedding, PackedExperts, PackedLinear, unpacked_numel
from edge0_train.base.quantize_model import quantize_checkpoint
from edge0_train.base.weights import RESIDENCIES, Codes, Residency
from edge0_train.build import build_student, input_identity, sketch_student
from edge0_train.data.counts import Rows
from edge0_train.data.rows import read_data
from edge0_train.phases.student_sft import _plan, student_sft
from edge0_train.run import open_run
from edge0_train.student import PrerouterHeads, StudentPath, add_lora
from edge0_train.student.lora import lora_disabled
from tests.tiny_models import tiny_qwen3_5_moe, tiny_tier
from tests.train.conftest import Make

TIER = tiny_tier()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    source = tiny_qwen3_5_moe(directory / "hf", tie_word_embeddings=request.param)
    quantize_checkpoint(source, directory / "int4", TIER)
    return directory / "int4"


def ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 384, (rows, length), generator=torch.Generator().manual_seed(3))


def student(base: Path, packed: Residency | None, dtype: torch.dtype = torch.float32) -> StudentPath:
    """A random student: every gradient that training takes flows in it."""
    model, _ = load_base(base, TIER, dtype=dtype, packed=packed)
    model.set_experts_implementation("grouped_mm")
    torch.manual_seed(5)
    add_lora(model, TIER)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    heads = PrerouterHeads(TIER)
    return StudentPath(model, TIER, heads)


def trained_values(path: StudentPath) -> dict[str, torch.Tensor]:
    """Logits of the student path, and the gradients of LoRA and heads."""
    decoded_BT = torch.ones_like(ids(), dtype=torch.bool)
    hidden_BTH = path.hidden(ids(), path.predicted(decoded_BT), use_cache=False).last_hidden_state
    logits_BTV = path.model.lm_head(hidden_BTH)
    logits_BTV.float().log_softmax(-1)[..., 7].sum().backward()
    assert path.heads is not None
    parameters = {**dict(path.model.named_parameters()), **dict(path.heads.named_parameters())}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    assert sum("lora_" in name for name in gradients) == 2 * len(TIER.lora_modules())
    assert any(name.startswith("layers.") for name in gradients)
    return {"logits": logits_BTV.detach(), **gradients}


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_logits_and_gradients_are_those_of_a_materialised_base(base: Path, residency: Residency) -> None:
    dense, packed = trained_values(student(base, None)), trained_values(student(base, residency))
    assert dense.keys() == packed.keys()
    for name, value in dense.items():
        assert torch.equal(packed[name], value), name


def test_a_bfloat16_base_computes_with_the_same_rounded_values(base: Path) -> None:
    dense, _ = load_base(base, TIER, dtype=torch.bfloat16)
    packed, _ = load_base(base, TIER, dtype=torch.bfloat16, packed="device")
    with torch.no_grad():
        assert torch.equal(packed(ids()).logits, dense(ids()).logits)


def test_only_hit_experts_are_dequantised(base: Path) -> None:
    model, _ = load_base(base, TIER, packed="device")
    experts = next(module for module in model.modules() if isinstance(module, PackedExperts))
    lent: list[tuple[int, ...]] = []
    experts.inner.register_forward_pre_hook(lambda module, args: lent.append(tuple(module.gate_up_proj.shape)))
    hidden_NH = torch.randn(3, TIER.hidden_size)
    experts(hidden_NH, torch.tensor([[5, 2], [2, 5], [5, 7]]), torch.full((3, 2), 0.5))
    assert lent == [(3, 128, 64)]
    assert not hasattr(experts.inner, "gate_up_proj")


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_dequantisation_that_fails_midway_leaves_nothing_lent(
    base: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Three a pass: down, then gate and up, which are lent as one parameter."""
    model, _ = load_base(base, TIER, packed="device")
    experts = next(module for module in model.modules() if isinstance(module, PackedExperts))
    inputs = torch.randn(3, TIER.hidden_size), torch.tensor([[5, 2], [2, 5], [5, 7]]), torch.full((3, 2), 0.5)
    expected, before, calls, dense = experts(*inputs), set(vars(experts.inner)), 0, Codes.dense

    def exhausted(codes: Codes, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise torch.OutOfMemoryError("no room")
        return dense(codes, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Codes, "dense", exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            experts(*inputs)
    assert set(vars(experts.inner)) == before
    assert torch.equal(experts(*inputs), expected)


def saved_bytes(module: torch.nn.Module, *inputs: torch.Tensor) -> int:
    """Of what autograd keeps for backward when `module` runs."""
    sizes = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs)
    return sum(sizes)


def test_nothing_dequantised_is_kept_for_backward(base: Path) -> None:
    x_NH = torch.randn(2, TIER.hidden_size, requires_grad=True)
    routing = (torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5))
    kept = {}
    for packed in (None, "device"):
        model, _ = load_base(base, TIER, packed=packed)
        layer = model.model.layers[0]
        kept[packed] = (
            saved_bytes(layer.mlp.shared_expert.up_proj, x_NH),
            saved_bytes(layer.mlp.experts, x_NH, *routing),
        )
    matrix = 4 * 64 * 64
    assert kept[None][0] >= matrix and kept[None][1] >= 4 * 3 * matrix  # the measure sees a dense base's weights
    assert kept["device"][0] == 0 and kept["device"][1] <= x_NH.nbytes + sum(part.nbytes for part in routing)


def test_every_large_matrix_is_packed_and_the_count_of_values_stays(base: Path) -> None:
    dense, _ = load_base(base, TIER)
    packed, _ = load_base(base, TIER, packed="device")
    left = {name for name, p in packed.named_parameters() if p.ndim > 1}
    assert {name.split(".")[-2] for name in left} == {"gate", "conv1d"}
    assert unpacked_numel(packed) == sum(p.numel() for p in dense.parameters())
    assert isinstance(packed.get_input_embeddings(), PackedEmbedding)


def test_a_lora_can_be_switched_off_on_packed_modules(base: Path) -> None:
    path, (bare, _) = student(base, "device"), load_base(base, TIER)
    with torch.no_grad(), lora_disabled(path.model):
        assert torch.equal(path.model(ids()).logits, bare(ids()).logits)


def test_a_mapped_base_stays_on_disk(base: Path) -> None:
    model, _ = load_base(base, TIER, packed="disk")
    linear = next(module for module in model.modules() if isinstance(module, PackedLinear))
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "safetensors" in line}
    assert linear.weight.shape == (linear.out_features, linear.in_features)
    assert str(base / "model.safetensors") in mapped


def test_residency_without_packed_storage_is_refused(make_config: Make) -> None:
    with pytest.raises(Edge0Error, match=r"base\.residency: disk needs base\.storage=packed"):
        make_config("student_sft", "base.residency=disk")


def test_sft_trains_the_same_values_from_a_packed_base(make_config: Make, tmp_path: Path) -> None:
    small = ("optim.steps=2", "optim.rows=4", "optim.micro_rows=2", "sample.max_new_tokens=4", "logger.every=1")
    losses = []
    for storage in (
        "storage=bf16",
        "storage=packed",
        "storage=packed base.residency=disk base.gradient_checkpointing=true",
    ):
        overrides = [f"base.{part}" if "." not in part.split("=")[0] else part for part in storage.split()]
        config = make_config("student_sft", *small, *overrides, f"run_dir={tmp_path / str(len(losses))}")
        run = open_run(config)
        run.record_inputs(input_identity(config))
        student_sft(config, run)
        rows = (tmp_path / str(len(losses)) / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 2


def test_a_sketch_gives_the_plan_of_a_loaded_packed_base(make_config: Make) -> None:
    config = make_config("student_sft", "base.storage=packed")
    data, dropped = read_data(config.text.rows, config.text.max_length)
    rows = Rows.of_data(data, dropped)
    loaded = build_student(config, prerouter=input_path(config, "prerouter"), new_lora=True).path
    plan = _plan(config, sketch_student(config, lora=True, heads=True), rows)
    assert plan == _plan(config, loaded, rows)
    dense = _plan(make_config("student_sft"), sketch_student(make_config("student_sft"), lora=True, heads=True), rows)
    assert plan["parameters"] == dense["parameters"] and "int4 base" in plan["memory"]


BITS = """
import hashlib, sys
from pathlib import Path
from tests.train.test_packed import student, trained_values

path = student(Path(sys.argv[1]), "device")
values = trained_values(path)
print([name for name, _ in path.model.named_buffers()])
print(hashlib.sha256(b"".join(values[name].detach().numpy().tobytes() for name in sorted(values))).hexdigest())
"""


def test_a_packed_base_is_the_same_whatever_pythons_hash_seed(tmp_path: Path) -> None:
    """Names that were once held in a set: modules, their buffers, and where they lie in memory followed its order."""
    root = Path(__file__).parents[2]
    quantize_checkpoint(tiny_qwen3_5_moe(tmp_path / "hf"), tmp_path / "int4", TIER)
    command = [sys.executable, "-c", BITS, str(tmp_path / "int4")]
    told = [
        subprocess.run(
            command,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and len(told[0].splitlines()) == 2
