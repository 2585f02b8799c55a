"""How near a stage is to the teacher: losses and divergences a token, answers, and all that a table shows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from edge0_train.data.health import repetition
from edge0_train.data.rows import IGNORE, Batch, TextRow
from edge0_train.data.tasks import is_correct
from edge0_train.losses import CHUNK
from edge0_train.measure.bench import Bench, Stage, routing_of, running
from edge0_train.measure.recall import head_recall
from edge0_train.objectives.passes import hidden_at_labels, labels_of
from edge0_train.student import Completion, Decoding, RoutingPass, StudentPath, generate


def measure(bench: Bench, stage: Stage) -> dict[str, float]:
    """Everything that a table shows of a stage: loss, kl, recall of its heads, exact_match and what is beside them."""
    with running(bench, stage) as path:
        scores = token_scores(path, stage, bench)
        if stage.heads is not None:
            scores["recall"] = head_recall(path, bench.batches, own=False)["mean"]
        return scores | exact_match(path, stage, bench)


@torch.no_grad()
def row_kl(
    path: StudentPath, stage: Stage, bench: Bench, look: Callable[[Batch, RoutingPass], None] | None = None
) -> list[torch.Tensor]:
    """KL(teacher || stage) in nats at every completion token, float64, a tensor for each row.

    `look` is called with every batch and the pass that has run over it.
    """
    found: list[torch.Tensor] = []
    for batch, teacher_NH in zip(bench.batches, bench.reference, strict=True):
        routing = routing_of(path, stage, batch)
        logp = path.model.lm_head(hidden_at_labels(path, batch, routing)).double().log_softmax(-1)
        teacher_logp = bench.teacher.model.lm_head(teacher_NH).double().log_softmax(-1)
        counts = (batch.labels_BT != IGNORE).sum(1).tolist()
        found += (teacher_logp.exp() * (teacher_logp - logp)).sum(-1).split(counts)
        if look:
            look(batch, routing)
    return found


def mean_and_error(sums_R: torch.Tensor, counts_R: torch.Tensor) -> tuple[float, float]:
    """Of all tokens, given sums and counts by row; the standard error is a ratio's of sums over rows, to first order."""
    mean = float(sums_R.sum() / counts_R.sum())
    return mean, float((sums_R - mean * counts_R).square().sum().sqrt() / counts_R.sum())


@torch.no_grad()
def token_scores(path: StudentPath, stage: Stage, bench: Bench) -> dict[str, float]:
    """Mean cross-entropy, KL(teacher || stage) and reverse KL(stage || teacher), in nats per completion token.

    Both divergences are over the whole vocabulary, on the teacher's completions.
    """
    loss = divergence = reverse = 0.0
    for batch, teacher_NH in zip(bench.batches, bench.reference, strict=True):
        hidden_NH = hidden_at_labels(path, batch, routing_of(path, stage, batch))
        target_N = labels_of(batch)
        for own, other, target in zip(
            hidden_NH.split(CHUNK), teacher_NH.split(CHUNK), target_N.split(CHUNK), strict=True
        ):
            logp = path.model.lm_head(own).float().log_softmax(-1)
            teacher_logp = bench.teacher.model.lm_head(other).float().log_softmax(-1)
            loss -= float(logp.gather(-1, target[:, None]).sum())
            divergence += float((teacher_logp.exp() * (teacher_logp - logp)).sum())
            reverse += float((logp.exp() * (logp - teacher_logp)).sum())
    count = sum(batch.valid for batch in bench.batches)
    return {"loss": loss / count, "kl": divergence / count, "reverse_kl": reverse / count}


def greedy_answers(path: StudentPath, stage: Stage, bench: Bench, rows: Sequence[TextRow]) -> Iterator[Completion]:
    """The stage's greedy completion of every row's prompt, in order, a batch at a time."""
    sample, chat = bench.config.sample, bench.student.chat
    for start in range(0, len(rows), sample.batch):
        yield from generate(
            path,
            [row.prompt_ids for row in rows[start : start + sample.batch]],
            Decoding(sample.max_new_tokens),
            end_ids=chat.end_ids,
            pad_id=chat.pad_id,
            native_k=stage.native_k,
        )


def exact_match(path: StudentPath, stage: Stage, bench: Bench) -> dict[str, float]:
    """Greedy completions of all rows that have an answer: share right in total and per task, cut off, repetition."""
    checked = [row for row in bench.rows if row.answer]
    if not checked:
        return {}
    right: dict[str, list[bool]] = {}
    cut = repeated = 0.0
    for row, done in zip(checked, greedy_answers(path, stage, bench, checked), strict=True):
        right.setdefault(row.task, []).append(is_correct(row.answer, bench.student.chat.text(done.ids)))
        cut += done.finish_reason == "length"
        repeated += repetition(done.ids)
    per_task = {task: sum(values) / len(values) for task, values in sorted(right.items())}
    count = len(checked)
    total = sum(sum(values) for values in right.values()) / count
    return {"exact_match": total, **per_task, "truncated": cut / count, "repetition": repeated / count}
