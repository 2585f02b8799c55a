"""How much memory a phase needs at its peak, from shapes alone; every part with its formula.

    need = phase_need(config, rows)
    print(need.describe())

An estimate: what libraries hold beside it (CUDA's context, fragmentation, workspaces) is left to `machine.SHARE`.
Letters: H hidden size, I expert width, E experts, K experts a token, F head input, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from edge0_train.base.packed import unpacked_numel
from edge0_train.build import in_float32, sketch_student
from edge0_train.config import PHASES, Config
from edge0_train.data.counts import Rows
from edge0_train.losses import CHUNK
from edge0_train.measure.bench import ROWS
from edge0_train.objectives.student import joint_parameters, lora_parameters
from edge0_train.student import StudentPath

Parts = dict[str, int]
"""{what, with its formula: bytes}"""
Sketches = dict[tuple[str, str], StudentPath]
"""{(base.storage, base.dtype): sketch}"""
TRAINABLE_BYTES = 16
"""A float32 value, its gradient, and AdamW's two moments."""
TOKEN_BYTES = 36
"""A token id of a text row: a Python int, and its place in a tuple."""
GIB = 2**30


@dataclass(frozen=True)
class Need:
    """Bytes of a phase at its peak, a process.

    Attributes:
        at: the part of the phase whose peak it is. device: on the device; on a CPU that is host memory too.
        host: in host memory beside that.
        weights: of `device`, what lies there from the first step on: no smaller batch makes it less.
    """

    at: str
    device: Parts
    host: Parts
    weights: int

    def describe(self) -> str:
        """The parts, largest sum first said."""
        lines = [
            f"about {sum(self.device.values()) / GIB:.2f} GiB at the peak ({self.at}): an estimate, the sum of",
            *(f"{size / GIB:8.3f} GiB {name}" for name, size in self.device.items()),
        ]
        if self.host:
            lines.append(f"and about {sum(self.host.values()) / GIB:.2f} GiB of host memory a process:")
        return "\n".join([*lines, *(f"{size / GIB:8.3f} GiB {name}" for name, size in self.host.items())])


def phase_need(config: Config, rows: Rows, sketches: Sketches | None = None) -> Need:
    """What a phase needs that trains on such rows; its modules are sketched from a config.json, no weights are read.

    Args:
        sketches: kept from call to call of the same tier and phase.
    """
    sketches = {} if sketches is None else sketches
    config = in_float32(config) if config.phase == "export" else config
    held = (config.base.storage, config.base.dtype)
    path = sketches.get(held)
    if path is None:
        lora = config.phase in ("student_sft", "on_policy", "evaluate", "export")
        path = sketch_student(config, lora=lora, heads=config.phase not in ("quantize", "teacher_text"))
        sketches[held] = path
    sizes = Sizes(config, path, rows)
    stages = STAGES[config.phase](sizes)
    at = max(stages, key=lambda name: sum(stages[name].values()))
    weights = sum(size for name, size in stages[at].items() if name.startswith(WEIGHTS))
    return Need(at, stages[at], _host(sizes), weights)


WEIGHTS = ("frozen values", "the teacher")


