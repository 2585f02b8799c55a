"""`heads.predictability` and `heads.change_penalty`: value and gradient, what they must not change, no cut changes them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Router, Sticky
from edge0_train.adapters import input_path
from edge0_train.build import build_student
from edge0_train.cli import set_up_torch
from edge0_train.config import Config, Heads, configure
from edge0_train.data.rows import IGNORE, Batch, collate
from edge0_train.losses import SCORE_FLOOR, chunked, cross_entropy
from edge0_train.objectives import completion_loss, joint_parameters, lora_parameters
from edge0_train.objectives.student import routing_changes, routing_divergence, sft_loss
from edge0_train.phases.student_sft import student_sft
from edge0_train.run import open_run
from edge0_train.student import RoutingPass, StudentPath
from tests.train.conftest import Make, task_rows

SIGMOID = Router("sigmoid_group", n_group=4, topk_group=2, scaling=2.5)
SMALL = (
    "optim.warmup=0",
    "optim.steps=2",
    "optim.rows=8",
    "logger.every=1",
    "sample.max_new_tokens=2",
    "optim.lr=1e-3",
)


def weights(**heads: float) -> Heads:
    """The phase's settings of heads, with other weights."""
    return dataclasses.replace(configure("phase=student_sft").heads, **heads)


def make_path(make_config: Make, *overrides: str, router: Router | None = None) -> tuple[Config, StudentPath]:
    """A nano student whose heads and LoRA are random enough for every way of the gradient to carry something.

    A sigmoid `router` has an expert bias in every layer.
    """
    config = make_config("student_sft", *overrides)
    path = build_student(config, prerouter=input_path(config, "prerouter"), new_lora=True).path
    if router:
        path.tier = dataclasses.replace(path.tier, router=router)
    random = torch.Generator().manual_seed(3)
    if router:
        for layer in range(path.tier.num_layers):
            bias_E = 0.1 * torch.randn(path.tier.num_experts, generator=random)
            path.router(layer).register_buffer("e_score_correction_bias", bias_E)
    assert path.heads
    with torch.no_grad():
        for name, parameter in lora_parameters(path).items():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=random))
        for name, parameter in path.heads.named_parameters():
            if "linear_init" not in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    return config, path


def listening(path: StudentPath, batch: Batch) -> RoutingPass:
    """A pass on the student path that has run and kept its routers' logits."""
    routing = path.predicted(batch.decoded_BT, batch.start_BT)
    routing.keep_logits = True
    path.hidden(batch.input_ids_BT, routing, use_cache=False)
    assert not routing.features
    return routing


def divergence(path: StudentPath, batch: Batch) -> torch.Tensor:
    return routing_divergence(path, listening(path, batch))


def gradients(parameters: dict[str, torch.nn.Parameter], value: torch.Tensor) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(value, [*parameters.values()], allow_unused=True)
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


def plain_divergence(path: StudentPath, batch: Batch) -> float:
    """Python numbers, one token and layer at a time; routers are listened to by hooks of this test."""
    spoken: dict[int, torch.Tensor] = {}
    handles = [
        path.router(n).register_forward_hook(lambda _, __, out, n=n: spoken.__setitem__(n, out[0].detach().double()))
        for n in path.tier.consumers
    ]
    routing = path.predicted(batch.decoded_BT, batch.start_BT, capture=True)
    with torch.no_grad():
        path.hidden(batch.input_ids_BT, routing, use_cache=False)
    for handle in handles:
        handle.remove()
    width, total = batch.input_ids_BT.shape[1], 0.0
    assert path.heads
    for b, row in enumerate(batch.rows):
        for t in range(len(row.prompt_ids) + 1, row.length - 1):  # the first decode step keeps the gates
            for layer in path.tier.consumers:
                with torch.no_grad():
                    head = path.heads(layer - 1, routing.features[layer - 1][b, t]).double().tolist()
                router = spoken[layer][b * width + t].tolist()
                if path.tier.router.kind == "softmax_topk":
                    total += _softmax_kl(router, head)
                else:
                    total += _bits_kl(router, path.router(layer).e_score_correction_bias.tolist(), head)
    return total


def _softmax_kl(p: list[float], q: list[float]) -> float:
    log_p, log_q = ([x - math.log(sum(map(math.exp, logits))) for x in logits] for logits in (p, q))
    return sum(math.exp(a) * (a - b) for a, b in zip(log_p, log_q, strict=True))


def _bits_kl(p: list[float], bias: list[float], q: list[float]) -> float:
    """The gate chooses by score + bias, taken for a probability between SCORE_FLOOR and 1 - SCORE_FLOOR."""
    scores, predicted = ([1 / (1 + math.exp(-x)) for x in logits] for logits in (p, q))
    total = 0.0
    for score, shift, b in zip(scores, bias, predicted, strict=True):
        a = min(max(score + shift, SCORE_FLOOR), 1 - SCORE_FLOOR)
        total += a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))
    return total


