"""A slow plain reference of the student path: one token at a time, no cache, every rule of docs/method.md 1.2-1.5 spelt out.

It shares nothing with the code under test but the base model: own timeline, own one-hots, own head formula, own router
mathematics, own hooks.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from edge0_runtime.contract.tier import Router, Sticky, Tier
from edge0_train.data.rows import TextRow
from edge0_train.student import PrerouterHeads, StudentPath
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
VARIANTS |= {
    f"{name}-sticky": dataclasses.replace(
        VARIANTS[name], router=dataclasses.replace(VARIANTS[name].router, sticky=Sticky(bias, window))
    )
    for name, bias, window in (("35b", 2.0, 2), ("8b", 6.0, 3), ("ling", 3.0, 4), ("token-aware-gate", 1.0, 1))
}
STICKY = tuple(name for name in VARIANTS if name.endswith("sticky"))
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
                chosen = choose(tier.router, self._with_bonus(layer, logits), tier.k, None)
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

    def _with_bonus(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        """What experts are chosen by at the newest position: its own history of choices is `chosen` so far."""
        bias, window = self.tier.router.sticky.bias, self.tier.router.sticky.window
        recent = {expert for chosen in self.chosen[layer][-window:] for expert in chosen} if window else set()
        return torch.tensor([value + bias * (e in recent) for e, value in enumerate(logits.tolist())])

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
