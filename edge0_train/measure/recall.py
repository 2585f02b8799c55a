"""How well heads predict the next token's routing, beside the five trivial baselines that they must beat (docs/method.md 3.1).

All of it at the held-out inputs that serving routes by prediction; the truth is a layer's own gate at the served K.
    recall@B   share of the true K experts that are among the B predicted; B = K is what is served, by the router's rule with its
               groups, larger ones are those of the highest score
    exact      share of (token, layer) pairs whose K predicted experts are the K true ones
    gate_mass  share of the true experts' mixing weight that the K predicted experts hold
Baselines, all at recall@K: uniform (K / E), the layer's most frequent experts, the previous token's set, a vote over the
last four tokens' sets (the newest wins ties), and what the next layer's gate, its bias included, would choose at h(N, t).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier
from edge0_train.data.rows import Batch
from edge0_train.objectives.passes import MakePass, native_pass, student_pass
from edge0_train.student import PrerouterHeads, StudentPath
from edge0_train.student.router import multi_hot, select, weigh

BASELINES = ("uniform", "frequency", "previous", "last_four", "next_gate")
BUDGETS = (8, 16)
LRU_TOKENS = 4096
"""Tokens that the simulated caches see; they are warm after a few dozen."""


@dataclass(frozen=True)
class RecallReport:
    """What `measure_recall` finds.

    Attributes:
        k: served K. tokens: predicted inputs.
        by_layer: {owner: {measure: value}}, measures as in the module's docstring, baselines under their names.
        by_group: {task of the rows: {measure: mean over layers}}; rows without a task are "other".
        lru_misses: {experts a layer held: {"predicted", "true": misses a token, summed over layers}}.
    """

    k: int
    tokens: int
    by_layer: dict[int, dict[str, float]]
    by_group: dict[str, dict[str, float]]
    lru_misses: dict[int, dict[str, float]]

    def mean(self, measure: str) -> float:
        """Mean over layers."""
        return sum(values[measure] for values in self.by_layer.values()) / len(self.by_layer)

    @property
    def recall(self) -> float:
        """The heads' recall@K, mean over layers."""
        return self.mean(f"recall@{self.k}")

    @property
    def baselines(self) -> dict[str, float]:
        """{baseline: its recall@K, mean over layers}."""
        return {name: self.mean(name) for name in BASELINES}

    def to_dict(self) -> dict[str, Any]:
        """Plain data with four digits."""
        data: dict[str, Any] = _rounded(asdict(self))
        return data


