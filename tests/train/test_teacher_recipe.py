"""The nano teacher's recipe at a few steps: what it saves loads, and its own pieces do what they say."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

RECIPE = Path(__file__).parents[2] / "recipes/nano/train_teacher.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("train_teacher", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(recipe, tmp_path_factory):
    """(recipe's tokenizer, trained model, directory, cost) after two steps; threads are put back."""
    out = tmp_path_factory.mktemp("teacher")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer = recipe.build_tokenizer(seed=0)
    model = recipe.build_model(seed=0)
    cost = recipe.train(model, tokenizer, recipe.Stage(2, {recipe.SHORT_TASKS: 8, ("chain",): 1}), seed=0)
    recipe.save(model, tokenizer, out)
    yield tokenizer, model, out, cost
    torch.set_num_threads(threads)


def test_two_steps_train_and_report_their_cost(recipe, built):
    _, model, _, cost = built
    assert 0 < cost["loss"] < 10
    assert cost["tokens"] > 2 * (8 * 20 + 150)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_directory_loads_in_transformers(recipe, built):
    tokenizer, model, out, _ = built
    recipe.check_tokenizer(tokenizer, out)
    loaded = recipe.load_checked(out)
    ids_BT, _, _ = recipe.encode_rows(tokenizer, recipe.problems("eval", 0, 2))
    with torch.no_grad():
        ours, theirs = model.eval()(ids_BT).logits, loaded(ids_BT).logits
    assert (ours - theirs).norm() < 0.05 * ours.norm()  # bf16 rounding is all that differs


def test_the_directory_loads_in_mlx_lm_with_the_same_logits(recipe, built):
    pytest.importorskip("mlx_lm")
    tokenizer, _, out, _ = built
    assert recipe.mlx_difference(recipe.load_checked(out), tokenizer, out) <= 1e-5


def test_the_layout_is_the_fused_one_under_language_model(built):
    _, _, out, _ = built
    with safe_open(out / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert all(name.startswith("model.language_model.") for name in names)
        experts_ERC = weights.get_tensor("model.language_model.layers.0.mlp.experts.gate_up_proj")
        assert experts_ERC.shape == (32, 128, 64)
        assert {weights.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    assert config["text_config"]["full_attention_interval"] == 4


def test_an_untrained_model_scores_nothing_and_every_task_is_counted(recipe, built):
    tokenizer, _, out, _ = built
    batch = [recipe.problems("eval", 0, 1, [task])[0] for task in recipe.TASKS]
    scores = recipe.evaluate(recipe.load_checked(out), tokenizer, batch)
    assert scores == {**{task: (0, 1) for task in recipe.TASKS}, "all": (0, 5)}


def test_labels_cover_the_completion_only(recipe, built):
    tokenizer = built[0]
    problem = recipe.problems("train", 1, 1)[0]
    ids_BT, mask_BT, labels_BT = recipe.encode_rows(tokenizer, [problem])
    assert tokenizer.decode(labels_BT[labels_BT != -100]) == problem.completion + recipe.IM_END
    assert mask_BT.sum() == ids_BT.shape[1]


def test_a_row_over_the_limit_is_refused(recipe, built):
    long = recipe.Problem("add", "1" * 60, "2" * 20, "2")
    with pytest.raises(ValueError, match=r"a row has 9[0-9] tokens; shorten task add to at most 64"):
        recipe.encode_rows(built[0], [long])


def test_a_chain_may_have_a_long_row(recipe, built):
    ids_BT, _, _ = recipe.encode_rows(built[0], recipe.problems("train", 1, 2, ["chain"]))
    assert recipe.ROW_TOKENS["add"] < ids_BT.shape[1] <= recipe.ROW_TOKENS["chain"]


def test_a_later_stage_can_start_from_what_an_earlier_one_left(recipe, built, tmp_path, monkeypatch):
    """Only the rest is trained, from the saved weights; card and scores tell of both kinds of tasks."""
    tokenizer, model, _, cost = built
    recipe.save(model, tokenizer, tmp_path / "stage1")
    (tmp_path / "stage1/cost.json").write_text(json.dumps(cost))
    last = recipe.Stage(1, {("chain",): 1}, rate=1e-9)
    monkeypatch.setattr(recipe, "STAGES", (recipe.STAGES[0], last))
    monkeypatch.setattr(recipe, "EVAL_COUNT", 4)
    monkeypatch.setattr(recipe, "EVAL_CHAINS", 1)
    monkeypatch.setattr(recipe, "MAX_NEW_TOKENS", dict.fromkeys(recipe.TASKS, 2))
    out = tmp_path / "out"
    recipe.main(["--start", "1", "--work", str(tmp_path), "--out", str(out)])
    before, *after = (recipe.load_checked(tmp_path / name).state_dict() for name in ("stage1", "stage2", "out"))
    assert all(torch.equal(before[name], other[name]) for name in before for other in after)
    card = (out / "README.md").read_text()
    assert (
        "| 1 of chain | 1 | 1e-09 |" in card and "| short | 0.000 | 0/4 |" in card and "| chain | 0.000 | 0/1 |" in card
    )
    assert f"| 32 of add, reverse, multiply, word | 1400 | 1.0 | {cost['tokens']:,} |" in card


def test_muon_on_2d_tensors_equals_torch_muon(recipe):
    """torch's Muon iterates in bf16, hence the tolerance; the batched one works in the tensor's own dtype."""
    torch.manual_seed(0)
    start = [torch.randn(16, 8), torch.randn(8, 32), torch.randn(16, 8)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimisers = recipe.Muon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0)
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in start]
        for params, optimiser in zip((ours, theirs), optimisers, strict=True):
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient.clone()
            optimiser.step()
    for p, q, first in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() < 0.02 * (q - first).norm()


def test_muon_treats_each_expert_as_a_matrix(recipe):
    torch.manual_seed(0)
    gradient_ERC = torch.randn(3, 16, 8)
    stacked = torch.nn.Parameter(torch.zeros(3, 16, 8))
    single = [torch.nn.Parameter(torch.zeros(16, 8)) for _ in range(3)]
    stacked.grad = gradient_ERC
    for p, gradient in zip(single, gradient_ERC, strict=True):
        p.grad = gradient
    recipe.Muon([stacked], lr=0.1).step()
    recipe.Muon(single, lr=0.1).step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in single]))


def test_every_parameter_has_one_optimiser_and_the_embedding_is_adamws(recipe, built):
    model = built[1]
    muon, adamw = recipe.build_optimisers(model)
    owned = [[id(p) for group in o.param_groups for p in group["params"]] for o in (muon, adamw)]
    assert sorted(owned[0] + owned[1]) == sorted(id(p) for p in model.parameters())
    assert id(model.get_input_embeddings().weight) in owned[1]
    assert id(model.model.layers[0].mlp.experts.down_proj) in owned[0]


def test_the_rate_warms_up_and_ends_near_zero(recipe):
    factors = [recipe.lr_factor(step, 1000) for step in range(1000)]
    assert factors[0] == pytest.approx(1 / recipe.WARMUP)
    assert max(factors) == factors[recipe.WARMUP - 1]
    assert 0 < factors[-1] < 0.002
