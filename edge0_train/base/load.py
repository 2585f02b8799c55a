"""The frozen base in transformers' classes, from an int4 MLX checkpoint; and the teacher.

The base's values are those that serving multiplies by, dequantised in float32 and rounded once to its dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Family
from edge0_runtime.contract.files import raise_problems
from edge0_runtime.contract.tier import Tier
from edge0_train.base.packed import pack, packable
from edge0_train.base.weights import MlxWeights, Residency, WeightSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""`base.dtype`."""
EXPERTS = "grouped_mm"
"""transformers' expert kernel: the fastest on CPU and CUDA at training shapes, and at decoding's on CPU (docs/parity.md 6)."""
# Fields of a text config that are not the model's: its class is chosen, and its dtype given, by the caller.
_NOT_ARCHITECTURE = (
    "model_type",
    "architectures",
    "quantization",
    "quantization_config",
    "dtype",
    "torch_dtype",
)


@dataclass(frozen=True)
class BaseReport:
    """What `load_base` read.

    Attributes:
        fingerprint: the checkpoint's.
        modules: {code width: number of quantised modules}.
        dropped: number of tensors of vision and multi-token prediction that were left out.
    """

    fingerprint: str
    modules: Mapping[int, int]
    dropped: int


def load_base(
    directory: Path | str,
    tier: Tier,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    packed: Residency | None = None,
) -> tuple[PreTrainedModel, BaseReport]:
    """The tier's base as a transformers model: eval mode, nothing requires a gradient.

    Args:
        directory: the MLX checkpoint, int4 or not.
        dtype: float32 or bfloat16; a few vectors stay float32, see `Link.float32`.
        packed: keep the codes, there, and dequantise when a module runs (packed.py); None dequantises everything now.

    Raises:
        Edge0Error: the checkpoint is not the tier's base, or not exactly its model's tensors (all are listed).
    """
    if dtype not in DTYPES.values():
        raise Edge0Error(f"base.dtype: {dtype} is not supported; choose float32 or bfloat16")
    checkpoint = Checkpoint.open(directory)
    checkpoint.check_architecture(tier)
    model = empty_model(checkpoint.text_config(), tier.layout, dtype)
    source = MlxWeights.open(checkpoint, tier.layout, parameter_shapes(model))
    device = torch.device(device)
    held = packable(model, source.links, source.quantised) if packed else {}
    rest = {name: link for name, link in source.links.items() if name not in held}
    materialise(model, replace(source, links=rest), dtype, device, left=frozenset(held))
    if packed:
        pack(model, held, lambda module: source.codes(module, device, packed), dtype, device)
    modules = Counter(how.bits for how in source.quantised.values())
    return model, BaseReport(checkpoint.fingerprint(), dict(modules), len(source.dropped))


def empty_model(text_config: Mapping[str, Any], layout: Family, dtype: torch.dtype) -> PreTrainedModel:
    """The family's transformers model on the meta device: modules and shapes, no values.

    Raises:
        Edge0Error: a config value at which transformers and mlx-lm compute different things.
    """
    raise_problems(
        "config.json",
        list(layout.disagreements(text_config)),
        "what is trained would not be what is served: choose another model",
    )
    fields = {key: value for key, value in text_config.items() if key not in _NOT_ARCHITECTURE}
    config = AutoConfig.for_model(layout.hf_model_type, **fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all parameters and persistent buffers, tied ones under their first name only."""
    held = model.state_dict().keys()
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in tensors if name in held}


def materialise(
    model: PreTrainedModel,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    left: frozenset[str] = frozenset(),
) -> None:
    """Fill a model on the meta device, tensor by tensor, all but the parameters `left`; then it is frozen and in eval mode."""
    for module in model.modules():
        # Buffers outside the state_dict (rotary frequencies) are made by a module's constructor: run it again.
        derived = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        if derived:
            fresh = type(module)(module.config)
            for name in derived:
                setattr(module, name, getattr(fresh, name).to(device))
    for name, tensor in source.module("", dtype, device):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        is_parameter = leaf in module._parameters
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
    model.tie_weights()
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = [f"{name}: no value" for name, tensor in tensors if tensor.is_meta and name not in left]
    raise_problems(f"{type(model).__name__}: left unfilled", empty, "the weight source is incomplete")
    model.requires_grad_(False)
    model.eval()


def load_teacher(directory: Path | str, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """A teacher from a transformers directory on this machine: eval mode, nothing requires a gradient.

    Raises:
        Edge0Error: no such directory, or its tensors are not exactly those of its model.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise Edge0Error(f"teacher.directory: {directory} has no config.json; give a transformers directory")
    model, info = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # told below, with all others
        output_loading_info=True,
    )
    problems = [f"{kind}: {', '.join(sorted(map(str, found)))}" for kind, found in info.items() if found]
    raise_problems(f"{directory}: tensors do not fit config.json", problems, "give a complete transformers model")
    model.requires_grad_(False)
    return model.to(device).eval()


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts (tied ones once) and the bytes of all parameters and buffers."""

    parameters: int
    trainable: int
    bytes: int


def describe(model: nn.Module) -> ModelSize:
    """How large a model is; works on the meta device too."""
    parameters = list(model.parameters())
    return ModelSize(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        bytes=sum(t.numel() * t.element_size() for t in (*parameters, *model.buffers())),
    )
