"""Documents packed into one row must not see each other.

Full attention gets a block-diagonal mask from transformers, and the prerouter's shift and one-hots are cut by the timeline. The
recurrent mixers (linear attention and its short convolution) know boundaries only in their CUDA kernels; so around each of them
the row is taken apart into one padded row a document, and put together again behind it. That is exact on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Documents:
    """Where the D documents of packed rows [B, T] lie; L is the longest one's length.

    Attributes:
        position_BT: int64; position within its document.
        source_DL: int64; flat position of each document's inputs, B*T for padding.
        document_N, within_N: int64; for every flat position its document and its place in it.
    """

    position_BT: torch.Tensor
    source_DL: torch.Tensor
    document_N: torch.Tensor
    within_N: torch.Tensor

    @classmethod
    def of(cls, start_BT: torch.Tensor) -> Documents:
        """From the documents' first inputs; a row's first input always starts one."""
        start_BT = start_BT.clone()
        start_BT[:, 0] = True
        start_N = start_BT.flatten()
        document_N = start_N.long().cumsum(0) - 1
        first_D = start_N.nonzero()[:, 0]
        flat_N = torch.arange(start_N.numel(), device=start_N.device)
        within_N = flat_N - first_D[document_N]
        source_DL = torch.full((first_D.numel(), int(within_N.max()) + 1), start_N.numel(), device=start_N.device)
        source_DL[document_N, within_N] = flat_N
        return cls(within_N.view_as(start_BT), source_DL, document_N, within_N)

    def take_apart(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [D, L, H], padded on the right with zeros (a causal mixer's real positions never see them)."""
        flat_NH = x_BTH.flatten(0, 1)
        return torch.cat([flat_NH, flat_NH.new_zeros(1, flat_NH.shape[1])])[self.source_DL]

    def put_together(self, x_DLH: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """[D, L, H] -> [B, T, H]."""
        return x_DLH[self.document_N, self.within_N].view(*shape[:2], -1)


def isolate_documents(mixers: Iterable[nn.Module], current: Callable[[], Documents | None]) -> None:
    """Hook the recurrent `mixers` of a model: they run document by document while `current()` is not None."""

    def before(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        documents = current()
        if documents is None:
            return None
        return args, {**kwargs, "hidden_states": documents.take_apart(kwargs["hidden_states"]), "attention_mask": None}

    def after(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
        documents = current()
        return None if documents is None else documents.put_together(output, documents.position_BT.shape)

    for mixer in mixers:
        mixer.register_forward_pre_hook(before, with_kwargs=True)
        mixer.register_forward_hook(after, with_kwargs=True)
