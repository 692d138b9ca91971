"""Prometheus metrics of the gateway's requests and connections, with bounded labels."""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Self

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.tenant_labels import TenantLabels
from streams.messages import TERMINAL_TYPES, Record

BUCKET_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

FIRST_TOKEN = Histogram(
    "millstream_time_to_first_token_seconds",
    "From the arrival of a request to its first token.",
    ["model", "priority"],
    buckets=BUCKET_SECONDS,
)
STAGE = Histogram(
    "millstream_stage_seconds",
    "Time spent in each stage of a request.",
    ["model", "stage"],
    buckets=BUCKET_SECONDS,
)
REQUESTS = Counter(
    "millstream_requests_total", "Requests by how they ended.", ["tenant", "model", "outcome"]
)
REFUSED = Counter(
    "millstream_refused_total", "Requests refused by the gateway.", ["tenant", "code"]
)
TOKENS = Counter(
    "millstream_tokens_total", "Tokens of ended requests.", ["tenant", "model", "direction"]
)
JOB_QUESTIONS = Counter(
    "millstream_gateway_job_questions_total",
    "Producers' questions about jobs over NATS, by operation and error code (empty: none).",
    ["operation", "code"],
)
ANSWERS_REPEATED = Counter(
    "millstream_gateway_repeated_answers_total",
    "Submissions over NATS that were answered with what an earlier one got, by where that was.",
    ["source"],
)
FILE_BYTES = Counter(
    "millstream_file_bytes_total", "Bytes of files that were stored and read.", ["direction"]
)
OPEN_WEBSOCKETS = Gauge("millstream_open_websockets", "Open WebSockets.")
CUT_CONNECTIONS = Counter(
    "millstream_cut_connections_total", "Connections closed for abuse.", ["reason"]
)
UNAUTHENTICATED = Counter(
    "millstream_unauthenticated_total",
    "Requests and handshakes without a credential, or with a wrong one.",
    ["entry_point"],
)
HANDSHAKES = Counter(
    "millstream_tls_handshakes_total", "TLS handshakes by how they ended.", ["outcome"]
)
CERTIFICATE_NOT_AFTER = Gauge(
    "millstream_tls_certificate_not_after_timestamp_seconds",
    "When the gateway's certificate expires, in seconds since 1970.",
)
CERTIFICATE_RELOADS = Counter(
    "millstream_tls_certificate_reloads_total",
    "Certificates found in changed files, by whether they were loaded or rejected.",
    ["outcome"],
)
FOLLOWED_REQUESTS = Gauge(
    "millstream_followed_requests", "Requests whose replies are relayed here."
)
UNUSABLE_STREAMS = Gauge(
    "millstream_unusable_stream",
    "1 for each stream that the broker refuses to make as it is declared.",
    ["stream"],
)


def observe_unusable(streams: Iterable[str]) -> None:
    """Set the gauge of unusable streams to 1 for each of these; drop all others from it."""
    UNUSABLE_STREAMS.clear()
    for stream in streams:
        UNUSABLE_STREAMS.labels(stream).set(1)


class BucketCounts:
    """A histogram's counts, one for each bucket of `BUCKET_SECONDS` and one for longer times.

    Not thread-safe: only the event loop may call it. That makes `observe`, which is called for each
    chunk, five times as fast as that of a Prometheus `Histogram`.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKET_SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration, in seconds."""
        self.counts[bisect_left(BUCKET_SECONDS, seconds)] += 1
        self.sum += seconds


class InterTokenHistogram(Collector):
    """Prometheus histogram of the time between the tokens of a request, by model and priority."""

    def __init__(self) -> None:
        self._times = defaultdict[tuple[str, str], BucketCounts](BucketCounts)

    def labels(self, model: str, priority: str) -> BucketCounts:
        """Return the counts for this model and priority, to which the caller adds its times."""
        return self._times[model, priority]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            "millstream_inter_token_seconds",
            "Time between the tokens of a request, averaged over each chunk.",
            labels=["model", "priority"],
        )
        bounds = [*map(floatToGoString, BUCKET_SECONDS), "+Inf"]
        for labels, times in self._times.copy().items():
            buckets = list(zip(bounds, accumulate(times.counts), strict=True))
            family.add_metric(labels, buckets, times.sum)
        yield family


INTER_TOKEN = InterTokenHistogram()
REGISTRY.register(INTER_TOKEN)


def _remove_tenant_series(tenant: str) -> None:
    for metric in (REQUESTS, REFUSED, TOKENS):
        metric.remove_by_labels({"tenant": tenant})


_TENANT_LABELS = TenantLabels(_remove_tenant_series)


def count_refused(tenant: str, code: str) -> None:
    """Count one request that was not accepted, by tenant and error code."""
    _TENANT_LABELS.record_use(tenant, 1, time.monotonic())
    REFUSED.labels(_TENANT_LABELS.label_for(tenant), code).inc()


class RequestMetrics:
    """Turns the records of one accepted request into metrics: call `observe` with each, in order.

    `arrived` is when the request came, in seconds of `time.perf_counter`; None for a request that
    was resumed here. A resumed request counts in no latency, and its model is taken from its
    records.
    """

    def __init__(self, tenant: str, model: str, priority: str, arrived: float | None) -> None:
        self._tenant, self._model, self._arrived_at = tenant, model, arrived
        if arrived is not None:
            self._first_token = FIRST_TOKEN.labels(model, priority)
            self._inter_token = INTER_TOKEN.labels(model, priority)
        self._last_chunk_at = 0.0

    def observe_unread(self, record: Record, size: int) -> bool:
        """Take a record, as the sink of a request whose client has left: only its end counts."""
        if record["type"] in TERMINAL_TYPES:
            self.observe(record)
        return True

    @classmethod
    def for_resumed(cls, tenant: str) -> Self:
        """Return the metrics of a request that began at another connection and was resumed here."""
        return cls(tenant, "", "", None)

    def observe(self, record: Record) -> None:
        """Update the metrics with the next record of the request's token log, of any type."""
        kind = record["type"]
        if kind == "chunk":
            if self._arrived_at is not None:
                self._observe_chunk(self._arrived_at, record["count"])
        elif kind == "started":
            self._model = record["model"]
        elif kind == "done":
            self._observe_end(record, record["finish_reason"])
            for stage, milliseconds in record["timing"].items():
                STAGE.labels(self._model, stage).observe(milliseconds / 1000)
        elif kind == "error":
            self._observe_end(record, record["code"])

    def _observe_chunk(self, arrived: float, count: int) -> None:
        now = time.perf_counter()
        if self._last_chunk_at:
            self._inter_token.observe((now - self._last_chunk_at) / max(1, count))
        else:
            self._first_token.observe(now - arrived)
        self._last_chunk_at = now

    def _observe_end(self, record: Record, outcome: str) -> None:
        used = {name: record["usage"][f"{name}_tokens"] for name in ("prompt", "completion")}
        _TENANT_LABELS.record_use(self._tenant, 1 + sum(used.values()), time.monotonic())
        tenant = _TENANT_LABELS.label_for(self._tenant)
        REQUESTS.labels(tenant, self._model, outcome).inc()
        for direction, tokens in used.items():
            TOKENS.labels(tenant, self._model, direction).inc(tokens)
