"""phase=evaluate: every stage of a training on the same held-out prompts, in one table.

    python -m edge0_train phase=evaluate tier=nano

Stages are the adapters found below `root`: the teacher, the int4 base at its own and at the served K, the base with untrained
(warm-started) heads, then what each phase of `chain` has made of it.

The measurements are functions of their own, on a `Bench` that holds models and rows: recipes/paper_claims uses them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind, check_binding
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import read_input
from edge0_train.base import transformers_module
from edge0_train.base.affine import dequantize_once, quantize
from edge0_train.build import Student, build_student, build_teacher
from edge0_train.config import Config
from edge0_train.data.rows import IGNORE, Batch, TextRow, collate, read_data
from edge0_train.data.tasks import is_correct
from edge0_train.report import print_plan, table
from edge0_train.run import Run
from edge0_train.student import (
    PrerouterHeads,
    RoutingPass,
    Sampling,
    StudentPath,
    generate,
    load_lora,
    lora_disabled,
)
from edge0_train.student.lora import ADAPTER
from edge0_train.student.routing import multi_hot, select

STAGE_NAMES = {
    "head_distill": "heads only",
    "head_refine": "+ refinement",
    "student_sft": "+ SFT",
    "on_policy": "+ on-policy",
}
ROWS = 64
"""Rows of a forward pass."""


@dataclass(frozen=True)
class Stage:
    """One row of a table: which model, and how it routes.

    Attributes:
        native_k: own gates with that K throughout; None: the tier's timeline with `heads`.
        teacher: run the teacher instead of the int4 base.
        heads, lora: the adapters; None: no heads, the LoRA switched off.
        k: served K of the timeline, if it is not the tier's.
        merged: the LoRA added to the base's weights and quantised again, instead of running beside them.
    """

    name: str
    native_k: int | None = None
    teacher: bool = False
    heads: PrerouterHeads | None = None
    lora: Mapping[str, Any] | None = None
    k: int | None = None
    merged: bool = False


@dataclass(frozen=True)
class Bench:
    """Models and held-out rows on which stages are compared.

    Attributes:
        student: the int4 base with LoRA layers in it; its path's heads and LoRA are those of the stage that ran last.
        rows, batches: the held-out rows, and the same in batches of `ROWS`.
        reference: the teacher's final hidden states [N, H] at the labels of each batch.
    """

    config: Config
    student: Student
    teacher: StudentPath
    rows: tuple[TextRow, ...]
    batches: tuple[Batch, ...]
    reference: tuple[torch.Tensor, ...]


def evaluate(config: Config, run: Run) -> dict[str, Any]:
    """Write `table.json` (in the summary) and print the table: loss and KL per completion token, exact match per task."""
    tier = config.tier
    data, dropped = read_data(config.text.rows, config.text.max_length)
    rows = data.held_out[: config.sample.eval_prompts]
    print_plan(config, {"rows": f"{len(rows)} held-out prompts (dropped: {dropped or 'none'})"})
    if config.dry_run:
        return {}
    adapters = _adapters(config)
    if not any(kind == "prerouter" for _, kind, _ in adapters):
        raise Edge0Error(f"root: no phase has written heads below {config.root}; run phase=head_distill first")
    bench = open_bench(config, rows)
    warm = warm_heads(bench.student.path)
    stages = [
        Stage(f"teacher, K={tier.base_k}", tier.base_k, teacher=True),
        Stage(f"int4, K={tier.base_k}", tier.base_k),
        Stage(f"int4, K={tier.k}", tier.k),
        Stage("untrained heads", heads=warm),
    ]
    heads, lora = warm, None
    for phase, kind, adapter in adapters:
        check_binding(
            bench.student.base.fingerprint,
            adapter if kind == "prerouter" else None,
            adapter if kind == "lora" else None,
        )
        if kind == "prerouter":
            heads = load_heads(bench.student.path, adapter)
        else:
            lora = adapter.tensors
        stage = Stage(STAGE_NAMES[phase], heads=heads, lora=lora)
        stages = [*(s for s in stages if s.name != stage.name), stage]

    results = []
    for stage in stages:
        results.append({"stage": stage.name, **measure(bench, stage)})
        print(f"  {stage.name}: KL to teacher {results[-1]['kl']:.4g}", flush=True)
    columns = {"stage": "stage", "loss": "loss", "kl": "KL to teacher", "recall": f"recall@{tier.k}"}
    columns |= {"exact_match": "exact match"} | {
        task: task for task in sorted({row.task for row in rows if row.answer})
    }
    text = table(list(columns.values()), [[r.get(c) for c in columns] for r in results])
    print(text)
    return {"rows": len(rows), "table": results, "text": text}


def _adapters(config: Config) -> list[tuple[str, Kind, Adapter]]:
    """(phase, kind, file) of every adapter that the chain has written, in order; a phase's heads before its LoRA."""
    found: list[tuple[str, Kind, Adapter]] = []
    for phase in config.chain:
        for kind in KINDS:
            path = Path(config.root) / phase / config.tier.file_name(kind)
            adapter = read_input(config, kind, str(path)) if path.is_file() else None
            if adapter:
                found.append((phase, kind, adapter))
    return found


