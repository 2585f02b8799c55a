"""A tier is read strictly, and everything derived from it follows from its numbers."""

from __future__ import annotations

import copy
import json
import re

import pytest

from edge0_runtime.contract import Edge0Error, Tier, builtin_tier, builtin_tier_names, family
from edge0_runtime.inspection import describe_tier, tier_text


def refused(data: dict, *reasons: str) -> None:
    with pytest.raises(Edge0Error) as error:
        Tier.from_dict(data)
    for reason in reasons:
        assert reason in str(error.value)


@pytest.fixture
def data(nano) -> dict:
    """The nano tier as plain data, to be damaged."""
    return copy.deepcopy(nano.to_dict())


def grouped(data: dict, **router) -> dict:
    return data | {"router": {"kind": "sigmoid_group", "n_group": 8, "topk_group": 4, "scaling": 2.5} | router}


# -- reading


@pytest.mark.parametrize("name", ["35b", "8b", "nano"])
def test_a_built_in_tier_survives_json(name):
    assert name in builtin_tier_names()
    tier = builtin_tier(name)
    assert Tier.from_dict(json.loads(json.dumps(tier.to_dict()))) == tier


@pytest.mark.parametrize(("small", "large"), [("nano", "35b"), ("nano-ling", "8b")])
def test_a_small_twin_routes_as_its_large_one(small, large):
    """The layers at the end, the timeline and the features are what a small run of the large tier must share."""
    one, two = (
        (
            [tier.num_layers - n for n in (tier.owners[-1], tier.consumers[-1])],
            (tier.family, tier.router, tier.k, tier.first_token, tier.feature_topk, tier.token_aware),
            (set(tier.lora.targets), tier.lora.r, tier.lora.alpha),
        )
        for tier in map(builtin_tier, (small, large))
    )
    assert one == two


def test_an_unknown_tier_is_refused_with_the_known_names():
    with pytest.raises(Edge0Error, match=r"'70b' is unknown; choose one of .*35b.*nano"):
        builtin_tier("70b")


@pytest.mark.parametrize("path", [(), ("router",), ("lora",)])
def test_unknown_and_missing_fields_are_named_at_every_level(data, path):
    part = data
    for key in path:
        part = part[key]
    part["surprise"] = 1
    refused(data, ".".join(("tier", *path)), "unknown: surprise")
    gone = {(): "k", ("router",): "kind", ("lora",): "r"}[path]
    del part[gone]
    refused(data, ".".join(("tier", *path)), "unknown: surprise", f"missing: {gone}")


def test_optional_router_fields_have_defaults(data):
    tier = Tier.from_dict(data | {"router": {"kind": "softmax_topk"}})
    assert (tier.router.n_group, tier.router.topk_group, tier.router.scaling) == (1, 1, 1.0) and tier.router.mass_k == 0


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_mapping_is_refused(value):
    refused(value, "is not a mapping")


def test_a_run_of_layers_may_be_given_by_its_ends(data):
    short = data | {"owners": {"first": 1, "last": 6}, "consumers": {"first": 2, "last": 6}}
    assert Tier.from_dict(short) == Tier.from_dict(data)


