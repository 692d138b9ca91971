"""Finished attempts and beats as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gpu_worker.attempt.terminals import FinishedRequest
from gpu_worker.engines.engine_stats import EngineStats
from streams.messages import Heartbeat

STAGES = Histogram(
    "millstream_worker_stage_seconds",
    "Time a request spent in a stage of its walk.",
    ["model", "stage"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
FINISHED = Counter(
    "millstream_worker_requests_total", "Requests ended by this worker.", ["model", "outcome"]
)
TOKENS = Counter(
    "millstream_worker_tokens_total",
    "Tokens of ended requests; `cached` are those of the prompt that a prefix cache had.",
    ["model", "direction"],
)
ADAPTERS = Counter(
    "millstream_worker_adapter_requests_total",
    "Ended requests that ran with an adapter; beyond the first fifty adapters as `other`.",
    ["model", "adapter", "outcome"],
)
MOST_ADAPTERS = 50
_adapters: set[tuple[str, str]] = set()
_POOL = ["model", "version"]
FREE_SEQUENCES = Gauge(
    "millstream_worker_free_sequences", "Credit: sequences that may still be taken.", _POOL
)
FREE_TOKENS = Gauge("millstream_worker_free_kv_tokens", "Credit: KV tokens not reserved.", _POOL)
BATCH_FILL = Gauge(
    "millstream_worker_batch_fill_ratio", "Running sequences over the most there may be.", _POOL
)
RATE = Gauge("millstream_worker_tokens_per_second", "Tokens generated per second.", _POOL)


class EngineStatsCollector(Collector):
    """What the loaded engines count, as they count it. A new engine of a model begins at zero."""

    def __init__(self) -> None:
        self._stats: dict[tuple[str, str], EngineStats] = {}

    def set_stats(self, model: str, version: str, stats: EngineStats | None) -> None:
        """From now on show `stats` of this engine; None: nothing."""
        self._stats.pop((model, version), None)
        if stats:
            self._stats[model, version] = stats

    def collect(self) -> Iterator[Metric]:
        engines = self._stats.copy()
        for name, (what, field) in _COUNTED.items():
            family = CounterMetricFamily(f"millstream_worker_{name}", what, labels=_POOL)
            for pool, stats in engines.items():
                family.add_metric(pool, getattr(stats, field))
            yield family
        kv = GaugeMetricFamily(
            "millstream_worker_kv_tokens",
            "Room of the KV cache: `used` by sequences, `cached` of past prompts, `free`.",
            labels=[*_POOL, "state"],
        )
        seconds = CounterMetricFamily(
            "millstream_worker_step_seconds", "Time spent in steps.", labels=[*_POOL, "part"]
        )
        for pool, stats in engines.items():
            for state in ("used", "cached", "free"):
                kv.add_metric([*pool, state], getattr(stats, f"kv_{state}"))
            for part, spent in stats.seconds.copy().items():
                seconds.add_metric([*pool, part], spent)
        yield from (kv, seconds)


_COUNTED = {
    "steps": ("Steps of the engine.", "steps"),
    "prefilled_tokens": ("Prompt tokens computed, again after a preemption.", "prefilled"),
    "generated_tokens": ("Tokens that the engine sampled.", "generated"),
    "preemptions": ("Sequences that gave their KV to others, to be computed again.", "preemptions"),
    "query_tokens": ("Prompt tokens looked up in the prefix cache.", "query_tokens"),
    "hit_tokens": ("Prompt tokens found there.", "hit_tokens"),
    "adapter_loads": ("Adapters loaded.", "adapter_loads"),
}
ENGINE_STATS = EngineStatsCollector()
REGISTRY.register(ENGINE_STATS)


def observe_finished(finished: FinishedRequest) -> None:
    """Count one ended request."""
    record = finished.record
    FINISHED.labels(record.model, record.outcome).inc()
    TOKENS.labels(record.model, "prompt").inc(record.prompt_tokens)
    TOKENS.labels(record.model, "completion").inc(record.completion_tokens)
    TOKENS.labels(record.model, "cached").inc(record.cached_tokens)
    if record.adapter:
        ADAPTERS.labels(
            record.model, _adapter_label(record.model, record.adapter), record.outcome
        ).inc()
    for stage, milliseconds in finished.timing.items():
        STAGES.labels(record.model, stage).observe(milliseconds / 1000)


def _adapter_label(model: str, adapter: str) -> str:
    """The first adapters seen keep their names as labels."""
    if len(_adapters) < MOST_ADAPTERS:
        _adapters.add((model, adapter))
    return adapter if (model, adapter) in _adapters else "other"


def observe_heartbeat(beat: Heartbeat) -> None:
    """Show a worker's credit."""
    pool = beat.model, beat.version
    FREE_SEQUENCES.labels(*pool).set(beat.free_sequences)
    FREE_TOKENS.labels(*pool).set(beat.free_tokens)
    BATCH_FILL.labels(*pool).set(beat.running / beat.max_sequences)
    RATE.labels(*pool).set(beat.tokens_per_second)
