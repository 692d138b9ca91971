"""Prometheus metrics of remote calls: outcomes, retries and the circuit breaker's state."""

from prometheus_client import Counter, Gauge

from gpu_worker.engines.remote.retrying_caller import CallResult

_STATES = {"closed": 0, "half_open": 1, "open": 2}
CALLS = Counter(
    "millstream_remote_calls_total",
    "Calls of a remote model by outcome: ok, refused, failed, cancelled, or the error's label.",
    ["upstream", "outcome"],
)
RETRIES = Counter(
    "millstream_remote_retries_total", "Calls that were made again after a failure.", ["upstream"]
)
BREAKER = Gauge(
    "millstream_remote_breaker_state",
    "State of the circuit breaker. 0: closed, 1: half-open, 2: open.",
    ["upstream"],
)


def observe_call(upstream: str, result: CallResult) -> None:
    """Count one call that has ended in the metrics of the model `upstream`."""
    CALLS.labels(upstream, result.outcome).inc()
    BREAKER.labels(upstream).set(_STATES[result.breaker_state])
    if result.is_retry:
        RETRIES.labels(upstream).inc()
