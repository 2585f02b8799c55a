"""prerouter: heads route the predicted layers one token ahead, and their experts are read meanwhile. The product.

Owner N's head, evaluated on input t, gives the router logits of layer N+1 on input t+1 (docs/method.md 1.3, 1.4). Layers
that keep their own gates are read as in `lookahead`, and by heads whose output no router takes.

The timeline needs no clock. A pass leaves features for the heads, or none; a step after one that left features is predicted.
Under first_token = "gate" a prompt leaves none: so the first decode step keeps its gates, and has no history to show.

Shapes: O owners (those whose next layer is predicted first), T tokens, K experts, E experts of a layer, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import mlx.core as mx
import numpy as np

from edge0_runtime import sticky
from edge0_runtime.arms import Parts
from edge0_runtime.arms.lookahead import Lookahead
from edge0_runtime.gates import Gate
from edge0_runtime.heads import EVERY
from edge0_runtime.routing import Routing, predicted, row, stack
from edge0_runtime.step import Step

GROUP = 4  # heads that run together inside a step: each group costs about as much as all at once, however small


class Features(NamedTuple):
    """What a pass leaves to the heads, by the names of `HEAD_INPUTS`.

    Attributes:
        hidden: [O, D], the last token's MoE inputs. routing, previous: [O, E], its routing and that of the token before. All
            float32.
    """

    hidden: mx.array
    routing: mx.array
    previous: mx.array


class Prerouter(Lookahead):
    """Prediction is routing.

    Attributes:
        guessed: layers that keep their own gate and have a head all the same (35b: the last one). What it predicts comes
            after the consumers' and routes nothing, but is a good guess what to read.
    """

    exact: ClassVar[bool] = False
    needs_heads: ClassVar[bool] = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        assert parts.heads is not None
        self._heads, self._tier = parts.heads, parts.tier
        self._owners = frozenset(self._heads.owners)
        # The layer above all of a group's owners -> the group.
        starts = range(0, len(self._heads.owners), GROUP)
        groups = [slice(start, min(start + GROUP, len(self._heads.owners))) for start in starts]
        self._groups = {max(self._heads.owners[rows]) + 1: rows for rows in groups}
        self.guessed = tuple(owner + 1 for owner in self._heads.owners[len(self._tier.consumers) :])

    def foresee(self, last: Step, coming: Step) -> None:
        """Run all heads on the last pass's features, if it left any: the consumers' routings, lazily."""
        if last.features is None or last.final:
            return
        if len(last.early) == len(self._groups):  # all of them have run in the last pass
            coming.ahead = stack([last.early[rows.start] for rows in self._groups.values()])
        else:
            assert coming.token is not None
            embedding_D = self.parts.embed(coming.token[None])[0] if self._tier.token_aware else None
            coming.ahead = self._predicted(last.features, last.since, embedding_D, EVERY)
        for index, layer in enumerate(self._tier.consumers):
            coming.foreseen[layer] = row(self._tier.router, coming.ahead, index)

    def hints(self, last: Step, coming: Step) -> None:
        """Stage the consumers' predicted experts; guess those of the heads that route nothing."""
        if coming.ahead is None:
            return
        consumers, experts_OK = self._tier.consumers, np.array(coming.ahead.experts_TK).astype(np.int64)
        coming.stage(consumers, experts_OK[: len(consumers)])
        coming.guess(self.guessed, experts_OK[len(consumers) :])

    def route(self, step: Step, gate: Gate, x: mx.array) -> Routing:
        """The prediction where there is one, else as in `lookahead`; an owner's input (and own choice) is kept for its head."""
        layer = gate.layer
        routing = step.foreseen.get(layer) or super().route(step, gate, x)
        if layer in self._owners and self._leaves_features(step):
            step.inputs[layer] = x.reshape(-1, x.shape[-1])[-1]
            if self._tier.feature_topk == "teacher":
                own = gate.own(x) if layer in step.foreseen else routing
                step.own[layer], step.own_by[layer] = gate.choice(own), own.scores
        return routing

    def remember(self, step: Step) -> Features | None:
        """The heads' inputs from this pass, lazily; None where the tier's timeline lets the pass leave none.

        Of a sticky tier every pass leaves `Step.since`.
        """
        if self._tier.router.sticky:
            step.since = self._since(step, EVERY)
        return self._features(step, EVERY) if self._leaves_features(step) else None

    def features_of(self, arrays: Sequence[mx.array]) -> Features:
        """Of a snapshot that was read from a file."""
        return Features(*arrays)

    def look_ahead(self, step: Step, layer: int) -> tuple[Sequence[int], mx.array] | None:
        """What a group of heads says, as soon as the layers that they speak of have run; not if they need the next token."""
        rows = self._groups.get(layer)
        if rows is None or self._tier.token_aware:
            return None
        since_CE = self._since(step, rows) if self._tier.router.sticky else None
        routing = step.early[rows.start] = self._predicted(self._features(step, rows), since_CE, None, rows)
        assert routing.experts_TK is not None
        return [owner + 1 for owner in self._heads.owners[rows]], routing.experts_TK

    def _predicted(
        self, features: Features, since_CE: mx.array | None, embedding_D: mx.array | None, rows: slice
    ) -> Routing:
        """Of the heads in `rows`, whose features and consumers' `since` these are."""
        logits_OE = self._heads(features._asdict(), embedding_D, rows)
        bonus_OE = None
        if since_CE is not None:  # none on what routes nothing, which stands behind the consumers'
            bonus_CE = sticky.bonus(self._tier.router.sticky, since_CE)
            bonus_OE = mx.pad(bonus_CE, [(0, len(logits_OE) - len(bonus_CE)), (0, 0)])
        return predicted(self._tier.router, logits_OE, self._tier.k, bonus_OE)

    def _features(self, step: Step, rows: slice) -> Features:
        """Of the heads in `rows`."""
        owners = self._heads.owners[rows]
        if self._tier.feature_topk == "executed":
            last_OTK = mx.stack([mx.array(step.ran[n][-2:]).astype(mx.uint32) for n in owners])
        else:
            last_OTK = mx.stack([step.own[n] for n in owners])
        last_OTE = self._heads.multi_hot(last_OTK)
        if last_OTE.shape[1] > 1:
            previous_OE = last_OTE[:, -2]
        elif step.last is not None and step.last.features is not None:  # the token before belongs to the pass before
            previous_OE = step.last.features.routing[rows]
        else:
            previous_OE = mx.zeros_like(last_OTE[:, -1])
        hidden_OD = mx.stack([step.inputs[n].astype(mx.float32) for n in owners])
        return Features(hidden_OD, last_OTE[:, -1], previous_OE)

    def _since(self, step: Step, rows: slice) -> mx.array:
        """Of the consumers in `rows`: [C, E]."""
        rule, last = self._tier.router.sticky, step.last
        before_CE = (sticky.never(self._tier) if last is None or last.since is None else last.since)[rows]
        ran = [mx.array(step.ran[layer][-rule.window :]).astype(mx.uint32) for layer in self._tier.consumers[rows]]
        return sticky.after(rule, before_CE, mx.stack(ran)) if ran else before_CE

    def _leaves_features(self, step: Step) -> bool:
        # Under "gate" the first decode step has no history: what the prompt routed to is not kept.
        return step.decoding or self._tier.first_token == "predicted"
