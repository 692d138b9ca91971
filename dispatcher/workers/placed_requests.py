"""Requests in flight by the worker that they were placed on, and those stranded there. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from dispatcher.workers.fleet import Fleet
from streams.headers import Envelope
from streams.subjects import ANY, Priority

PULL_TIMEOUT_SECONDS = 1.0  # in which a worker should pull what was placed on it


class Stage(IntEnum):
    """The stages of a dispatched request that has not ended, in order: a later one is greater.

    A request whose worker has died is `PUBLISHED` again until another worker reports it.
    """

    RESERVED = 1  # its room counts as used
    PLACED = 2  # on one worker; most requests are for any, and skip this
    PUBLISHED = 3  # in WORK
    PULLED = 4  # a worker has reported it


@dataclass(slots=True)
class InFlightRequest:
    """One request that was dispatched and has not ended, as the model's leader knows it.

    `charged` are the virtual tokens (prompt + 2 * generated) that its tenant was charged for it so
    far.
    """

    envelope: Envelope
    priority: Priority
    work_priority: Priority  # its lane in WORK
    version: str
    charged: int  # virtual tokens
    seq: int = 0  # in WORK; 0 until it is published
    dispatched_at: float = 0.0  # epoch seconds
    worker: str = ANY  # on which it was placed
    holder: str = ""  # the worker that last reported having pulled it
    reply: str = ""  # the acknowledgement subject of that delivery
    reported_at: float = 0.0  # when a worker last reported it, or it was published; monotonic s
    done_fraction: float = 0.0  # of its expected service, by the worker's last report

    @property
    def stage(self) -> Stage:
        """The last stage that the request is known to have reached."""
        if self.holder:
            return Stage.PULLED
        if self.seq:
            return Stage.PUBLISHED
        return Stage.RESERVED if self.worker == ANY else Stage.PLACED

    @property
    def tenant(self) -> str:
        return self.envelope.tenant

    @property
    def prompt_tokens(self) -> int:
        return self.envelope.prompt_tokens

    @property
    def cost(self) -> int:
        """The request's reserved tokens: its prompt plus the most that it may generate."""
        return self.envelope.cost

    @property
    def deadline(self) -> int:
        """The time by which the request must be done, in epoch milliseconds."""
        return self.envelope.deadline


@dataclass(frozen=True)
class StrandedWork:
    """At most `count` requests that should be taken back from the worker they were placed on.

    `why` is the reason: `silent` (no heartbeats), `unloaded` (the worker has not loaded the model),
    `draining` (it is shutting down) or `not_pulled` (it did not pull them in time).
    """

    worker: str
    version: str
    count: int
    why: str  # silent, unloaded, draining, not_pulled


class PlacedRequests:
    """The requests in the stream WORK that were placed on one worker, grouped by that worker.

    The owner adds each request when it is published, and removes it when it has ended or was moved.
    """

    def __init__(self) -> None:
        # By worker and version, then by sequence in WORK
        self._placed: dict[tuple[str, str], dict[int, InFlightRequest]] = {}

    def add(self, flight: InFlightRequest) -> None:
        """Add a request that was published for one worker; ignored if any worker may take it."""
        if flight.worker != ANY:
            self._placed.setdefault((flight.worker, flight.version), {})[flight.seq] = flight

    def remove(self, flight: InFlightRequest) -> None:
        """Remove a request that has ended or was moved elsewhere; an unknown one is ignored."""
        address = flight.worker, flight.version
        if flights := self._placed.get(address):
            flights.pop(flight.seq, None)
            if not flights:
                del self._placed[address]

    def has_any(self, worker: str, version: str) -> bool:
        """Return True if a request lies in WORK that was placed on a worker."""
        return (worker, version) in self._placed

    def find_stranded(self, fleet: Fleet, now: float) -> list[StrandedWork]:
        """Return the requests to take back, one entry per worker and version; empty if none.

        A worker that is shutting down (draining), has not loaded the model, or sends no heartbeats
        loses all its requests; those that it had pulled are given out by the broker only after its
        ack wait. Any other worker loses only the requests that it has not pulled within
        `PULL_TIMEOUT_SECONDS` (1 s) of their dispatch. `now` is epoch seconds.
        """
        if not self._placed:
            return []
        pending, found = fleet.pending_sequences, []
        for (worker, version), flights in self._placed.items():
            reason = _absence_reason(fleet, worker, version)
            overdue = flights if reason else _find_overdue(flights, pending, now)
            if overdue:
                found.append(StrandedWork(worker, version, len(overdue), reason or "not_pulled"))
        return found


def _absence_reason(fleet: Fleet, worker: str, version: str) -> str:
    """The reason why a worker takes no work of a version; empty if it does take it."""
    beat = fleet.last_heartbeat(worker, version)
    if beat is None:
        return "silent"
    if not beat.resident:
        return "unloaded"
    return "draining" if beat.draining else ""


def _find_overdue(
    flights: Mapping[int, InFlightRequest], unpulled: set[int], now: float
) -> list[InFlightRequest]:
    """The requests that their worker has not pulled within `PULL_TIMEOUT_SECONDS`."""
    waiting = (flights[seq] for seq in flights.keys() & unpulled)
    return [flight for flight in waiting if now - flight.dispatched_at > PULL_TIMEOUT_SECONDS]