# -- models and stages -------------------------------------------------------------------------------------------------


def open_bench(config: Config, rows: Sequence[TextRow]) -> Bench:
    """Load base and teacher, and let the teacher read the rows once."""
    student, teacher = build_student(config, new_lora=True), build_teacher(config)
    device = student.path.model.device
    parts = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
    batches = tuple(collate(part, student.chat.pad_id, device) for part in parts)
    reference = tuple(_hidden(teacher, batch, teacher.native(teacher.tier.base_k)) for batch in batches)
    return Bench(config, student, teacher, tuple(rows), batches, reference)


def warm_heads(path: StudentPath) -> PrerouterHeads:
    """Untrained heads: the next layer's router applied to this layer's hidden state (docs/method.md 1.3)."""
    heads = PrerouterHeads(path.tier).to(path.model.device)
    heads.warm_start(lambda layer: path.router(layer).weight)
    return heads


def load_heads(path: StudentPath, adapter: Adapter) -> PrerouterHeads:
    """Heads with the values of a prerouter file."""
    heads = PrerouterHeads(path.tier).to(path.model.device)
    heads.load(adapter.tensors)
    return heads.requires_grad_(False)


@contextmanager
def running(bench: Bench, stage: Stage) -> Iterator[StudentPath]:
    """The stage's model inside the block: its heads, K and LoRA in place; afterwards K and the base's weights are back."""
    if stage.teacher:
        yield bench.teacher
        return
    path, tier = bench.student.path, bench.config.tier
    path.heads = stage.heads
    path.tier = dataclasses.replace(tier, k=stage.k or tier.k)
    if stage.lora is not None:
        load_lora(path.model, tier, stage.lora)
    with ExitStack() as stack:
        if stage.merged:
            stack.enter_context(merged(bench))
        stack.enter_context(lora_disabled(path.model) if stage.lora is None or stage.merged else nullcontext())
        try:
            yield path
        finally:
            path.tier = tier


def measure(bench: Bench, stage: Stage) -> dict[str, float]:
    """Everything that a table shows of a stage: loss, kl, recall of its heads, exact_match and what is beside them."""
    with running(bench, stage) as path:
        scores = token_scores(path, stage, bench)
        if stage.heads is not None:
            scores["recall"] = head_recall(path, bench.batches, own=False)["mean"]
        return scores | exact_match(path, stage, bench)


def _routing(path: StudentPath, stage: Stage, batch: Batch) -> RoutingPass:
    return path.native(stage.native_k) if stage.native_k else path.predicted(batch.decoded_BT)


@torch.no_grad()
def _hidden(path: StudentPath, batch: Batch, routing: RoutingPass) -> torch.Tensor:
    """Final hidden states [N, H] at the completions' labels."""
    output = path.hidden(batch.input_ids_BT, routing, use_cache=False)
    return output.last_hidden_state[batch.labels_BT != IGNORE]


