"""When a routing is predicted: the decode timeline that training and serving share (docs/method.md 1.4, 1.5).

Index t is the INPUT token. In a conversation with a prompt of P tokens, inputs 0..P-1 are the prompt (prefill), input P
is the first generated token and thereby the first decode step. Owner N's head, evaluated at input t, routes layer N+1 at
input t+1.

* first_token = "gate" (35b): input P still routes by its own gate; its features are captured with an all-zero previous
  one-hot; inputs t > P are predicted.
* first_token = "predicted" (8b): input P is predicted already, from the last prompt position P-1 with the routing of
  position P-2 as the previous one-hot (zeros when P = 1).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

FirstToken = Literal["gate", "predicted"]
FeatureTopk = Literal["executed", "teacher"]
FIRST_TOKEN_RULES: tuple[FirstToken, ...] = ("gate", "predicted")
FEATURE_TOPK_KINDS: tuple[FeatureTopk, ...] = ("executed", "teacher")


def predicted_mask(first_token: FirstToken, decoded_T: np.ndarray, start_T: np.ndarray | None = None) -> np.ndarray:
    """Which inputs are routed by prediction.

    Args:
        first_token: the tier's rule for the first decode step.
        decoded_T: bool [T]; True where serving processes the input in a decode step (t >= P; in a conversation of
            several turns, every run of True is one reply).
        start_T: bool [T]; True at the first input of every document packed into the row. None: one document.

    Returns:
        bool [T]. Under "predicted" it equals `decoded_T`; under "gate" the first input of every run is left out.
        A document's first input is never predicted: there is no earlier token to predict it from.
    """
    decoded_T = np.asarray(decoded_T, dtype=bool)
    predicted_T: np.ndarray = decoded_T & ~_starts(decoded_T, start_T)
    if first_token == "gate":
        predicted_T &= np.concatenate([[False], decoded_T[:-1]])
    return predicted_T


def previous_valid_mask(
    first_token: FirstToken, predicted_T: np.ndarray, start_T: np.ndarray | None = None
) -> np.ndarray:
    """Where a head's previous one-hot is input t-1's routing rather than zeros: bool [T].

    Under "gate" the state is cleared until the first decode step, so only a predicted input has a predecessor whose
    routing was captured. Under "predicted" the prompt's routing is captured too; only a document's first input has no
    predecessor.
    """
    predicted_T = np.asarray(predicted_T, dtype=bool)
    return predicted_T.copy() if first_token == "gate" else ~_starts(predicted_T, start_T)


def _starts(like_T: np.ndarray, start_T: np.ndarray | None) -> np.ndarray:
    """Document starts; input 0 always is one."""
    starts_T = np.zeros_like(like_T) if start_T is None else np.asarray(start_T, dtype=bool).copy()
    starts_T[:1] = True
    return starts_T
