"""The prerouter's timeline, token by token with caches, against a slow reference that knows no state.

The reference recomputes the whole sequence for every token, without any cache, and applies docs/method.md 1.5
literally: all heads at all positions, shifted by one, chosen by the contract's masks. Heads and routing are
NumPy in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from edge0_runtime.arms.prerouter import Prerouter
from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.tier import Tier
from edge0_runtime.contract.timeline import predicted_mask, previous_valid_mask
from edge0_runtime.engine import Engine
from edge0_runtime.heads import Heads
from edge0_runtime.inspection import inspect, inspection_text
from edge0_runtime.sequence import Sequence

NEW_TOKENS = 7
RULES = [(first, kind) for first in ("gate", "predicted") for kind in ("executed", "teacher")]


def topk_sets(logits_TE: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-logits_TE, axis=-1)[:, :k], axis=-1)


def multi_hot(indices_TK: np.ndarray, experts: int) -> np.ndarray:
    rows = np.zeros((len(indices_TK), experts))
    np.put_along_axis(rows, indices_TK, 1.0, axis=-1)
    return rows


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


class ReferenceBlock(nn.Module):
    """A MoE block over a whole sequence; what the layer below predicts for it comes through `shared`."""

    def __init__(self, block: Any, layer: int, tier: Tier, heads: dict[str, np.ndarray], shared: dict) -> None:
        super().__init__()
        self.block = block
        self._at = (layer, tier, heads, shared)

    def __call__(self, x: mx.array) -> mx.array:
        layer, tier, _, shared = self._at
        own_TE = np.array(self.block.gate(x)[0], dtype=np.float64)
        logits_TE = own_TE
        if layer in tier.consumers and shared["use_heads"]:
            shifted_TE = np.concatenate([np.zeros((1, tier.num_experts)), shared["prediction"][:-1]])
            logits_TE = np.where(shared["predicted_T"][:, None], shifted_TE, own_TE)
        indices_TK = topk_sets(logits_TE, tier.k)
        shared["executed"][layer] = indices_TK
        if layer in tier.owners:
            feature_TK = indices_TK if tier.feature_topk == "executed" else topk_sets(own_TE, tier.k)
            shared["prediction"] = self._head(np.array(x[0], dtype=np.float64), feature_TK)
        weight_TK = np.take_along_axis(np.exp(logits_TE), indices_TK, axis=-1)
        weight_TK /= weight_TK.sum(-1, keepdims=True)
        y = self.block.switch_mlp(x, mx.array(indices_TK[None].astype(np.uint32)))
        y = (y * mx.array(weight_TK[None, ..., None].astype(np.float32))).sum(axis=-2)
        return y + mx.sigmoid(self.block.shared_expert_gate(x)) * self.block.shared_expert(x)

    def _head(self, h_TD: np.ndarray, feature_TK: np.ndarray) -> np.ndarray:
        layer, tier, heads, shared = self._at
        fc1, fc2, linear = (
            heads[f"layers.{layer}.{part}.weight"].astype(np.float64) for part in ("fc1", "fc2", "linear_init")
        )
        hot_TE = multi_hot(feature_TK, tier.num_experts)
        before_TE = np.concatenate([np.zeros((1, tier.num_experts)), hot_TE[:-1]]) * shared["valid_T"][:, None]
        x_TI = np.concatenate([h_TD, hot_TE, before_TE], axis=-1)
        if tier.token_aware:  # the token of the next input; what follows the last one is never used
            following_TD = np.concatenate([shared["token_TD"][1:], np.zeros((1, tier.hidden_size))])
            x_TI = np.concatenate([x_TI, following_TD], axis=-1)
        return gelu(x_TI @ fc1.T) @ fc2.T + x_TI @ linear.T


def reference(
    directory: Path, model: Any, tier: Tier, prompt: list[int], *, use_heads: bool = True
) -> tuple[list[int], list[np.ndarray], list[np.ndarray]]:
    """Greedy tokens, experts [L, K] and logits [V] of every step."""
    heads = read_adapter(directory / tier.file_name("prerouter"), "prerouter").tensors
    shared: dict[str, Any] = {"executed": {}, "use_heads": use_heads}
    for layer, decoder in enumerate(model.layers):
        decoder.mlp = ReferenceBlock(decoder.mlp, layer, tier, heads, shared)
    tokens, experts, logits = list(prompt), [], []
    for _ in range(NEW_TOKENS):
        decoded_T = np.arange(len(tokens)) >= len(prompt)
        shared["predicted_T"] = predicted_mask(tier.first_token, decoded_T)
        shared["valid_T"] = previous_valid_mask(tier.first_token, shared["predicted_T"])
        embedding_TD = np.array(model.language_model.model.embed_tokens(mx.array(tokens)), dtype=np.float64)
        shared["token_TD"] = embedding_TD / np.sqrt((embedding_TD**2).mean(-1, keepdims=True) + 1e-6)
        row = np.array(model(mx.array([tokens]))[0, -1])
        tokens.append(int(row.argmax()))
        experts.append(np.stack([shared["executed"][n][-1] for n in range(tier.num_layers)]))
        logits.append(row)
    return tokens[len(prompt) :], experts, logits


def served(engine: Engine, chunks: list[list[int]]) -> tuple[list[int], list[np.ndarray], list[np.ndarray]]:
    """The same from the runtime, its prompt given in `chunks`."""
    sequence = Sequence(engine.model)
    for chunk in chunks[:-1]:
        assert sequence.prefill(chunk, last=False) is None
    logits = sequence.prefill(chunks[-1], last=True)
    tokens, experts, rows = [], [], []
    for _ in range(NEW_TOKENS):
        assert logits is not None and sequence.last is not None
        rows.append(np.array(logits))
        tokens.append(int(rows[-1].argmax()))
        experts.append(sequence.last.executed())
        logits = sequence.decode(tokens[-1])
    return tokens, experts, rows


def assert_same(got: tuple, expected: tuple) -> None:
    assert got[0] == expected[0]
    assert np.array_equal(np.stack(got[1]), np.stack(expected[1]))
    for row, wanted in zip(got[2], expected[2], strict=True):
        assert np.linalg.norm(row - wanted) < 1e-4 * np.linalg.norm(wanted)


@pytest.mark.parametrize("token_aware", [False, True])
@pytest.mark.parametrize(("first_token", "feature_topk"), RULES)
def test_decode_with_caches_equals_the_parallel_definition(
    make_dir: Callable[..., Path],
    plain_model: Callable[[Path, int], Any],
    prompts: list[list[int]],
    first_token: str,
    feature_topk: str,
    token_aware: bool,
) -> None:
    directory = make_dir(first_token=first_token, feature_topk=feature_topk, token_aware=token_aware)
    with Engine.load(directory, lora=False) as engine:
        for prompt in prompts[:3]:
            expected = reference(directory, plain_model(directory, 2), engine.model.tier, prompt)
            for size in sorted({1, 2, 5, len(prompt)}):
                chunks = [prompt[start : start + size] for start in range(0, len(prompt), size)]
                assert_same(served(engine, chunks), expected)
            steps = list(engine.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, trace=True))
            assert_same(([s.token for s in steps], [s.experts for s in steps], [s.logits for s in steps]), expected)
        assert engine.stats()["dropped_experts"] == 0


def test_the_rules_differ_where_they_should(
    make_dir: Callable[..., Path], plain_model: Callable[[Path, int], Any], prompts: list[list[int]]
) -> None:
    """Guards the tests above: on these prompts rule, feature kind and prediction change the routing."""
    runs = {}
    for first_token, feature_topk in RULES:
        directory = make_dir(first_token=first_token, feature_topk=feature_topk)
        with Engine.load(directory, lora=False) as engine:
            runs[first_token, feature_topk] = np.stack(served(engine, [prompts[2]])[1])
    with Engine.load(make_dir(), lora=False, prerouter=False) as engine:
        own = served(engine, [prompts[2]])
        assert_same(
            own, reference(make_dir(), plain_model(make_dir(), 2), engine.model.tier, prompts[2], use_heads=False)
        )
    different = [np.stack(own[1]), *runs.values()]
    for i, one in enumerate(different):
        for other in different[:i]:
            assert not np.array_equal(one, other)


@pytest.mark.parametrize("first_token", ["gate", "predicted"])
@pytest.mark.parametrize("cut", [(1,), (1, 1), (6, 1), (3, 3, 1), (3, 4)], ids=str)
def test_a_pass_of_one_token_is_still_the_prompt(
    make_dir: Callable[..., Path], prompts: list[list[int]], first_token: str, cut: tuple[int, ...]
) -> None:
    """A prompt of one token, or a last chunk of one: own gates, and the rule of the first token counts from there."""
    with Engine.load(make_dir(first_token=first_token), lora=False) as engine:
        sequence, ids = Sequence(engine.model), iter(prompts[2])
        for chunk in cut:
            sequence.prefill([next(ids) for _ in range(chunk)], last=True)
            assert sequence.last is not None and not sequence.last.foreseen
            assert (sequence.last.features is None) == (first_token == "gate")
        before_OE = None if sequence.last.features is None else np.array(sequence.last.features.previous)
        if before_OE is not None:  # the token before may lie in another chunk, or nowhere
            assert (before_OE.sum(axis=-1) == (0 if cut == (1,) else engine.model.tier.k)).all()
        predicted = []
        for token in (5, 80, 7):
            sequence.decode(token)
            predicted.append(sorted(sequence.last.foreseen))
            if before_OE is None:  # and what the prompt routed to is never seen
                before_OE = np.array(sequence.last.features.previous)
                assert not before_OE.any()
        assert predicted == [[] if first_token == "gate" else [1, 2], [1, 2], [1, 2]]


def test_only_consumers_follow_the_heads(make_dir: Callable[..., Path], prompts: list[list[int]]) -> None:
    """Step 1 is the first predicted one; layers 0 and 3 keep their gates, whatever owner 2's head says."""
    with Engine.load(make_dir(), lora=False) as engine:
        arm = engine.model.arm
        assert isinstance(arm, Prerouter) and (engine.model.tier.consumers, arm.guessed) == ((1, 2), (3,))
        chosen = []
        # Traced, since without a trace a step may be built before the one before is handed out.
        for index, _ in enumerate(engine.generate(prompts[2], max_tokens=5, ignore_eos=True, trace=True)):
            sequence = engine.sequence
            assert sequence is not None and sequence.last is not None and sequence.coming is not None
            chosen.append([layer in sequence.last.foreseen for layer in range(4)])
            assert (sequence.coming.ahead is not None) == (1 <= index < 4)  # nor behind the last
            if sequence.coming.ahead is not None:
                logits = np.array(sequence.coming.ahead.logits_TE)
                assert logits.shape == (3, 8) and np.isfinite(logits).all()
    assert chosen == [[False] * 4, [False] * 4, *[[False, True, True, False]] * 3]


