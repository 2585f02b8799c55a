"""The masks equal a plain simulation of serving, step by step, for both first-token rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_runtime.contract import predicted_mask, previous_valid_mask
from edge0_runtime.contract.timeline import FIRST_TOKEN_RULES

P, D = False, True  # an input of a prompt (prefill), an input of a decode step


def simulate(rule: str, decoded: list[bool]) -> tuple[list[bool], list[bool]]:
    """Serve the inputs one by one, as docs/method.md 1.4 tells it; returns (predicted, previous_valid).

    The state of one owner is the prediction it has made for the next input, and the routing captured at the last one.
    Under "gate" prefill captures nothing and clears the state; under "predicted" prefill captures as decoding does.
    """
    prediction = captured = False
    predicted, previous_valid = [], []
    for decode_step in decoded:
        if rule == "gate" and not decode_step:
            prediction = captured = False
            predicted.append(False)
            previous_valid.append(False)
            continue
        predicted.append(decode_step and prediction)
        previous_valid.append(captured)
        prediction = captured = True
    return predicted, previous_valid


@given(st.sampled_from(FIRST_TOKEN_RULES), st.lists(st.booleans(), max_size=40))
def test_the_masks_equal_the_step_by_step_simulation(rule, decoded):
    mask = predicted_mask(rule, np.array(decoded, dtype=bool))
    predicted, previous_valid = simulate(rule, decoded)
    assert mask.tolist() == predicted
    assert previous_valid_mask(rule, mask).tolist() == previous_valid


@pytest.mark.parametrize(
    ("rule", "decoded", "predicted", "previous_valid"),
    [
        # one turn, P = 3: the gate rule predicts t > P with the first step's previous one-hot zero, the other t >= P
        ("gate", [P, P, P, D, D, D], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]),
        ("predicted", [P, P, P, D, D, D], [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]),
        # P = 1: input 1 is predicted from input 0, whose previous one-hot is zero
        ("gate", [P, D, D], [0, 0, 1], [0, 0, 1]),
        ("predicted", [P, D, D], [0, 1, 1], [0, 1, 1]),
        # two turns
        ("gate", [P, D, D, P, P, D, D], [0, 0, 1, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0, 1]),
        ("predicted", [P, D, D, P, P, D, D], [0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 1]),
        # no prompt: nothing to predict input 0 from
        ("gate", [D, D, D], [0, 1, 1], [0, 1, 1]),
        ("predicted", [D, D, D], [0, 1, 1], [0, 1, 1]),
        ("gate", [], [], []),
        ("predicted", [], [], []),
    ],
)
def test_the_masks_by_hand(rule, decoded, predicted, previous_valid):
    mask = predicted_mask(rule, np.array(decoded, dtype=bool))
    assert mask.astype(int).tolist() == predicted
    assert previous_valid_mask(rule, mask).astype(int).tolist() == previous_valid


@pytest.mark.parametrize("rule", FIRST_TOKEN_RULES)
def test_the_arguments_are_left_alone(rule):
    decoded = np.array([D, P, D, D])
    mask = predicted_mask(rule, decoded)
    before = mask.copy()
    previous_valid_mask(rule, mask)[:] = True
    np.testing.assert_array_equal(mask, before)
    mask[:] = True
    assert decoded.tolist() == [D, P, D, D]
