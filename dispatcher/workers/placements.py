"""What was placed on which worker and has not ended, and what of it waits there in vain. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from dispatcher.workers.fleet import Fleet
from streams.headers import Envelope
from streams.subjects import ANY, Priority

PULL_TIMEOUT_SECONDS = 1.0  # for a worker to pull what was placed on it


@dataclass(slots=True)
class InFlightRequest:
    """A request that was dispatched and has not ended: what it was charged, what it reserves."""

    envelope: Envelope
    priority: Priority
    work_priority: Priority  # of WORK
    version: str
    charged: int
    seq: int = 0  # in WORK; 0 while it is on its way there
    dispatched_at: float = 0.0  # epoch seconds
    worker: str = ANY  # it was placed there
    holder: str = ""  # the worker that has told last that it took it, and the delivery's reply
    reply: str = ""
    # When a worker has last told of it, or it came there: monotonic seconds
    reported_at: float = 0.0

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
    """Work that was placed on a worker and is to be taken back: at most so many messages."""

    worker: str
    version: str
    count: int
    why: str  # silent, unloaded, draining, not_pulled


class PlacedRequests:
    """Requests in flight by the worker that they were placed on; its owner adds and removes."""

    def __init__(self) -> None:
        self._placed: dict[
            tuple[str, str], dict[int, InFlightRequest]
        ] = {}  # by worker and version

    def add(self, flight: InFlightRequest) -> None:
        """It lies in WORK; what is for any worker is of no interest here."""
        if flight.worker != ANY:
            self._placed.setdefault((flight.worker, flight.version), {})[flight.seq] = flight

    def remove(self, flight: InFlightRequest) -> None:
        """Idempotent."""
        address = flight.worker, flight.version
        if flights := self._placed.get(address):
            flights.pop(flight.seq, None)
            if not flights:
                del self._placed[address]

    def find_stranded(self, fleet: Fleet, now: float) -> list[StrandedWork]:
        """All of a worker that drains, has no engine or is not there; of others what is late.

        Of the first the broker gives out what was pulled only when its ack wait has passed.
        """
        if not self._placed:
            return []
        unpulled, found = fleet.pending_sequences, []
        for (worker, version), flights in self._placed.items():
            why = _absence_reason(fleet, worker, version)
            late = flights if why else _find_overdue(flights, unpulled, now)
            if late:
                found.append(StrandedWork(worker, version, len(late), why or "not_pulled"))
        return found


def _absence_reason(fleet: Fleet, worker: str, version: str) -> str:
    """Why a worker takes no work of a version; empty if it does."""
    beat = fleet.last_heartbeat(worker, version)
    if beat is None:
        return "silent"
    if not beat.resident:
        return "unloaded"
    return "draining" if beat.draining else ""


def _find_overdue(
    flights: Mapping[int, InFlightRequest], unpulled: set[int], now: float
) -> list[InFlightRequest]:
    """What its worker has not pulled in time."""
    waiting = (flights[seq] for seq in flights.keys() & unpulled)
    return [flight for flight in waiting if now - flight.dispatched_at > PULL_TIMEOUT_SECONDS]
