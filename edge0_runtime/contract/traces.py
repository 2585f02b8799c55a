"""Reference traces: what the torch student did on a few prompts, shipped with an export for `verify`.

File `verify_edge0_<tier>.safetensors`; per prompt i, counted from 0:

    prompt.<i>.ids      I32 [P]        the prompt
    generated.<i>.ids   I32 [T]        greedy continuation
    experts.<i>         I32 [T, L, K]  routed experts of the L MoE layers in order, ids rising
    logits.<i>.ids      I32 [T, N]     the N largest logits, largest first
    logits.<i>.values   F32 [T, N]
    prompt.<i>.experts  I32 [P, L, K]  routed experts of the prompt's positions, ids rising
    own.<i>             I32 [T, O, K]  what the O owners' own gates choose, ids rising; feature_topk = teacher only

Row 0 is the last prompt position, the input that yields generated[0]; row s >= 1: input generated[s-1]. The last two came with
version 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge0_runtime.contract.files import raise_problems
from edge0_runtime.contract.strict_safetensors import read_array, read_header, write_atomic
from edge0_runtime.contract.tier import Tier

_PARTS = {
    "prompt.{}.ids": "I32",
    "generated.{}.ids": "I32",
    "experts.{}": "I32",
    "logits.{}.ids": "I32",
    "logits.{}.values": "F32",
}
_PROMPT_EXPERTS, _OWN = "prompt.{}.experts", "own.{}"  # I32
_VERSIONS = ("1", "2")
_REQUIRED_METADATA = ("kind", "tier", "format_version", "base_fingerprint", "compute_dtype")


@dataclass(frozen=True)
class PromptTrace:
    """One prompt's reference; see the module for what a row is.

    `prompt_experts_PLK` is None in a trace of version 1, `own_TOK` also where no own choice is a feature.
    """

    prompt_ids_P: np.ndarray
    generated_ids_T: np.ndarray
    experts_TLK: np.ndarray
    logits_ids_TN: np.ndarray
    logits_values_TN: np.ndarray
    prompt_experts_PLK: np.ndarray | None = None
    own_TOK: np.ndarray | None = None


@dataclass(frozen=True)
class ReferenceTrace:
    """A file of prompts' references.

    Attributes:
        tier: name of the tier.
        base_fingerprint: of the base that it was made with.
        prerouter_sha256, lora_sha256: of the adapter files; None for one that took no part.
        compute_dtype: dtype of the computation, e.g. float32.
        prompts: the prompts' references; L and K are the same in all.
    """

    tier: str
    base_fingerprint: str
    prerouter_sha256: str | None
    lora_sha256: str | None
    compute_dtype: str
    prompts: tuple[PromptTrace, ...]


def write_trace(path: str | Path, trace: ReferenceTrace, tier: Tier | None = None) -> None:
    """Check and write a trace atomically. `tier`, if given, bounds ids, L and K as in `read_trace`.

    Raises one Edge0Error listing what is wrong with the trace; the old file is then untouched.
    """
    raise_problems(f"{path}: not written", trace_problems(trace, tier), "fix the exporter")
    tensors: dict[str, np.ndarray] = {}
    for i, prompt in enumerate(trace.prompts):
        for part, array in zip(_PARTS, _arrays(prompt), strict=True):
            tensors[part.format(i)] = array.astype(np.float32 if _PARTS[part] == "F32" else np.int32)
        for part, later in ((_PROMPT_EXPERTS, prompt.prompt_experts_PLK), (_OWN, prompt.own_TOK)):
            if later is not None:
                tensors[part.format(i)] = later.astype(np.int32)
    metadata = {
        "kind": "verify",
        "tier": trace.tier,
        "format_version": _VERSIONS[trace.prompts[0].prompt_experts_PLK is not None],
        "base_fingerprint": trace.base_fingerprint,
        "compute_dtype": trace.compute_dtype,
    }
    hashes = {"prerouter_sha256": trace.prerouter_sha256, "lora_sha256": trace.lora_sha256}
    write_atomic(path, tensors, metadata | {key: value for key, value in hashes.items() if value is not None})


def read_trace(path: str | Path, tier: Tier | None = None) -> ReferenceTrace:
    """Read and check a trace.

    With `tier`, ids must also lie inside its vocabulary and experts, L must be its number of MoE layers and K
    its served K. Raises one Edge0Error listing everything that is wrong.
    """
    path = Path(path)
    header = read_header(path)
    metadata = header.metadata
    problems = [f"metadata {key} is missing" for key in _REQUIRED_METADATA if key not in metadata]
    if metadata.get("kind", "verify") != "verify":
        problems.append(f"metadata kind is {metadata['kind']!r}, must be 'verify'")
    version = metadata.get("format_version", "1")
    if version not in _VERSIONS:
        problems.append(f"format_version {version!r} is not one of {', '.join(_VERSIONS)}: update Edge0")
    later = {_PROMPT_EXPERTS: version != "1", _OWN: version != "1" and _OWN.format(0) in header.entries}
    parts = _PARTS | {part: "I32" for part, there in later.items() if there}
    numbers = {int(match[1]) for name in header.entries if (match := re.fullmatch(r"prompt\.(\d{1,6})\.ids", name))}
    expected = {part.format(i): dtype for i in range(len(numbers)) for part, dtype in parts.items()}
    problems += [f"{name}: missing" for name in sorted(expected.keys() - header.entries.keys())]
    problems += [f"{name}: unknown" for name in sorted(header.entries.keys() - expected.keys())]
    problems += [
        f"{name}: dtype {header.entries[name].dtype}, must be {dtype}"
        for name, dtype in expected.items()
        if name in header.entries and header.entries[name].dtype != dtype
    ]
    what, fix = f"{path}: not a reference trace", "export the tier again"
    raise_problems(what, problems, fix)
    trace = ReferenceTrace(
        tier=metadata["tier"],
        base_fingerprint=metadata["base_fingerprint"],
        prerouter_sha256=metadata.get("prerouter_sha256"),
        lora_sha256=metadata.get("lora_sha256"),
        compute_dtype=metadata["compute_dtype"],
        prompts=tuple(
            PromptTrace(
                *(read_array(header, part.format(i)) for part in _PARTS),
                *(read_array(header, part.format(i)) if there else None for part, there in later.items()),
            )
            for i in range(len(numbers))
        ),
    )
    raise_problems(what, trace_problems(trace, tier), fix)
    return trace


def trace_problems(trace: ReferenceTrace, tier: Tier | None = None) -> list[str]:
    """What is wrong with a trace, as sentences; [] if nothing is."""
    problems = [] if trace.prompts else ["no prompts"]
    if tier is not None and trace.tier != tier.name:
        problems.append(f"tier {trace.tier!r} is not {tier.name!r}, the tier served")
    for i, prompt in enumerate(trace.prompts):
        problems += [f"prompt {i}: {problem}" for problem in _prompt_problems(prompt, tier)]
    layouts = sorted({prompt.experts_TLK.shape[1:] for prompt in trace.prompts})
    if len(layouts) > 1:
        problems.append(f"experts: prompts differ in [layers, K]: {', '.join(map(str, layouts))}")
    for name in ("prompt_experts_PLK", "own_TOK"):
        if len({getattr(prompt, name) is None for prompt in trace.prompts}) > 1:
            problems.append(f"{name.rpartition('_')[0]}: there for some prompts and not for others")
    return problems


def _arrays(prompt: PromptTrace) -> tuple[np.ndarray, ...]:
    """In the order of _PARTS."""
    return (
        prompt.prompt_ids_P,
        prompt.generated_ids_T,
        prompt.experts_TLK,
        prompt.logits_ids_TN,
        prompt.logits_values_TN,
    )


def _named(prompt: PromptTrace) -> dict[str, np.ndarray]:
    """The arrays by the names that they have in sentences, in the order of _PARTS."""
    return dict(zip(("prompt", "generated", "experts", "logits ids", "logits values"), _arrays(prompt), strict=True))


def _prompt_problems(prompt: PromptTrace, tier: Tier | None) -> list[str]:
    """What is wrong with one prompt's arrays; values are looked at only where all shapes fit."""
    return list(_shape_problems(prompt)) or [
        *_layout_problems(prompt, tier),
        *_later_problems(prompt, tier),
        *_id_problems(prompt, tier),
        *_logits_problems(prompt),
    ]