def test_inspect_names_token_aware_heads_and_that_upstream_lacks_them(make_dir: Callable[..., Path]) -> None:
    for token_aware in (False, True):
        data = inspect(make_dir(token_aware=token_aware))
        assert data["prerouter"]["token_aware"] is token_aware and data["problems"] == []
        assert f"  token_aware: {token_aware}\n" in inspection_text(data)
        for kind in ("prerouter", "lora"):
            assert any("token_aware" in problem for problem in data[kind]["upstream_problems"]) == token_aware


@pytest.mark.parametrize("token_aware", [False, True])
def test_heads_run_before_the_step_and_for_its_own_token(
    make_dir: Callable[..., Path], prompts: list[list[int]], token_aware: bool
) -> None:
    """Predictions may be asked for early, several times, and for a token that is not decoded in the end."""
    with Engine.load(make_dir(token_aware=token_aware), lora=False) as engine:
        expected = served(engine, [prompts[2]])
        sequence = Sequence(engine.model)
        logits = sequence.prefill(prompts[2], last=True)
        for step, token in enumerate(expected[0][:4]):
            guesses = []
            for guess in (token, (token + 1) % 384, token):
                ahead = sequence.foresee(mx.array(guess)).ahead
                guesses += [] if ahead is None else [np.array(ahead.logits_TE)]
            assert len(guesses) == (3 if step > 0 else 0)  # under "gate" the first decode step isn't predicted
            if guesses:
                assert np.array_equal(guesses[0], guesses[2])
                assert np.array_equal(guesses[0], guesses[1]) == (not token_aware)
            sequence.foresee(mx.array((token + 1) % 384))
            logits = sequence.decode(token)
            assert np.array_equal(np.array(logits), expected[2][step + 1])
            assert sequence.last is not None
            assert np.array_equal(sequence.last.executed(), expected[1][step + 1])