@torch.no_grad()
def measure_recall(path: StudentPath, heads: PrerouterHeads, batches: Sequence[Batch]) -> RecallReport:
    """Heads and baselines on the predicted inputs of `batches` (one row a line), under native routing.

    Raises Edge0Error when no input of them is routed by prediction.
    """
    tier = path.tier
    frequency = _expert_counts(path, batches)
    per_token: dict[int, list[dict[str, torch.Tensor]]] = {owner: [] for owner in tier.owners}
    sets: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {owner: [] for owner in tier.owners}
    groups: list[str] = []

    def pair(at_BT: torch.Tensor, owner: int, features_BTF: torch.Tensor, router_BTE: torch.Tensor) -> None:
        """One head's measures on the batch at hand, in the middle of the pass: one owner's features are held at a time."""
        shape, bias_E = router_BTE.shape[:2], path.expert_bias(owner + 1)
        executed_BTK = select(tier.router, router_BTE.flatten(0, 1), tier.k, bias_E).unflatten(0, shape)
        true_BTE = multi_hot(executed_BTK, tier.num_experts)
        before_BTE = torch.cat([torch.zeros_like(true_BTE[:, :1]), true_BTE[:, :-1]], dim=1)
        weight_EH, features_NF = path.router(owner + 1).weight.float(), features_BTF[at_BT]
        head_NE, next_gate_NE = heads(owner, features_NF), features_NF[:, : weight_EH.shape[1]] @ weight_EH.T
        served_NK = select(tier.router, head_NE, tier.k)
        guesses = {
            "frequency": frequency[owner + 1].expand_as(true_BTE)[at_BT],
            "previous": before_BTE[at_BT],
            "last_four": _recent_votes(before_BTE)[at_BT],
            "next_gate": multi_hot(select(tier.router, next_gate_NE, tier.k, bias_E), tier.num_experts),
        }
        true_NK = executed_BTK[at_BT]
        measured = _of_head(tier, head_NE, served_NK, true_NK, router_BTE[at_BT]) | {
            name: _recall(score_NE, true_NK, tier.k) for name, score_NE in guesses.items()
        }
        per_token[owner].append({name: value.cpu() for name, value in measured.items()})
        sets[owner].append((served_NK.cpu(), true_NK.cpu()))

    for batch, at_BT in _passes(path, batches, native_pass, pair):
        groups += [batch.rows[row].task or "other" for row in at_BT.nonzero()[:, 0].tolist()]
    if not groups:
        raise Edge0Error(
            f"text.rows: none of the {sum(len(batch.rows) for batch in batches)} held-out rows has an input that is routed by"
            " prediction; completions of three tokens and more have some: raise sample.max_new_tokens in phase=teacher_text"
        )
    joined = {owner: _concatenated(parts) for owner, parts in per_token.items()}
    uniform = {"uniform": tier.k / tier.num_experts}
    by_layer = {
        owner: {name: float(values.mean()) for name, values in measured.items()} | uniform
        for owner, measured in joined.items()
    }
    by_group: dict[str, dict[str, float]] = {}
    for group in sorted(set(groups)):
        at_N = torch.tensor([name == group for name in groups])
        names = [name for name in joined[tier.owners[0]] if name not in BASELINES]
        by_group[group] = {"tokens": int(at_N.sum())} | {
            name: float(torch.stack([joined[owner][name][at_N] for owner in tier.owners]).mean()) for name in names
        }
    return RecallReport(tier.k, len(groups), by_layer, by_group, _cache_misses(tier, sets))


@torch.no_grad()
def head_recall(path: StudentPath, batches: Sequence[Batch], own: bool) -> dict[str, float]:
    """Recall@K of the path's heads alone, {"mean" and every owner: share of the true set}, without rounding.

    Under native routing, as in `measure_recall`, or (own) under the heads' own predictions, as in decoding.
    """
    hits, targets, heads = dict.fromkeys(path.tier.owners, 0.0), 0, path.heads
    assert heads is not None

    def pair(at_BT: torch.Tensor, owner: int, features_BTF: torch.Tensor, router_BTE: torch.Tensor) -> None:
        served_NK = select(path.tier.router, heads(owner, features_BTF[at_BT]), path.tier.k)
        true_NK = select(path.tier.router, router_BTE[at_BT], path.tier.k, path.expert_bias(owner + 1))
        hits[owner] += float(found(served_NK, true_NK, path.tier.num_experts).sum())

    for _, at_BT in _passes(path, batches, student_pass if own else native_pass, pair):
        targets += int(at_BT.sum())
    recall = {owner: hit / (path.tier.k * targets) for owner, hit in hits.items()}
    return {"mean": sum(recall.values()) / len(recall), **{str(owner): value for owner, value in recall.items()}}