# -- quality -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def token_scores(path: StudentPath, stage: Stage, bench: Bench) -> dict[str, float]:
    """Mean cross-entropy, KL(teacher || stage) and reverse KL(stage || teacher), in nats per completion token.

    Both divergences are over the whole vocabulary, on the teacher's completions.
    """
    loss = divergence = reverse = 0.0
    for batch, teacher_NH in zip(bench.batches, bench.reference, strict=True):
        hidden_NH = _hidden(path, batch, _routing(path, stage, batch))
        target_N = batch.labels_BT[batch.labels_BT != IGNORE]
        for own, other, target in zip(hidden_NH.split(1024), teacher_NH.split(1024), target_N.split(1024), strict=True):
            logp = path.model.lm_head(own).float().log_softmax(-1)
            teacher_logp = bench.teacher.model.lm_head(other).float().log_softmax(-1)
            loss -= float(logp.gather(-1, target[:, None]).sum())
            divergence += float((teacher_logp.exp() * (teacher_logp - logp)).sum())
            reverse += float((logp.exp() * (logp - teacher_logp)).sum())
    count = sum(batch.valid for batch in bench.batches)
    return {"loss": loss / count, "kl": divergence / count, "reverse_kl": reverse / count}


def exact_match(path: StudentPath, stage: Stage, bench: Bench) -> dict[str, float]:
    """Greedy completions of all rows that have an answer: share right in total and per task, cut off, repetition."""
    sample, chat = bench.config.sample, bench.student.chat
    checked = [row for row in bench.rows if row.answer]
    if not checked:
        return {}
    right: dict[str, list[bool]] = {}
    cut = repeated = 0.0
    for start in range(0, len(checked), sample.batch):
        part = checked[start : start + sample.batch]
        completions = generate(
            path,
            [row.prompt_ids for row in part],
            Sampling(sample.max_new_tokens),
            end_ids=chat.end_ids,
            pad_id=chat.pad_id,
            native_k=stage.native_k,
        )
        for row, done in zip(part, completions, strict=True):
            right.setdefault(row.task, []).append(is_correct(row.answer, chat.text(done.ids)))
            cut += done.finish_reason == "length"
            repeated += repetition(done.ids)
    per_task = {task: sum(values) / len(values) for task, values in sorted(right.items())}
    count = len(checked)
    total = sum(sum(values) for values in right.values()) / count
    return {"exact_match": total, **per_task, "truncated": cut / count, "repetition": repeated / count}


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Share of a completion's n-grams that it has written before, 0..1 (seq-rep-4 of Welleck et al. 2019)."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# -- routing -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def head_recall(path: StudentPath, batches: Sequence[Batch], own: bool) -> dict[str, float]:
    """Recall@K of the path's heads at predicted inputs, {"mean" and every owner: share of the true set}.

    The true set is the next layer's own gate at the served K, on the hidden states of the same pass: under native routing, or
    (own) under the heads' own predictions, as in decoding.
    """
    hits, targets, heads = dict.fromkeys(path.tier.owners, 0.0), 0, path.heads
    assert heads is not None
    for batch in batches:
        where = batch.decoded_BT, batch.start_BT
        routing = path.predicted(*where, capture=True) if own else path.native(path.tier.k, *where, capture=True)
        path.hidden(batch.input_ids_BT, routing, use_cache=False)
        at_BT = path.timeline(*where)[0]
        targets += int(at_BT.sum())
        for owner in path.tier.owners:
            guess_NE = heads(owner, routing.features[owner][at_BT])
            true_NE = routing.router_logits[owner + 1][at_BT]
            bias_E = getattr(path.router(owner + 1), "e_score_correction_bias", None)
            hits[owner] += _shared(
                select(path.tier.router, guess_NE, path.tier.k),
                select(path.tier.router, true_NE, path.tier.k, bias_E),
                path.tier.num_experts,
            )
    recall = {owner: hit / (path.tier.k * targets) for owner, hit in hits.items()}
    return {"mean": sum(recall.values()) / len(recall), **{str(owner): value for owner, value in recall.items()}}


