"""A parameter at the edge of what float32 holds still chooses a token that the model thinks likely."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.sampling import make_sampler

VOCABULARY = 4096
LIKELY = (3000, 3001)
OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def logits() -> mx.array:
    """Two tokens share nearly all of the probability, 3 to 1; token 0, which argmax gives where all is NaN, has none."""
    values = mx.full(VOCABULARY, -30.0)
    values[mx.array(LIKELY)] = mx.array([2.0, 2.0 - math.log(3)])
    return values


def drawn(logits_V: mx.array | None = None, **changes: float) -> set[int]:
    sample = make_sampler(**{**OFF, **changes}, seed=1, vocab_size=VOCABULARY)  # type: ignore[arg-type]
    return {sample(logits() if logits_V is None else logits_V).item() for _ in range(24)}


FLAT = mx.arange(VOCABULARY) / VOCABULARY  # no token is likely, the last one a little more than the others


TINY = (5e-324, 1e-320, 1e-300, 1e-46, 1e-45, 1e-39, 1e-38, 1.2e-38, 1e-37, 1e-36, 1e-20, 1e-9)


@pytest.mark.parametrize("temperature", [0.0, *TINY])
def test_a_temperature_that_goes_to_zero_takes_the_most_likely_token(temperature):
    assert drawn(temperature=temperature) == {LIKELY[0]}
    assert drawn(FLAT, temperature=temperature) == {VOCABULARY - 1}


@pytest.mark.parametrize("top_p", [*TINY, 1e-6, 1e-3, 0.5])
def test_a_top_p_that_goes_to_zero_takes_the_most_likely_token(top_p):
    assert drawn(top_p=top_p) == {LIKELY[0]}
    assert drawn(FLAT, top_p=min(top_p, 1e-4)) == {VOCABULARY - 1}


@pytest.mark.parametrize(
    "changes", [{}, {"top_p": 1 - 1e-16}, {"top_p": 0.9}, {"top_k": 2}, *({"min_p": p} for p in TINY)]
)
def test_filters_that_leave_both_give_both(changes):
    assert drawn(**changes) == set(LIKELY)


@pytest.mark.parametrize("changes", [{"min_p": 1.0}, {"min_p": 0.5}, {"top_k": 1}])
def test_filters_that_leave_one_give_one(changes):
    assert drawn(**changes) == {LIKELY[0]}


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_the_hottest_temperature_still_keeps_to_the_filters(filters):
    assert drawn(temperature=1e30, **filters) == set(LIKELY)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e39}, {"temperature": math.nan}, {"temperature": -1.0}, {"temperature": math.inf}, {"top_p": 0.0},
        {"top_p": 1.5}, {"top_p": math.nan}, {"top_k": -1}, {"top_k": 1.5}, {"min_p": -0.1}, {"min_p": math.nan},
    ],
)  # fmt: skip
def test_what_float32_does_not_hold_or_nature_has_not_is_refused(changes):
    (name,) = changes
    with pytest.raises(Edge0Error, match=f"{name}: .* must be"):
        drawn(**changes)
