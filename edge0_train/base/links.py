"""What a row of a family's table (`contract/links.py`) does to tensors: the parameter from its MLX tensors, and the way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edge0_runtime.contract.links import Config, Link


def hf_shape(link: Link, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Shape of the parameter, from the shapes of its MLX tensors (unpacked: [..., out, in])."""
    return tuple(to_hf(link, [torch.empty(*shape, device="meta") for shape in shapes]).shape)


def to_hf(link: Link, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parameter from its MLX tensors, in their dtype; exact for one_centred only in float32."""
    if link.change == "one_centred":
        return tensors[0] - 1
    if link.change == "absorbed":
        return torch.cat([tensors[0].mT, tensors[1]], dim=1).flatten(0, 1)
    if link.change == "conv_axes":
        tensors = [tensor.movedim(2, 1) for tensor in tensors]
    if len(tensors) == 1:
        return tensors[0].contiguous()
    return torch.cat(list(tensors), dim=-2 if link.change == "same" else 0)


def to_mlx(link: Link, tensor: torch.Tensor, config: Config) -> tuple[torch.Tensor, ...]:
    """The MLX tensors of a parameter, in its dtype (mlx-lm too adds 1 in the source's); views if possible."""
    if link.change == "one_centred":
        return (tensor + 1,)
    if link.change == "absorbed":
        heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
        return heads[:, : config["qk_nope_head_dim"]].mT, heads[:, config["qk_nope_head_dim"] :]
    if link.change == "conv_axes":
        tensor = tensor.movedim(2, 1)
    return tensor.chunk(len(link.mlx), dim=-2 if link.change == "same" else 0) if len(link.mlx) > 1 else (tensor,)


def from_part(link: Link, tensor: torch.Tensor) -> torch.Tensor:
    """A part as it lies on disk (experts stacked) -> its MLX tensor; also the way back."""
    return tensor.movedim(2, 1) if link.change == "conv_axes" else tensor
