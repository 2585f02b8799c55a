"""How much of what a layer needs is still there from a moment ago: misses of a least-recently-used store of experts.

A memory budget holds so many experts a layer; what is not among them is read. Counted is what decoding reads: every input of a
sequence uses the store, the prompt's too, and only predicted ones are counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch


class Store:
    """The least recently used experts of one layer; `held` at most, at least as many as one input uses."""

    def __init__(self, held: int) -> None:
        self.held = held
        self._experts: OrderedDict[int, None] = OrderedDict()

    def use(self, experts: Iterable[int]) -> int:
        """Use these together: how many of them had to be read."""
        wanted = dict.fromkeys(experts)
        read = sum(expert not in self._experts for expert in wanted)
        for expert in wanted:
            self._experts[expert] = None
            self._experts.move_to_end(expert)
        while len(self._experts) > self.held:
            self._experts.popitem(last=False)
        return read


def misses(ran_TK: Sequence[Sequence[int]], held: int) -> float:
    """Experts a token of one sequence that are not among the `held` that were used last."""
    store = Store(held)
    return sum(map(store.use, ran_TK)) / len(ran_TK)


class Locality:
    """Misses by number of experts held, over sequences one after the other, as a server meets them: nothing is forgotten between.

    Attributes:
        sizes: experts held of a layer.
        inputs: (layer, predicted input) pairs counted.
    """

    def __init__(self, layers: Sequence[int], sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._stores = {layer: [Store(size) for size in sizes] for layer in layers}
        self._misses = [0] * len(self.sizes)
        self._used = self.inputs = 0

    def add(self, executed: dict[int, torch.Tensor], row: int, predicted_T: torch.Tensor, length: int) -> None:
        """One sequence: the experts that ran (`RoutingPass.executed`), and which of its first `length` inputs were predicted."""
        counted = predicted_T[:length].tolist()
        for layer, stores in self._stores.items():
            for ran_K, counts in zip(executed[layer][row, :length].tolist(), counted, strict=True):
                self._used += len(set(ran_K)) * counts
                for index, store in enumerate(stores):
                    read = store.use(ran_K)
                    self._misses[index] += read * counts
            self.inputs += sum(counted)

    def misses(self) -> dict[int, float]:
        """{experts held of a layer: experts read an input and layer}."""
        return {size: count / max(1, self.inputs) for size, count in zip(self.sizes, self._misses, strict=True)}

    def used(self) -> float:
        """Experts that ran, an input and layer."""
        return self._used / max(1, self.inputs)
