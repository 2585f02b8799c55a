"""MLX's affine quantisation in torch, bit for bit.

A row of `in` values is cut into groups; a group stores `bits`-wide codes, one scale and one bias, so that
w ~ code * scale + bias. Codes lie little end first in uint32 words: [..., out, in] packs into
[..., out, in * bits / 32]. The byte views below take a little-endian machine for granted.
Source: `mx.quantize` and `mx.dequantize` (mode "affine") on a CPU; `tests/parity` compares every bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edge0_runtime.contract.errors import Edge0Error

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_SCALE = 1e-7  # mlx's floor for a scale, in float32
CHUNK = 1 << 24  # values handled at once: bounds the float32 temporaries to a few hundred MB


def infer_bits(packed_shape: Sequence[int], scales_shape: Sequence[int], group_size: int) -> int:
    """Width of a code from the shapes of the packed words and of the scales.

    Args:
        packed_shape: [..., out, words]. scales_shape: [..., out, groups].
        group_size: values per group, as the config says.

    Raises:
        Edge0Error: the leading dimensions differ, or no width in `BITS` fits.
    """
    if len(packed_shape) < 2 or list(packed_shape[:-1]) != list(scales_shape[:-1]):
        raise Edge0Error(
            f"packed weight {list(packed_shape)} and scales {list(scales_shape)} differ in their rows; "
            "both belong to one matrix and must agree in all but the last dimension"
        )
    in_features = scales_shape[-1] * group_size
    bits, rest = divmod(packed_shape[-1] * 32, in_features) if in_features else (0, 0)
    if rest or bits not in BITS:
        raise Edge0Error(
            f"packed weight {list(packed_shape)} with scales {list(scales_shape)} and group_size {group_size} "
            f"would be {packed_shape[-1] * 32 / max(in_features, 1):g} bits per value; supported are {BITS}: "
            "check group_size"
        )
    return bits


def quantize(w: torch.Tensor, bits: int, group_size: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a matrix, or a stack of them, as `mx.quantize` does; the same bits on a CPU.

    Args:
        w: [..., out, in] in float32, bfloat16 or float16.

    Returns:
        packed uint32 [..., out, in * bits / 32]; scales and biases [..., out, in / group_size] in w's dtype.

    Raises:
        Edge0Error: unsupported dtype, bits or group size, or `in` is not a multiple of the group.
    """
    _check_kind(bits, group_size)
    if w.dtype not in FLOATS:
        raise Edge0Error(f"quantize: dtype {w.dtype} is not supported; use float32, bfloat16 or float16")
    if w.ndim < 2 or w.shape[-1] % group_size or not w.numel():
        raise Edge0Error(
            f"quantize: shape {list(w.shape)} cannot be cut into groups of {group_size}; "
            "needed are at least two dimensions and a last one that the group size divides"
        )
    *rows, in_features = w.shape
    flat = w.reshape(-1, in_features)
    packed = torch.empty(len(flat), in_features * bits // 8, dtype=torch.uint8, device=w.device)
    scales = torch.empty(len(flat), in_features // group_size, dtype=w.dtype, device=w.device)
    biases = torch.empty_like(scales)
    step = max(1, CHUNK // in_features)
    for i in range(0, len(flat), step):
        part = slice(i, i + step)
        packed[part], scales[part], biases[part] = _quantize_rows(flat[part], bits, group_size)
    groups = in_features // group_size
    return packed.view(torch.uint32).view(*rows, -1), scales.view(*rows, groups), biases.view(*rows, groups)


def _quantize_rows(w: torch.Tensor, bits: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[rows, in] -> (bytes [rows, in * bits / 8], scales, biases [rows, groups])."""
    levels = float((1 << bits) - 1)
    groups = w.float().unflatten(-1, (-1, group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    low_dominates = low.abs() > high.abs()
    scale = torch.clamp((high - low) / levels, min=SMALLEST_SCALE)
    scale = torch.where(low_dominates, scale, -scale)
    edge = torch.where(low_dominates, low, high)
    # The scale is bent so that zero falls on a code: the extreme value and zero are then both exact.
    zero_code = torch.round(edge / scale)
    bent = zero_code != 0
    scale = torch.where(bent, edge / torch.where(bent, zero_code, 1.0), scale)
    bias = torch.where(bent, edge, 0.0)
    # Codes come from the float32 scale and bias, not from the stored, rounded ones: so does mlx.
    codes = (groups - bias[..., None]).div_(scale[..., None]).round_().clamp_(0, levels)
    codes = codes.to(torch.uint8).flatten(-2)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes, scale.to(w.dtype), bias.to(w.dtype)


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, bits: int, group_size: int = 64
) -> torch.Tensor:
    """What `mx.dequantize` returns on a CPU: product and sum are each rounded to the dtype of `scales`.

    Only for comparisons with mlx: in bfloat16 its error is three times that of `dequantize_once`.

    Args:
        packed: uint32 [..., out, words]. scales, biases: [..., out, groups].

    Returns:
        [..., out, in] in the dtype of `scales`.
    """
    return _dequantize(packed, scales, biases, bits, group_size, scales.dtype, scales.dtype)


def dequantize_once(
    packed: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantise in float32 and round once, to `dtype`: the training base.

    This is what a quantised matmul with float32 accumulation multiplies by, i.e. the serving weights.

    Args:
        packed: uint32 [..., out, words]. scales, biases: [..., out, groups], any float dtype.

    Returns:
        [..., out, in] in `dtype`.
    """
    return _dequantize(packed, scales, biases, bits, group_size, torch.float32, dtype)


def _dequantize(
    packed: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor,
    bits: int,
    group_size: int,
    arithmetic: torch.dtype,
    dtype: torch.dtype,
) -> torch.Tensor:
    _check_kind(bits, group_size)
    if packed.dtype not in (torch.uint32, torch.int32):
        raise Edge0Error(f"dequantize: packed weight is {packed.dtype}; it must be uint32 (or its int32 view)")
    if scales.shape != biases.shape or scales.dtype != biases.dtype:
        raise Edge0Error(
            f"dequantize: scales {list(scales.shape)} {scales.dtype} and biases {list(biases.shape)} "
            f"{biases.dtype} must agree; the checkpoint is damaged or mixes two matrices"
        )
    found = infer_bits(packed.shape, scales.shape, group_size)
    if found != bits:
        raise Edge0Error(f"dequantize: bits {bits} was asked for, but the shapes hold {found}-bit codes")
    *rows, words = packed.shape
    in_features = words * 32 // bits
    code_bytes = packed.contiguous().view(torch.uint8).view(-1, words * 4)
    scales, biases = scales.reshape(-1, scales.shape[-1]), biases.reshape(-1, biases.shape[-1])
    out = torch.empty(len(code_bytes), in_features, dtype=dtype, device=packed.device)
    step = max(1, CHUNK // in_features)
    for i in range(0, len(out), step):
        part = slice(i, i + step)
        codes = code_bytes[part]
        if bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        values = codes.to(arithmetic).unflatten(-1, (-1, group_size))
        # Two plain operations: a fused multiply-add would round differently from mlx.
        values.mul_(scales[part].to(arithmetic)[..., None]).add_(biases[part].to(arithmetic)[..., None])
        out[part] = values.flatten(-2)
    return out.view(*rows, in_features)


def _check_kind(bits: int, group_size: int) -> None:
    if bits not in BITS:
        raise Edge0Error(f"quantization bits: {bits!r} is not supported; choose one of {BITS}")
    if group_size not in GROUP_SIZES:
        raise Edge0Error(f"quantization group_size: {group_size!r} is not supported; choose one of {GROUP_SIZES}")
