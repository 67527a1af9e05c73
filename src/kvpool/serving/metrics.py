"""What operators watch, as Prometheus reads it: a registry of its own for each engine.

Knows nothing of: HTTP.
"""

from collections.abc import Callable, Iterator

from kvpool.errors import MissingExtraError
from kvpool.serving.engine_loop import Figures

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError("prometheus-client", "serve") from error

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Latencies and counts of requests; the figures of the engine are asked for when they are read."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(figures))
        self.first_token = Histogram(
            "kvpool_time_to_first_token_seconds", "Arrival to first token", buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        )  # fmt: skip
        self.next_token = Histogram(
            "kvpool_inter_token_seconds", "Between two tokens of a request", buckets=_NEXT_TOKEN_S,
            registry=self._registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("kvpool_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self.cached_tokens = Counter("kvpool_cached_tokens", "Of these, found in the cache", registry=self._registry)
        self.generated_tokens = Counter("kvpool_generated_tokens", "Tokens that were answered", registry=self._registry)
        self.requests = Counter("kvpool_requests", "Requests by how they ended", ["end"], registry=self._registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        now = self._figures()
        yield _gauge("kvpool_requests_running", "Requests that hold blocks", now.num_running)
        yield _gauge("kvpool_requests_waiting", "Requests in the scheduler's queue", now.num_waiting)
        yield _gauge("kvpool_cache_usage_ratio", "Share of blocks held", now.num_held_blocks / now.num_usable_blocks)
        yield _gauge("kvpool_cache_blocks", "Blocks that can be used", now.num_usable_blocks)
        yield _counter("kvpool_prefix_cache_queries", "Tokens looked up in the cache", now.num_queried_tokens)
        yield _counter("kvpool_prefix_cache_hits", "Tokens found in the cache", now.num_hit_tokens)
        yield _counter("kvpool_evictions", "Cached blocks given up for others", now.num_evictions)
        yield _counter("kvpool_preemptions", "Requests that gave way to others", now.num_preemptions)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