def _passes(
    path: StudentPath, batches: Sequence[Batch], routing: MakePass, pair: Callable[..., None]
) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Run every batch; yields it with its predicted inputs, bool [B, T], after `pair(these inputs, owner, ...)` of all owners."""
    for batch in batches:
        at_BT = path.timeline(batch.decoded_BT, batch.start_BT)[0]
        chosen = routing(path, batch)
        chosen.pair = functools.partial(pair, at_BT)
        path.hidden(batch.input_ids_BT, chosen, use_cache=False)
        yield batch, at_BT


def found(guess_NK: torch.Tensor, true_NK: torch.Tensor, experts: int) -> torch.Tensor:
    """1.0 for every one of the true experts that is among the guessed, else 0.0: [N, K]. Its mean is recall."""
    return multi_hot(guess_NK, experts).gather(-1, true_NK)


def best_baseline(report: RecallReport) -> tuple[str, float]:
    """Name and mean recall@K of the strongest baseline."""
    return max(report.baselines.items(), key=lambda pair: pair[1])


def lru_misses(accesses: Iterable[Iterable[int]], size: int) -> int:
    """Misses of one layer's LRU cache of `size` experts that is asked for a set of experts at every token.

    Experts of a set are asked for in ascending order, which counts for the eviction order alone.
    """
    held: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for experts in accesses:
        for expert in sorted(experts):
            if expert in held:
                held.move_to_end(expert)
                continue
            misses += 1
            held[expert] = None
            if len(held) > size:
                held.popitem(last=False)
    return misses


def _of_head(
    tier: Tier, head_NE: torch.Tensor, served_NK: torch.Tensor, true_NK: torch.Tensor, logits_NE: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A head's measures for every token, [N] each. served_NK: what the router's rule chooses by the head's logits."""
    found_NK = found(served_NK, true_NK, tier.num_experts)
    weights_NK = weigh(tier.router, logits_NE, true_NK)
    wider = [budget for budget in BUDGETS if tier.k < budget <= tier.num_experts]
    measured = {f"recall@{tier.k}": found_NK.mean(-1)}
    measured |= {f"recall@{budget}": _recall(head_NE, true_NK, budget) for budget in wider}
    measured["exact"] = found_NK.all(-1).float()
    measured["gate_mass"] = (found_NK * weights_NK).sum(-1) / weights_NK.sum(-1)
    return measured


def _recall(score_NE: torch.Tensor, true_NK: torch.Tensor, budget: int) -> torch.Tensor:
    """Share of every token's true experts that are among the `budget` of the highest score, [N]."""
    return found(score_NE.topk(budget, -1).indices, true_NK, score_NE.shape[-1]).mean(-1)


def _recent_votes(before_BTE: torch.Tensor) -> torch.Tensor:
    """Votes of the last four tokens' sets, the newer ones slightly heavier so that they win ties."""
    votes_BTE = torch.zeros_like(before_BTE)
    for age in range(min(4, before_BTE.shape[1])):
        votes_BTE[:, age:] += (1 - 0.01 * age) * before_BTE[:, : before_BTE.shape[1] - age]
    return votes_BTE


def _expert_counts(path: StudentPath, batches: Sequence[Batch]) -> dict[int, torch.Tensor]:
    """{layer: how often each expert ran [E]} at the completions' inputs."""
    counts: dict[int, torch.Tensor] = {}
    add: Callable[[int, torch.Tensor], None] = lambda layer, n: counts.__setitem__(layer, counts.get(layer, 0) + n)  # noqa: E731
    for batch in batches:
        routing = path.native(path.tier.k, start_BT=batch.start_BT)
        path.hidden(batch.input_ids_BT, routing, use_cache=False)
        for layer, executed in routing.executed.items():
            add(layer, multi_hot(executed[batch.decoded_BT], path.tier.num_experts).sum(0))
    return counts


def _cache_misses(tier: Tier, sets: dict[int, list[tuple[torch.Tensor, torch.Tensor]]]) -> dict[int, dict[str, float]]:
    """Misses a token of one LRU a layer, fed in time order (row after row) with the predicted, and with the true, sets."""
    sizes = sorted({2 * tier.k, 4 * tier.k, tier.num_experts // 2} - {*range(tier.k)})
    result: dict[int, dict[str, float]] = {size: {} for size in sizes if size < tier.num_experts}
    for number, kind in enumerate(("predicted", "true")):
        layers = [torch.cat([pair[number] for pair in parts])[:LRU_TOKENS].tolist() for parts in sets.values()]
        for size in result:
            result[size][kind] = sum(lru_misses(layer, size) for layer in layers) / len(layers[0])
    return result


def _concatenated(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 4) if isinstance(value, float) else value
