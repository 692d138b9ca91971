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


GROUPS = Counter(
    "millstream_remote_groups_total", "Groups of calls of a single-item API.", ["upstream"]
)
GROUP_REQUESTS = Counter(
    "millstream_remote_group_requests_total", "Requests in these groups.", ["upstream"]
)


def observe_group(upstream: str, requests: int) -> None:
    """Count one group of calls that begins in the metrics of the model `upstream`."""
    GROUPS.labels(upstream).inc()
    GROUP_REQUESTS.labels(upstream).inc(requests)


def observe_call(upstream: str, result: CallResult) -> None:
    """Count one call that has ended in the metrics of the model `upstream`."""
    CALLS.labels(upstream, result.outcome).inc()
    BREAKER.labels(upstream).set(_STATES[result.breaker_state])
    if result.is_retry:
        RETRIES.labels(upstream).inc()
