"""A base that stays int4 in memory: modules that hold MLX's packed tensors and dequantise them while they run.

Nothing dequantised outlives a forward or a backward pass: what backward needs, it dequantises again. The values are those of
a materialised base (`affine.dequantize_once`), bit for bit. Where the codes lie is free (`base.residency`): a module moves to
its device what a pass needs: a linear module its matrix, an experts module the experts that the batch is routed to, an
embedding the rows of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from edge0_runtime.contract.links import Link
from edge0_train.base.weights import Codes


class PackedModule(nn.Module):
    """A frozen module over codes, held as buffers.

    Attributes:
        dtype, device: of the values that it computes with.
    """

    def __init__(self, codes: Mapping[str, Codes], dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.dtype, self.device = dtype, device
        self._kinds = {name: (one.bits, one.group_size) for name, one in codes.items()}
        for name, one in codes.items():
            for part in ("words", "scales", "biases"):
                self.register_buffer(f"{name}_{part}", getattr(one, part), persistent=False)

    def codes(self, name: str) -> Codes:
        """The codes under `name`, as they lie in memory: nothing is copied."""
        words, scales, biases = (self._buffers[f"{name}_{part}"] for part in ("words", "scales", "biases"))
        assert words is not None and scales is not None and biases is not None
        return Codes(words, scales, biases, *self._kinds[name])

    def all_codes(self) -> list[Codes]:
        """Those of every name, to count them or to ask where they lie."""
        return [self.codes(name) for name in self._kinds]


class PackedMatrix(PackedModule):
    """A packed module over one matrix. Reading `weight` dequantises."""

    def __init__(self, codes: Codes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({"weight": codes}, dtype, device)

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], dequantised anew on every read, in the module's dtype and on its device."""
        return self.codes("weight").dense(self.dtype, self.device)


class PackedLinear(PackedMatrix, nn.Linear):  # type: ignore[override]  # its weight is read-only
    """nn.Linear without a bias; PEFT puts a LoRA on it as on any other."""

    def __init__(self, codes: Codes, dtype: torch.dtype, device: torch.device) -> None:
        PackedMatrix.__init__(self, codes, dtype, device)
        self.out_features, self.in_features = codes.shape
        self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """X [..., in] -> x W^T [..., out]."""
        return _product(input, self)


class _Product(torch.autograd.Function):
    """x W^T; nothing is saved, backward makes W again for dy W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: PackedLinear) -> torch.Tensor:
        ctx.module = module
        return F.linear(x, module.weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient: torch.Tensor = gradients[0] @ ctx.module.weight
        return gradient, None


_product: Callable[[torch.Tensor, PackedLinear], torch.Tensor] = _Product.apply


class PackedEmbedding(PackedMatrix, nn.Embedding):  # type: ignore[override]  # its weight is read-only
    """nn.Embedding that dequantises the rows it looks up."""

    def __init__(self, codes: Codes, padding_idx: int | None, dtype: torch.dtype, device: torch.device) -> None:
        PackedMatrix.__init__(self, codes, dtype, device)
        self.num_embeddings, self.embedding_dim = codes.shape
        self.padding_idx = padding_idx

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids [...] -> their rows [..., H]."""
        rows_NH = self.codes("weight").pick(input.flatten()).dense(self.dtype, self.device)
        rows: torch.Tensor = rows_NH.unflatten(0, input.shape)
        return rows


class PackedExperts(PackedModule):
    """Drop-in for transformers' experts: it lends the library's own module the weights of the experts that a batch needs."""

    def __init__(
        self, inner: nn.Module, parts: Mapping[str, tuple[Codes, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`parts`: {parameter of `inner` [E, out, in]: the stacks that its rows are made of, in order}."""
        super().__init__(
            {f"{name}_{i}": one for name, stacks in parts.items() for i, one in enumerate(stacks)}, dtype, device
        )
        self._parts = {name: len(stacks) for name, stacks in parts.items()}
        for name in parts:
            del inner._parameters[name]
        self.inner = inner

    def forward(self, hidden_NH: torch.Tensor, index_NK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Mix N tokens' K chosen experts: [N, H]; `index_NK` names the experts, `weight_NK` weighs them.

        With gradients the weights are made again in backward, for the U experts that the batch has hit.
        """
        hit_U, local_NK = torch.unique(index_NK, return_inverse=True)

        def run(hidden_NH: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
            inner: Any = self.inner
            inner.num_experts = len(hit_U)
            try:
                for name, count in self._parts.items():
                    picked = (self.codes(f"{name}_{i}").pick(hit_U) for i in range(count))
                    stacks = [codes.dense(self.dtype, self.device) for codes in picked]
                    setattr(inner, name, stacks[0] if count == 1 else torch.cat(stacks, dim=-2))
                mixed_NH: torch.Tensor = inner(hidden_NH, local_NK, weight_NK)
                return mixed_NH
            finally:  # dequantising too may run out of memory midway
                for name in self._parts:
                    vars(inner).pop(name, None)

        if not torch.is_grad_enabled():
            return run(hidden_NH, weight_NK)
        mixed_NH: torch.Tensor = checkpoint(run, hidden_NH, weight_NK, use_reentrant=False, preserve_rng_state=False)
        return mixed_NH


def packable(model: PreTrainedModel, links: Mapping[str, Link], quantised: Collection[str]) -> dict[str, Link]:
    """Of `links` those of parameters whose module has a packed twin and whose tensors are codes in the checkpoint, in order.

    The others (norms, routers, convolutions, what the checkpoint left in floats) are small and stay dense.

    Args:
        links: {parameter: its row of the name table}. quantised: MLX module paths.
    """

    def fits(name: str, link: Link) -> bool:
        module = model.get_submodule(name.rpartition(".")[0])
        linear = isinstance(module, nn.Linear) and module.bias is None
        codes = all(one.removesuffix(".weight") in quantised for one in link.mlx)
        return codes and link.change == "same" and (bool(link.per_expert) or linear or isinstance(module, nn.Embedding))

    return {name: link for name, link in links.items() if fits(name, link)}


def pack(
    model: PreTrainedModel,
    links: Mapping[str, Link],
    codes: Callable[[str], Codes],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace the modules of the parameters `links` (`packable` ones) by packed ones that compute in `dtype` on `device`.

    `codes` gives those of an MLX module path.
    """
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    experts: dict[str, dict[str, tuple[Codes, ...]]] = {}
    for name, link in links.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        stacks = tuple(codes(one.removesuffix(".weight")) for one in link.mlx)
        if link.per_expert:
            experts.setdefault(path, {})[leaf] = stacks
        elif isinstance(module, nn.Embedding):
            model.set_submodule(path, PackedEmbedding(stacks[0], module.padding_idx, dtype, device))
            if tied:
                model.set_output_embeddings(PackedLinear(stacks[0], dtype, device))
        else:
            model.set_submodule(path, PackedLinear(stacks[0], dtype, device))
    for path, parts in experts.items():
        model.set_submodule(path, PackedExperts(model.get_submodule(path), parts, dtype, device))
    model.eval()


def unpacked_numel(model: nn.Module) -> int:
    """How many values the parameters of `model` stand for, tied ones once."""
    packed = {
        id(one.words): one.shape.numel()
        for m in model.modules()
        if isinstance(m, PackedModule)
        for one in m.all_codes()
    }
    return sum(parameter.numel() for parameter in model.parameters()) + sum(packed.values())