def _shape_problems(prompt: PromptTrace) -> Iterable[str]:
    arrays = _named(prompt)
    dimensions = [array.ndim for array in arrays.values()]
    if dimensions != [1, 1, 3, 2, 2]:
        yield f"arrays have {dimensions} dimensions, must be [1, 1, 3, 2, 2]"
        return
    steps, top = len(prompt.experts_TLK), prompt.logits_ids_TN.shape[1]
    for name, shape in (("generated", (steps,)), ("logits ids", (steps, top)), ("logits values", (steps, top))):
        if arrays[name].shape != shape:
            yield f"{name}: shape {list(arrays[name].shape)}, by the experts' shape it must be {list(shape)}"
    if empty := [name for name, array in arrays.items() if array.size == 0]:
        yield f"{', '.join(empty)}: empty"


def _layout_problems(prompt: PromptTrace, tier: Tier | None) -> Iterable[str]:
    """Layers and K, where there is a tier that says them."""
    if tier is None:
        return
    _, layers, k = prompt.experts_TLK.shape
    moe_layers = len(tier.layout.moe_layers(tier.architecture))
    if (layers, k) != (moe_layers, tier.k):
        yield f"experts: {layers} layers and K = {k}, tier {tier.name} has {moe_layers} and K = {tier.k}"


