"""One sequence on a model: KV and recurrent state + the last step + a token -> the next step.

    sequence = Sequence(model)
    logits = sequence.prefill(prompt_ids, last=True)
    token = mx.argmax(logits)
    sequence.foresee(token)       # the coming step: what is known of it, lazily
    sequence.flush(token)         # the one evaluation; reads of the coming step begin
    logits = sequence.run()       # its forward pass, lazily

Where the model never waits for an expert, `run` may follow `foresee` at once, before anything is evaluated.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from collections.abc import Sequence as Ids
from typing import Any

import mlx.core as mx
import numpy as np

from edge0_runtime.model import Model
from edge0_runtime.network import prompt_cache
from edge0_runtime.snapshot import Rows, Snapshot, arrays_of, has_rows, part_of, restore
from edge0_runtime.step import Step

# A prompt chunk that routes to each expert at least this often on average uses nearly all of them: exp(-2) = 14 %
# would be left out by uniform routing.
WHOLE_LAYER_USES = 2


class Sequence:
    """The state of the one sequence that a model is processing; a new one ends the last.

    Attributes:
        last: the pass that was built last, maybe not evaluated yet; None before the prompt.
        coming: the step that `foresee` made and that isn't run yet.
        model: that it runs on. tokens: how many it has processed. restored: how many of them a snapshot brought.
    """

    def __init__(self, model: Model, snapshot: Snapshot | None = None) -> None:
        """At the beginning, or where a snapshot was taken. Nothing is being read for another sequence afterwards."""
        self.model = model
        self._kv: list[Any] = prompt_cache(model.network, model.keeping.kv_bits)
        self._rows: Rows | None = None  # that the last snapshot copied
        self.tokens = self.restored = 0
        self.last: Step | None = None
        self.coming: Step | None = None
        if model.memory is not None:
            model.memory.abandon()
        if snapshot is not None:
            self.restore(snapshot)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on where the snapshot was taken; at the beginning of a sequence only."""
        if self.last is not None:
            raise RuntimeError("a sequence that has begun; make another one to go on from a snapshot")
        restore(self._kv, snapshot)
        self._rows, self.tokens, self.restored = snapshot.rows, snapshot.tokens, snapshot.tokens
        self.last = Step(
            snapshot.index,
            trail=snapshot.trail,
            features=snapshot.features,
            since=snapshot.since,
            ran=dict(snapshot.ran),
        )

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def prefill(self, token_ids: Ids[int], *, last: bool) -> mx.array | None:
        """Process a chunk of the prompt.

        Returns:
            Logits [vocabulary] after the chunk's last token when `last`, not evaluated yet; else None, and
            the chunk is done.
        """
        if last:
            (step,) = self._prompt_steps([token_ids])
            return self._forward(step, mx.array(list(token_ids)))
        self.prefill_chunks([token_ids], threading.Event())
        return None

    def prefill_chunks(
        self, chunks: Ids[Ids[int]], cancel: threading.Event, keep: Collection[int] = ()
    ) -> list[Snapshot] | None:
        """Process chunks of the prompt: as one after the other, but a layer's experts are read once for all of them.

        Args:
            keep: numbers of chunks behind which a snapshot is taken.

        Returns:
            The snapshots; or None when `cancel` was set, and the sequence can only be closed.
        """
        steps, tokens = self._prompt_steps(chunks), [mx.array(list(chunk)) for chunk in chunks]
        if not self.model.never_waits:
            return self._by_layers(steps, tokens, cancel, keep)
        kept = []
        for index, (step, tokens_T) in enumerate(zip(steps, tokens, strict=True)):
            if cancel.is_set():
                return None
            self._forward(step, tokens_T)
            step.logits_V = None  # nobody wants them, so they aren't computed
            self._end_of_chunks()
            if index in keep:
                kept.append(self.snapshot())
        return kept

    def _prompt_steps(self, chunks: Ids[Ids[int]]) -> list[Step]:
        tier = self.model.tier
        whole = sum(map(len, chunks)) * tier.k >= WHOLE_LAYER_USES * tier.num_experts
        trail = 0 if self.last is None else self.last.trail
        steps = []
        for chunk in chunks:
            trail = None if trail is None else hash((trail, *chunk))
            steps.append(Step(trail=trail, whole_layers=whole))
        return steps

    def _by_layers(
        self, steps: list[Step], tokens: list[mx.array], cancel: threading.Event, keep: Collection[int]
    ) -> list[Snapshot] | None:
        model = self.model
        assert model.memory is not None  # somebody waits for experts
        self._begin(steps[0])
        model.memory.age()
        starts = itertools.accumulate((tokens_T.size for tokens_T in tokens), initial=0)
        hidden, calls = [], []
        for tokens_T, start in zip(tokens, starts, strict=False):
            first_1TD, layers = model.layers.calls(model.network, tokens_T, self._kv, start)
            hidden.append(first_1TD)
            calls.append(layers)
        parts: dict[int, list[Any]] = {index: [] for index in sorted(keep)}
        for layer, calls_of_chunks in enumerate(zip(*calls, strict=True)):
            entry, copied = self._kv[layer], self._copied
            for index, (step, call) in enumerate(zip(steps, calls_of_chunks, strict=True)):
                if cancel.is_set():
                    return None
                self._let_run(step)
                step.again = step is not steps[-1]
                hidden[index] = call(hidden[index])
                # Before the next graph is built: it may compute from the same slots with other experts in them.
                mx.eval(hidden[index], entry.state, list(step.inputs.values()))
                model.memory.release()
                step.routings.clear()  # nobody looks at a chunk's
                step.stop()
                if index in parts:  # the next chunk changes the entry
                    parts[index].append(part_of(entry, copied))
                    copied = entry.offset if has_rows(entry) else copied
            if layer in model.memory.layers:
                model.memory.rank(layer, np.concatenate([step.ran[layer] for step in steps]))
        for step in steps:
            step.last = self.last
            step.features = model.arm.remember(step)
            step.stop()
            self.last = step
        self._end_of_chunks()
        kept = []
        for index, (step, tokens_T) in enumerate(zip(steps, tokens, strict=True)):
            self.tokens += tokens_T.size
            if index in parts:
                kept.append(self._snapshot(step, parts[index]))
        return kept

    def _end_of_chunks(self) -> None:
        assert self.last is not None
        self._evaluate_state()
        self._check_files()
        self._settle()
        self.last.routings.clear()
        mx.clear_cache()  # a chunk's arrays have odd sizes that the allocator would keep

    # -- one generated token -------------------------------------------------------------------------------------------

    def foresee(self, token: mx.array) -> Step:
        """Make the step that will process `token`, a scalar id that may not be evaluated yet.

        To be called as soon as the token is chosen; `flush` then evaluates it together with what is foreseen. May be called
        again with another token.
        """
        if self.last is None:
            raise RuntimeError("a step needs one before it; prefill the prompt first")
        step = self.coming = Step(self.last.index + 1, token)
        self.model.arm.foresee(self.last, step)
        return step

    def flush(self, *arrays: mx.array, final: bool = False) -> None:
        """A step's one evaluation: its logits, `arrays` that depend on them, and what is foreseen of the coming step.

        Reads of the coming step's experts then begin, as far as the arm knows them; none where it is `final`: no step will come.
        """
        last, (coming, token) = self.last, self._foreseen()
        assert last is not None  # what is foreseen comes after a pass
        logits = [] if last.logits_V is None else [last.logits_V]
        foreseen = [] if coming.ahead is None else coming.ahead.arrays()
        mx.eval(*arrays, *logits, *foreseen)
        self._check_files()
        self._settle()
        coming.trail = None if last.trail is None else hash((last.trail, int(token)))
        coming.memory = None if final else self.model.memory
        coming.flushed = True
        if self.model.memory is not None:
            self.model.memory.turn()
            self.model.arm.hints(last, coming)

    def run(self) -> mx.array:
        """The coming step's pass: logits [vocabulary], not evaluated yet."""
        if self.last is not None and self.last.final:
            raise RuntimeError("the step before was to be the final one, so nothing is foreseen of this one")
        step, token = self._foreseen()
        logits = self._forward(step, token[None])
        self.model.predicted_steps += bool(step.foreseen)
        return logits

    def decode(self, token_id: int, *, final: bool = False) -> mx.array:
        """All of it for a token that is known: logits [vocabulary] for the next, not evaluated yet.

        `final`: no step will follow this one, so nothing is read for it.
        """
        if self.coming is None or self.coming.token is None or self.coming.token.item() != token_id:
            self.foresee(mx.array(token_id))
        assert self.coming is not None
        if not self.coming.flushed:
            self.flush()
        self.coming.final = final
        return self.run()

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What it takes to go on from here, evaluated; between steps only."""
        if self.last is None:
            raise RuntimeError("a snapshot needs a pass; prefill the prompt first")
        if self.last.logits_V is not None:
            mx.eval(self.last.logits_V)
        self._evaluate_state()
        self._settle()
        return self._snapshot(self.last, [part_of(entry, self._copied) for entry in self._kv])

    @property
    def _copied(self) -> int:
        """Tokens whose rows the last snapshot has."""
        return 0 if self._rows is None else self._rows.stop

    def _snapshot(self, step: Step, parts: Ids[Any]) -> Snapshot:
        """After `step`, of what the prompt cache's entries held then: of rows those behind the last snapshot's."""
        rows = [part if has_rows(entry) else None for entry, part in zip(self._kv, parts, strict=True)]
        states = [None if has_rows(entry) else part for entry, part in zip(self._kv, parts, strict=True)]
        if self._rows is None or self._rows.stop < self.tokens:
            self._rows = Rows(self._rows, self.tokens, tuple(rows))
        mx.eval(arrays_of([step.features, step.since]))
        ran = {layer: np.array(experts_TK[-1:]) for layer, experts_TK in step.ran.items()}
        return Snapshot(self._rows, tuple(states), step.index, step.trail, step.features, step.since, ran)

    def close(self) -> None:
        """Give its memory back, whatever became of it; nothing is read for it any more."""
        for step in (self.model.running.step, self.last, self.coming):
            if step is not None:
                step.stop()  # an exception that somebody keeps may hold the step, and slots are large
        self.model.running.step = Step()
        self._kv, self._rows, self.last, self.coming = [], None, None, None
        if self.model.memory is not None:
            self.model.memory.abandon()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _foreseen(self) -> tuple[Step, mx.array]:
        """The coming step and its token."""
        if self.coming is None or self.coming.token is None:
            raise RuntimeError("a step that nobody foresaw; call foresee first")
        return self.coming, self.coming.token

    def _forward(self, step: Step, tokens_T: mx.array) -> mx.array:
        model = self.model
        self._begin(step)
        logits_1TV = model.network(tokens_T[None], cache=self._kv)
        step.features = model.arm.remember(step)
        step.logits_V = logits_1TV[0, -1]
        self.last = step
        self.tokens += tokens_T.size
        return step.logits_V

    def _begin(self, step: Step) -> None:
        model, last = self.model, self.last
        if last is not None and last.logits_V is not None and not model.never_waits:
            mx.eval(last.logits_V)  # their graph may have to compute from slots that this pass overwrites
        self._settle()
        self.coming = None  # what was foreseen is for the step after the last one
        step.last = last
        if last is not None:
            last.stop()
        self._let_run(step)
        if step.whole_layers and model.memory is not None:
            model.memory.want_layer(model.memory.layers[0])

    def _let_run(self, step: Step) -> None:
        model = self.model
        step.route, step.look_ahead = model.arm.route, model.arm.look_ahead
        step.memory, step.waits = model.memory, not model.never_waits
        model.running.step = step

    def _evaluate_state(self) -> None:
        assert self.last is not None
        mx.eval([entry.state for entry in self._kv], arrays_of([self.last.features, self.last.since]))

    def _settle(self) -> None:
        """Everything built so far is evaluated, or will never wait.

        Raises RuntimeError if a block chose an expert that was not staged for it: the step's result is wrong then.
        """
        if self.last is not None and (dropped := self.last.dropped()):
            self.model.dropped += sum(dropped.values())
            layer, count = next(iter(dropped.items()))
            raise RuntimeError(f"layer {layer}: {count} routed experts were not staged")
        if self.model.memory is not None:
            self.model.memory.release()

    def _check_files(self) -> None:
        """A pass is computed; whatever of it was read came from the files as they were opened."""
        if not self.model.never_waits:
            self.model.store.check()
