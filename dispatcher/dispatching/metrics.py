"""Prometheus metrics of the queue, of dispatches and of what the dispatcher mends."""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from dispatcher.dispatching.model_state import ModelState
from streams.messages import Pressure
from streams.subjects import Priority

QUEUE_SECONDS = Histogram(
    "millstream_dispatcher_queue_seconds",
    "Time from acceptance to dispatch.",
    ["model", "priority"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
QUEUED = Gauge("millstream_dispatcher_queued_requests", "Queued requests.", ["model", "priority"])
SUBMISSIONS = Gauge(
    "millstream_dispatcher_waiting_submissions",
    "Submissions over NATS that no gateway has accepted yet.",
    ["model", "priority"],
)
QUEUED_TOKENS = Gauge(
    "millstream_dispatcher_queued_tokens", "Reserved tokens queued.", ["model", "priority"]
)
OLDEST = Gauge(
    "millstream_dispatcher_oldest_age_seconds", "Age of the oldest queued request.", ["model"]
)
IN_FLIGHT = Gauge("millstream_dispatcher_in_flight_requests", "Dispatched, not ended.", ["model"])
WORKERS = Gauge("millstream_dispatcher_workers", "Workers that send heartbeats.", ["model"])
WAIT = Gauge(
    "millstream_dispatcher_estimated_wait_seconds",
    "Estimated wait of a new request.",
    ["model", "priority"],
)
WAIT_ERROR = Histogram(
    "millstream_dispatcher_wait_error_seconds",
    "Time from acceptance to dispatch less what was estimated at acceptance.",
    ["model", "priority"],
    buckets=(-100, -30, -10, -3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10, 30, 100),
)
STALLS = Counter(
    "millstream_dispatcher_stalls_total",
    "Times that a consumer of `REQUESTS` or `WORK` was stuck: it had messages, delivered none.",
    ["model", "stream"],
)
BLOCKED = Counter(
    "millstream_dispatcher_blocked_seconds_total",
    "Time for which the next request could not be sent, by reason.",
    ["model", "reason"],
)
ENDED = Counter(
    "millstream_dispatcher_ended_total",
    "Requests that the dispatcher ended since no worker would, by outcome.",
    ["model", "outcome"],
)
PLACED = Counter(
    "millstream_dispatcher_placed_total",
    "Requests published for the worker that holds their prefix or adapter, or for any, by reason.",
    ["model", "why"],
)
TAKEN_BACK = Counter(
    "millstream_dispatcher_taken_back_total",
    "Requests taken back from a worker that did not serve them, published for any, by reason.",
    ["model", "why"],
)


def observe_dispatch(
    model: str, priority: str, queue_seconds: float, estimated_seconds: float | None
) -> None:
    """Record a dispatched request's seconds in the queue, and the error of its estimated wait.

    `estimated_seconds` is the wait that was estimated at acceptance, None if there was no estimate.
    """
    QUEUE_SECONDS.labels(model, priority).observe(max(0.0, queue_seconds))
    if estimated_seconds is not None:
        WAIT_ERROR.labels(model, priority).observe(queue_seconds - estimated_seconds)


def observe_placed(model: str, why: str) -> None:
    """Count a dispatched request by the reason for its worker: `why` of its `Placement`."""
    PLACED.labels(model, why).inc()


def observe_requeue(model: str, why: str) -> None:
    """Count a request that was taken back from a worker that did not serve it, by reason."""
    TAKEN_BACK.labels(model, why).inc()


def observe_blocked(model: str, reason: str, seconds: float) -> None:
    """Add seconds to the time for which the next request could not be dispatched, by reason.

    `reason` is a word of `explain.find_blocking_reason`.
    """
    BLOCKED.labels(model, reason).inc(seconds)


def observe_stuck_consumer(model: str, stream: str) -> None:
    """Count a consumer of the stream REQUESTS or WORK that delivered nothing though it should."""
    STALLS.labels(model, stream).inc()


def observe_ended(model: str, outcome: str) -> None:
    """Count a request that the dispatcher ended; `outcome` is `cancelled` or an error code."""
    ENDED.labels(model, outcome).inc()


def observe_queue(state: ModelState, pressure: Pressure) -> None:
    """Set a model's gauges: queued requests and tokens, waits, requests in flight, workers.

    Queued requests, tokens and waits are by priority; an unknown wait shows as 0.
    """
    model = state.model
    for priority, wait in pressure.wait_seconds.items():
        QUEUED.labels(model, priority).set(pressure.queued[priority])
        QUEUED_TOKENS.labels(model, priority).set(state.queue.count_queued(Priority(priority))[1])
        WAIT.labels(model, priority).set(wait or 0.0)
    IN_FLIGHT.labels(model).set(len(state.in_flight))
    WORKERS.labels(model).set(pressure.workers)


def observe_submissions(model: str, submissions: Mapping[tuple[str, Priority], int]) -> None:
    """Set the gauges of a model's waiting submissions, which are given by tenant and priority."""
    for priority in Priority:
        waiting = sum(count for (_, each), count in submissions.items() if each is priority)
        SUBMISSIONS.labels(model, priority.value).set(waiting)


def observe_oldest(state: ModelState, now: float) -> None:
    """Set the gauge for the age of the oldest queued request, in seconds; 0 if none is queued.

    `now` is epoch seconds. Looks at every tenant's queues, so it should not be called often.
    """
    oldest = state.queue.oldest
    age = now - oldest.accepted / 1000 if oldest else 0.0
    OLDEST.labels(state.model).set(max(0.0, age))
