"""MLX's affine quantisation in torch, against hand numbers and a plain reference (mlx itself: tests/parity)."""

from __future__ import annotations

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base import affine


def reference_group(values: list[float], bits: int) -> tuple[list[int], float, float]:
    """One float32 group, step by step: (codes, scale, bias)."""
    w = torch.tensor(values)
    low, high, levels = w.min(), w.max(), float(2**bits - 1)
    scale = torch.clamp((high - low) / levels, min=1e-7)
    edge = low if low.abs() > high.abs() else high
    if edge is high:
        scale = -scale
    zero_code = torch.round(edge / scale)
    bias = torch.tensor(0.0)
    if zero_code != 0:
        scale, bias = edge / zero_code, edge
    codes = [int(torch.clamp(torch.round((x - bias) / scale), 0, levels)) for x in w]
    return codes, float(scale), float(bias)


def unpack(packed: torch.Tensor, bits: int) -> list[int]:
    """Codes of packed words, low bits first."""
    words = [int(word) for word in packed.flatten()]
    return [word >> shift & (1 << bits) - 1 for word in words for shift in range(0, 32, bits)]


@pytest.mark.parametrize("bits", affine.BITS)
@pytest.mark.parametrize("group_size", affine.GROUP_SIZES)
def test_quantize_agrees_with_the_plain_reference(bits: int, group_size: int) -> None:
    w = torch.randn(3, 2 * group_size, generator=torch.Generator().manual_seed(0))
    w[0, :group_size] = 0
    w[1, :group_size] = 0.37
    w[2] = w[2].abs() * 50
    packed, scales, biases = affine.quantize(w, bits, group_size)
    assert packed.dtype == torch.uint32 and packed.shape == (3, 2 * group_size * bits // 32)
    codes, expected_scales, expected_biases = [], [], []
    for group in w.view(-1, group_size):
        one, scale, bias = reference_group(group.tolist(), bits)
        codes += one
        expected_scales.append(scale)
        expected_biases.append(bias)
    assert unpack(packed, bits) == codes
    assert scales.flatten().tolist() == expected_scales
    assert biases.flatten().tolist() == expected_biases


def test_a_group_of_hand_numbers() -> None:
    w = torch.zeros(1, 64)
    w[0, :4] = torch.tensor([15.0, 7.0, 1.0, 0.0])  # low 0, high 15: scale -1, bias 15
    packed, scales, biases = affine.quantize(w, 4)
    assert (scales.item(), biases.item()) == (-1, 15)
    assert unpack(packed, 4)[:5] == [0, 8, 14, 15, 15]
    assert torch.equal(affine.dequantize(packed, scales, biases, 4), w)


@pytest.mark.parametrize("bits", affine.BITS)
def test_zero_and_the_extreme_value_are_exact(bits: int) -> None:
    w = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    w[:, ::64] = 0
    back = affine.dequantize(*affine.quantize(w, bits), bits)
    groups, back = w.view(-1, 64), back.view(-1, 64)
    extreme = groups.abs().argmax(-1, keepdim=True)
    assert torch.equal(back.gather(1, extreme), groups.gather(1, extreme))
    # w = scale * zero_code up to one rounding of the scale, so zero comes back as a rounding error at most
    assert (back[:, 0].abs() <= 1e-6 * groups.abs().amax(-1)).all()


@pytest.mark.parametrize("bits", affine.BITS)
@pytest.mark.parametrize("stored", affine.FLOATS)
def test_dequantize_once_rounds_once(bits: int, stored: torch.dtype) -> None:
    w = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(2)).to(stored)
    packed, scales, biases = affine.quantize(w, bits)
    full = affine.dequantize(packed, scales.float(), biases.float(), bits)
    assert full.shape == w.shape and full.dtype == torch.float32
    for dtype in affine.FLOATS:
        assert torch.equal(affine.dequantize_once(packed, scales, biases, bits, 64, dtype), full.to(dtype))


def test_one_rounding_is_nearer_than_mlx_s_two() -> None:
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    packed, scales, biases = affine.quantize(w, 4)
    exact = affine.dequantize_once(packed, scales, biases, 4, 64, torch.float32)
    once = affine.dequantize_once(packed, scales, biases, 4, 64, torch.bfloat16).float()
    twice = affine.dequantize(packed, scales, biases, 4).float()
    assert (once - exact).norm() < 0.5 * (twice - exact).norm()


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(5, 7, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    whole = affine.quantize(w, 4)
    back = affine.dequantize_once(*whole, 4, 64, torch.bfloat16)
    monkeypatch.setattr(affine, "CHUNK", 3 * 128)
    parts = affine.quantize(w, 4)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, parts, strict=True))
    assert torch.equal(affine.dequantize_once(*whole, 4, 64, torch.bfloat16), back)


def test_an_int32_view_and_a_strided_matrix_are_accepted() -> None:
    w = torch.randn(6, 256, generator=torch.Generator().manual_seed(5))
    packed, scales, biases = affine.quantize(w[:, 64:192], 4)
    assert torch.equal(packed, affine.quantize(w[:, 64:192].contiguous(), 4)[0])
    assert torch.equal(
        affine.dequantize(packed.view(torch.int32), scales, biases, 4),
        affine.dequantize(packed, scales, biases, 4),
    )


def test_infer_bits() -> None:
    assert affine.infer_bits((256, 512, 256), (256, 512, 32), 64) == 4  # the 35b's gate_proj
    assert affine.infer_bits((256, 512), (256, 32), 64) == 8  # its router
    assert affine.infer_bits((8, 16), (8, 2), 64) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: affine.quantize(torch.zeros(4, 96), 4), r"\[4, 96\] cannot be cut into groups of 64"),
        (lambda: affine.quantize(torch.zeros(64), 4), "two dimensions"),
        (lambda: affine.quantize(torch.zeros(0, 64), 4), "cannot be cut"),
        (lambda: affine.quantize(torch.zeros(4, 64, dtype=torch.int32), 4), "torch.int32 is not supported"),
        (lambda: affine.quantize(torch.zeros(4, 64), 3), "bits: 3 is not supported"),
        (lambda: affine.quantize(torch.zeros(4, 64), 4, 16), "group_size: 16 is not supported"),
        (lambda: affine.infer_bits((4, 8), (5, 1), 64), "differ in their rows"),
        (lambda: affine.infer_bits((4, 8), (4, 1), 128), "2 bits per value"),
        (lambda: affine.infer_bits((4, 8), (4, 0), 64), "check group_size"),
    ],
)
def test_wrong_input_is_one_sentence(call, message: str) -> None:
    with pytest.raises(Edge0Error, match=message):
        call()


def test_dequantize_refuses_what_does_not_belong_together() -> None:
    packed, scales, biases = affine.quantize(torch.randn(4, 128), 4)
    with pytest.raises(Edge0Error, match="bits 8 was asked for, but the shapes hold 4-bit codes"):
        affine.dequantize(packed, scales, biases, 8)
    with pytest.raises(Edge0Error, match="must agree"):
        affine.dequantize(packed, scales, biases[:2], 4)
    with pytest.raises(Edge0Error, match=r"torch\.float32; it must be uint32"):
        affine.dequantize(packed.view(torch.float32), scales, biases, 4)
