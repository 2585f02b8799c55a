"""One arm on the held-out rows: nearness to the teacher and right answers by row, and how many experts a token reads."""

from __future__ import annotations

from typing import Any

from edge0_train.data.rows import Batch
from edge0_train.data.tasks import is_correct
from edge0_train.locality import Locality
from edge0_train.measure.bench import Bench, Stage, running
from edge0_train.measure.quality import greedy_answers, row_kl
from edge0_train.student import RoutingPass
from recipes.sticky.bends import READ

HELD = (4, 8, 12, 16)
"""Experts held of a layer, of nano's 32."""


def measure(bench: Bench, stage: Stage) -> dict[str, Any]:
    """By row, so that arms can be compared in pairs, and as means.

    Returns:
        kl: by row the sum over completion tokens of KL(teacher || stage) in nats. tokens: by row. right: by row with an answer,
        "1" or "0" for the greedy answer. misses: {experts held of a layer: experts read a predicted input and layer}. mean: of
        all that.
    """
    with running(bench, stage) as path:
        k = path.tier.k
        locality = Locality(path.tier.consumers, [size for size in HELD if size >= k])

        def look(batch: Batch, routing: RoutingPass) -> None:
            executed = routing.executed | getattr(path, READ, {})
            assert routing.predicted_BT is not None
            for row, predicted_T in enumerate(routing.predicted_BT):
                length = int(batch.decoded_BT[row].nonzero().max()) + 1
                locality.add(executed, row, predicted_T, length)

        rows = row_kl(path, stage, bench, look)
        kl, tokens = [float(row.sum()) for row in rows], [len(row) for row in rows]
        checked = [row for row in bench.rows if row.answer]
        answers = greedy_answers(path, stage, bench, checked)
        text = bench.student.chat.text
        right = [is_correct(row.answer, text(done.ids)) for row, done in zip(checked, answers, strict=True)]
    return {
        "kl": kl,
        "tokens": tokens,
        "right": "".join(str(int(one)) for one in right),
        "misses": locality.misses(),
        "mean": {
            "kl": sum(kl) / sum(tokens),
            "exact_match": sum(right) / len(right),
            "experts": locality.used(),
            **{f"misses {size}": round(value, 3) for size, value in locality.misses().items()},
        },
    }
