"""The student path against a slow plain reference: one token at a time, no cache, every rule of docs/method.md 1.2-1.5 spelt out.

The reference shares nothing with the code under test but the base model: own timeline, own one-hots, own head formula, own router
mathematics, own hooks.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Router, Tier
from edge0_train.base.names import family_names, transformers_module
from edge0_train.data.rows import Batch, TextRow, collate
from edge0_train.student import Decoding, PrerouterHeads, StudentPath, add_lora, generate, lora_disabled
from edge0_train.student.generate import StepRecord
from tests.twins import TWINS

BASE_K = 4
NUMBERS: dict[str, Any] = {
    "num_hidden_layers": 6,  # 3 linear, 1 full attention, 2 linear
    "hidden_size": 32,
    "num_experts_per_tok": BASE_K,
    "moe_intermediate_size": 32,
    "vocab_size": 96,
}
TARGETS = [
    "linear_attn.in_proj_qkv", "linear_attn.in_proj_b", "linear_attn.out_proj", "self_attn.q_proj", "self_attn.o_proj",
    "mlp.shared_expert.gate_proj", "mlp.shared_expert.down_proj",
]  # fmt: skip
# Owner 4 has a head whose output nobody uses, as owner 38 of the 35b tier; layers 0, 1 and 5 keep their gates.
FIELDS: dict[str, Any] = {"owners": [1, 2, 3, 4], "consumers": [2, 3, 4], "head_width": 16, **NUMBERS}
TIER: Tier = TWINS["qwen3_5_moe"].tier(
    **FIELDS, shared_expert_intermediate_size=32, lora={"r": 4, "alpha": 8, "targets": TARGETS}
)
LING: Tier = TWINS["bailing_moe_v3"].tier(
    **FIELDS, k=3, lora={"r": 4, "alpha": 8, "targets": list(TWINS["bailing_moe_v3"].targets)}
)
SOFTMAX, SIGMOID = TIER.router, Router("sigmoid_group", n_group=4, topk_group=2, scaling=2.5)
VARIANTS = {
    "35b": TIER,
    "executed-predicted": dataclasses.replace(TIER, first_token="predicted"),
    "teacher-gate-base_k": dataclasses.replace(TIER, feature_topk="teacher", k=BASE_K),
    "teacher-predicted": dataclasses.replace(TIER, feature_topk="teacher", first_token="predicted"),
    "8b": dataclasses.replace(TIER, feature_topk="teacher", first_token="predicted", router=SIGMOID, k=3),
    "sigmoid-executed-gate": dataclasses.replace(TIER, router=SIGMOID),
    "token-aware-gate": dataclasses.replace(TIER, token_aware=True),
    "token-aware-predicted": dataclasses.replace(
        TIER, feature_topk="teacher", first_token="predicted", router=SIGMOID, k=3, token_aware=True
    ),
}
VARIANTS |= {
    "ling": LING,
    "ling-executed-gate": dataclasses.replace(LING, feature_topk="executed", first_token="gate"),
}
TOKEN_AWARE = ("token-aware-gate", "token-aware-predicted")
ROWS = [(1, 7), (2, 6), (5, 5), (6, 1)]  # (prompt, completion) lengths


# -- the reference -----------------------------------------------------------------------------------------------------


class Reference:
    """Token-by-token decoding without a cache.

    At every token the whole prefix runs again; the positions before keep the routing that they were given when they
    were processed, the new position is routed by the rules. Nothing is detached, so gradients can be compared too.
    """

    def __init__(self, model: torch.nn.Module, tier: Tier, heads: PrerouterHeads):
        self.model, self.tier = model, tier
        self.heads = {name: value.detach() for name, value in heads.state_dict().items()}
        self.layers = [n for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")]
        for layer in self.layers:
            model.model.layers[layer].mlp.gate.register_forward_hook(self._hook(layer))

    def run(self, ids: Sequence[int], decoded: Sequence[bool]) -> tuple[torch.Tensor, list[dict[int, set[int]]]]:
        """Final hidden states [T, H], and the executed sets {layer: experts} of every position."""
        layers, self.ids = self.layers, list(ids)
        self.predicted, self.has_previous = timeline(self.tier.first_token, decoded)
        self.chosen: dict[int, list[list[int]]] = {n: [] for n in layers}
        self.weights: dict[int, list[torch.Tensor]] = {n: [] for n in layers}
        self.hot: dict[int, list[torch.Tensor]] = {n: [] for n in layers}
        self.head_logits: dict[int, list[torch.Tensor]] = {n: [] for n in layers}
        hidden = []
        for t in range(len(ids)):
            output = self.model.model(input_ids=torch.tensor([list(ids[: t + 1])]), use_cache=False)
            hidden.append(output.last_hidden_state[0, t])
        return torch.stack(hidden), [{n: set(self.chosen[n][t]) for n in layers} for t in range(len(ids))]

    def _hook(self, layer: int):
        def route(gate: Any, args: Any, output: Any) -> Any:
            tier = self.tier
            hidden, own_logits = args[0].reshape(-1, tier.hidden_size), output[0]
            t = len(own_logits) - 1
            bias = getattr(gate, "e_score_correction_bias", None)
            own = choose(tier.router, own_logits[t], tier.k, bias)
            logits, chosen = own_logits[t], own
            if self.predicted[t] and layer in tier.consumers:
                logits = self.head_logits[layer - 1][t - 1]
                chosen = choose(tier.router, logits, tier.k, None)
            self.chosen[layer].append(chosen)
            self.weights[layer].append(mix(tier.router, logits, chosen))
            if layer in tier.owners:
                now = torch.zeros(tier.num_experts)
                for expert in chosen if tier.feature_topk == "executed" else own:
                    now[expert] = 1.0
                self.hot[layer].append(now)
                before = self.hot[layer][t - 1] if self.has_previous[t] else torch.zeros(tier.num_experts)
                x = torch.cat([hidden[t], now, before, self._next_token(t)])
                self.head_logits[layer].append(self._head(layer, x))
            return own_logits, torch.stack(self.weights[layer]), torch.tensor(self.chosen[layer])

        return route

    def _next_token(self, t: int) -> torch.Tensor:
        """What a token-aware head sees of input t + 1; what follows the last input is never used."""
        if not self.tier.token_aware:
            return torch.zeros(0)
        following = self.ids[t + 1] if t + 1 < len(self.ids) else 0
        embedding = self.model.model.embed_tokens.weight[following]
        return embedding / torch.sqrt((embedding**2).sum() / len(embedding) + 1e-6)

    def _head(self, owner: int, x: torch.Tensor) -> torch.Tensor:
        fc1, fc2, linear = (self.heads[f"layers.{owner}.{part}.weight"] for part in ("fc1", "fc2", "linear_init"))
        inner = fc1 @ x
        gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        return fc2 @ gelu + linear @ x


def timeline(first_token: str, decoded: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """(routed by prediction, previous one-hot is the position before's) as a little state machine (docs/method.md 1.4)."""
    predicted, has_previous, steps = [], [], 0
    for t, is_decoded in enumerate(decoded):
        steps = steps + 1 if is_decoded else 0  # 1 at the first decode step of a reply
        if first_token == "gate":
            by_head = steps > 1
        else:
            by_head = steps > 0 and t > 0
        predicted.append(by_head)
        has_previous.append(by_head if first_token == "gate" else t > 0)
    return predicted, has_previous


def choose(router: Router, logits: torch.Tensor, k: int, bias: torch.Tensor | None) -> list[int]:
    score = [1 / (1 + math.exp(-x)) for x in logits.tolist()] if router.kind == "sigmoid_group" else logits.tolist()
    if bias is not None:
        score = [s + b for s, b in zip(score, bias.tolist(), strict=True)]
    allowed = list(range(len(score)))
    if router.kind == "sigmoid_group":
        size = len(score) // router.n_group
        groups = [allowed[g * size : (g + 1) * size] for g in range(router.n_group)]
        groups.sort(key=lambda group: -sum(sorted(score[e] for e in group)[-2:]))
        allowed = [e for group in groups[: router.topk_group] for e in group]
    return sorted(allowed, key=lambda e: -score[e])[:k]


def mix(router: Router, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    """Mixing weights, differentiable in the logits."""
    if router.kind == "sigmoid_group":
        score = [1 / (1 + torch.exp(-logits[e])) for e in chosen]
        total = sum(score) + 1e-20  # type: ignore[operator]
        return torch.stack([2.5 * s / total for s in score])
    score = [torch.exp(logits[e] - logits.max().detach()) for e in chosen]
    return torch.stack([s / sum(score) for s in score])  # type: ignore[arg-type]


# -- the models --------------------------------------------------------------------------------------------------------


Models = dict[str, torch.nn.Module]  # by family


@pytest.fixture(scope="module")
def bases() -> Models:
    """Of Ling's seeds 0 is ill-conditioned: a delta rule's output near zero before its norm (float error 1e-4)."""
    return {tier.family: TWINS[tier.family].random(tier, seed=seed) for tier, seed in ((TIER, 0), (LING, 1))}


@pytest.fixture(scope="module")
def base(bases: Models) -> torch.nn.Module:
    return bases[TIER.family]


@pytest.fixture(scope="module")
def adapted(bases: Models) -> Models:
    """The bases with a LoRA whose B is not zero."""
    models = {tier.family: add_lora(copy.deepcopy(bases[tier.family]), tier) for tier in (TIER, LING)}
    torch.manual_seed(1)
    for model in models.values():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return models


def random_heads(tier: Tier) -> PrerouterHeads:
    heads = PrerouterHeads(tier)
    torch.manual_seed(2)
    for name, parameter in heads.named_parameters():
        scale = {"fc1": 1.0, "fc2": 3.0, "linear_init": 2.0}[name.split(".")[2]]
        parameter.data = scale * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
        parameter.requires_grad_(False)
    return heads


def make(adapted: Models, tier: Tier) -> tuple[StudentPath, Reference]:
    """The path and the reference, each on its own copy of the model; a sigmoid rule has a bias on every gate."""
    heads, models = random_heads(tier), [copy.deepcopy(adapted[tier.family]) for _ in range(2)]
    if tier.router.kind == "sigmoid_group" and tier.family == TIER.family:
        torch.manual_seed(3)
        for layer in range(tier.num_layers):
            bias = 0.3 * torch.randn(tier.num_experts)
            for model in models:
                model.model.layers[layer].mlp.gate.register_buffer("e_score_correction_bias", bias)
    return StudentPath(models[0], tier, heads), Reference(models[1], tier, heads)


def text_rows(lengths: Sequence[tuple[int, int]] = ROWS, seed: int = 4) -> list[TextRow]:
    random = torch.Generator().manual_seed(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, NUMBERS["vocab_size"], (n,), generator=random).tolist())

    return [TextRow(ids(prompt), ids(completion), "length") for prompt, completion in lengths]


def as_sets(executed: dict[int, torch.Tensor], row: int, t: int) -> dict[int, set[int]]:
    return {layer: set(indices[row, t].tolist()) for layer, indices in executed.items()}


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


# -- (a) parallel equals the reference ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_parallel_pass_equals_decoding_token_by_token(adapted, name):
    """Prompts of 1, 2 and more tokens in one right-padded batch."""
    tier = VARIANTS[name]
    path, reference = make(adapted, tier)
    rows = text_rows()
    batch = collate(rows, pad_id=0)
    with torch.no_grad():
        routing = path.predicted(batch.decoded_BT, capture=True)
        hidden_BTH = path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state
        differing = total = 0
        for row, data in enumerate(rows):
            ids = [*data.prompt_ids, *data.completion_ids][:-1]
            decoded = [t >= len(data.prompt_ids) for t in range(len(ids))]
            want_TH, want_sets = reference.run(ids, decoded)
            for t in range(len(ids)):
                assert as_sets(routing.executed, row, t) == want_sets[t], (row, t)
                for layer in tier.consumers:
                    if reference.predicted[t]:
                        logits = routing.router_logits[layer][row, t]
                        gate = path.router(layer)
                        own = choose(tier.router, logits, tier.k, getattr(gate, "e_score_correction_bias", None))
                        total, differing = total + 1, differing + (set(own) != want_sets[t][layer])
            close(hidden_BTH[row, : len(ids)], want_TH)
    assert total > 20 and differing > total / 3, "the heads agree with the gates: the test would prove nothing"


@pytest.mark.parametrize("name", ["35b", "executed-predicted", "8b", *TOKEN_AWARE])
def test_several_replies_in_one_row(adapted, name):
    """Each run of decoded inputs is a reply of its own; also one that starts at input 0 and a prompt of one token between two."""
    path, reference = make(adapted, VARIANTS[name])
    for flags in ("001110110011", "000111101111", "111011"):
        decoded = [flag == "1" for flag in flags]
        ids = text_rows([(len(flags), 1)])[0].prompt_ids
        with torch.no_grad():
            routing = path.predicted(torch.tensor([decoded]))
            hidden_BTH = path.hidden(torch.tensor([ids]), routing, use_cache=False).last_hidden_state
            want_TH, want_sets = reference.run(ids, decoded)
        assert [as_sets(routing.executed, 0, t) for t in range(len(ids))] == want_sets
        close(hidden_BTH[0], want_TH)


def test_a_lora_target_that_the_model_lacks_is_named(bases):
    """The tier knows two layers more than the model has: nothing is adapted in silence."""
    deeper = dataclasses.replace(TIER, architecture={**TIER.architecture, "num_hidden_layers": 8})
    with pytest.raises(Edge0Error, match=r"tier\.lora\.targets: PEFT matched \d+ modules, .*missing .*layers\.6"):
        add_lora(copy.deepcopy(bases[TIER.family]), deeper)


@pytest.mark.parametrize("tier", [TIER, LING], ids=lambda tier: tier.family)
def test_lora_adds_alpha_over_r_times_b_a(bases, adapted, tier):
    """On linear attention, full attention, (the dense MLP) and shared experts."""
    modules = {transformers_module(tier.family, path) for path in tier.lora_modules()}
    assert len(modules) == (5 * 3 + 1 * 2 + 6 * 2 if tier is TIER else 5 * 5 + 1 * 4 + 2 + 5)
    for name in sorted(modules):
        plain, lora = bases[tier.family].get_submodule(name), adapted[tier.family].get_submodule(name)
        x = torch.randn(7, plain.in_features, generator=torch.Generator().manual_seed(5))
        a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
        close(lora(x), x @ plain.weight.T + 2.0 * (x @ a.T) @ b.T)


@pytest.mark.parametrize("name", ["35b", "8b", "ling", *TOKEN_AWARE])
def test_features_of_a_native_pass_are_what_decoding_would_capture(adapted, name):
    """Phase 1: own gates throughout, with the decode timeline's previous one-hots; at t stands what predicts input t."""
    tier = VARIANTS[name]
    path, _ = make(adapted, tier)
    batch = collate(text_rows(), pad_id=0)
    with torch.no_grad():
        routing = path.native(tier.k, batch.decoded_BT, capture=True)
        path.hidden(batch.input_ids_BT, routing, use_cache=False)
    for row, decoded in enumerate(batch.decoded_BT.tolist()):
        _, has_previous = timeline(tier.first_token, decoded)
        for owner in tier.owners:
            bias = getattr(path.router(owner), "e_score_correction_bias", None)
            assert not routing.features[owner][row, 0, :48].any()
            for t in range(len(decoded) - 1):
                own = choose(tier.router, routing.router_logits[owner][row, t], tier.k, bias)
                assert set(own) == set(routing.executed[owner][row, t].tolist())
                features = routing.features[owner][row, t + 1]
                close(features[:32] @ path.router(owner).weight.T, routing.router_logits[owner][row, t])
                assert set(features[32:40].nonzero()[:, 0].tolist()) == set(own)
                before = set(routing.executed[owner][row, t - 1].tolist()) if has_previous[t] else set()
                assert set(features[40:48].nonzero()[:, 0].tolist()) == before
                assert len(features) == (80 if tier.token_aware else 48)
                if tier.token_aware:
                    embedding = path.model.model.embed_tokens.weight[batch.input_ids_BT[row, t + 1]]
                    close(features[48:], embedding / (embedding.square().mean() + 1e-6).sqrt())


@pytest.mark.parametrize("name", ["35b", "token-aware-gate"])
def test_only_a_token_aware_head_sees_the_token_that_is_being_routed(adapted, name):
    """Two texts that differ in the last input alone."""
    path, _ = make(adapted, VARIANTS[name])
    ids = list(text_rows([(8, 1)])[0].prompt_ids)
    with torch.no_grad():
        predictions = []
        for last in (5, 6):
            routing = path.predicted(torch.arange(8)[None] >= 3)
            path.hidden(torch.tensor([[*ids[:-1], last]]), routing, use_cache=False)
            predictions.append(torch.stack([routing.predictions[n][0] for n in TIER.owners]))
    close(predictions[0][:, :-1], predictions[1][:, :-1])
    same = [torch.allclose(a, b, atol=1e-4) for a, b in zip(predictions[0][:, -1], predictions[1][:, -1], strict=True)]
    assert same == [name == "35b"] * len(TIER.owners)


@pytest.mark.parametrize("name", ["35b", "token-aware-gate"])
def test_warm_started_heads_apply_the_next_router_and_nothing_else(base, name):
    tier = VARIANTS[name]
    path = StudentPath(copy.deepcopy(base), tier)
    heads = PrerouterHeads(tier)
    heads.warm_start(lambda layer: path.router(layer).weight)
    x = torch.randn(5, tier.head_input, generator=torch.Generator().manual_seed(8))
    for owner in tier.owners:
        close(heads(owner, x), x[:, :32] @ path.router(owner + 1).weight.T)
    assert {key: value.shape for key, value in heads.tensors().items()} == tier.head_tensors()


# -- packing -----------------------------------------------------------------------------------------------------------

PACKED = [(1, 7), (2, 2), (1, 1), (5, 5), (2, 1), (3, 6), (1, 2)]
"""Rows shorter than the short convolution's kernel among them."""


@pytest.mark.parametrize("name", ["35b", "executed-predicted", "8b", "ling", *TOKEN_AWARE])
def test_packed_rows_equal_decoding_each_alone(adapted, name):
    """Nothing crosses a document's boundary: attention, delta rule, short convolution, prerouter shift, one-hots."""
    path, reference = make(adapted, VARIANTS[name])
    rows = text_rows(PACKED)
    batch = collate(rows, pad_id=0, pack_length=16)
    assert 1 < len(batch.input_ids_BT) < len(rows)
    with torch.no_grad():
        routing = path.predicted(batch.decoded_BT, batch.start_BT)
        hidden_BTH = path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state
    for row, (line, at) in zip(batch.rows, places(batch), strict=True):
        ids = [*row.prompt_ids, *row.completion_ids][:-1]
        assert batch.input_ids_BT[line, at : at + len(ids)].tolist() == ids
        with torch.no_grad():
            want_TH, want_sets = reference.run(ids, [t >= len(row.prompt_ids) for t in range(len(ids))])
        assert [as_sets(routing.executed, line, at + t) for t in range(len(ids))] == want_sets
        close(hidden_BTH[line, at : at + len(ids)], want_TH, 3e-5)


@pytest.mark.parametrize("name", ["35b", "ling"])
def test_packed_gradients_equal_the_sum_of_the_rows_own(adapted, name):
    path, _ = make(adapted, VARIANTS[name])
    rows = text_rows(PACKED)
    sums = []
    for pack_length in (0, 16):
        batch = collate(rows, pad_id=0, pack_length=pack_length)
        routing = path.predicted(batch.decoded_BT, batch.start_BT)
        hidden_BTH = path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state
        spots = dict(zip(batch.rows, places(batch), strict=True))
        parts = [hidden_BTH[line, at : at + row.length - 1] for row, (line, at) in ((row, spots[row]) for row in rows)]
        probe(torch.cat(parts)).backward()
        sums.append(gradients(path.model))
    for key in sums[0]:
        close(sums[1][key], sums[0][key], 1e-4)


def places(batch: Batch) -> list[tuple[int, int]]:
    """(line, first input) of every row, in the batch's order; a start with other ids than the next row's is padding."""
    found: list[tuple[int, int]] = []
    for line, at in batch.start_BT.nonzero().tolist():
        row = batch.rows[min(len(found), len(batch.rows) - 1)]
        ids = [*row.prompt_ids, *row.completion_ids][:-1]
        if len(found) < len(batch.rows) and batch.input_ids_BT[line, at : at + len(ids)].tolist() == ids:
            found.append((line, at))
    return found


# -- (b) parallel equals incremental -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["35b", "teacher-predicted", "8b", "sigmoid-executed-gate", "ling", "ling-executed-gate", *TOKEN_AWARE]
)
def test_generate_equals_the_parallel_pass(adapted, name):
    """Ragged prompts, left padding, cache: the same ids, executed sets and logits at every step."""
    tier = VARIANTS[name]
    path, reference = make(adapted, tier)
    prompts = [row.prompt_ids for row in text_rows([(1, 1), (2, 1), (5, 1), (9, 1)])]
    records: list[StepRecord] = []
    with torch.no_grad():
        done = generate(path, prompts, Decoding(8), end_ids=(), pad_id=0, observe=records.append)
        rows = [TextRow(prompt, d.ids, "length") for prompt, d in zip(prompts, done, strict=True)]
        batch = collate(rows, pad_id=0)
        routing = path.predicted(batch.decoded_BT)
        hidden_BTH = path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state
        logits_BTV = path.model.lm_head(hidden_BTH)
    assert [record.step for record in records] == list(range(8))
    for row, prompt in enumerate(prompts):
        assert len(done[row].ids) == 8 and done[row].finish_reason == "length"
        for position in range(len(prompt)):
            left = max(map(len, prompts)) - len(prompt) + position
            assert as_sets(records[0].routing.executed, row, left) == as_sets(routing.executed, row, position)
        for record in records:
            t = len(prompt) - 1 + record.step
            close(record.logits_BV[row], logits_BTV[row, t], 2e-5)
            assert done[row].ids[record.step] == int(logits_BTV[row, t].argmax())
            assert as_sets(record.routing.executed, row, -1) == as_sets(routing.executed, row, t), (row, t)
    with torch.no_grad():  # and, for the shortest prompt, the reference
        ids = [*prompts[0], *done[0].ids][:-1]
        want_TH, want_sets = reference.run(ids, [t >= 1 for t in range(len(ids))])
        assert [as_sets(r.routing.executed, 0, -1) for r in records] == want_sets
        assert [int(x) for x in reference.model.lm_head(want_TH).argmax(-1)] == list(done[0].ids)


