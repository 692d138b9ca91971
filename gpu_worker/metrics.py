"""Prometheus metrics of a worker: finished requests, heartbeats and engine counters."""

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gpu_worker.attempt.terminals import FinishedRequest
from gpu_worker.engines.engine_stats import EngineStats
from streams.messages import Heartbeat
from streams.records.worker_time import WorkerTime
from streams.subjects import OTHER

STAGES = Histogram(
    "millstream_worker_stage_seconds",
    "Seconds that a request spent in a stage: queue, dispatch, prefill, decode, total.",
    ["model", "stage"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
FINISHED = Counter(
    "millstream_worker_requests_total", "Requests ended by this worker.", ["model", "outcome"]
)
TOKENS = Counter(
    "millstream_worker_tokens_total",
    "Tokens of ended requests; `cached`: prompt tokens found in a prefix cache.",
    ["model", "direction"],
)
ADAPTERS = Counter(
    "millstream_worker_adapter_requests_total",
    "Ended requests that used an adapter; adapters after the first fifty count as `_other`.",
    ["model", "adapter", "outcome"],
)
MOST_ADAPTERS = 50
_adapters: set[tuple[str, str]] = set()
_POOL = ["model", "version"]
FREE_SEQUENCES = Gauge(
    "millstream_worker_free_sequences", "Credit: sequences that can still be accepted.", _POOL
)
FREE_TOKENS = Gauge("millstream_worker_free_kv_tokens", "Credit: KV tokens not reserved.", _POOL)
BATCH_FILL = Gauge(
    "millstream_worker_batch_fill_ratio", "Running sequences over the maximum.", _POOL
)
WORKER_SECONDS = Counter(
    "millstream_worker_seconds_total",
    "Seconds of this worker: `step` (of the engine), `idle`, `load`; `lost` is a part of `step`.",
    [*_POOL, "use"],
)
RECLAIM_NOTICES = Counter(
    "millstream_worker_reclaim_notices_total",
    "Times that the provider has said that it takes this machine back: `notice`, or a `hint`.",
    ["kind"],
)
METADATA_ERRORS = Counter(
    "millstream_worker_metadata_errors_total",
    "Questions that the provider's metadata service did not answer as it documents.",
)
RATE = Gauge("millstream_worker_tokens_per_second", "Tokens generated per second.", _POOL)


class EngineStatsCollector(Collector):
    """Prometheus collector that exports the counters of the loaded engines at each scrape.

    The values are read from each engine's `EngineStats`. Counters of a model version restart at
    zero when it gets a new engine.
    """

    def __init__(self) -> None:
        self._stats: dict[tuple[str, str], EngineStats] = {}

    def set_stats(self, model: str, version: str, stats: EngineStats | None) -> None:
        """Export `stats` for this model version from now on, in place of earlier ones.

        None means that the version has no engine: nothing is exported for it.
        """
        self._stats.pop((model, version), None)
        if stats:
            self._stats[model, version] = stats

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families with their present values; prometheus_client calls this."""
        engines = self._stats.copy()
        for name, (help_text, field) in _COUNTERS.items():
            family = CounterMetricFamily(f"millstream_worker_{name}", help_text, labels=_POOL)
            for labels, stats in engines.items():
                family.add_metric(labels, getattr(stats, field))
            yield family
        kv = GaugeMetricFamily(
            "millstream_worker_kv_tokens",
            "KV cache in tokens: `used` by sequences, `cached` from past prompts, `free`.",
            labels=[*_POOL, "state"],
        )
        seconds = CounterMetricFamily(
            "millstream_worker_step_seconds",
            "Seconds spent in each part of the engine's steps.",
            labels=[*_POOL, "part"],
        )
        for labels, stats in engines.items():
            for state in ("used", "cached", "free"):
                kv.add_metric([*labels, state], getattr(stats, f"kv_{state}"))
            for part, spent in stats.seconds.copy().items():
                seconds.add_metric([*labels, part], spent)
        yield from (kv, seconds)


_COUNTERS = {
    "steps": ("Steps of the engine.", "steps"),
    "prefilled_tokens": (
        "Prompt tokens computed; those recomputed after a preemption count again.",
        "prefilled",
    ),
    "generated_tokens": ("Tokens that the engine sampled.", "generated"),
    "preemptions": ("Sequences that lost their KV to others and are recomputed.", "preemptions"),
    "query_tokens": ("Prompt tokens looked up in the prefix cache.", "query_tokens"),
    "hit_tokens": ("Prompt tokens found in the prefix cache.", "hit_tokens"),
    "adapter_loads": ("Adapters loaded.", "adapter_loads"),
}
ENGINE_STATS = EngineStatsCollector()
REGISTRY.register(ENGINE_STATS)


def observe_finished(finished: FinishedRequest) -> None:
    """Add one request that has ended to the counters; call it once per request.

    Counts its outcome, its prompt, completion and cached tokens, its adapter, and the seconds that
    it spent in each stage.
    """
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
    """Return the adapter's name as a label for the first fifty adapters seen, then `_other`."""
    if len(_adapters) < MOST_ADAPTERS:
        _adapters.add((model, adapter))
    return adapter if (model, adapter) in _adapters else OTHER


def observe_worker_time(time: WorkerTime) -> None:
    """Add a record of this worker's time to the counters; call it once per record."""
    uses = {"idle": time.idle_ns, "load": time.load_ns, "lost": time.lost_ns}
    uses["step"] = time.elapsed_ns - time.idle_ns - time.load_ns
    for use, nanoseconds in uses.items():
        WORKER_SECONDS.labels(time.model, time.version, use).inc(nanoseconds / 1e9)


def forget_model(model: str, version: str) -> None:
    """Show no gauges of a model version that is served no longer."""
    for gauge in (FREE_SEQUENCES, FREE_TOKENS, BATCH_FILL, RATE):
        with suppress(KeyError):
            gauge.remove(model, version)
    ENGINE_STATS.set_stats(model, version, None)


def observe_heartbeat(beat: Heartbeat) -> None:
    """Set the gauges of a heartbeat's model version: free capacity, batch fill ratio, tokens/s."""
    labels = beat.model, beat.version
    FREE_SEQUENCES.labels(*labels).set(beat.free_sequences)
    FREE_TOKENS.labels(*labels).set(beat.free_tokens)
    BATCH_FILL.labels(*labels).set(beat.running / beat.max_sequences)
    RATE.labels(*labels).set(beat.tokens_per_second)
