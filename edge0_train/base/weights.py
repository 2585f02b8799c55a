"""Where the base's tensors come from: an MLX checkpoint, compared with the model before any data is read.

Nothing is guessed from names: a tensor is quantised if its `.scales` exist, its bits follow from shapes and must
agree with config.json, and every tensor of the file must have exactly its place in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Family
from edge0_runtime.contract.files import open_regular, raise_problems, read_exact
from edge0_runtime.contract.links import Link
from edge0_runtime.contract.strict_safetensors import Header, TensorEntry
from edge0_train.base.affine import dequantize_once, infer_bits
from edge0_train.base.links import hf_shape, to_hf

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U32": torch.uint32}
FLOATS = ("F32", "BF16", "F16")
Residency = Literal["device", "host", "disk"]
"""Where the codes of a packed base lie: with what computes, in the host's memory, or mapped from the checkpoint's files."""
RESIDENCIES: tuple[Residency, ...] = get_args(Residency)


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
class Codes:
    """One quantised matrix, or a stack of them, as MLX stores it.

    Attributes:
        words: int32, the bits of MLX's uint32 (which torch can't index everywhere): [..., out, in * bits / 32].
        scales, biases: [..., out, in / group_size].
    """

    words: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor
    bits: int
    group_size: int

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        return torch.Size((*self.words.shape[:-1], self.words.shape[-1] * 32 // self.bits))

    def pick(self, index: torch.Tensor) -> Codes:
        """Entries of the first dimension: experts of a stack, rows of an embedding."""
        index = index.to(self.words.device)
        return self._map(lambda tensor: tensor[index])

    def dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The values on `device`: float32 arithmetic, rounded once to `dtype`. The codes travel, not their expansion."""
        if device.type == "meta":
            return torch.empty(self.shape, dtype=dtype, device=device)
        there = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return dequantize_once(there.words, there.scales, there.biases, self.bits, self.group_size, dtype)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
        return Codes(change(self.words), change(self.scales), change(self.biases), self.bits, self.group_size)


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
    def open(cls, checkpoint: Checkpoint, layout: Family, shapes: Mapping[str, tuple[int, ...]]) -> MlxWeights:
        """Compare headers, config.json and model; reads no data.

        Args:
            shapes: {transformers parameter: shape} of the model, tied parameters once.

        Raises:
            Edge0Error: lists every tensor that is missing, left over, of a wrong shape or dtype, or that
                contradicts config.json.
        """
        config = checkpoint.text_config()
        dropped = tuple(sorted(name for name in checkpoint.entries if layout.is_dropped(name, config)))
        left_over = set(checkpoint.entries) - set(dropped)
        links: dict[str, Link] = {}
        quantised: dict[str, Quantisation] = {}
        problems: list[str] = []
        for hf_name, shape in shapes.items():
            forms = [_Form.of(checkpoint, link, shape) for link in layout.links_of_hf(hf_name, config)]
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
                yield hf_name, to_hf(link, [self._tensor(name, wanted, device) for name in link.mlx])

    def _tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """One MLX tensor, dequantised if need be: packed words travel to the device, not their expansion."""
        module = name.removesuffix(".weight")
        if module in self.quantised:
            return self.codes(module, device, "device").dense(dtype, device)
        values = read_tensor(*self.checkpoint.entries[name]).to(device)
        _check_finite(self.checkpoint, name, values)
        return values.to(dtype)

    def codes(self, module: str, device: torch.device, residency: Residency) -> Codes:
        """The codes of a quantised MLX module. Raises Edge0Error when scales or biases are not finite."""

        def get(name: str) -> torch.Tensor:
            read = map_tensor if residency == "disk" else read_tensor
            tensor = read(*self.checkpoint.entries[name])
            return tensor.to(device) if residency == "device" else tensor

        sidecars = _sidecars(f"{module}.weight")
        scales, biases = (get(part) for part in sidecars)
        for part, tensor in zip(sidecars, (scales, biases), strict=True):
            _check_finite(self.checkpoint, part, tensor)
        how = self.quantised[module]
        return Codes(get(f"{module}.weight").view(torch.int32), scales, biases, how.bits, how.group_size)


def read_tensor(header: Header, entry: TensorEntry) -> torch.Tensor:
    """One tensor of a safetensors file, as it is stored, in fresh memory. Raises Edge0Error on a short read."""
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    with open_regular(header.path) as file:
        read_exact(file, header.path, entry.start, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor


def map_tensor(header: Header, entry: TensorEntry) -> torch.Tensor:
    """The same tensor, mapped: its pages are read when they are used, and the kernel may drop them again.

    Raises Edge0Error for a file whose tensors are not aligned to their dtype.
    """
    dtype = TORCH_DTYPES[entry.dtype]
    if entry.start % dtype.itemsize:
        raise Edge0Error(
            f"{header.path}: {entry.name} starts at byte {entry.start}, which is no multiple of {dtype.itemsize}, so it can't"
            " be mapped; set base.residency=host"
        )
    # Copy on write: torch wants writable memory, and nothing ever writes to it.
    raw = np.memmap(header.path, np.uint8, mode="c", offset=entry.start, shape=(entry.end - entry.start,))
    return torch.from_numpy(raw).view(dtype).view(entry.shape)


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
        return hf_shape(link, found) == shape
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
    _check_packed(module, weight, scales, biases)
    if config_says is None:
        raise Edge0Error(f"{module}: has .scales, but config.json says that it is not quantised")
    _check_bits(module, weight, scales, config_says)
    return config_says


def _check_packed(module: str, weight: TensorEntry, scales: TensorEntry, biases: TensorEntry) -> None:
    """Raise Edge0Error unless the three tensors have the dtypes and shapes of one quantised module."""
    if weight.dtype != "U32" or scales.dtype not in FLOATS or biases.dtype != scales.dtype:
        raise Edge0Error(
            f"{module}: weight, scales, biases are {weight.dtype}, {scales.dtype}, {biases.dtype}; "
            "expected U32 and one float dtype"
        )
    if scales.shape != biases.shape:
        raise Edge0Error(f"{module}: scales {list(scales.shape)} and biases {list(biases.shape)} differ")


def _check_bits(module: str, weight: TensorEntry, scales: TensorEntry, config_says: Quantisation) -> None:
    """Raise Edge0Error unless the shapes hold codes of as many bits as config.json says."""
    try:
        bits = infer_bits(weight.shape, scales.shape, config_says.group_size)
    except Edge0Error as problem:
        raise Edge0Error(f"{module}: {problem}") from None
    if bits != config_says.bits:
        raise Edge0Error(
            f"{module}: its shapes hold {bits}-bit codes, config.json says {config_says.bits} bits"
            f" (group_size {config_says.group_size})"
        )


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
