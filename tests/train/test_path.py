"""The student path against a slow plain reference (tests/reference_path.py), in parallel and token by token."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base.families import cpu_options
from edge0_train.base.names import transformers_module
from edge0_train.data.rows import TextRow, collate
from edge0_train.student import Decoding, PrerouterHeads, StudentPath, add_lora, generate, lora_disabled
from edge0_train.student.generate import StepRecord
from tests.reference_path import (
    BASE_K,
    LING,
    STICKY,
    TIER,
    TOKEN_AWARE,
    VARIANTS,
    as_sets,
    choose,
    close,
    make,
    random_heads,
    text_rows,
    timeline,
)

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


@pytest.mark.parametrize("name", ["35b", "executed-predicted", "8b", *TOKEN_AWARE, *STICKY])
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


# -- (b) parallel equals incremental -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["35b", "teacher-predicted", "8b", "sigmoid-executed-gate", "ling", "ling-executed-gate", *TOKEN_AWARE, *STICKY],
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


@pytest.mark.parametrize("name", ["35b", "8b", "ling", *TOKEN_AWARE, *STICKY])
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
    ids, options = collate(text_rows(), pad_id=0).input_ids_BT, cpu_options(tier.family)
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
        with pytest.raises(ValueError, match="this pass has run already"):
            path.hidden(second.input_ids_BT, routing, use_cache=False)
