"""Requests: what is refused, how they end, that they don't touch each other, and which thread may do what."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine, Token
from edge0_runtime.sampling import make_sampler
from edge0_runtime.sequence import Sequence
from edge0_runtime.step import Step
from tests.mlx_memory import mlx_bytes


@pytest.fixture(scope="module")
def engine(tiny_dir: Path) -> Iterator[Engine]:
    with Engine.load(tiny_dir) as loaded:
        yield loaded


def ids(steps: Iterator[Token]) -> list[int]:
    return [step.token for step in steps]


def test_every_request_equals_a_fresh_engines(tiny_dir: Path, engine: Engine, prompts: list[list[int]]) -> None:
    together = [ids(engine.generate(p, max_tokens=8, ignore_eos=True)) for p in prompts * 2]
    for prompt, first, second in zip(prompts, together, together[4:], strict=False):
        with Engine.load(tiny_dir) as fresh:
            assert ids(fresh.generate(prompt, max_tokens=8, ignore_eos=True)) == first == second


def test_an_aborted_request_leaves_nothing_behind(engine: Engine, prompts: list[list[int]]) -> None:
    expected = ids(engine.generate(prompts[2], max_tokens=8, ignore_eos=True))
    steps = engine.generate(prompts[3], max_tokens=8, ignore_eos=True)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert ids(engine.generate(prompts[2], max_tokens=8, ignore_eos=True)) == expected


def test_a_second_request_is_refused_while_one_runs(engine: Engine, prompts: list[list[int]]) -> None:
    steps = engine.generate(prompts[1], max_tokens=3, ignore_eos=True)
    next(steps)
    with pytest.raises(Edge0Error, match="a request is running"):
        next(engine.generate(prompts[1], max_tokens=3))
    assert len(list(steps)) == 2
    assert len(ids(engine.generate(prompts[1], max_tokens=3, ignore_eos=True))) == 3


def test_a_request_that_is_never_iterated_blocks_nobody(engine: Engine, prompts: list[list[int]]) -> None:
    engine.generate(prompts[1], max_tokens=3)
    assert ids(engine.generate(prompts[1], max_tokens=1))


def test_length_and_stop(engine: Engine, prompts: list[list[int]]) -> None:
    steps = list(engine.generate(prompts[2], max_tokens=5, ignore_eos=True))
    assert [s.finish_reason for s in steps] == [None] * 4 + ["length"]
    assert [s.index for s in steps] == list(range(5))
    tokens = [s.token for s in steps]
    end = engine.eos_ids
    try:
        engine.eos_ids = frozenset({tokens[3]})
        stopped = list(engine.generate(prompts[2], max_tokens=5))
        assert [s.token for s in stopped] == tokens[: tokens.index(tokens[3]) + 1]
        assert stopped[-1].finish_reason == "stop"
        ignoring = list(engine.generate(prompts[2], max_tokens=5, ignore_eos=True))
        assert [s.token for s in ignoring] == tokens
        # the end token as the last allowed one is a natural end
        assert list(engine.generate(prompts[2], max_tokens=tokens.index(tokens[3]) + 1))[-1].finish_reason == "stop"
    finally:
        engine.eos_ids = end


def test_end_tokens_come_from_all_files(tiny_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_dir, directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [9, 11]}')
    with Engine.load(directory) as engine:
        assert engine.eos_ids == {2, 9, 11}


def test_cancel_in_decode_and_in_prefill(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = threading.Event()
    steps = engine.generate(prompts[2], max_tokens=9, ignore_eos=True, cancel=cancel)
    first = next(steps)
    cancel.set()
    (last,) = steps
    assert first.finish_reason is None
    assert (last.finish_reason, last.index, last.token) == ("cancelled", 1, -1)

    cancel, forward = threading.Event(), Sequence._forward
    chunks = []

    def cancelling(sequence: Sequence, step: Step, tokens_T: mx.array) -> mx.array:
        chunks.append(tokens_T.size)
        if len(chunks) == 2:
            cancel.set()
        return forward(sequence, step, tokens_T)

    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "_forward", cancelling)
        patch.setattr(engine, "prefill_chunk", 4)
        (only,) = engine.generate(prompts[3], max_tokens=9, cancel=cancel)
    assert (only.finish_reason, only.index) == ("cancelled", 0)
    assert chunks == [4, 4]


def test_chunked_prefill_equals_one_shot(engine: Engine) -> None:
    prompt = np.random.default_rng(6).integers(3, 384, size=70).tolist()
    whole = list(engine.generate(prompt, max_tokens=4, ignore_eos=True, trace=True))
    try:
        for chunk in (1, 7, 64):
            engine.prefill_chunk = chunk
            steps = list(engine.generate(prompt, max_tokens=4, ignore_eos=True, trace=True))
            assert [s.token for s in steps] == [s.token for s in whole]
            assert np.allclose(steps[0].logits, whole[0].logits, rtol=1e-3, atol=1e-4)
    finally:
        engine.prefill_chunk = 512


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([], {}, "prompt: it has no tokens"),
        ([5, 384], {}, r"prompt: \[384\].*0\.\.383"),
        ([5, -1], {}, r"prompt: \[-1\]"),
        ([5, "6"], {}, "prompt"),
        ([5], {"max_tokens": 0}, "max_tokens: 0"),
        ([5] * 200, {"max_tokens": 57}, "200 tokens.*57.*context of 256"),
        ([5], {"temperature": -0.1}, "temperature"),
        ([5], {"temperature": float("nan")}, "temperature"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"top_p": 1.1}, "top_p"),
        ([5], {"top_k": -1}, "top_k"),
        ([5], {"min_p": 2.0}, "min_p"),
    ],
)
def test_wrong_arguments_are_refused_at_once(engine: Engine, prompt: list, options: dict, says: str) -> None:
    with pytest.raises(Edge0Error, match=says):
        engine.generate(prompt, **({"max_tokens": 4} | options))


def test_the_context_can_be_filled_to_the_last_token(engine: Engine) -> None:
    assert len(ids(engine.generate([5] * 250, max_tokens=6, ignore_eos=True))) == 6


def test_a_seed_fixes_the_tokens_and_no_seed_does_not(engine: Engine, prompts: list[list[int]]) -> None:
    def sample(seed: int | None) -> list[int]:
        return ids(engine.generate(prompts[2], max_tokens=16, temperature=1.5, seed=seed, ignore_eos=True))

    first = sample(3)
    mx.random.seed(99)
    mx.eval(mx.random.normal((4,)))
    assert sample(3) == first
    assert sample(4) != first
    assert sample(None) != sample(None)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(engine: Engine, prompts: list[list[int]], options: dict) -> None:
    greedy = ids(engine.generate(prompts[2], max_tokens=6, ignore_eos=True))
    sampled = engine.generate(prompts[2], max_tokens=6, temperature=2.0, seed=1, ignore_eos=True, **options)
    assert ids(sampled) == greedy


def test_samples_follow_the_distribution(engine: Engine, prompts: list[list[int]]) -> None:
    (step,) = engine.generate(prompts[2], max_tokens=1, trace=True, ignore_eos=True)
    assert step.logits is not None
    logprobs = step.logits - np.log(np.exp(step.logits).sum())
    assert step.logprob == pytest.approx(logprobs[step.token], abs=1e-4)
    tempered = np.exp(logprobs / 0.5)
    tempered /= tempered.sum()
    sample, logits = make_sampler(0.5, 1.0, 0, 0.0, 1, 384), mx.array(step.logits)
    drawn = np.array([sample(logits).item() for _ in range(1000)])
    for token in np.argsort(-tempered)[:3]:
        # five standard errors
        spread = 5 * np.sqrt(tempered[token] * (1 - tempered[token]) / 1000)
        assert abs((drawn == token).mean() - tempered[token]) < spread


def test_logits_that_are_not_finite_fail_the_request_only(engine: Engine, prompts: list[list[int]]) -> None:
    expected = ids(engine.generate(prompts[2], max_tokens=3, ignore_eos=True))
    norm = engine.model.network.language_model.model.norm
    good, norm.weight = norm.weight, mx.full(norm.weight.shape, float("nan"))
    mx.eval(norm.weight)
    with pytest.raises(Edge0Error, match="NaN"):
        list(engine.generate(prompts[2], max_tokens=3))
    norm.weight = good
    assert ids(engine.generate(prompts[2], max_tokens=3, ignore_eos=True)) == expected


def test_loading_and_generating_may_be_different_threads(tiny_dir: Path, prompts: list[list[int]]) -> None:
    outputs: list[object] = []

    def in_thread(work: Callable[[], object]) -> object:
        def run() -> None:
            try:
                outputs.append(work())
            except BaseException as error:
                outputs.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(outputs[-1], BaseException):
            raise outputs[-1]
        return outputs[-1]

    engine = in_thread(lambda: Engine.load(tiny_dir))
    assert isinstance(engine, Engine)
    with engine:
        for options in ({}, {"temperature": 1.0, "top_p": 0.9, "top_k": 9, "min_p": 0.01, "seed": 5}):
            here = ids(engine.generate(prompts[3], max_tokens=6, ignore_eos=True, **options))
            there = in_thread(
                lambda options=options: ids(engine.generate(prompts[3], max_tokens=6, ignore_eos=True, **options))
            )
            assert here == there


def test_replay_feeds_the_given_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    steps = list(engine.generate(prompts[2], max_tokens=5, ignore_eos=True, trace=True))
    replayed = list(engine.replay(prompts[2], [step.token for step in steps]))
    for step, again in zip(steps, replayed, strict=True):
        assert step.token == again.token
        assert np.array_equal(step.experts, again.experts) and np.array_equal(step.logits, again.logits)
    other = list(engine.replay(prompts[2], [9, 9, 9]))
    assert [step.token for step in other] == [9, 9, 9]


@pytest.mark.parametrize("kind", ["prerouter", "lora"])
def test_a_missing_adapter_names_file_and_flag(tiny_dir: Path, tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_dir, directory)
    (directory / f"{kind}_edge0_tiny.safetensors").unlink()
    with pytest.raises(Edge0Error, match=f"{kind}_edge0_<tier>.safetensors.*--no-{kind}"):
        Engine.load(directory)
    # without the prerouter file the LoRA's binding to it isn't checked: it isn't served
    with Engine.load(directory, **{kind: False}) as engine:
        assert ids(engine.generate([5], max_tokens=1))


def test_a_base_without_any_adapter_file_needs_a_tier(base_dir: Path) -> None:
    with pytest.raises(Edge0Error, match="--tier"):
        Engine.load(base_dir, prerouter=False, lora=False)
    with pytest.raises(Edge0Error, match="not the base of tier nano"):
        Engine.load(base_dir, prerouter=False, lora=False, tier_name="nano")


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), float("inf")])
def test_a_memory_budget_must_be_a_positive_number(tiny_dir: Path, budget: float) -> None:
    with pytest.raises(Edge0Error, match="memory_budget"):
        Engine.load(tiny_dir, memory_budget=budget)


def test_the_plan_says_what_is_served(engine: Engine) -> None:
    assert engine.plan().startswith("tier tiny: K 2, 2 layers predicted, LoRA on 31 modules; arm prerouter")


def test_memory_is_given_back_after_every_request(engine: Engine, prompts: list[list[int]]) -> None:
    list(engine.generate(prompts[3], max_tokens=2, ignore_eos=True))  # all experts that the requests need are loaded
    before = mlx_bytes()
    for _ in range(5):
        list(engine.generate(prompts[3], max_tokens=2, ignore_eos=True))
    steps = engine.generate(prompts[3], max_tokens=2, ignore_eos=True)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert mx.get_active_memory() == before


def test_a_request_begins_clean_whatever_the_model_did_before(engine: Engine, prompts: list[list[int]]) -> None:
    expected = ids(engine.generate(prompts[2], max_tokens=4, ignore_eos=True))
    sequence = Sequence(engine.model)
    sequence.prefill(prompts[3], last=True)
    sequence.decode(5)
    assert ids(engine.generate(prompts[2], max_tokens=4, ignore_eos=True)) == expected