@pytest.mark.parametrize("router", [None, SIGMOID])
def test_the_value_is_the_plain_kl_over_consumers_and_predicted_inputs(make_config, router):
    path = make_path(make_config, router=router)[1]
    batch = collate(task_rows("train", 3), 0)
    value = float(divergence(path, batch).detach())
    assert value == pytest.approx(plain_divergence(path, batch), rel=1e-4) and value > 1


def test_the_gradient_reaches_lora_and_joint_heads_and_is_the_slope(make_config):
    """Through the consumers' routers and the heads' features: all LoRA before the last of them, all heads that route."""
    config, path = make_path(make_config)
    batch = collate(task_rows("train", 1), 0)
    frozen = gradients(lora_parameters(path), divergence(path, batch))
    heads = joint_parameters(config, path.heads)
    parameters = lora_parameters(path) | heads
    found = gradients(parameters, divergence(path, batch))
    for name, value in frozen.items():  # heads that train along change nothing for the LoRA
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    silent = {name for name in parameters if name not in found or not bool(found[name].abs().sum() > 0)}
    behind = ("layers.6.mlp.shared_expert", "layers.7.")
    assert silent == {name for name in parameters if any(part in name for part in behind)}
    # Central differences uphill. Routed sets are constants of the gradient: the step is so small that none changes.
    random = torch.Generator().manual_seed(7)
    direction = {name: grad * torch.rand(grad.shape, generator=random) for name, grad in found.items()}
    slope = sum(float((found[name] * d).sum()) for name, d in direction.items())
    step = 2e-5 * float(divergence(path, batch).detach()) / slope
    values, routed = [], []
    with torch.no_grad():
        for size in (step, -2 * step):
            for name, d in direction.items():
                parameters[name] += size * d
            routing = listening(path, batch)
            values.append(float(routing_divergence(path, routing)))
            routed.append(torch.stack([*routing.executed.values()]).sort(-1).values)
    assert torch.equal(*routed)
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=2e-2)


@pytest.mark.parametrize("pack_length", [0, 96])
def test_gradient_checkpointing_changes_nothing(make_config, pack_length):
    batch = collate(task_rows("train", 4), 0, pack_length=pack_length)
    results = []
    for flag in ("false", "true"):
        config, path = make_path(make_config, f"base.gradient_checkpointing={flag}")
        parameters = lora_parameters(path) | joint_parameters(config, path.heads)
        value, said = sft_loss(path, batch, weights(predictability=0.1))
        value.backward()
        results.append((value.detach(), said, {n: p.grad for n, p in parameters.items()}))
    (want, want_said, wanted), (got, got_said, gotten) = results
    assert torch.equal(want, got) and want_said == got_said
    for name, grad in wanted.items():
        assert grad is not None
        torch.testing.assert_close(gotten[name], grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max() + 1e-12))


def test_two_threads_give_the_same_bits_again(make_config):
    config, path = make_path(make_config)
    set_up_torch(2, config.base.device)
    batch = collate(task_rows("train", 8), 0)
    parameters = lora_parameters(path) | joint_parameters(config, path.heads)
    first, *others = [gradients(parameters, sft_loss(path, batch, weights(predictability=0.1))[0]) for _ in range(4)]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_packed_documents_give_the_sum_of_the_rows_own(make_config):
    path = make_path(make_config)[1]
    rows = task_rows("train", 4)
    packed = divergence(path, collate(rows, 0, pack_length=96))
    alone = sum(float(divergence(path, collate([row], 0)).detach()) for row in rows)
    assert float(packed.detach()) == pytest.approx(alone, rel=1e-4)


def test_weight_0_is_bit_for_bit_the_loss_alone_and_a_weight_adds_to_it(make_config):
    path = make_path(make_config)[1]
    batch = collate(task_rows("train", 3), 0)
    parameters = lora_parameters(path)
    output = path.hidden(batch.input_ids_BT, path.predicted(batch.decoded_BT, batch.start_BT), use_cache=False)
    at_BT = batch.labels_BT != IGNORE
    plain = chunked(cross_entropy, output.last_hidden_state[at_BT], path.model.lm_head, batch.labels_BT[at_BT])
    value, said = sft_loss(path, batch, weights(predictability=0.0))
    assert torch.equal(value, plain) and said == {}
    want, got = gradients(parameters, plain), gradients(parameters, value)
    assert all(torch.equal(want[name], got[name]) for name in want)
    weighted, said = sft_loss(path, batch, weights(predictability=0.25))
    extra = divergence(path, batch)
    assert said == {
        "loss_alone": pytest.approx(float(plain.detach())),
        "routing_kl": pytest.approx(float(extra.detach())),
    }
    assert float(weighted.detach()) == pytest.approx(float((plain + 0.25 * extra).detach()))
    of_sum, of_extra = gradients(parameters, weighted), gradients(parameters, extra)
    for name, grad in of_sum.items():
        parts = want[name] + 0.25 * of_extra.get(name, torch.zeros_like(grad))
        assert float((grad - parts).norm()) <= 1e-3 * float(want[name].norm() + parts.norm()), name
    assert torch.equal(completion_loss(path, batch), plain)