@torch.no_grad()
def feature_drift(path: StudentPath, batches: Sequence[Batch]) -> dict[str, float]:
    """How far decoding takes a head's hidden features away from those of native routing, on the same text.

    h is layer N's MoE input at the inputs before predicted ones, for the owner layers N that predictions can reach (above the
    first consumer). cosine: mean over tokens and owners. relative_l2: |h_own - h_native| / |h_native|, root of summed squares
    per owner, mean over owners. recall_native and recall_own: of the heads, on either side.
    """
    tier = path.tier
    owners = [owner for owner in tier.owners if owner > tier.consumers[0]]
    cosine, moved, size = (dict.fromkeys(owners, 0.0) for _ in range(3))
    count = 0
    for batch in batches:
        where = batch.decoded_BT, batch.start_BT
        features = []
        for routing in (path.native(tier.k, *where, capture=True), path.predicted(*where, capture=True)):
            path.hidden(batch.input_ids_BT, routing, use_cache=False)
            features.append(routing.features)
        at_BT = path.timeline(*where)[0]
        count += int(at_BT.sum())
        for owner in owners:
            native_NH, own_NH = (side[owner][at_BT][:, : tier.hidden_size] for side in features)
            cosine[owner] += float(torch.cosine_similarity(native_NH, own_NH, dim=-1).sum())
            moved[owner] += float((own_NH - native_NH).square().sum())
            size[owner] += float(native_NH.square().sum())
    return {
        "cosine": sum(cosine.values()) / (count * len(owners)),
        "relative_l2": sum((moved[o] / size[o]) ** 0.5 for o in owners) / len(owners),
        "recall_native": head_recall(path, batches, own=False)["mean"],
        "recall_own": head_recall(path, batches, own=True)["mean"],
    }


@torch.no_grad()
def adjacent_overlap(path: StudentPath, batches: Sequence[Batch], k: int) -> dict[str, float]:
    """Share of a layer's k experts that also ran for the token before, over decoded inputs and all MoE layers.

    chance: k / E, for even and independent use. frequency: sum_e f_e^2 / k with f_e the share of tokens that use expert e in
    that layer, for independent draws with the experts' real popularity.
    """
    experts, pairs = path.tier.num_experts, 0
    shared: dict[int, float] = {}
    used_E: dict[int, torch.Tensor] = {}
    tokens = 0
    for batch in batches:
        routing = path.native(k)
        path.hidden(batch.input_ids_BT, routing, use_cache=False)
        both_BT = batch.decoded_BT[:, 1:] & batch.decoded_BT[:, :-1]
        pairs, tokens = pairs + int(both_BT.sum()), tokens + int(batch.decoded_BT.sum())
        for layer, executed_BTK in routing.executed.items():
            now, before = executed_BTK[:, 1:][both_BT], executed_BTK[:, :-1][both_BT]
            shared[layer] = shared.get(layer, 0.0) + _shared(now, before, experts)
            used_E[layer] = used_E.get(layer, 0.0) + multi_hot(executed_BTK[batch.decoded_BT], experts).sum(0)
    frequency = [float((count_E / tokens).square().sum()) / k for count_E in used_E.values()]
    return {
        "overlap": sum(shared.values()) / (k * pairs * len(shared)),
        "chance": k / experts,
        "frequency": sum(frequency) / len(frequency),
    }


def _shared(a_NK: torch.Tensor, b_NK: torch.Tensor, experts: int) -> float:
    """Experts that are in both sets, summed over tokens."""
    return float((multi_hot(a_NK, experts) * multi_hot(b_NK, experts)).sum())


# -- merging: what requantisation leaves of a LoRA (docs/method.md 1.6) -------------------------------------------------------

SURVIVAL_BATCHES = 4
"""Of `ROWS` rows, for the logits: enough, and every batch runs three models."""
GROUPS = {
    "linear_attn": "linear attention", "self_attn": "attention", "attention": "attention",
    "shared_expert": "shared expert", "shared_experts": "shared expert", "mlp": "dense MLP",
}  # fmt: skip
"""By the first of these path elements; Ling's `attention` is of both kinds."""


