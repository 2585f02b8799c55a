"""One forward pass as an object: what is known before it, what happens in it, what it leaves to the next one.

A decode step's life, in order (docs/streaming.md "One decode step" draws it):

1. `Sequence.foresee` makes it as soon as its token is chosen; the arm fills `foreseen`: routings that are known by now.
2. `Sequence.flush` evaluates token and foresight in one go; the arm's hints have experts read (`stage`, `guess`, `want`).
3. `Sequence.run` builds the pass. Each MoE layer's gate asks the arm for its routing (`routings`), each expert call says what
   it computes (`ran`).
4. The arm leaves in `features` what the next step's foresight needs, and the step becomes the sequence's `last`.

Shapes: T tokens of the pass (1 when decoding), L layers, K experts per token, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from edge0_runtime.experts.memory import ExpertMemory
from edge0_runtime.routing import Routing

PROMPT = -1


@dataclass(eq=False)
class Step:
    """One forward pass of one sequence. All arrays may be lazy unless said otherwise.

    Attributes:
        index: of the decode step, from 0; PROMPT for a chunk of the prompt.
        token: the id that a decode step processes, scalar; None for a chunk of the prompt.
        trail: fingerprint of all ids of the sequence, as they were cut into passes, up to and with this pass's; None where it
            isn't known: before the flush, and behind a step that was run without one.
        route: (step, gate, x) -> what routes the gate's layer: the arm's. look_ahead: (step, layer) -> layers and their
            experts in the next step, as far as the arm knows them by now.
        last: the pass before; its own is forgotten.
        memory: the experts that the pass computes from and has read ahead; None where all are resident.
        waits: an expert may have to be waited for, so that knowing it earlier is worth something.
        whole_layers, again: `experts.streaming.Pass`; so are staged, guessed, expected, chosen and ran.
        foreseen: layer -> its routing, known before the layer below has run.
        ahead: stacked, what the arm foresaw and its hints go by; to be evaluated with the flush.
        flushed: the flush before this step has taken place. final: none will follow it, so nothing is read for the next.
        routings: layer -> what routed it.
        inputs: layer -> [D], its MoE input at the last token, where the arm keeps it.
        own: layer -> [<=2, K], what its own gate chooses at the last two tokens, where the arm keeps it; own_by: by which
            scores, as `Routing.scores`.
        features: what the arm leaves for the next step's foresight. early: first of a group of heads -> what these have said
            of it already while this step ran.
        since: [consumers, E], what it leaves of a sticky tier beside them, the prompt's passes included (sticky.py).
        logits_V: after the pass's last token.
    """

    index: int = PROMPT
    token: mx.array | None = None
    trail: int | None = None
    route: Callable[[Step, Any, mx.array], Routing] | None = None
    look_ahead: Callable[[Step, int], tuple[Sequence[int], mx.array] | None] | None = None
    last: Step | None = None
    memory: ExpertMemory | None = None
    waits: bool = False
    whole_layers: bool = False
    again: bool = False
    foreseen: dict[int, Routing] = field(default_factory=dict)
    ahead: Routing | None = None
    flushed: bool = False
    final: bool = False
    staged: dict[int, np.ndarray] = field(default_factory=dict)
    guessed: dict[int, np.ndarray] = field(default_factory=dict)
    expected: dict[int, mx.array] = field(default_factory=dict)
    routings: dict[int, Routing] = field(default_factory=dict)
    chosen: dict[int, mx.array] = field(default_factory=dict)
    ran: dict[int, np.ndarray | mx.array] = field(default_factory=dict)
    inputs: dict[int, mx.array] = field(default_factory=dict)
    own: dict[int, mx.array] = field(default_factory=dict)
    own_by: dict[int, Callable[[], mx.array] | None] = field(default_factory=dict)
    features: Any = None
    early: dict[int, Routing] = field(default_factory=dict)
    since: mx.array | None = None
    logits_V: mx.array | None = None
    _submitted: tuple[int, mx.array] | None = None  # the last layer that went on, and its input

    @property
    def decoding(self) -> bool:
        """Whether it processes a generated token."""
        return self.index != PROMPT

    # -- what an arm has read ---------------------------------------------------------------------------------------

    def stage(self, layers: Sequence[int], experts_LK: np.ndarray) -> None:
        """These ARE the experts of these layers in this step: read them, and don't wait for their routers."""
        self.staged.update(zip(layers, experts_LK, strict=True))
        self.want(layers, experts_LK)

    def guess(self, layers: Sequence[int], experts_LK: np.ndarray, *, soon: bool = False) -> None:
        """These layers will choose themselves, and probably these: read them while such guesses are mostly right."""
        self.guessed.update(zip(layers, experts_LK, strict=True))
        if self.memory is not None:
            self.memory.guess(layers, experts_LK, soon=soon)

    def want(self, layers: Sequence[int], experts_LK: np.ndarray) -> None:
        """These may be experts of these layers: read them as far as they aren't there."""
        if self.memory is not None:
            self.memory.want(layers, experts_LK)

    # -- while it runs ----------------------------------------------------------------------------------------------

    def proceed(self, layer: int, x: mx.array) -> None:
        """The layer has its experts and x, its input, is built: have it computed while the pass is built on.

        What the arm knows by now of the next step's experts is looked at meanwhile, and read.
        """
        if not self.decoding or self.look_ahead is None or self.memory is None:
            return
        known = None if self.final else self.look_ahead(self, layer)
        if known is not None:
            mx.async_eval(known[1])  # before x: it needs no more than the input of the layer below
        mx.async_eval(x)
        below, self._submitted = self._submitted, (layer, x)
        if below is not None:
            mx.eval(below[1])
            self.memory.release(below[0])
        if known is not None:
            for above, experts_K in zip(known[0], np.array(known[1]).astype(np.int64), strict=True):
                # A layer that is routed so in this step will be in the next one: that is no guess.
                ask = self.memory.want if above in self.staged else self.memory.guess
                ask([above], experts_K[None], early=True)

    def stop(self) -> None:
        """Whatever became of it, nothing computes for it any more, and it holds no slots."""
        self.memory = self.route = self.look_ahead = self.last = None
        if self._submitted is not None:
            mx.eval(self._submitted[1])
            self._submitted = None

    # -- afterwards -------------------------------------------------------------------------------------------------

    def dropped(self) -> dict[int, int]:
        """Layer -> routed experts that were not among those staged, after the pass is evaluated; anything is a bug.

        Each pass is asked once: what it chose is forgotten.
        """
        chosen, self.chosen = self.chosen, {}
        counts = {
            layer: int(np.isin(np.array(indices), self.staged[layer], invert=True).sum())
            for layer, indices in chosen.items()
        }
        return {layer: count for layer, count in counts.items() if count}

    def executed(self) -> np.ndarray:
        """Experts of the last token: [MoE layers, K], sorted."""
        last = (np.array(self.ran[layer][-1]).astype(np.int64) for layer in sorted(self.ran))
        return np.stack([np.sort(row) for row in last])

    def scores(self) -> dict[int, np.ndarray]:
        """Layer -> [E], what the last token's experts were chosen by; for a pass of one token."""
        return {
            layer: np.array(routing.scores()) for layer, routing in self.routings.items() if routing.scores is not None
        }

    def own_scores(self) -> dict[int, np.ndarray]:
        """Layer -> [E], what the choices in `own` of the last token were made by; for a pass of one token."""
        return {layer: np.array(scores()) for layer, scores in self.own_by.items() if scores is not None}


class Running:
    """Which step is running. mlx-lm's call of a block can't carry it, so all its wrappers share this one reference."""

    def __init__(self) -> None:
        self.step = Step()
