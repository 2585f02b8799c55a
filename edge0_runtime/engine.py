"""One request at a time: prompt ids in, generated tokens out, from a model directory with its two adapters.

    with Engine.load("models/nano") as engine:
        for token in engine.generate(prompt_ids, max_tokens=64):
            ...

A request's MLX work is all done in the thread that iterates; loading and generating may be different threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any

import mlx.core as mx

from edge0_runtime import request
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.model_files import check_library_files
from edge0_runtime.experts.memory import COUNTERS
from edge0_runtime.experts.reader import IO_THREADS
from edge0_runtime.libraries import PreTrainedTokenizerBase
from edge0_runtime.loading import load_model
from edge0_runtime.model import Model
from edge0_runtime.observation import Observation
from edge0_runtime.plan import Keeping, budget_of
from edge0_runtime.prefix.cuts import Prompt, cut
from edge0_runtime.prefix.folder import folder_of
from edge0_runtime.prefix.store import Prefixes
from edge0_runtime.request import Token
from edge0_runtime.sampling import Defaults, Processor, Sampler, make_sampler, processed
from edge0_runtime.sequence import Sequence
from edge0_runtime.serving import Serving
from edge0_runtime.text import end_tokens, load_tokenizer

__all__ = ["Engine", "Token"]
log = logging.getLogger(__name__)


class Engine:
    """A loaded model that serves one request at a time; a second one while the first is running is refused.

    Attributes:
        model_dir: where it was loaded from. model: network and experts. tokenizer: transformers'.
        sequence: of the request that is running. observation: what its steps do, for whoever watches.
        eos_ids: end tokens. defaults: how the model wants to be sampled.
        context_length: most tokens of prompt and answer together.
        prefill_chunk: prompt tokens per forward pass. prefill_width: prompt tokens that go through the layers together, chunk by
            chunk.
        prefixes: snapshots, for requests that begin alike.
    """

    def __init__(
        self,
        model_dir: Path,
        model: Model,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: frozenset[int],
        defaults: Defaults,
        busy: threading.Lock | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """`busy` is held while a request runs; engines whose models share memory share it too, and their snapshots."""
        self.model_dir = model_dir
        self.model = model
        self.sequence: Sequence | None = None
        self.prefixes = prefixes or Prefixes(model)
        self.observation = Observation(tuple(sorted(model.store.tensors)), model.store.num_experts)
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.defaults = defaults
        self.context_length = model.context_length
        self.prefill_chunk, self.prefill_width = model.prefill_chunk, model.prefill_width
        self._busy = busy or threading.Lock()
        self._requests = self._prompt_tokens = self._generated_tokens = 0

    @classmethod
    def load(
        cls,
        model_dir: str | os.PathLike[str],
        *,
        prerouter: bool = True,
        lora: bool = True,
        arm: str | None = None,
        memory_budget: float | None = None,
        context: int | None = None,
        kv_bits: int | None = None,
        prefix_cache: float | None = 0.0,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_dir_limit: float = 8.0,
        io_threads: int = IO_THREADS,
        allow_mismatch: bool = False,
        tier_name: str | None = None,
        adapters: str | os.PathLike[str] | None = None,
        float32: bool = False,
    ) -> Engine:
        """Load a model directory.

        Args:
            model_dir: int4 base, tokenizer and adapter files.
            prerouter, lora: False serves without that file: own gates, no recovery.
            arm: how experts are routed and read, a name of `edge0_runtime.arms`; None: by the prerouter, or on
                demand without it.
            memory_budget: GiB for all that MLX holds: resident weights, adapters, the context's keys and values, activations and
                experts. None takes a quarter of the machine's memory, or what all experts need if that is less.
            context: tokens of prompt and answer that the budget reserves memory for; None: 4,096, or the model's if that is less.
                A longer request is served, beyond the budget, with a warning.
            kv_bits: 8 or 4 quantises keys and values as mlx-lm does: not what was trained. None: as they are computed.
            prefix_cache: GiB of the budget for snapshots, from which requests go on that begin alike; None: an eighth of it.
            cache_dir, cache_dir_limit: where snapshots are written to as well, and GiB that they may take there; None: nowhere.
            io_threads: threads that read experts.
            allow_mismatch: serve adapters that name another base or prerouter.
            tier_name: which adapter files, when the directory holds several or none.
            adapters: the directory of the adapter files, where they don't lie beside the base.
            float32: compute in float32 where the device would in the dtype of the files (`verify`); a CPU always does.

        Raises:
            Edge0Error: whatever is wrong with the directory, before anything large is read.
        """
        keeping, folder = Keeping.of(context, kv_bits, prefix_cache), folder_of(cache_dir, cache_dir_limit)
        checkpoint = Checkpoint.open(Path(model_dir))
        language = read_language(checkpoint)
        model = load_model(
            checkpoint,
            Serving(prerouter, lora, arm, None if adapters is None else Path(adapters), tier_name),
            budget_bytes=budget_of(memory_budget),
            keeping=keeping,
            io_threads=io_threads,
            allow_mismatch=allow_mismatch,
            float32=float32,
        )
        engine = cls(checkpoint.directory, model, *language, prefixes=Prefixes(model, folder))
        log.info("%s", engine.plan())
        return engine

    def plan(self) -> str:
        """What was loaded, in one line for the user."""
        model, memory = self.model, self.model.memory
        experts = model.store.num_experts * len(model.store.tensors)
        routed = 0 if model.heads is None else len(model.tier.consumers)
        return (
            f"tier {model.tier.name}: K {model.tier.k}, {routed} layers predicted,"
            f" LoRA on {model.lora_modules} modules; arm {model.arm_name},"
            f" {experts if memory is None else memory.slots} of {experts} experts held"
        )

    def set_memory_budget(self, memory_budget: float | None) -> None:
        """Serve the requests that follow within another budget, as in `load`. Raises Edge0Error while one runs."""
        budget_bytes = budget_of(memory_budget)
        with self._between_requests("memory_budget"):
            self.prefixes.clear()  # before the room for them is another
            self.model.resize(budget_bytes)
            self.prefill_chunk, self.prefill_width = self.model.prefill_chunk, self.model.prefill_width

    def set_arm(self, arm: str) -> None:
        """Serve the requests that follow in another way; resident is only there from the start."""
        with self._between_requests("arm"):
            self.model.set_arm(arm)

    def forget_experts(self) -> None:
        """Begin the next request without experts in memory, unless all of them are there for good."""
        with self._between_requests("experts"):
            self.model.forget_experts()

    @contextlib.contextmanager
    def _between_requests(self, what: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise Edge0Error(f"{what}: a request is running; finish or close it first")
        try:
            yield
        finally:
            self._busy.release()

    def generate(
        self,
        prompt_ids: Ids[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        processors: Ids[Processor] = (),
        top_logprobs: int = 0,
        ignore_eos: bool = False,
        cancel: threading.Event | None = None,
        progress: Callable[[int, int], None] | None = None,
        trace: bool = False,
    ) -> Iterator[Token]:
        """Generate up to `max_tokens` tokens.

        Args:
            prompt_ids: token ids, at least one.
            max_tokens: at least 1; with the prompt it must fit the model's context.
            temperature: 0 takes the most likely token; the next four then have no effect.
            top_p, top_k, min_p: 1, 0 and 0 switch them off; applied in the order top_p, min_p, top_k, as in
                mlx-lm.
            seed: of this request alone: whatever else runs, the same seed gives the same tokens. None draws
                one.
            processors: change the logits that are sampled from, in this order (sampling.py); steps are not built ahead then.
            top_logprobs: how many of the most likely tokens `Token.top` has.
            ignore_eos: go on after an end token.
            cancel: checked before every prefill chunk and every token.
            progress: called with how many tokens of the prompt are processed, and how many of those were known from before.
            trace: fill `Token.experts` and `Token.logits`.

        Raises:
            Edge0Error: at once for a wrong argument; while iterating when the engine is busy, when experts
                can't be read, when their files were written to or when logits aren't finite. The engine stays usable.
        """
        if max_tokens < 1:
            raise Edge0Error(f"max_tokens: {max_tokens} must be at least 1")
        self._check_request(prompt_ids, max_tokens)
        sample = make_sampler(temperature, top_p, top_k, min_p, seed, self.model.vocab_size)
        if processors:
            sample = processed(sample, processors, prompt_ids)
        ends, ahead = frozenset() if ignore_eos else self.eos_ids, not processors
        event = cancel or threading.Event()
        return self._run(list(prompt_ids), max_tokens, sample, ends, event, trace, ahead, top_logprobs, progress)

    def cut(self, prompt_ids: Ids[int]) -> Prompt:
        """The passes in which a prompt is always processed."""
        return cut(prompt_ids, self.prefill_chunk, self.eos_ids)

    def replay(self, prompt_ids: Ids[int], generated_ids: Ids[int]) -> Iterator[Token]:
        """Process a known continuation: like a traced `generate`, but the tokens are the given ones."""
        self._check_request(prompt_ids, len(generated_ids))
        self._check_request([*prompt_ids, *generated_ids], 0)
        forced = iter(generated_ids)

        def next_forced(_: mx.array) -> mx.array:
            return mx.array(next(forced))

        count = len(generated_ids)
        return self._run(list(prompt_ids), count, next_forced, frozenset(), threading.Event(), trace=True)

    def _check_request(self, prompt_ids: Ids[int], max_tokens: int) -> None:
        request.check(prompt_ids, max_tokens, self.model.vocab_size, self.context_length)

    def _run(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        sample: Sampler,
        stop_ids: frozenset[int],
        cancel: threading.Event,
        trace: bool,
        ahead: bool = True,
        top: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Token]:
        if not self._busy.acquire(blocking=False):
            raise Edge0Error("engine: a request is running; finish or close it before the next")
        try:
            sequence = self.sequence = Sequence(self.model)
            if not self.model.never_waits:
                self.model.recover()
            self._requests += 1
            self.observation.begin()
            logits = request.prefill(
                sequence, self.cut(prompt_ids), self.prefill_width, cancel, self.prefixes, progress
            )
            if logits is None:
                yield Token(0, -1, 0.0, "cancelled", cached_tokens=sequence.restored)
                return
            self._prompt_tokens += len(prompt_ids)
            reserved = self.context_length if self.model.plan is None else self.model.plan.context
            # Where no expert is waited for, a step is built while the one before computes. A trace looks at each.
            ahead = ahead and self.model.never_waits and not trace
            for token in request.decode(
                sequence, logits, max_tokens, sample, stop_ids, cancel, ahead=ahead, trace=trace, top=top
            ):
                self._generated_tokens += token.finish_reason != "cancelled"
                self.observation.saw(self.model, sequence, token)
                if token.index == max(0, reserved - len(prompt_ids)):
                    log.warning(
                        "context: longer than the %d tokens that memory is reserved for; load with --context", reserved
                    )
                yield token
        except (KeyboardInterrupt, SystemExit):  # may have struck anywhere, also midway in the slots' bookkeeping
            self.model.forget_experts()
            raise
        finally:
            self._end()
            self._busy.release()

    def _end(self) -> None:
        """Give the request's memory back, also after an error; nothing is read for it any more."""
        if self.sequence is not None:
            self.sequence.close()
        self.sequence = None
        self.prefixes.save()
        self.observation.end(self.model)
        mx.clear_cache()

    def stats(self) -> dict[str, Any]:
        """Counters since loading; `dropped_experts` is always 0."""
        model, memory = self.model, self.model.memory
        counters = dict.fromkeys((*COUNTERS, "held"), 0) if memory is None else memory.counters()
        return {
            "requests": self._requests,
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self._generated_tokens,
            "predicted_steps": model.predicted_steps,
            "dropped_experts": model.dropped,
            "expert_loads": counters["loads"],
            "expert_bytes": counters["bytes_read"],
            "expert_hits": counters["hits"],
            "expert_misses": counters["misses"],
            "expert_late_misses": counters["late"],
            "expert_evictions": counters["evictions"],
            "blocked_load_seconds": counters["blocked_seconds"],
            "experts_held": counters["held"],
            "expert_slots": 0 if memory is None else memory.slots,
            "expert_slot_bytes": 0 if memory is None else memory.nbytes,
            **self.prefixes.stats(),
        }

    def close(self) -> None:
        """Close the checkpoint's files; the engine can't be used afterwards."""
        self.prefixes.close()
        self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_language(
    checkpoint: Checkpoint, template: Path | None = None
) -> tuple[PreTrainedTokenizerBase, frozenset[int], Defaults]:
    """Tokenizer, end tokens and sampling of a model directory; raises Edge0Error before anything large is read."""
    check_library_files(checkpoint.directory)
    defaults = Defaults.of_model(checkpoint.directory)
    tokenizer = load_tokenizer(checkpoint.directory, checkpoint.config, template)
    return tokenizer, end_tokens(checkpoint, tokenizer), defaults