def test_a_finished_row_changes_nothing_for_the_others(adapted):
    """A row stops at its end token; the rest goes on as if it were alone."""
    path, _ = make(adapted, TIER)
    prompts = [row.prompt_ids for row in text_rows([(3, 1), (6, 1)])]
    free = generate(path, prompts, Decoding(9), end_ids=(), pad_id=0)
    end = next(t for t in free[0].ids[1:5] if t not in free[1].ids)
    stop = free[0].ids.index(end) + 1
    done = generate(path, prompts, Decoding(9), end_ids=(end,), pad_id=0)
    assert done[0].ids == free[0].ids[:stop] and done[0].finish_reason == "stop"
    assert done[1].ids == free[1].ids and done[1].finish_reason == "length"
    alone = generate(path, prompts[:1], Decoding(9), end_ids=(end,), pad_id=end)
    assert alone[0] == done[0]


def test_native_generation_is_the_bare_models_greedy_text(base):
    path = StudentPath(copy.deepcopy(base), TIER)
    prompt = text_rows([(4, 1)])[0].prompt_ids
    done = generate(path, [prompt], Decoding(6), end_ids=(), pad_id=0, native_k=BASE_K)[0]
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(base(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert list(done.ids) == ids[4:]


def test_sampling_follows_the_models_distribution(adapted):
    """Temperature and top-p against hand-made frequencies; the same generator gives the same text."""
    path, _ = make(adapted, TIER)
    prompt = text_rows([(3, 1)])[0].prompt_ids
    records: list[StepRecord] = []
    generate(path, [prompt], Decoding(1), end_ids=(), pad_id=0, observe=records.append)
    p = (records[0].logits_BV[0].double() / 0.7).softmax(-1)
    order = sorted(range(len(p)), key=lambda v: -float(p[v]))
    kept: list[int] = []
    while sum(float(p[v]) for v in kept) < 0.8:
        kept.append(order[len(kept)])
    random = torch.Generator().manual_seed(0)
    many = generate(path, [prompt] * 400, Decoding(1, 0.7, 0.8), end_ids=(), pad_id=0, generator=random)
    drawn = [d.ids[0] for d in many]
    assert set(drawn) <= set(kept)
    mass = sum(float(p[v]) for v in kept)
    for v in kept[:5]:
        expected = float(p[v]) / mass
        assert drawn.count(v) / 400 == pytest.approx(expected, abs=4 * math.sqrt(expected / 400))
    twice = [
        generate(path, [prompt], Decoding(5, 1.0), end_ids=(), pad_id=0, generator=torch.Generator().manual_seed(9))
        for _ in range(2)
    ]
    assert twice[0] == twice[1]


# -- (c) rows do not see each other ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["35b", "8b", "ling", *TOKEN_AWARE])
def test_a_row_of_a_batch_equals_the_row_alone(adapted, name):
    path, _ = make(adapted, VARIANTS[name])
    rows = text_rows()
    together = collate(rows, pad_id=0)
    with torch.no_grad():
        routing = path.predicted(together.decoded_BT)
        hidden_BTH = path.hidden(together.input_ids_BT, routing, use_cache=False).last_hidden_state
        for i, row in enumerate(rows):
            one = collate([row], pad_id=0)
            alone = path.predicted(one.decoded_BT)
            own_BTH = path.hidden(one.input_ids_BT, alone, use_cache=False).last_hidden_state
            length = row.length - 1
            close(hidden_BTH[i, :length], own_BTH[0])
            for layer in routing.executed:
                assert torch.equal(
                    routing.executed[layer][i, :length].sort(-1).values, alone.executed[layer][0].sort(-1).values
                )
        prompts = [row.prompt_ids for row in rows]
        batched = generate(path, prompts, Decoding(5), end_ids=(), pad_id=0)
        assert batched == [generate(path, [p], Decoding(5), end_ids=(), pad_id=0)[0] for p in prompts]


# -- (d) native passes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [TIER, LING], ids=lambda tier: tier.family)
def test_native_pass_at_the_models_k_is_the_bare_model_bit_for_bit(bases, tier):
    base = bases[tier.family]
    path = StudentPath(copy.deepcopy(base), tier, random_heads(tier))
    ids, options = collate(text_rows(), pad_id=0).input_ids_BT, family_names(tier.family).cpu_options
    with torch.no_grad():
        got = path.hidden(ids, path.native(BASE_K), use_cache=False).last_hidden_state
        assert torch.equal(got, base.model(input_ids=ids, use_cache=False, **options).last_hidden_state)
        fewer = path.hidden(ids, path.native(2), use_cache=False).last_hidden_state
        bare = copy.deepcopy(base)
        for n in tier.layout.moe_layers(tier.architecture):
            bare.model.layers[n].mlp.gate.top_k = 2
        assert torch.equal(fewer, bare.model(input_ids=ids, use_cache=False, **options).last_hidden_state)
        assert not torch.equal(fewer, got)


def test_native_passes_do_not_depend_on_what_the_student_did_before(base, adapted):
    """The teacher's pass: bit-equal before, between and after student passes, with the LoRA switched off."""
    path, _ = make(adapted, TIER)
    batch = collate(text_rows(), pad_id=0)
    ids = batch.input_ids_BT
    with torch.no_grad():
        want = base.model(input_ids=ids, use_cache=False).last_hidden_state
        student = path.hidden(ids, path.predicted(batch.decoded_BT), use_cache=False).last_hidden_state
        generate(path, [row.prompt_ids for row in text_rows()], Decoding(3), end_ids=(), pad_id=0)
        with lora_disabled(path.model):
            assert torch.equal(path.hidden(ids, path.native(BASE_K), use_cache=False).last_hidden_state, want)
        again = path.hidden(ids, path.predicted(batch.decoded_BT), use_cache=False).last_hidden_state
    assert torch.equal(student, again) and not torch.equal(student, want)
    assert all(p.requires_grad == ("lora_" in name) for name, p in path.model.named_parameters())


def test_predicted_pass_without_heads_is_refused(base):
    path = StudentPath(copy.deepcopy(base), TIER)
    with pytest.raises(ValueError, match="heads"):
        path.hidden(torch.tensor([[1, 2]]), path.predicted(torch.tensor([[False, True]])))


def test_a_used_pass_is_refused(adapted):
    """A RoutingPass belongs to one forward: a second one would silently run the first one's experts."""
    path, _ = make(adapted, TIER)
    first, second = (collate(text_rows(seed=seed), pad_id=0) for seed in (4, 40))
    routing = path.predicted(first.decoded_BT)
    with torch.no_grad():
        path.hidden(first.input_ids_BT, routing, use_cache=False)
        with pytest.raises(ValueError):
            path.hidden(second.input_ids_BT, routing, use_cache=False)


# -- (e) gradients -----------------------------------------------------------------------------------------------------


def lora(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in lora(model).items()}  # type: ignore[union-attr]
    model.zero_grad(set_to_none=True)
    return found


def probe(hidden_TH: torch.Tensor) -> torch.Tensor:
    """A scalar that every position takes part in."""
    weight = torch.randn(hidden_TH.shape, generator=torch.Generator().manual_seed(6))
    return (hidden_TH * weight).sum()


def path_value(path: StudentPath, row: TextRow) -> torch.Tensor:
    batch = collate([row], pad_id=0)
    routing = path.predicted(batch.decoded_BT)
    return probe(path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_lora_gradient_equals_the_references(adapted, name):
    """Including the part that reaches the LoRA of layer N at t-1 through the head and layer N+1's mixing weights."""
    path, reference = make(adapted, VARIANTS[name])
    row = text_rows([(3, 7)])[0]
    path_value(path, row).backward()
    ids = [*row.prompt_ids, *row.completion_ids][:-1]
    probe(reference.run(ids, [t >= 3 for t in range(len(ids))])[0]).backward()
    got, want = gradients(path.model), gradients(reference.model)
    assert got.keys() == want.keys() and len(got) > 20
    for key in got:
        close(got[key], want[key], 2e-4)
        assert float(want[key].abs().max()) > 0


def test_lora_gradient_equals_finite_differences(adapted):
    path, _ = make(adapted, TIER)
    row = text_rows([(3, 7)])[0]
    path_value(path, row).backward()
    gradient = gradients(path.model)
    random = torch.Generator().manual_seed(7)
    direction = {n: torch.randn(p.shape, generator=random) for n, p in lora(path.model).items()}
    slope = sum(float((gradient[n] * d).sum()) for n, d in direction.items())
    values = []
    with torch.no_grad():
        for step in (1e-4, -1e-4):
            for name, p in lora(path.model).items():
                p += step * direction[name]
            values.append(float(path_value(path, row).double()))
            for name, p in lora(path.model).items():
                p -= step * direction[name]
    assert (values[0] - values[1]) / 2e-4 == pytest.approx(slope, rel=1e-2)


def test_heads_train_through_the_path_only_if_asked(adapted):
    path, _ = make(adapted, TIER)
    row = text_rows([(3, 7)])[0]
    path_value(path, row).backward()
    assert path.heads is not None and all(p.grad is None for p in path.heads.parameters())
    path.heads.requires_grad_(True)
    path_value(path, row).backward()
    for owner in TIER.owners:
        grad = path.heads.layers[str(owner)].fc1.weight.grad
        used = owner + 1 in TIER.consumers
        assert (grad is not None and bool(grad.abs().sum() > 0)) == used, owner


# -- (f) gradient checkpointing ----------------------------------------------------------------------------------------


@contextmanager
def experts_calls(path: StudentPath) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Experts that really ran, by layer and call: once in forward, once more when a layer is recomputed."""
    layers = path.tier.layout.moe_layers(path.tier.architecture)
    calls: dict[int, list[torch.Tensor]] = {n: [] for n in layers}
    handles = [
        path.model.model.layers[n].mlp.experts.register_forward_pre_hook(lambda _, args, n=n: calls[n].append(args[1]))
        for n in calls
    ]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["35b", "8b", "ling", *TOKEN_AWARE])
def test_gradient_checkpointing_gives_the_same_gradients_and_experts(adapted, name):
    path, _ = make(adapted, VARIANTS[name])
    row = text_rows([(3, 7)])[0]
    plain_value = path_value(path, row)
    plain_value.backward()
    want = gradients(path.model)
    path.model.activation_checkpointing_enable({"use_reentrant": False})
    path.model.train()
    with experts_calls(path) as calls:
        value = path_value(path, row)
        value.backward()
    assert torch.equal(value, plain_value)
    got = gradients(path.model)
    for key in want:
        close(got[key], want[key], 1e-6)
    for layer, indices in calls.items():
        assert len(indices) == 2, f"layer {layer} was not recomputed"
        assert torch.equal(indices[0], indices[1])


def test_recompute_keeps_the_experts_even_when_the_gate_would_change_its_mind(adapted):
    """Rounding may flip a near-tie between forward and recompute; here the gates are turned round to force it."""
    path, _ = make(adapted, TIER)
    row = text_rows([(3, 7)])[0]
    path.model.activation_checkpointing_enable({"use_reentrant": False})
    path.model.train()
    with experts_calls(path) as calls:
        value = path_value(path, row)
        for layer in range(TIER.num_layers):
            path.router(layer).weight.data.neg_()
        value.backward()
    assert all(torch.equal(*indices) for indices in calls.values())