@dataclass(frozen=True)
class Sizes:
    """What the parts of one phase's need are computed from."""

    config: Config
    path: StudentPath
    rows: Rows

    @property
    def width(self) -> int:
        """Bytes of a value that is computed with."""
        return 4 if self.config.base.dtype == "float32" else 2

    @property
    def packed(self) -> bool:
        """Whether the base is held as int4 codes."""
        return self.config.base.storage == "packed"

    @property
    def layer(self) -> int:
        """Values that a layer makes of a token."""
        tier = self.config.tier
        return 12 * tier.hidden_size + tier.k * (2 * tier.hidden_size + 3 * tier.expert_width)

    @property
    def prompt(self) -> int:
        """Tokens that a prompt is taken to have."""
        longest, new = self.config.text.max_length, self.config.sample.max_new_tokens
        return max(longest - new, longest // 2)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """{name: parameter} that the phase trains."""
        if not PHASES[self.config.phase].trains:
            return {}
        if self.config.phase in ("head_distill", "head_refine"):
            return dict(self.path.heads.named_parameters()) if self.path.heads else {}
        joint = joint_parameters(self.config, self.path.heads) if self.config.phase == "student_sft" else {}
        return lora_parameters(self.path) | joint

    def weights(self) -> Parts:
        """The base and what trains on it, and the experts that a packed layer makes while it runs."""
        tier, base = self.config.tier, self.config.base
        trainable = self.trainable()
        mine = {id(p) for p in trainable.values()}
        heads = self.path.heads.parameters() if self.path.heads else ()
        others = [p for p in (*self.path.model.parameters(), *heads) if id(p) not in mine]
        codes = self.path.model.buffers() if base.residency == "device" else ()
        parts = {
            f"frozen values ({'int4' if self.packed else base.dtype} base)": sum(
                t.numel() * t.element_size() for t in (*others, *codes)
            )
        }
        if trainable:
            parts[f"trainables x {TRAINABLE_BYTES} B (value, gradient, two moments)"] = TRAINABLE_BYTES * sum(
                p.numel() for p in trainable.values()
            )
        if self.packed:
            experts = tier.num_experts * 5 * tier.hidden_size * tier.expert_width * self.width
            parts[f"one layer's experts while it runs: E x 5 H I x {self.width} B"] = experts
        return parts

    def teacher(self) -> Parts:
        """The teacher: the base's model in floats."""
        dtype = self.config.base.dtype
        return {f"the teacher, as many values as the base ({dtype})": self.width * unpacked_numel(self.path.model)}

    def training_tokens(self) -> int:
        """Inputs of the largest micro-batch, padding included."""
        optim, line, rows = self.config.optim, self.config.text.pack_length, self.rows
        if not line:
            return optim.micro_rows * rows.longest
        return math.ceil(optim.micro_rows * rows.mean / line) * max(line, rows.longest)

    def through_base(self) -> Parts:
        """Activations that backward needs, of a pass with gradients through all layers."""
        tier, tokens = self.config.tier, self.training_tokens()
        if self.config.base.gradient_checkpointing:
            formula = "(layers x H + one layer's (12 H + K (2 H + 3 I)))"
            kept = tier.num_layers * tier.hidden_size + self.layer
        else:
            formula, kept = "layers x (12 H + K (2 H + 3 I))", tier.num_layers * self.layer
        return {
            f"activations: {tokens:,} tokens x {formula} x {self.width} B": tokens * kept * self.width
        } | self.logits(tokens)

    def forward(self, tokens: int, head: bool = False) -> Parts:
        """Activations of a pass without gradients: one layer's at a time, and with `head` those of a head that trains."""
        tier, values = self.config.tier, f"{self.width} B x one layer's (12 H + K (2 H + 3 I))"
        each = self.width * self.layer
        if head:
            each += 4 * 2 * (tier.head_input + tier.num_experts + tier.head_width)
            values = f"({values} + 4 B x one head's (2 F + 2 E + 2 width))"
        return {f"activations: {tokens:,} tokens x {values}": tokens * each}

    def logits(self, tokens: int) -> Parts:
        """Logits of a chunk of tokens, in float32, with their softmax and gradient."""
        chunk = min(CHUNK, tokens)
        size = 12 * chunk * self.config.tier.architecture["vocab_size"]
        return {f"logits: {chunk:,} tokens a chunk x vocabulary x 3 x 4 B": size}

    def generation(self, rows: int, prompt: int, new: int) -> Parts:
        """A batch of completions: the cache at its end, the pass over the prompts, the logits of a step."""
        vocabulary = self.config.tier.architecture["vocab_size"]
        tokens = rows * (prompt + new)
        per_token, state = cache_values(self.config.tier.architecture)
        return {
            f"cache: {tokens:,} tokens x {per_token:,} values x {self.width} B": tokens * per_token * self.width,
            f"recurrent states: {rows:,} rows x {state:,} values x 4 B": rows * state * 4,
            **self.forward(rows * prompt),
            f"logits: {rows:,} rows x vocabulary x 3 x 4 B": 12 * rows * vocabulary,
        }


def cache_values(architecture: Mapping[str, Any]) -> tuple[int, int]:
    """(keys and values of a token, of all layers with attention; values of a row's recurrent states) in transformers' caches."""
    arch = architecture
    layers, heads = arch["num_hidden_layers"], arch["num_attention_heads"]
    every = arch.get("full_attention_interval") or arch.get("layer_group_size") or 1
    attending = layers // every
    head = arch.get("head_dim") or arch["hidden_size"] // heads
    if "kv_lora_rank" in arch:
        each = heads * (arch["qk_nope_head_dim"] + arch["qk_rope_head_dim"] + arch["v_head_dim"])
    else:
        each = 2 * arch.get("num_key_value_heads", heads) * head
    keys, values = arch.get("linear_key_head_dim", head), arch.get("linear_value_head_dim", head)
    state = arch.get("linear_num_value_heads", heads) * keys * values
    return attending * each, (layers - attending) * state


def _quantize(sizes: Sizes) -> dict[str, Parts]:
    return {"on the host": {}}


def _teacher_text(sizes: Sizes) -> dict[str, Parts]:
    sample = sizes.config.sample
    if sample.backend == "vllm":
        return {"vLLM": sizes.teacher() | {"vLLM's own cache: what it finds free, over all GPUs of the process": 0}}
    return {"generation": sizes.teacher() | sizes.generation(sample.batch, sizes.prompt, sample.max_new_tokens)}


def _heads(sizes: Sizes) -> dict[str, Parts]:
    return {"training": sizes.weights() | sizes.forward(sizes.training_tokens(), head=True)}


def _student_sft(sizes: Sizes) -> dict[str, Parts]:
    return {"training": sizes.weights() | sizes.through_base()}


def _on_policy(sizes: Sizes) -> dict[str, Parts]:
    sample, longest = sizes.config.sample, sizes.config.text.max_length - 1
    kept = sizes.teacher() if sizes.config.teacher.resident else {}
    scored = sizes.forward(sample.batch * longest) | sizes.logits(sample.batch * longest)
    trained = {name: size for name, size in sizes.weights().items() if name.startswith("trainables")}
    return {
        "training": sizes.weights() | kept | sizes.through_base(),
        "rollout": sizes.weights() | kept | sizes.generation(sample.batch, sizes.prompt, sample.max_new_tokens),
        "scoring": (sizes.weights() if kept else trained) | sizes.teacher() | scored,
    }


def _evaluate(sizes: Sizes) -> dict[str, Parts]:
    config, longest = sizes.config, sizes.rows.longest
    count = min(config.sample.eval_prompts, sizes.rows.held_out or config.sample.eval_prompts)
    labels = math.ceil(count * sizes.rows.labels)
    size = labels * config.tier.hidden_size * sizes.width
    hidden = {f"the teacher's last hidden states: {labels:,} tokens x H x {sizes.width} B": size}
    both = sizes.weights() | sizes.teacher() | hidden
    tokens = min(ROWS, count) * longest
    rows = min(config.sample.batch, count)
    return {
        "reading": both | sizes.forward(tokens) | sizes.logits(tokens),
        "answers": both | sizes.generation(rows, sizes.prompt, config.sample.max_new_tokens),
    }


def _export(sizes: Sizes) -> dict[str, Parts]:
    want = sizes.config.export
    return {"traces": sizes.weights() | sizes.generation(want.trace_prompts, sizes.prompt, want.trace_tokens)}


STAGES: dict[str, Callable[[Sizes], dict[str, Parts]]] = {
    "quantize": _quantize,
    "teacher_text": _teacher_text,
    "head_distill": _heads,
    "head_refine": _heads,
    "student_sft": _student_sft,
    "on_policy": _on_policy,
    "evaluate": _evaluate,
    "export": _export,
}
"""{phase: its stages, each with what the device holds at its peak}."""


def _host(sizes: Sizes) -> Parts:
    """Host memory beside the device's: text rows, codes that stay there, a teacher on its way, a student that waits."""
    config, parts = sizes.config, Parts()
    on_gpu, phase = config.base.device != "cpu", config.phase
    if phase == "quantize":
        tier = config.tier
        matrices = (2 * tier.num_experts * tier.expert_width, int(tier.architecture["vocab_size"]))
        parts["the largest parameter, in four copies of 4 B"] = 16 * tier.hidden_size * max(matrices)
    if phase in ("head_distill", "head_refine", "student_sft"):
        tokens = math.ceil(sizes.rows.train * (sizes.rows.mean + 1))
        parts[f"text rows: {tokens:,} tokens x {TOKEN_BYTES} B"] = tokens * TOKEN_BYTES
    if config.base.residency == "host" and phase not in ("quantize", "teacher_text"):
        parts["the base's codes"] = sum(b.numel() * b.element_size() for b in sizes.path.model.buffers())
    if on_gpu and phase in ("teacher_text", "on_policy", "evaluate"):
        parts["the teacher while it is loaded"] = sum(sizes.teacher().values())
    if on_gpu and phase == "on_policy" and not config.teacher.resident:
        parts["the student while the teacher scores"] = next(iter(sizes.weights().values()))
    return parts
