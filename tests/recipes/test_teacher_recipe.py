"""The nano teachers' recipe at a few steps: what it saves loads, and its own pieces do what they say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from edge0_runtime.contract.tier import builtin_tier
from edge0_train.config import asset
from edge0_train.data.tasks import SHORT_TASKS, TASKS, Problem, problems
from recipes.nano import train_teacher
from recipes.nano.teacher import evaluation
from recipes.nano.teacher.checkpoint import build_model, load_checked, mlx_difference, save
from recipes.nano.teacher.evaluation import evaluate
from recipes.nano.teacher.families import BIAS_RATE, move_biases
from recipes.nano.teacher.optimiser import WARMUP, Muon, build_optimisers, lr_factor
from recipes.nano.teacher.rows import IM_END, ROW_TOKENS, build_tokenizer, check_tokenizer, encode_rows
from recipes.nano.teacher.training import Stage, train
from tests.tiny_ling import tiny_ling

NANO, LING_TIER = builtin_tier("nano"), builtin_tier("nano-ling")
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "mlp.gate.weight", "mlp.gate.expert_bias")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(seed=0)


@pytest.fixture(scope="module", params=[NANO, LING_TIER], ids=lambda tier: tier.name)
def built(request, tokenizer, tmp_path_factory):
    """(tier, trained model, directory, cost) after two steps; threads are put back."""
    tier, out = request.param, tmp_path_factory.mktemp("teacher")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = build_model(tier, seed=0)
    cost = train(tier, model, tokenizer, Stage(2, {SHORT_TASKS: 8, ("chain",): 1}), seed=0)
    save(tier, model, tokenizer, out)
    yield tier, model, out, cost
    torch.set_num_threads(threads)


def test_two_steps_train_and_report_their_cost(built):
    _, model, _, cost = built
    assert 0 < cost["loss"] < 10
    assert cost["balance"] >= 1
    assert cost["tokens"] > 2 * (8 * 20 + 150)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_directory_loads_in_transformers(tokenizer, built):
    _, model, out, _ = built
    check_tokenizer(tokenizer, out, problems("eval", 0, 64))
    loaded = load_checked(out)
    ids_BT, _, _ = encode_rows(tokenizer, problems("eval", 0, 2))
    with torch.no_grad():
        ours, theirs = model.eval()(ids_BT).logits, loaded(ids_BT).logits
    assert (ours - theirs).norm() < 0.05 * ours.norm()  # bf16 rounding is all that differs


def test_the_directory_loads_in_mlx_lm_with_the_same_logits(tokenizer, built):
    pytest.importorskip("mlx_lm")
    assert mlx_difference(load_checked(built[2]), tokenizer, built[2], seed=0) <= 1e-5


def test_the_embedded_teacher_is_of_this_configuration_and_tokenizer(built):
    tier, _, out, _ = built
    embedded = Path(asset(f"{tier.name}-teacher"))
    ours, theirs = (json.loads((where / "config.json").read_text()) for where in (out, embedded))
    assert ours | {"transformers_version": ""} == theirs | {"transformers_version": ""}
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (embedded / name).read_bytes()


def stored(directory):
    """{name: (shape, dtype)} of a saved model."""
    with safe_open(directory / "model.safetensors", "pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118, not a dict
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize("built", [NANO], indirect=True, ids=["nano"])
def test_nanos_layout_is_the_fused_one_under_language_model(built):
    found = stored(built[2])
    assert all(name.startswith("model.language_model.") for name in found)
    assert found["model.language_model.layers.0.mlp.experts.gate_up_proj"] == ((32, 128, 64), torch.bfloat16)
    assert {dtype for _, dtype in found.values()} == {torch.bfloat16}
    config = json.loads((built[2] / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    assert config["text_config"]["full_attention_interval"] == 4


@pytest.mark.parametrize("built", [LING_TIER], indirect=True, ids=["nano-ling"])
def test_lings_layout_is_the_published_originals(built, tmp_path):
    """The names and shapes that tests/tiny_ling.py spells out by hand."""
    found, reference = stored(built[2]), stored(tiny_ling(tmp_path, **LING_TIER.architecture))
    assert {name: shape for name, (shape, _) in found.items()} == {
        name: shape for name, (shape, _) in reference.items()
    }
    assert {name for name, (_, dtype) in found.items() if dtype == torch.float32} == {
        name for name in found if name.endswith(FLOAT32)
    }


def test_an_untrained_model_scores_nothing_and_every_task_is_counted(tokenizer, built):
    batch = [problems("eval", 0, 1, [task])[0] for task in TASKS]
    scores = evaluate(load_checked(built[2]), tokenizer, batch)
    assert scores == {**{task: (0, 1) for task in TASKS}, "all": (0, 5)}


def test_labels_cover_the_completion_only(tokenizer):
    problem = problems("train", 1, 1)[0]
    ids_BT, mask_BT, labels_BT = encode_rows(tokenizer, [problem])
    assert tokenizer.decode(labels_BT[labels_BT != -100]) == problem.completion + IM_END
    assert mask_BT.sum() == ids_BT.shape[1]


def test_a_row_over_the_limit_is_refused(tokenizer):
    long = Problem("add", "1" * 60, "2" * 20, "2")
    with pytest.raises(ValueError, match=r"a row has 9[0-9] tokens; shorten task add to at most 64"):
        encode_rows(tokenizer, [long])


def test_a_chain_may_have_a_long_row(tokenizer):
    ids_BT, _, _ = encode_rows(tokenizer, problems("train", 1, 2, ["chain"]))
    assert ROW_TOKENS["add"] < ids_BT.shape[1] <= ROW_TOKENS["chain"]


def test_a_bias_moves_against_its_experts_load_and_padding_counts_for_nothing():
    model = build_model(LING_TIER, seed=0)
    wanted = torch.arange(32).flip(0).float()  # expert 0 most, in a group with 1, 2 and 3
    layers = LING_TIER.layout.moe_layers(LING_TIER.architecture)
    logits_NE = wanted.div(8).expand(3, 32).clone()
    logits_NE[2] = logits_NE[2].flip(0)  # padding, which wants the others
    before = {layer: model.model.layers[layer].mlp.gate.e_score_correction_bias.clone() for layer in layers}
    penalty, unevenness = move_biases(LING_TIER, model, [logits_NE] * len(layers), torch.tensor([[1, 1, 0]]))
    assert penalty == 0 and unevenness == 32 / 8
    step_E = torch.where(torch.arange(32) < 8, -BIAS_RATE, BIAS_RATE)
    for layer in layers:
        bias_E = model.model.layers[layer].mlp.gate.e_score_correction_bias
        torch.testing.assert_close(bias_E - before[layer], step_E)


@pytest.mark.parametrize("built", [NANO], indirect=True, ids=["nano"])
def test_a_later_stage_can_start_from_what_an_earlier_one_left(tokenizer, built, tmp_path, monkeypatch):
    """Only the rest is trained, from the saved weights; card and scores tell of both kinds of tasks."""
    tier, model, _, cost = built
    save(tier, model, tokenizer, tmp_path / "stage1")
    (tmp_path / "stage1/cost.json").write_text(json.dumps(cost))
    last = Stage(1, {("chain",): 1}, rate=1e-9)
    monkeypatch.setitem(train_teacher.STAGES, tier.name, (train_teacher.STAGES["nano"][0], last))
    monkeypatch.setattr(train_teacher, "EVAL_COUNT", 4)
    monkeypatch.setattr(train_teacher, "EVAL_CHAINS", 1)
    monkeypatch.setattr(evaluation, "MAX_NEW_TOKENS", dict.fromkeys(TASKS, 2))
    out = tmp_path / "out"
    train_teacher.main(["--tier", tier.name, "--start", "1", "--work", str(tmp_path), "--out", str(out)])
    before, *after = (load_checked(tmp_path / name).state_dict() for name in ("stage1", "stage2", "out"))
    assert all(torch.equal(before[name], other[name]) for name in before for other in after)
    card = (out / "README.md").read_text()
    assert (
        "| 1 of chain | 1 | 1e-09 |" in card and "| short | 0.000 | 0/4 |" in card and "| chain | 0.000 | 0/1 |" in card
    )
    assert f"| 32 of add, reverse, multiply, word | 1400 | 1.0 | {cost['tokens']:,} |" in card


def test_muon_on_2d_tensors_equals_torch_muon():
    """torch's Muon iterates in bf16, hence the tolerance; the batched one works in the tensor's own dtype."""
    torch.manual_seed(0)
    start = [torch.randn(16, 8), torch.randn(8, 32), torch.randn(16, 8)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimisers = Muon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0)
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in start]
        for params, optimiser in zip((ours, theirs), optimisers, strict=True):
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient.clone()
            optimiser.step()
    for p, q, first in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() < 0.02 * (q - first).norm()


def test_muon_treats_each_expert_as_a_matrix():
    torch.manual_seed(0)
    gradient_ERC = torch.randn(3, 16, 8)
    stacked = torch.nn.Parameter(torch.zeros(3, 16, 8))
    single = [torch.nn.Parameter(torch.zeros(16, 8)) for _ in range(3)]
    stacked.grad = gradient_ERC
    for p, gradient in zip(single, gradient_ERC, strict=True):
        p.grad = gradient
    Muon([stacked], lr=0.1).step()
    Muon(single, lr=0.1).step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in single]))


def test_every_parameter_has_one_optimiser_and_the_vocabulary_is_adamws(built):
    model = built[1]
    muon, adamw = build_optimisers(model)
    owned = [[id(p) for group in o.param_groups for p in group["params"]] for o in (muon, adamw)]
    assert sorted(owned[0] + owned[1]) == sorted(id(p) for p in model.parameters())
    assert id(model.get_input_embeddings().weight) in owned[1]
    assert id(model.get_output_embeddings().weight) in owned[1]
    assert id(model.model.layers[1].mlp.experts.down_proj) in owned[0]


def test_the_rate_warms_up_and_ends_near_zero():
    factors = [lr_factor(step, 1000) for step in range(1000)]
    assert factors[0] == pytest.approx(1 / WARMUP)
    assert max(factors) == factors[WARMUP - 1]
    assert 0 < factors[-1] < 0.002