@pytest.mark.parametrize(
    ("field", "value", "reasons"),
    [
        ("k", 33, ("tier.k: 33 is larger than the 32 experts", "lower tier.k")),
        ("k", 0, ("tier.k: 0 is not a whole number of at least 1",)),
        ("k", True, ("tier.k: True",)),
        ("k", 4.0, ("tier.k: 4.0",)),
        ("head_width", 0, ("tier.head_width: 0",)),
        ("family", "gpt", ("family: 'gpt' is not supported", "qwen3_5_moe")),
        ("router", {"kind": "hash"}, ("router.kind: 'hash' is unknown", "softmax_topk, sigmoid_group")),
        ("feature_topk", "both", ("feature_topk: 'both' is unknown", "executed, teacher")),
        ("first_token", "maybe", ("first_token: 'maybe' is unknown", "gate, predicted")),
        ("token_aware", 1, ("tier.token_aware: 1 is neither true nor false",)),
        ("token_aware", "yes", ("tier.token_aware: 'yes'",)),
        ("token_aware", None, ("tier.token_aware: None",)),
        ("owners", [1, 2, 3, 4, 5, 6, 7], ("tier.owners: [7] of a model with 8 layers", "0..6")),
        ("owners", [-1, 1, 2, 3, 4, 5, 6], ("tier.owners: [-1]",)),
        ("owners", [1, 1, 2, 3, 4, 5, 6], ("rising and each once",)),
        ("owners", [2, 1, 3, 4, 5, 6], ("rising and each once",)),
        ("owners", [], ("tier.owners: []",)),
        ("owners", "1-6", ("neither a list of layer indices nor",)),
        ("owners", [1.0], ("neither a list of layer indices nor",)),
        ("owners", {"first": 1}, ("neither a list of layer indices nor",)),
        ("owners", [1, 2], ("tier.consumers: [4, 5, 6] have no head",)),
        ("consumers", [], ("tier.consumers: []",)),
        ("consumers", [3, 2], ("rising and each once",)),
        ("consumers", [1, 2], ("tier.consumers: [1] have no head",)),
    ],
)
def test_a_wrong_field_is_refused_with_its_value_and_the_fix(data, field, value, reasons):
    refused(data | {field: value}, *reasons)


@pytest.mark.parametrize(
    ("lora", "reasons"),
    [
        ({"targets": ["mlp.gate"]}, ("tier.lora.targets: ['mlp.gate'] match no module", "self_attn.q_proj")),
        ({"targets": ["self_attn.q_proj", "q_proj"]}, ("['q_proj'] match no module",)),
        ({"targets": ["mlp.switch_mlp.up_proj"]}, ("match no module",)),
        ({"targets": []}, ("tier.lora.targets: []",)),
        ({"r": 0}, ("tier.lora.r: 0",)),
        ({"alpha": 0}, ("tier.lora.alpha: 0 is not a number larger than 0",)),
        ({"alpha": float("nan")}, ("tier.lora.alpha: nan",)),
    ],
)
def test_a_wrong_lora_is_refused(data, lora, reasons):
    refused(data | {"lora": data["lora"] | lora}, *reasons)


def test_missing_architecture_numbers_are_all_named(data):
    del data["architecture"]["hidden_size"], data["architecture"]["head_dim"]
    refused(data, "hidden_size", "head_dim", "config.json")


@pytest.mark.parametrize(
    ("router", "k", "reason"),
    [
        ({"n_group": 5}, 4, "router.n_group: 5 does not divide 32 experts"),
        ({"topk_group": 9}, 4, "router.topk_group: 9 must lie in 1..n_group = 8"),
        ({"topk_group": 0}, 4, "router.topk_group: 0"),
        ({"topk_group": 1}, 5, "tier.k: 5 does not fit the 4 experts of topk_group = 1"),
    ],
)
def test_expert_groups_must_divide_the_experts_and_hold_k(data, router, k, reason):
    refused(grouped(data, **router) | {"k": k}, reason)
    assert Tier.from_dict(grouped(data)).router.scaling == 2.5


@pytest.mark.parametrize("mass_k", [0, 4, 16, 32])
def test_a_wider_mass_holds_at_least_the_chosen(data, mass_k):
    router = {"kind": "softmax_topk", "mass_k": mass_k}
    assert Tier.from_dict(data | {"router": router}).router.mass_k == mass_k


@pytest.mark.parametrize("router", [{"kind": "softmax_topk", "mass_k": m} for m in (3, 33, -1, "8")])
def test_another_mass_is_refused(data, router):
    with pytest.raises(Edge0Error, match=rf"tier\.router\.mass_k: {router['mass_k']!r}"):
        Tier.from_dict(data | {"router": router})


