"""The queue and its decisions as Prometheus metrics."""

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
QUEUED_TOKENS = Gauge(
    "millstream_dispatcher_queued_tokens", "Reserved tokens queued.", ["model", "priority"]
)
OLDEST = Gauge(
    "millstream_dispatcher_oldest_age_seconds", "Age of the oldest queued request.", ["model"]
)
IN_FLIGHT = Gauge("millstream_dispatcher_in_flight_requests", "Dispatched, not ended.", ["model"])
WORKERS = Gauge("millstream_dispatcher_workers", "Workers that beat.", ["model"])
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
    "Times that a consumer of `REQUESTS` or `WORK` delivered nothing though it should have.",
    ["model", "stream"],
)
BLOCKED = Counter(
    "millstream_dispatcher_blocked_seconds_total",
    "Time for which the next in line could not be sent, by reason.",
    ["model", "reason"],
)
ENDED = Counter(
    "millstream_dispatcher_ended_total",
    "Requests that the dispatcher ended since no worker will, by outcome.",
    ["model", "outcome"],
)
PLACED = Counter(
    "millstream_dispatcher_placed_total",
    "Requests sent to the worker that holds their prefix or adapter, or to any: why.",
    ["model", "why"],
)
TAKEN_BACK = Counter(
    "millstream_dispatcher_taken_back_total",
    "Requests that their worker has not served, sent to any: why.",
    ["model", "why"],
)


def observe_dispatch(
    model: str, priority: str, queue_seconds: float, told_seconds: float | None
) -> None:
    """One request was sent on; `told_seconds` is the wait that was estimated for it."""
    QUEUE_SECONDS.labels(model, priority).observe(max(0.0, queue_seconds))
    if told_seconds is not None:
        WAIT_ERROR.labels(model, priority).observe(queue_seconds - told_seconds)


def observe_placed(model: str, why: str) -> None:
    """One request was sent on; `why` is that of `dispatcher.workers.prefix_routing.Placed`."""
    PLACED.labels(model, why).inc()


def observe_requeue(model: str, why: str) -> None:
    """One request was taken back from the worker that it was placed on."""
    TAKEN_BACK.labels(model, why).inc()


def observe_blocked(model: str, reason: str, seconds: float) -> None:
    """The next in line has waited for so long, because of this."""
    BLOCKED.labels(model, reason).inc(seconds)


def observe_stuck_consumer(model: str, stream: str) -> None:
    """A consumer had to be made anew, or resumed."""
    STALLS.labels(model, stream).inc()


def observe_ended(model: str, outcome: str) -> None:
    """A request was ended by the dispatcher: no worker will."""
    ENDED.labels(model, outcome).inc()


def observe_queue(books: ModelState, pressure: Pressure) -> None:
    """The state of one model's queue and fleet."""
    model = books.model
    for priority, wait in pressure.wait_seconds.items():
        QUEUED.labels(model, priority).set(pressure.queued[priority])
        QUEUED_TOKENS.labels(model, priority).set(books.queue.count_queued(Priority(priority))[1])
        WAIT.labels(model, priority).set(wait or 0.0)
    IN_FLIGHT.labels(model).set(len(books.in_flight))
    WORKERS.labels(model).set(pressure.workers)


def observe_oldest(books: ModelState, now: float) -> None:
    """How long the oldest queued request has waited; it looks at every lane, so not too often."""
    oldest = books.queue.oldest
    age = now - oldest.accepted / 1000 if oldest else 0.0
    OLDEST.labels(books.model).set(max(0.0, age))
