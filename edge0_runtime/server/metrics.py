"""Numbers for Prometheus: what was asked and answered, and what the engine did for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edge0_runtime.host.memory import rss_bytes
from edge0_runtime.server.exchange import Finished
from edge0_runtime.server.worker import Worker

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ENGINE = {
    "expert_bytes": ("edge0_expert_read_bytes", "Bytes of experts read from the disk."),
    "expert_loads": ("edge0_expert_loads", "Experts read from the disk."),
    "expert_hits": ("edge0_expert_hits", "Experts that a layer computed with and that were in memory."),
    "expert_misses": ("edge0_expert_misses", "Experts that a layer had to have read."),
    "expert_evictions": ("edge0_expert_evictions", "Experts that made room for others."),
    "blocked_load_seconds": ("edge0_blocked_seconds", "Seconds that computing waited for experts."),
}
"""Counters of `Engine.stats` -> (name here, help)."""


class Metrics:
    """Of one server."""

    def __init__(self, engines: Sequence[Engine], worker: Worker) -> None:
        """Of engines that share their memory, or of one."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "edge0_requests", "HTTP requests that were answered.", ["endpoint", "status"], registry=registry
        )
        self._tokens = Counter("edge0_tokens", "Tokens of finished generations.", ["kind"], registry=registry)
        self._queued = Histogram("edge0_queue_seconds", "Waiting for the engine.", buckets=SECONDS, registry=registry)
        self._first = Histogram(
            "edge0_first_token_seconds", "From arrival to the first token.", buckets=SECONDS, registry=registry
        )
        self._total = Histogram(
            "edge0_generation_seconds", "From arrival to the end.", buckets=SECONDS, registry=registry
        )
        for kind in ("prompt", "cached", "completion"):
            self._tokens.labels(kind)
        registry.register(_Engine(engines[0], worker))

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP request has ended."""
        self._requests.labels(endpoint, str(status)).inc()

    def generated(self, end: Finished) -> None:
        """A generation has; from any thread."""
        self._tokens.labels("prompt").inc(end.prompt_tokens)
        self._tokens.labels("cached").inc(end.cached_tokens)
        self._tokens.labels("completion").inc(end.completion_tokens)
        self._queued.observe(end.queued_s)
        self._first.observe(end.first_token_s)
        self._total.observe(end.total_s)

    def text(self) -> bytes:
        """All of it in the format of CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Engine(Collector):
    """What the engine and its queue say when they are asked."""

    def __init__(self, engine: Engine, worker: Worker) -> None:
        self._engine, self._worker = engine, worker

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that nobody asks the engine before it is scraped."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Numbers of now."""
        stats = self._engine.stats()
        for field, (name, text) in ENGINE.items():
            yield CounterMetricFamily(name, text, value=stats[field])
        yield GaugeMetricFamily("edge0_expert_slots", "Experts that fit in memory.", value=stats["expert_slots"])
        yield GaugeMetricFamily("edge0_experts_held", "Experts in memory.", value=stats["experts_held"])
        yield GaugeMetricFamily("edge0_queue_length", "Requests that wait.", value=self._worker.waiting)
        yield GaugeMetricFamily("edge0_up", "1 while requests are taken.", value=float(self._worker.alive))
        memory = GaugeMetricFamily(
            "edge0_memory_bytes", "The process; MLX's allocator; of that, the experts' slots.", labels=["of"]
        )
        memory.add_metric(["process"], rss_bytes())
        memory.add_metric(["allocator"], mx.get_active_memory())
        memory.add_metric(["expert_slots"], stats["expert_slot_bytes"])
        yield memory
