"""The routed experts of a layer, computed in place from the slots that the I/O threads fill.

It takes the place of mlx-lm's SwitchGLU in the block and computes with that very module; only its weights are those of
a slot pool, and experts are named by slot. Rows keep their order and don't depend on each other, so the result is
bit-equal to the resident model's, whichever way the experts came there:

* full: every expert is in memory for good; nothing is waited for or looked up.
* staged: the experts were known before the step (a prediction is a routing) and are on their way; the graph is built
  without waiting for the router, and the layer waits for bytes only.
* exact: the router is evaluated, its experts are taken from memory or read.
* whole layer (long prompt chunks): exact, but all experts of the layer were asked for one layer ago.

Shapes: T tokens, K experts per token, R = T * K rows, H hidden, N distinct experts, G rows of a group.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from edge0_runtime.contract.families import PROJECTIONS, QUANTISED_PARTS
from edge0_runtime.experts.memory import ExpertMemory
from edge0_runtime.experts.pool import SlotPool
from edge0_runtime.routing import RoutingLog


class ResidentSwitchGLU(nn.Module):
    """mlx-lm's module with all its weights in memory, as it is; the routing is logged."""

    def __init__(self, inner: SwitchGLU, layer: int, log: RoutingLog) -> None:
        super().__init__()
        self.inner = inner
        self._layer, self._log = layer, log

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self._log.executed[self._layer] = indices.reshape(-1, indices.shape[-1])
        return self.inner(x, indices)


class StreamingSwitchGLU(nn.Module):
    """Drop-in for `mlp.switch_mlp`: (x [1, T, H], indices [1, T, K]) -> [1, T, K, H]."""

    _memory: ExpertMemory
    _pool: SlotPool

    def __init__(self, inner: SwitchGLU, layer: int, log: RoutingLog) -> None:
        super().__init__()
        self.inner = inner
        self._layer = layer
        self._log = log
        self.detach()

    def detach(self) -> None:
        """Forget the weights: the module is only the mathematics, the memory belongs to a pool."""
        for projection in PROJECTIONS:
            for part in QUANTISED_PARTS:
                self.inner[projection].pop(part, None)
        for name in ("_memory", "_pool"):
            self.__dict__.pop(name, None)

    def attach(self, memory: ExpertMemory) -> None:
        """Compute from the slots of `memory` from now on."""
        self._memory, self._pool = memory, memory.pool(self._layer)
        for tensor, weight in zip(memory.store.tensors[self._layer], self._pool.weights(self._layer), strict=True):
            self.inner[tensor.projection][tensor.part] = weight

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        known_K = self._memory.take_staged(self._layer, indices)
        expected: mx.array | None = None  # of the next layer, as far as this one can tell
        if known_K is not None:
            self._log.executed[self._layer] = known_K[None]
        if self._pool.full:
            if known_K is None:
                self._log.executed[self._layer] = indices.reshape(-1, indices.shape[-1])
            return self.inner(x, indices)
        if known_K is not None:
            experts_N = known_K
        else:
            expected = self._log.expected.pop(self._layer + 1, None)
            mx.eval(x, indices, expected)  # and with them all layers below
            self._pool.release()
            indices_TK = np.array(indices).reshape(-1, indices.shape[-1])
            self._log.executed[self._layer] = indices_TK
            experts_N = np.unique(indices_TK)
            self._memory.chosen(self._layer, experts_N)
        if len(experts_N) > self._pool.slots:
            return self._compute_in_groups(x, indices, experts_N)
        self._pool.acquire(self._layer, experts_N, lambda: mx.eval(x), foreseen=known_K is not None)
        self._memory.look_ahead(self._layer, None if expected is None else np.array(expected))
        return self.inner(x, self._pool.locate(self._layer, indices))

    def _compute_in_groups(self, x: mx.array, indices: mx.array, experts_N: np.ndarray) -> mx.array:
        """[1, T, K, H] with more experts than slots: half a pool computes while the other half is read."""
        mx.eval(x, indices)
        self._pool.release()
        x_TH, routed_R = x.reshape(-1, x.shape[-1]), np.array(indices).reshape(-1)
        size = max(1, self._pool.slots // 2)
        here_N = self._pool.present(self._layer, experts_N)
        ordered_N = np.concatenate([experts_N[here_N], experts_N[~here_N]])
        groups = [ordered_N[start : start + size] for start in range(0, len(ordered_N), size)]
        rows, results = [], []
        for number, group_N in enumerate(groups):
            self._pool.acquire(self._layer, group_N, lambda: None)  # the group before is evaluated
            for following_N in groups[number + 1 : number + 2]:
                self._pool.want([self._layer], following_N[None])
            row_G = np.flatnonzero(np.isin(routed_R, group_N))
            slots_G1 = self._pool.locate(self._layer, mx.array(routed_R[row_G, None]))
            results.append(self.inner(x_TH[mx.array(row_G // indices.shape[-1])], slots_G1).squeeze(-2))
            mx.eval(results[-1])
            self._pool.release()
            rows.append(row_G)
        result_RH = mx.concatenate(results)[mx.array(np.argsort(np.concatenate(rows)))]
        return result_RH.reshape(*indices.shape, x.shape[-1])
