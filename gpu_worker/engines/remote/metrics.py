"""Calls as Prometheus metrics."""

from prometheus_client import Counter, Gauge

from gpu_worker.engines.remote.retrying_caller import CallResult

_STATES = {"closed": 0, "half_open": 1, "open": 2}
CALLS = Counter(
    "millstream_remote_calls_total",
    "Calls of a remote model by outcome: ok, refused, failed, cancelled, or the fault.",
    ["upstream", "outcome"],
)
RETRIES = Counter(
    "millstream_remote_retries_total", "Calls that were made again after a failure.", ["upstream"]
)
BREAKER = Gauge(
    "millstream_remote_breaker_state", "0: closed, 1: half-open, 2: open.", ["upstream"]
)


def observe_call(upstream: str, called: CallResult) -> None:
    """Count one call that has ended."""
    CALLS.labels(upstream, called.outcome).inc()
    BREAKER.labels(upstream).set(_STATES[called.breaker_state])
    if called.is_retry:
        RETRIES.labels(upstream).inc()
