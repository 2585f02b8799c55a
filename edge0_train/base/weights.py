"""Where the base's tensors come from: an MLX checkpoint, compared with the model before any data is read.

Nothing is guessed from names: a tensor is quantised if its `.scales` exist, its bits follow from shapes and must
agree with config.json, and every tensor of the file must have exactly its place in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import open_regular, raise_problems, read_exact
from edge0_runtime.contract.strict_safetensors import Header, TensorEntry
from edge0_train.base.affine import dequantize_once, infer_bits
from edge0_train.base.names import FamilyNames, Link

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U32": torch.uint32}
FLOATS = ("F32", "BF16", "F16")


class WeightSource(Protocol):
    """The base's tensors, one module at a time, in transformers' names and layout.

    `load_base` materialises a whole model from one; a streamed layer would ask for its own module when it runs.
    """

    def module(self, path: str, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """(full parameter name, tensor) of all parameters below a module such as `model.layers.3`; "" is all.

        The tensors are fresh, on `device` and in `dtype`; a few vectors stay float32, see `Link.float32`.
        """
        ...


@dataclass(frozen=True)
class Quantisation:
    """How one module is quantised: code width and values per group."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class MlxWeights:
    """A WeightSource over an MLX checkpoint that fits its model.

    Attributes:
        checkpoint: the opened directory.
        links: {transformers parameter: its row of the name table}, all parameters of the model.
        quantised: {MLX module path: how}, all quantised modules.
        dropped: tensors of the checkpoint that belong to no text model.
    """

    checkpoint: Checkpoint
    links: Mapping[str, Link]
    quantised: Mapping[str, Quantisation]
    dropped: tuple[str, ...]

    @classmethod
    def open(cls, checkpoint: Checkpoint, names: FamilyNames, shapes: Mapping[str, tuple[int, ...]]) -> MlxWeights:
        """Compare headers, config.json and model; reads no data.

        Args:
            shapes: {transformers parameter: shape} of the model, tied parameters once.

        Raises:
            Edge0Error: lists every tensor that is missing, left over, of a wrong shape or dtype, or that
                contradicts config.json.
        """
        config = checkpoint.text_config()
        dropped = tuple(sorted(name for name in checkpoint.entries if names.is_dropped(name, config)))
        left_over = set(checkpoint.entries) - set(dropped)
        links: dict[str, Link] = {}
        quantised: dict[str, Quantisation] = {}
        problems: list[str] = []
        for hf_name, shape in shapes.items():
            forms = [_Form.of(checkpoint, link, shape) for link in names.links_of_hf(hf_name, config)]
            if not forms:
                problems.append(f"{hf_name}: a parameter of the transformers model without a row in its name table")
                continue
            form = min(forms, key=lambda form: len(form.problems))  # the first that fits, or the likeliest
            links[hf_name] = form.link
            quantised |= form.quantised
            problems += form.problems
            for name in form.link.mlx:
                left_over.difference_update((name, *_sidecars(name)))
        problems += [f"{name}: the model has no place for it" for name in sorted(left_over)]
        raise_problems(
            f"{checkpoint.directory}: tensors do not fit the model that config.json describes",
            problems,
            "use a complete, unmixed checkpoint of the tier's base",
        )
        return cls(checkpoint, links, quantised, dropped)

    def module(self, path: str, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightSource."""
        prefix = f"{path}." if path else ""
        for hf_name, link in self.links.items():
            if hf_name.startswith(prefix):
                wanted = torch.float32 if link.float32 else dtype
                yield hf_name, link.to_hf([self._tensor(name, wanted, device) for name in link.mlx])

    def _tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """One MLX tensor, dequantised if need be: packed words travel to the device, not their expansion."""
        values = read_tensor(*self.checkpoint.entries[name]).to(device)
        how = self.quantised.get(name.removesuffix(".weight"))
        if how is None:
            _check_finite(self.checkpoint, name, values)
            return values.to(dtype)
        scales, biases = (read_tensor(*self.checkpoint.entries[part]).to(device) for part in _sidecars(name))
        for part, tensor in zip(_sidecars(name), (scales, biases), strict=True):
            _check_finite(self.checkpoint, part, tensor)
        return dequantize_once(values, scales, biases, how.bits, how.group_size, dtype)


def read_tensor(header: Header, entry: TensorEntry) -> torch.Tensor:
    """One tensor of a safetensors file, as it is stored, in fresh memory. Raises Edge0Error on a short read."""
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    with open_regular(header.path) as file:
        read_exact(file, header.path, entry.start, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor


def _check_finite(checkpoint: Checkpoint, name: str, values: torch.Tensor) -> None:
    """Raise Edge0Error naming file and tensor when it holds NaN or infinity; found later, it is just a NaN loss."""
    bad = int((~values.isfinite()).sum())
    if bad:
        raise Edge0Error(
            f"{checkpoint.entries[name][0].path}: {name} has {bad} of {values.numel()} values that are not finite;"
            " download or quantise the base again"
        )


@dataclass(frozen=True)
class _Form:
    """One row of the name table, compared with a checkpoint: does it hold the parameter in this form?"""

    link: Link
    quantised: Mapping[str, Quantisation]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint, link: Link, shape: tuple[int, ...]) -> _Form:
        found: list[tuple[int, ...]] = []
        quantised: dict[str, Quantisation] = {}
        problems: list[str] = []
        for name in link.mlx:
            try:
                how = _stored_as(checkpoint, name)
            except Edge0Error as problem:
                problems.append(str(problem))
                continue
            found.append(_entry(checkpoint, name).shape)
            if how is not None:
                quantised[name.removesuffix(".weight")] = how
                found[-1] = (*found[-1][:-1], found[-1][-1] * 32 // how.bits)
        if len(found) == len(link.mlx) and not _fits(link, found, shape):
            listed = ", ".join(f"{name} {list(one)}" for name, one in zip(link.mlx, found, strict=True))
            problems.append(f"{listed}: cannot be the model's {link.hf} {list(shape)}")
        return cls(link, quantised, tuple(problems))


def _sidecars(name: str) -> tuple[str, ...]:
    """Names of the scales and biases that a quantised `.weight` comes with."""
    module = name.removesuffix(".weight")
    return () if module == name else (f"{module}.scales", f"{module}.biases")


def _entry(checkpoint: Checkpoint, name: str) -> TensorEntry:
    return checkpoint.entries[name][1]


def _fits(link: Link, found: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    try:
        return link.hf_shape(found) == shape
    except (RuntimeError, IndexError):  # not even of the right rank
        return False


def _stored_as(checkpoint: Checkpoint, name: str) -> Quantisation | None:
    """How an MLX tensor is quantised, None if it is not. Raises Edge0Error: the tensor and what contradicts."""
    if name not in checkpoint.entries:
        raise Edge0Error(f"{name}: missing")
    weight = _entry(checkpoint, name)
    module = name.removesuffix(".weight")
    config_says, by_name = _config_quantisation(checkpoint.config, module)
    parts = [part for part in _sidecars(name) if part in checkpoint.entries]
    if not parts:
        if by_name and config_says is not None:
            raise Edge0Error(f"{module}: config.json says {config_says.bits} bits, but it has no .scales")
        if weight.dtype not in FLOATS:
            raise Edge0Error(f"{name}: stored as {weight.dtype} without .scales; expected one of {FLOATS}")
        return None
    if len(parts) == 1:
        raise Edge0Error(f"{module}: has {parts[0]} but not the other of .scales and .biases")
    scales, biases = (_entry(checkpoint, part) for part in parts)
    if weight.dtype != "U32" or scales.dtype not in FLOATS or biases.dtype != scales.dtype:
        raise Edge0Error(
            f"{module}: weight, scales, biases are {weight.dtype}, {scales.dtype}, {biases.dtype}; "
            "expected U32 and one float dtype"
        )
    if scales.shape != biases.shape:
        raise Edge0Error(f"{module}: scales {list(scales.shape)} and biases {list(biases.shape)} differ")
    if config_says is None:
        raise Edge0Error(f"{module}: has .scales, but config.json says that it is not quantised")
    try:
        bits = infer_bits(weight.shape, scales.shape, config_says.group_size)
    except Edge0Error as problem:
        raise Edge0Error(f"{module}: {problem}") from None
    if bits != config_says.bits:
        raise Edge0Error(
            f"{module}: its shapes hold {bits}-bit codes, config.json says {config_says.bits} bits"
            f" (group_size {config_says.group_size})"
        )
    return config_says


def _config_quantisation(config: Mapping[str, Any], module: str) -> tuple[Quantisation | None, bool]:
    """What config.json says about a module, and whether it names the module (else it is the general value)."""
    block = config.get("quantization") or config.get("quantization_config")
    if not block:
        return None, False
    own = block.get(module, True)
    if own is False:
        return None, True
    values = {**block, **(own if isinstance(own, Mapping) else {})}
    if values.get("mode", "affine") != "affine":
        raise Edge0Error(f"{module}: config.json says mode {values['mode']!r}; only affine is supported")
    if "bits" not in values or "group_size" not in values:
        raise Edge0Error(f"{module}: config.json's quantization block lacks bits or group_size")
    return Quantisation(values["bits"], values["group_size"]), module in block
