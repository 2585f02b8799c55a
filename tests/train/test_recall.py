"""The recall report against plain loops over tokens and sets."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Router
from edge0_train.adapters import input_path
from edge0_train.build import build_student
from edge0_train.data.rows import Batch, TextRow, collate
from edge0_train.measure.head_report import perplexities
from edge0_train.measure.recall import BASELINES, LRU_TOKENS, best_baseline, lru_misses, measure_recall
from edge0_train.phases.head_distill import head_distill
from edge0_train.run import open_run
from edge0_train.student import StudentPath
from tests.train.conftest import Make, task_rows


def top(scores: torch.Tensor, k: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda e: -float(scores[e]))[:k])


def chosen(router: Router, logits: torch.Tensor, k: int) -> set[int]:
    """What the router's rule chooses: the k best, of the groups with the best pairs if it has groups."""
    if router.kind == "softmax_topk":
        return top(logits, k)
    size = len(logits) // router.n_group
    scores = logits.sigmoid()
    pairs = torch.stack([sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(router.n_group)])
    kept = top(pairs, router.topk_group)
    return top(torch.tensor([float(s) if e // size in kept else -1.0 for e, s in enumerate(scores)]), k)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def plain_lru(accesses: list[set[int]], size: int) -> int:
    """A list, newest last."""
    held: list[int] = []
    misses = 0
    for experts in accesses:
        for expert in sorted(experts):
            if expert in held:
                held.remove(expert)
            else:
                misses += 1
                if len(held) == size:
                    held.pop(0)
            held.append(expert)
    return misses


@pytest.fixture(scope="module")
def made(make_config: Make) -> tuple[StudentPath, Any]:
    config = make_config("student_sft")
    student = build_student(config, prerouter=input_path(config, "prerouter"))
    return student.path, student.path.heads


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    rows = task_rows("eval", 7)
    rows[3] = TextRow(rows[3].prompt_ids, rows[3].completion_ids, "stop", "", "")  # of no task
    return [collate(rows[:4], 0), collate(rows[4:], 0)]


def reference(path: StudentPath, heads: Any, batches: list[Batch]) -> tuple[dict[int, list[dict[str, Any]]], list[str]]:
    """{owner: one dict a predicted token}, and the tokens' groups; sets and dicts only."""
    tier, k = path.tier, path.tier.k
    tokens: dict[int, list[dict[str, Any]]] = {owner: [] for owner in tier.owners}
    groups: list[str] = []
    counts: dict[int, Counter[int]] = {owner: Counter() for owner in tier.owners}
    passes = []
    for batch in batches:
        routing = path.native(k, batch.decoded_BT, batch.start_BT, capture=True)
        with torch.no_grad():
            path.hidden(batch.input_ids_BT, routing, use_cache=False)
        passes.append(routing)
        for owner in tier.owners:
            for b, t in batch.decoded_BT.nonzero().tolist():
                counts[owner].update(routing.executed[owner + 1][b, t].tolist())
    for batch, routing in zip(batches, passes, strict=True):
        for b, row in enumerate(batch.rows):
            first = len(row.prompt_ids) + 1  # the first decode step keeps the gates
            for t in range(first, row.length - 1):
                groups.append(row.task or "other")
                for owner in tier.owners:
                    sets = [set(routing.executed[owner + 1][b, u].tolist()) for u in range(t + 1)]
                    true = sets[t]
                    feature = routing.features[owner][b, t]
                    with torch.no_grad():
                        logits = heads(owner, feature)
                        gate = path.router(owner + 1).weight.float() @ feature[: tier.hidden_size]
                    router_logits = routing.router_logits[owner + 1][b, t]
                    softmax = tier.router.kind == "softmax_topk"
                    probabilities = router_logits.softmax(-1) if softmax else router_logits.sigmoid()
                    weight = {e: float(probabilities[e]) for e in true}
                    votes = Counter({e: 0.0 for e in range(tier.num_experts)})
                    for age in range(4):
                        for expert in sets[t - 1 - age] if t - 1 - age >= 0 else ():
                            votes[expert] += 1 - 0.01 * age
                    guess = chosen(tier.router, logits, k)
                    tokens[owner].append(
                        {f"recall@{n}": len(top(logits, n) & true) / k for n in (8, 16)}
                        | {
                            "recall@4": len(guess & true) / k,
                            "exact": float(guess == true),
                            "gate_mass": sum(weight[e] for e in guess & true) / sum(weight.values()),
                            "uniform": k / tier.num_experts,
                            "previous": len(sets[t - 1] & true) / k,
                            "next_gate": len(chosen(tier.router, gate, k) & true) / k,
                            "frequent": counts[owner],
                            "votes": votes,
                            "true": true,
                            "guess": guess,
                        }
                    )
    return tokens, groups


@pytest.mark.parametrize(
    "router", [Router("softmax_topk"), Router("sigmoid_group", n_group=8, topk_group=2, scaling=2.5)]
)
def test_the_report_equals_plain_loops(made, batches, router, monkeypatch):
    path, heads = made
    monkeypatch.setattr(path, "tier", dataclasses.replace(path.tier, router=router))
    report = measure_recall(path, heads, batches)
    tokens, groups = reference(path, heads, batches)
    assert (report.k, report.tokens) == (4, len(groups)) and report.tokens > 50
    measures = ("recall@4", "recall@8", "recall@16", "exact", "gate_mass")
    for owner, rows in tokens.items():
        found = report.by_layer[owner]
        assert found.keys() == {*measures, *BASELINES}
        for name in (*measures, "uniform", "previous", "next_gate"):
            assert found[name] == pytest.approx(mean([row[name] for row in rows]), abs=1e-6), (owner, name)
        # Ties may be broken either way: the recall lies between the worst and the best way to break them.
        for name, key in (("frequency", "frequent"), ("last_four", "votes")):
            low, high = [], []
            for row in rows:
                ordered = sorted(range(32), key=lambda e: -row[key][e])
                edge = row[key][ordered[3]]
                sure = {e for e in range(32) if row[key][e] > edge}
                tied = {e for e in range(32) if row[key][e] == edge}
                room, hits = 4 - len(sure), len(sure & row["true"])
                low.append((hits + max(0, room - len(tied - row["true"]))) / 4)
                high.append((hits + min(room, len(tied & row["true"]))) / 4)
            assert mean(low) - 1e-6 <= found[name] <= mean(high) + 1e-6, (owner, name)
    for group in set(groups):
        at = [n for n, name in enumerate(groups) if name == group]
        assert report.by_group[group]["tokens"] == len(at)
        for name in measures:
            want = mean([rows[n][name] for rows in tokens.values() for n in at])
            assert report.by_group[group][name] == pytest.approx(want, abs=1e-6)
    assert set(report.by_group) == set(groups) and "other" in groups
    assert report.recall == pytest.approx(mean([row["recall@4"] for rows in tokens.values() for row in rows]), abs=1e-6)
    assert set(report.lru_misses) == {8, 16}
    for size, misses in report.lru_misses.items():
        for name, key in (("predicted", "guess"), ("true", "true")):
            total = sum(plain_lru([row[key] for row in rows], size) for rows in tokens.values())
            assert misses[name] == pytest.approx(total / len(groups)), (size, name)
    assert best_baseline(report)[1] == max(report.mean(name) for name in BASELINES)
    assert json.loads(json.dumps(report.to_dict()))["by_layer"]["1"]["exact"] == round(report.by_layer[1]["exact"], 4)


def test_lru_equals_a_plain_list():
    random_ = random.Random(1)
    for size in (1, 3, 8, 40):
        accesses = [set(random_.sample(range(16), 4)) for _ in range(200)]
        assert lru_misses(accesses, size) == plain_lru(accesses, size)
    assert lru_misses([{1, 2}, {1, 2}, {3}, {1}], 2) == 2 + 0 + 1 + 1
    assert lru_misses([], 4) == 0 and LRU_TOKENS > 1000


def test_a_perfect_head_is_measured_as_perfect(made, batches):
    """A head that is told the true logits: everything is 1, and its cache misses are the true ones."""
    path, _ = made
    told: dict[int, torch.Tensor] = {}

    def oracle(owner: int, features: torch.Tensor) -> torch.Tensor:
        return told[owner]

    logits: dict[int, list[torch.Tensor]] = {owner: [] for owner in path.tier.owners}
    for batch in batches:
        routing = path.native(path.tier.k, batch.decoded_BT, batch.start_BT, capture=True)
        with torch.no_grad():
            path.hidden(batch.input_ids_BT, routing, use_cache=False)
        at_BT = path.timeline(batch.decoded_BT, batch.start_BT)[0]
        for owner in path.tier.owners:
            logits[owner].append(routing.router_logits[owner + 1][at_BT])
    told |= {owner: values[0] for owner, values in logits.items()}
    report = measure_recall(path, oracle, batches[:1])  # type: ignore[arg-type]
    for name in ("recall@4", "recall@8", "exact", "gate_mass"):
        assert report.mean(name) == pytest.approx(1.0)
    assert all(misses["predicted"] == misses["true"] for misses in report.lru_misses.values())


def test_rows_without_a_predicted_input_are_an_error(made):
    """A completion of two tokens has one decode step, which keeps the gates: nothing to divide by."""
    path, heads = made
    short = [TextRow((5, 6, 7), (8, 2), "stop")] * 3
    with pytest.raises(Edge0Error, match=r"text\.rows: none of the 3 held-out rows .*sample\.max_new_tokens"):
        measure_recall(path, heads, [collate(short, 0)])


def test_perplexity_with_heads_committed_is_the_student_paths(made, batches):
    path, heads = made
    found = perplexities(path, heads, batches)
    for kind in ("committed", "native"):
        total = count = 0.0
        for batch in batches:
            for row in batch.rows:
                one = collate([row], 0)
                routing = path.predicted(one.decoded_BT) if kind == "committed" else path.native(path.tier.k)
                with torch.no_grad():
                    hidden = path.hidden(one.input_ids_BT, routing, use_cache=False).last_hidden_state
                    logp = path.model.lm_head(hidden)[0].log_softmax(-1)
                for t in range(len(row.prompt_ids) - 1, row.length - 1):
                    total -= float(logp[t, (*row.prompt_ids, *row.completion_ids)[t + 1]])
                    count += 1
        assert found[kind] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_head_distill_stores_the_report_and_prints_it(make_config, tmp_path, capsys):
    config = make_config(
        "head_distill", f"run_dir={tmp_path / 'run'}", "optim.steps=40", "optim.rows=24", "optim.micro_rows=12", "optim.lr=5e-3",
    )  # fmt: skip
    run = open_run(config)
    summary = run.finish(head_distill(config, run))
    stored = json.loads((Path(config.run_dir) / "done.json").read_text())
    assert stored["recall"].keys() == {"heads", "before", *BASELINES}
    assert stored["recall"]["heads"] == pytest.approx(mean(list(stored["recall_by_layer"].values())), abs=1e-4)
    report = stored["recall_report"]
    assert report["by_layer"].keys() == {"1", "2", "3", "4", "5", "6"} and report["lru_misses"].keys() == {"8", "16"}
    assert set(report["by_group"]) <= {"add", "multiply", "reverse", "word"}
    assert 1 < stored["perplexity"]["native"] < stored["perplexity"]["committed"]
    printed = capsys.readouterr().out
    assert "layer 2" in printed and "LRU of 8 experts" in printed and "perplexity with heads committed" in printed
    assert summary["recall"]["heads"] > summary["recall"]["before"]