def _merged_weights(bench: Bench) -> Iterator[tuple[str, Any, torch.Tensor, torch.Tensor]]:
    """(MLX path, LoRA layer, U, M) of every target: W + delta, float32, and that as the base would hold it, int4 or bfloat16.

    As mlx-lm's fuse does, the sum is quantised from bfloat16, the dtype of the checkpoint's scales.
    """
    model, tier = bench.student.path.model, bench.config.tier
    checkpoint = Checkpoint.open(Path(bench.config.base.directory))
    quantised = checkpoint.config.get("quantization")
    if not quantised:
        raise Edge0Error(f"base.directory: {bench.config.base.directory} is not quantised; merging loses nothing there")
    for path in tier.lora_modules():
        layer: Any = model.get_submodule(transformers_module(tier.family, path))
        how = quantised.get(path, quantised)
        delta = layer.lora_B[ADAPTER].weight @ layer.lora_A[ADAPTER].weight * layer.scaling[ADAPTER]
        unmerged = layer.base_layer.weight.float() + delta.float()
        again = unmerged.bfloat16()
        if f"{path}.scales" in checkpoint.entries:
            packed = quantize(again, how["bits"], how["group_size"])
            again = dequantize_once(*packed, how["bits"], how["group_size"], torch.float32)
        yield path, layer, unmerged, again.float()


@contextmanager
@torch.no_grad()
def merged(bench: Bench) -> Iterator[None]:
    """Inside the block the base's targets hold the merged and requantised weights (the caller switches the LoRA off)."""
    before: list[tuple[LoraLayer, torch.Tensor]] = []
    try:
        for _, layer, _, again in _merged_weights(bench):
            before.append((layer, layer.base_layer.weight.data))
            layer.base_layer.weight.data = again.to(layer.base_layer.weight.dtype)
        yield
    finally:
        for changed, weight in before:
            changed.base_layer.weight.data = weight


def survival(bench: Bench, stage: Stage) -> dict[str, float]:
    """1 - |U - M| / |U - B| for the stage's LoRA: 1 if merging keeps all of it, 0 if the error is as large as the LoRA.

    U unmerged, M merged and requantised, B base; |.| is the root of summed squares, so a LoRA smaller than int4's rounding error
    gives a negative share. Weights: over a group's targets together; logits: over completion tokens, on the stage's own path.
    """
    error: dict[str, list[float]] = {group: [0.0, 0.0] for group in GROUPS.values()}
    with running(bench, dataclasses.replace(stage, merged=False)), torch.no_grad():
        for path, layer, unmerged, again in _merged_weights(bench):
            group = next(name for part, name in GROUPS.items() if f".{part}." in path)
            error[group][0] += float((unmerged - again).square().sum())
            error[group][1] += float((unmerged - layer.base_layer.weight.float()).square().sum())
    share = {group: 1 - (lost / total) ** 0.5 for group, (lost, total) in error.items() if total}
    variants = [dataclasses.replace(stage, merged=False), dataclasses.replace(stage, merged=True)]
    variants.append(dataclasses.replace(stage, lora=None, merged=False))
    lost = total = 0.0
    for batch in bench.batches[:SURVIVAL_BATCHES]:
        unmerged, again, base = (_logits(bench, variant, batch) for variant in variants)
        lost += float((unmerged - again).square().sum())
        total += float((unmerged - base).square().sum())
    return share | {"logits": 1 - (lost / total) ** 0.5}


@torch.no_grad()
def _logits(bench: Bench, stage: Stage, batch: Batch) -> torch.Tensor:
    """[N, V] at the batch's labels: held whole, so for small vocabularies or few rows."""
    with running(bench, stage) as path:
        head: Callable[[torch.Tensor], torch.Tensor] = path.model.lm_head
        return head(_hidden(path, batch, _routing(path, stage, batch))).float()