def test_a_step_that_nobody_foresaw_is_a_bug_and_not_a_guess(
    make_dir: Callable[..., Path], prompts: list[list[int]]
) -> None:
    with Engine.load(make_dir(), lora=False) as engine:
        sequence = Sequence(engine.model)
        with pytest.raises(RuntimeError, match="prefill"):
            sequence.foresee(mx.array(5))
        sequence.prefill(prompts[2], last=True)
        with pytest.raises(RuntimeError, match="nobody foresaw"):
            sequence.run()
        sequence.decode(5)
        with pytest.raises(RuntimeError, match="nobody foresaw"):
            sequence.run()


def test_behind_the_final_step_no_head_runs_and_no_step_either(
    make_dir: Callable[..., Path], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(make_dir(first_token="predicted"), lora=False) as engine:
        sequence = Sequence(engine.model)
        sequence.prefill(prompts[2], last=True)
        sequence.decode(5, final=True)
        ran: list[None] = []
        monkeypatch.setattr(Heads, "__call__", lambda *_: ran.append(None))
        assert sequence.foresee(mx.array(9)).ahead is None and not ran
        with pytest.raises(RuntimeError, match="to be the final one"):
            sequence.decode(9)


def test_reset_forgets_the_last_request(make_dir: Callable[..., Path], prompts: list[list[int]]) -> None:
    with Engine.load(make_dir(first_token="predicted"), lora=False) as engine:
        first = served(engine, [[7]])  # one token: the previous one-hot must be zeros
        served(engine, [prompts[2]])
        assert_same(served(engine, [[7]]), first)
