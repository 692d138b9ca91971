"""Requests in flight by the worker that they were placed on, and those stranded there. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from dispatcher.workers.fleet import Fleet
from streams.headers import Envelope
from streams.subjects import ANY, Priority

PULL_TIMEOUT_SECONDS = 1.0  # in which a worker should pull what was placed on it


class Stage(IntEnum):
    """How far a request in flight has come; requeued work is published again."""

    RESERVED = 1  # its room counts as used
    PLACED = 2  # on one worker; most requests are for any, and skip this
    PUBLISHED = 3  # in WORK
    PULLED = 4  # a worker has reported it


@dataclass(slots=True)
class InFlightRequest:
    """A request that was dispatched and has not ended: its charge, its reservation, where it is."""

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
        """How far it has come, by what is known of it."""
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
        return self.envelope.cost

    @property
    def deadline(self) -> int:
        """Epoch ms."""
        return self.envelope.deadline


@dataclass(frozen=True)
class StrandedWork:
    """Work to take back from the worker that it was placed on: at most `count` messages."""

    worker: str
    version: str
    count: int
    why: str  # silent, unloaded, draining, not_pulled


class PlacedRequests:
    """Published requests in flight, by the worker that they were placed on.

    The owner adds and removes them.
    """

    def __init__(self) -> None:
        # By worker and version, then by sequence in WORK
        self._placed: dict[tuple[str, str], dict[int, InFlightRequest]] = {}

    def add(self, flight: InFlightRequest) -> None:
        """Add a published request; one for any worker is ignored."""
        if flight.worker != ANY:
            self._placed.setdefault((flight.worker, flight.version), {})[flight.seq] = flight

    def remove(self, flight: InFlightRequest) -> None:
        """Remove a request. Idempotent."""
        address = flight.worker, flight.version
        if flights := self._placed.get(address):
            flights.pop(flight.seq, None)
            if not flights:
                del self._placed[address]

    def find_stranded(self, fleet: Fleet, now: float) -> list[StrandedWork]:
        """Find the work to take back, by worker and version, with the reason. `now`: epoch seconds.

        All work is stranded that was placed on a worker which drains, has no engine loaded or is
        not there; of other workers' work, what was not pulled within `PULL_TIMEOUT_SECONDS`. From
        the first kind of worker the broker gives out what was pulled only after its ack wait has
        passed.
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
