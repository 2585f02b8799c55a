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

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from edge0_runtime.contract.families import PROJECTIONS, QUANTISED_PARTS
from edge0_runtime.experts.memory import ExpertMemory
from edge0_runtime.experts.pool import SlotPool
from edge0_runtime.libraries import SwitchGLU


class Pass(Protocol):
    """The running forward pass, as far as a layer's experts take part in it; `step.Step` is one.

    Attributes:
        whole_layers: it uses nearly every expert of every layer (a long chunk of a prompt), so each layer's are read while
            the one before computes.
        again: the layer that runs will run for another chunk of the prompt before the next layer does.
        staged: layer -> [K], its experts, known before its router has spoken.
        guessed: layer -> [K], what the layer was guessed to choose itself.
        expected: layer -> [1, K], the same guess while it isn't evaluated yet.
        chosen: layer -> what the block of a staged layer chose, lazily.
        ran: layer -> [T, K], the experts that the block computed; lazy where nobody waited for them.
    """

    whole_layers: bool
    again: bool
    staged: dict[int, np.ndarray]
    guessed: dict[int, np.ndarray]
    expected: dict[int, mx.array]
    chosen: dict[int, mx.array]
    ran: dict[int, np.ndarray | mx.array]

    def guess(self, layers: Sequence[int], experts_LK: np.ndarray, *, soon: bool = False) -> None:
        """Have experts read that these layers will probably choose."""

    def proceed(self, layer: int, x: mx.array) -> None:
        """The layer has its experts and x, its input, is built: have that computed while the pass is built on."""


class Running(Protocol):
    """Which pass is running; `step.Running` is one."""

    @property
    def step(self) -> Pass:
        """The running pass."""


class ResidentSwitchGLU(nn.Module):
    """mlx-lm's module with all its weights in memory, as it is; what ran is noted."""

    def __init__(self, inner: SwitchGLU, layer: int, running: Running) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self._layer, self._running = layer, running

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """(x [1, T, H], indices [1, T, K]) -> [1, T, K, H]; nothing is waited for."""
        self._running.step.ran[self._layer] = indices.reshape(-1, indices.shape[-1])
        outputs: mx.array = self.inner(x, indices)
        return outputs


class StreamingSwitchGLU(nn.Module):
    """Drop-in for `mlp.switch_mlp`: (x [1, T, H], indices [1, T, K]) -> [1, T, K, H]."""

    _memory: ExpertMemory
    _pool: SlotPool

    def __init__(self, inner: SwitchGLU, layer: int, running: Running) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self._layer, self._running = layer, running
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
        """Note what ran, in whichever of the four ways. Raises Edge0Error when an expert can't be read."""
        step, layer = self._running.step, self._layer
        staged_K = step.staged.get(layer)
        if staged_K is not None:
            step.chosen[layer] = indices
            step.ran[layer] = staged_K[None]
        if self._pool.full:
            if staged_K is None:
                step.ran[layer] = indices.reshape(-1, indices.shape[-1])
            outputs: mx.array = self.inner(x, indices)
            return outputs
        expected: mx.array | None = None  # of the next layer, as far as this one can tell
        experts_N = staged_K
        if experts_N is None:
            expected = step.expected.pop(layer + 1, None)
            experts_N = self._routed(step, x, indices, expected)
        if len(experts_N) > self._pool.slots:
            return self._compute_in_groups(x, indices, experts_N)
        self._pool.acquire(layer, experts_N, lambda: mx.eval(x), foreseen=staged_K is not None)
        self._read_next(step, expected)
        step.proceed(layer, x)
        outputs = self.inner(x, self._pool.locate(layer, indices))
        return outputs

    def _routed(self, step: Pass, x: mx.array, indices: mx.array, expected: mx.array | None) -> np.ndarray:
        """[N], the distinct experts that the layer's router has chosen; waits for it, and with it for all layers below."""
        mx.eval(x, indices, expected)
        self._pool.release()
        indices_TK = np.array(indices).reshape(-1, indices.shape[-1])
        step.ran[self._layer] = indices_TK
        experts_N = np.unique(indices_TK)
        guessed_K = step.guessed.get(self._layer)
        if guessed_K is not None:
            self._memory.judge(self._layer, guessed_K, experts_N)
        return experts_N

    def _read_next(self, step: Pass, expected_1K: mx.array | None) -> None:
        """While this layer computes, experts of the next one are read: in whole layers all, else `expected_1K`."""
        following = self._memory.after(self._layer)
        if following is None:
            return
        if step.whole_layers:
            if step.again:
                self._memory.want_layer(self._layer, soon=True)  # what is there stays
            self._memory.want_layer(following, soon=True)
        elif expected_1K is not None:
            step.guess([following], np.array(expected_1K), soon=True)

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
        result_RH: mx.array = mx.concatenate(results)[mx.array(np.argsort(np.concatenate(rows)))]
        return result_RH.reshape(*indices.shape, x.shape[-1])