def test_a_sigmoid_router_has_no_wider_mass(data):
    with pytest.raises(Edge0Error, match=r"tier\.router\.mass_k: 8 must be 0, or with softmax_topk"):
        Tier.from_dict(grouped(data, mass_k=8))


# -- derived


def test_what_a_tier_derives_from_its_numbers(nano):
    assert (nano.hidden_size, nano.num_layers, nano.num_experts, nano.base_k) == (64, 8, 32, 8)
    assert (nano.start_layer, nano.head_input) == (2, 64 + 2 * 32)
    assert nano.file_name("prerouter") == "prerouter_edge0_nano.safetensors"
    assert nano.file_name("lora") == "lora_edge0_nano.safetensors"


def test_head_tensors_have_one_head_per_owner(nano):
    tensors = nano.head_tensors()
    assert {int(key.split(".")[1]) for key in tensors} == set(nano.owners)
    assert tensors["layers.6.fc1.weight"] == (128, 128)
    assert tensors["layers.6.fc2.weight"] == (32, 128)
    assert tensors["layers.6.linear_init.weight"] == (32, 128)


def test_a_token_aware_head_has_the_token_as_one_more_input(nano, data):
    tier = Tier.from_dict(data | {"token_aware": True})
    assert tier.token_aware and not nano.token_aware
    assert tier.to_dict() == nano.to_dict() | {"token_aware": True}
    assert Tier.from_dict(json.loads(json.dumps(tier.to_dict()))) == tier
    assert tier.head_input == 2 * 64 + 2 * 32
    shapes = tier.head_tensors()
    assert shapes.keys() == nano.head_tensors().keys()
    assert shapes["layers.6.fc1.weight"] == (128, 192)
    assert shapes["layers.6.fc2.weight"] == (32, 128)
    assert shapes["layers.6.linear_init.weight"] == (32, 192)
    assert tier.lora_tensors() == nano.lora_tensors()


def test_people_are_told_of_token_aware_heads(nano, data):
    assert "token-aware" not in tier_text(describe_tier(nano))
    assert "mass_k 0, sticky (bias 0.0, window 0)\n" in tier_text(describe_tier(nano))
    assert "first token gate, token-aware\n" in tier_text(describe_tier(Tier.from_dict(data | {"token_aware": True})))


def test_a_tier_from_before_token_aware_heads_has_none(nano, data):
    del data["token_aware"]
    assert Tier.from_dict(data) == nano


def test_lora_tensors_are_pairs_on_exactly_the_targets(nano):
    modules, tensors = nano.lora_modules(), nano.lora_tensors()
    assert len(tensors) == 2 * len(modules)
    for path, (in_features, out_features) in modules.items():
        assert tensors[f"{path}.lora_A"] == (16, in_features)
        assert tensors[f"{path}.lora_B"] == (out_features, 16)
    # every layer: 3 of the shared expert; 2 full-attention layers with 4, 6 linear ones with 5
    assert len(modules) == 8 * 3 + 2 * 4 + 6 * 5
    below = {re.sub(r"^language_model\.model\.layers\.\d+\.", "", path) for path in modules}
    assert below == set(nano.lora.targets)
    attention = {int(path.split(".")[3]) for path in modules if "self_attn" in path}
    assert attention == {3, 7}


def test_fewer_targets_give_fewer_modules(data):
    data["lora"]["targets"] = ["self_attn.o_proj"]
    assert len(Tier.from_dict(data).lora_modules()) == 2


def test_names_of_the_expert_tensors_and_the_bytes_of_one_expert():
    """The published files: one expert of the 35b is 1,769,472 bytes, one layer 452,984,832."""
    arch = builtin_tier("35b").architecture
    layout = family("qwen3_5_moe")
    (name,) = layout.expert_tensors(3, "up_proj", "scales")
    assert name == "language_model.model.layers.3.mlp.switch_mlp.up_proj.scales"
    weights = 3 * arch["hidden_size"] * arch["moe_intermediate_size"]
    assert weights // 2 + 2 * 2 * weights // 64 == 1_769_472
    assert layout.moe_layers(arch) == tuple(range(40))


