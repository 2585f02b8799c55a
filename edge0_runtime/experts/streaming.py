"""The routed experts of a layer, fetched from disk as they are routed to: the `exact` path.

It takes the place of mlx-lm's SwitchGLU in the block and computes with that very module, on the experts that
the tokens need, stacked and re-indexed. The order of rows is kept, so the result is bit-equal to the resident
model's. Shapes: T tokens, K experts per token, R = T * K rows, H hidden, U distinct experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from edge0_runtime.contract.families import PROJECTIONS, QUANTISED_PARTS
from edge0_runtime.experts.cache import Expert, ExpertCache
from edge0_runtime.routing import RoutingLog


class StreamingSwitchGLU(nn.Module):
    """Drop-in for `mlp.switch_mlp`: (x [1, T, H], indices [1, T, K]) -> [1, T, K, H]."""

    def __init__(self, inner: SwitchGLU, layer: int, cache: ExpertCache, log: RoutingLog) -> None:
        super().__init__()
        self.inner = inner
        self._layer = layer
        self._cache = cache
        self._log = log
        self._release()

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        indices_TK = np.array(indices).reshape(-1, indices.shape[-1])  # waits for the router
        self._log.executed[self._layer] = indices_TK
        distinct_U = np.unique(indices_TK)
        room = self._cache.capacity
        if len(distinct_U) <= room:
            experts = [self._cache.get(self._layer, int(e)) for e in distinct_U]
            self._check_present(indices_TK, experts)
            return self._compute(x, np.searchsorted(distinct_U, indices_TK).reshape(indices.shape), experts)
        groups = [distinct_U[start : start + room] for start in range(0, len(distinct_U), room)]
        return self._compute_in_groups(x, indices_TK, groups).reshape(*indices.shape, x.shape[-1])

    def _compute_in_groups(self, x: mx.array, indices_TK: np.ndarray, groups: Sequence[np.ndarray]) -> mx.array:
        """[R, H], a few experts at a time with the rows routed to them, within the cache's budget."""
        x_TH = x.reshape(-1, x.shape[-1])
        routed_R = indices_TK.reshape(-1)
        rows, results = [], []
        for group_U in groups:
            experts = [self._cache.get(self._layer, int(e)) for e in group_U]
            row_G = np.flatnonzero(np.isin(routed_R, group_U))
            self._check_present(routed_R[row_G], experts)
            local_G1 = np.searchsorted(group_U, routed_R[row_G])[:, None]
            result_GH = self._compute(x_TH[mx.array(row_G // indices_TK.shape[-1])], local_G1, experts).squeeze(-2)
            mx.eval(result_GH)  # frees this group's experts before the next is read
            rows.append(row_G)
            results.append(result_GH)
        return mx.concatenate(results)[mx.array(np.argsort(np.concatenate(rows)))]

    def _compute(self, x: mx.array, local: np.ndarray, experts: Sequence[Expert]) -> mx.array:
        """mlx-lm's SwitchGLU over the stacked `experts`; `local` indexes into them."""
        tensors = self._cache.store.tensors[self._layer]
        for position, tensor in enumerate(tensors):
            stacked = mx.stack([expert.arrays[position] for expert in experts])
            setattr(getattr(self.inner, tensor.projection), tensor.part, stacked)
        result = self.inner(x, mx.array(local.astype(np.uint32)))
        self._release()
        return result

    def _check_present(self, routed: np.ndarray, experts: Sequence[Expert]) -> None:
        """Count and refuse routings that none of `experts` serves: going on would silently be wrong."""
        missing = int(np.isin(routed, [expert.index for expert in experts], invert=True).sum())
        if missing:
            self._log.dropped += missing
            raise RuntimeError(f"layer {self._layer}: {missing} routed experts were not fetched")

    def _release(self) -> None:
        """Forget the weights: the module is only the mathematics, the memory belongs to the cache."""
        for projection in PROJECTIONS:
            for part in QUANTISED_PARTS:
                self.inner[projection].pop(part, None)