@pytest.fixture
def trained(make_config: Make, tmp_path: Path) -> Callable[..., tuple[dict, list[dict]]]:
    def run(name: str, *overrides: str) -> tuple[dict, list[dict]]:
        config = make_config("student_sft", f"run_dir={tmp_path / name}", *SMALL, *overrides)
        student_sft(config, open_run(config))
        tensors = read_adapter(tmp_path / name / "lora_edge0_nano.safetensors", "lora").tensors
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return dict(tensors), rows

    return run


def test_any_cut_of_the_window_gives_the_same_training(trained):
    whole, rows = trained("1x8", "optim.micro_rows=8", "heads.predictability=0.1")
    halves, half_rows = trained("2x4", "optim.micro_rows=4", "heads.predictability=0.1")
    for a, b in zip(rows, half_rows, strict=True):
        for name in ("loss", "loss_alone", "routing_kl", "gradient_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
        assert a["loss"] == pytest.approx(a["loss_alone"] + 0.1 * a["routing_kl"])
    for name, value in whole.items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(halves[name]), rtol=2e-2, atol=2e-4)


def test_off_says_nothing(trained):
    assert not {"routing_kl", "loss_alone"} & {name for row in trained("off", "optim.steps=1")[1] for name in row}


def test_a_negative_weight_is_refused(make_config):
    with pytest.raises(Edge0Error, match=r"heads\.predictability: -1\.0 is below 0"):
        make_config("student_sft", "heads.predictability=-1")


# -- changes -----------------------------------------------------------------------------------------------------------


def plain_changes(path: StudentPath, batch: Batch, routing: RoutingPass, window: int) -> float:
    """Python numbers, one row, token and layer at a time, with sets."""
    total, softmax = 0.0, path.tier.router.kind == "softmax_topk"
    for b, row in enumerate(batch.rows):
        for t in range(len(row.prompt_ids) + 1, row.length - 1):
            for layer in path.tier.consumers:
                logits = routing.predictions[layer - 1][b, t].double().tolist()
                scores = [math.exp(z) if softmax else 1 / (1 + math.exp(-z)) for z in logits]
                recent = {e for before in routing.executed[layer][b, max(0, t - window) : t].tolist() for e in before}
                total += sum(s for e, s in enumerate(scores) if e not in recent) / sum(scores)
    return total


@pytest.mark.parametrize(
    ("router", "sticky", "window"), [(None, None, 2), (None, Sticky(2.0, 3), 3), (SIGMOID, Sticky(0.1, 1), 1)]
)
def test_changes_are_the_scores_of_what_did_not_run_a_moment_ago(make_config, router, sticky, window):
    path = make_path(make_config, router=router)[1]
    if sticky:
        path.tier = dataclasses.replace(path.tier, router=dataclasses.replace(path.tier.router, sticky=sticky))
    batch = collate(task_rows("train", 3), 0)
    routing = listening(path, batch)
    value = float(routing_changes(path, routing).detach())
    assert value == pytest.approx(plain_changes(path, batch, routing, window), rel=1e-5) and value > 1


def test_the_change_penalty_pulls_heads_to_what_ran_and_packing_sums_it(make_config):
    config, path = make_path(make_config)
    rows = task_rows("train", 4)
    packed = collate(rows, 0, pack_length=96)
    assert len(packed.rows) == 4 and len(packed.input_ids_BT) < 4, "two documents share a line"
    alone = sum(float(routing_changes(path, listening(path, collate([row], 0))).detach()) for row in rows)
    assert float(routing_changes(path, listening(path, packed)).detach()) == pytest.approx(alone, rel=1e-4)
    parameters = joint_parameters(config, path.heads) | lora_parameters(path)
    plain, said = sft_loss(path, packed, weights())
    weighed, said = sft_loss(path, packed, weights(change_penalty=0.1))
    assert float((weighed - plain).detach()) == pytest.approx(0.1 * said["changes"], rel=1e-3)
    found = gradients(parameters, routing_changes(path, listening(path, packed)))
    assert {name for name in parameters if name.endswith("fc2.weight")} <= found.keys()
    with torch.no_grad():
        for name, grad in found.items():
            parameters[name] -= 1e-3 * grad / (grad.norm() + 1e-12)
    assert float(routing_changes(path, listening(path, packed)).detach()) < said["changes"]