def test_layers_and_modules_of_the_8b():
    """24 layers: the first dense, every fourth latent attention; one expert of the published file is 1,327,104 bytes."""
    tier = builtin_tier("8b")
    assert tier.layout.moe_layers(tier.architecture) == tuple(range(1, 24))
    assert tier.layout.expert_tensors(5, "up_proj", "scales") == (
        "model.layers.5.mlp.switch_mlp.up_proj.scales", "model.layers.5.mlp.experts.up_proj.scales",
    )  # fmt: skip
    weights = 3 * tier.hidden_size * tier.architecture["moe_intermediate_size"]
    assert 23 * tier.num_experts * (weights // 2 + 2 * 2 * weights // 64) == 3_906_994_176
    modules = tier.lora_modules()
    latent = {int(path.split(".")[2]) for path in modules if path.endswith("kv_b_proj")}
    assert latent == {3, 7, 11, 15, 19, 23} == {int(p.split(".")[2]) for p in modules if p.endswith("dense")}
    assert {path for path in modules if ".mlp." in path} == {
        f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")
    }
    assert "model.layers.1.mlp.shared_experts.up_proj" in tier.layout.linear_modules(tier.architecture)


@pytest.mark.parametrize(
    ("numbers", "reasons"),
    [
        ({"first_k_dense_replace": -1}, ("architecture.first_k_dense_replace: -1", "at least 0")),
        ({"first_k_dense_replace": None}, ("architecture.first_k_dense_replace: None",)),
        ({"first_k_dense_replace": 24}, ("none of its 24 layers has routed experts",)),
        ({"first_k_dense_replace": 8}, ("tier.owners: [7]", "8..22")),
        ({"q_lora_rank": 0}, ("architecture.q_lora_rank: 0",)),
        ({"q_lora_rank": "256"}, ("architecture.q_lora_rank: '256'",)),
        ({"kv_lora_rank": None}, ("architecture.kv_lora_rank: None",)),
    ],
)
def test_numbers_that_may_be_zero_or_absent_are_checked_all_the_same(numbers, reasons):
    data = builtin_tier("8b").to_dict()
    refused(data | {"architecture": data["architecture"] | numbers}, *reasons)


def test_a_dense_layer_or_a_low_rank_query_may_be_absent():
    data = builtin_tier("8b").to_dict()
    numbers = dict(data["architecture"]) | {"first_k_dense_replace": 0}
    del numbers["q_lora_rank"]
    tier = Tier.from_dict(data | {"architecture": numbers, "lora": data["lora"] | {"targets": ["attention.q_proj"]}})
    assert tier.layout.moe_layers(numbers) == tuple(range(24))
    assert tier.lora_modules()["model.layers.3.attention.q_proj"] == (1536, 16 * 192)
    del numbers["first_k_dense_replace"]
    refused(data | {"architecture": numbers}, "first_k_dense_replace missing")


def test_only_a_family_that_may_leave_weights_alone_has_a_tier_that_does(data):
    router = {"kind": "softmax_topk", "renormalise": False}
    with pytest.raises(Edge0Error, match=r"tier\.router\.renormalise: qwen3_5_moe always renormalises"):
        Tier.from_dict(data | {"router": router})
    numbers = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 384, "num_experts_per_tok": 4, "num_attention_heads": 2,
               "num_key_value_heads": 1, "num_experts": 8, "intermediate_size": 64}  # fmt: skip
    lora = {"r": 4, "alpha": 8, "targets": ["self_attn.q_proj"]}
    olmoe = {"family": "olmoe", "architecture": numbers, "owners": [1], "consumers": [2], "lora": lora}
    assert not Tier.from_dict(data | olmoe | {"router": router}).router.renormalise
    with pytest.raises(Edge0Error, match=r"tier\.router\.renormalise: 'no' is neither true nor false"):
        Tier.from_dict(data | olmoe | {"router": router | {"renormalise": "no"}})