def _id_problems(prompt: PromptTrace, tier: Tier | None) -> Iterable[str]:
    """Tokens and experts that the tier doesn't have (without one: that no int32 is), and experts out of order."""
    arrays = _named(prompt)
    vocabulary, experts = (2**31, 2**31) if tier is None else (tier.architecture["vocab_size"], tier.num_experts)
    limits = {"prompt": vocabulary, "generated": vocabulary, "logits ids": vocabulary, "experts": experts}
    for name, limit in limits.items():
        array = arrays[name]
        if not np.issubdtype(array.dtype, np.integer):
            yield f"{name}: dtype {array.dtype}, must be integers"
        elif array.min() < 0 or array.max() >= limit:
            yield f"{name}: ids {array.min()}..{array.max()}, must lie in 0..{limit - 1}"
    if not (np.diff(prompt.experts_TLK, axis=-1) > 0).all():
        yield "experts: ids of a layer must rise, each once"


def _later_problems(prompt: PromptTrace, tier: Tier | None) -> Iterable[str]:
    """What came with version 2: choices of other layers or positions than there are, or that are no choices."""
    steps, layers, k = prompt.experts_TLK.shape
    own_TOK, limit = prompt.own_TOK, 2**31 if tier is None else tier.num_experts
    owners = (0 if own_TOK is None else own_TOK.shape[1]) if tier is None else len(tier.owners)
    parts = {
        "prompt_experts": (prompt.prompt_experts_PLK, (len(prompt.prompt_ids_P), layers, k)),
        "own": (own_TOK, (steps, owners, k)),
    }
    for name, (array, wanted) in parts.items():
        if array is None:
            continue
        if array.shape != wanted or array.size == 0:
            yield f"{name}: shape {list(array.shape)}, must be {list(wanted)}"
        elif array.min() < 0 or array.max() >= limit:
            yield f"{name}: ids {array.min()}..{array.max()}, must lie in 0..{limit - 1}"
        elif not (np.diff(array, axis=-1) > 0).all():
            yield f"{name}: ids of a layer must rise, each once"
        elif name == "prompt_experts" and (array[-1] != prompt.experts_TLK[0]).any():
            yield "prompt_experts: the last position isn't what row 0 of experts ran"


def _logits_problems(prompt: PromptTrace) -> Iterable[str]:
    """Rows that are not the largest logits in order, or whose first is not the token that was generated."""
    values = prompt.logits_values_TN
    if not np.isfinite(values).all():
        yield "logits values: not all finite"
    elif (np.diff(values, axis=-1) > 0).any():
        yield "logits values: must fall along a row"
    if any(len(np.unique(row)) < len(row) for row in prompt.logits_ids_TN):
        yield "logits ids: an id occurs twice in a row"
    # The trace is greedy: catches rows shifted by one step, which no shape shows. Ties may go either way.
    chosen = np.where(prompt.logits_ids_TN == prompt.generated_ids_T[:, None], values, -np.inf).max(axis=-1)
    if (chosen < values[:, 0]).any():
        yield f"generated: step {int(np.argmax(chosen < values[:, 0]))} is not the largest logit of its row"
