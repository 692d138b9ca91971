"""A history put in order: each request's events together, what was stored beside them. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from streams.topology import LOG_SECONDS
from tests.chaos.history import (
    Accepted,
    AccessProbed,
    AccessViolated,
    BatchEnded,
    BatchSubmitted,
    BatchTries,
    Cancelled,
    Chunk,
    Disconnected,
    Ended,
    Event,
    FaultInjected,
    FootprintChange,
    LedgerEntry,
    QueueDepth,
    Refused,
    RunStarted,
    Started,
    Stored,
    StoredLog,
    Submitted,
    UnexpectedFrame,
    UnknownOnResume,
)

E = TypeVar("E", bound=Event)
READ_SECONDS = 120.0  # from the last end until all that is stored has been read


@dataclass
class ObservedRequest:
    """One request as its client saw it."""

    submitted: Submitted
    accepted: list[Accepted] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    cancelled: list[Cancelled] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """Empty until it was accepted."""
        return self.accepted[0].request_id if self.accepted else ""

    @property
    def outcome(self) -> str:
        """Empty until it has ended."""
        return self.ended[0].outcome if self.ended else ""

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def is_right(self) -> bool:
        """All of the undisturbed output, or as much as its client waited for."""
        words = self.submitted.words
        if self.outcome == "cancelled":
            return bool(self.cancelled) and self.text == "".join(words[: self.tokens])
        return self.outcome == "length" and self.text == "".join(words)


class IndexedHistory:
    """All of one run."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = list(events)
        self.began = self.all(RunStarted)[0]
        self.requests = {each.request: ObservedRequest(each) for each in self.all(Submitted)}
        self._assign_events()
        self.logs = {log.request_id: log for log in self.all(StoredLog)}
        self.complete_logs = _whole(self.logs) if self.began.forgets else self.logs
        self.bills: dict[str, list[LedgerEntry]] = defaultdict(list)
        for bill in self.all(LedgerEntry):
            self.bills[bill.request_id].append(bill)
        self.acknowledged = {stored.request for stored in self.all(Stored)}
        self.batches = self.all(BatchSubmitted)
        self.batch_ends = {each.batch: each for each in self.all(BatchEnded)}
        self.tries = {each.batch: each.request_ids for each in self.all(BatchTries)}
        self.probes, self.queue_depths = self.all(AccessProbed), self.all(QueueDepth)
        self.footprints, self.injections = self.all(FootprintChange), self.all(FaultInjected)
        self.unknown, self.unexpected = self.all(UnknownOnResume), self.all(UnexpectedFrame)
        self.violations = self.all(AccessViolated)
        self.dropped, self.readers = self.all(Disconnected), _readers(self.injections)
        read_at = max((end.at for end in self.all(Ended)), default=0.0) + READ_SECONDS
        self._kept_since = read_at - LOG_SECONDS

    def _assign_events(self) -> None:
        """Give each stream its events."""
        for event in self._events:
            match event:
                case Accepted():
                    self.requests[event.request].accepted.append(event)
                case Refused():
                    self.requests[event.request].refused.append(event)
                case Started():
                    self.requests[event.request].started.append(event)
                case Chunk():
                    self.requests[event.request].chunks.append(event)
                case Cancelled():
                    self.requests[event.request].cancelled.append(event)
                case Ended():
                    self.requests[event.request].ended.append(event)

    def all(self, kind: type[E]) -> list[E]:
        """Every event of one kind, in the order of the history."""
        return [event for event in self._events if isinstance(event, kind)]

    @property
    def accepted(self) -> list[ObservedRequest]:
        """The requests to which something was promised."""
        return [stream for stream in self.requests.values() if stream.accepted]

    @property
    def produced(self) -> list[ObservedRequest]:
        """The requests that producers have published to NATS."""
        return [stream for stream in self.requests.values() if stream.submitted.route]

    @property
    def wiped(self) -> list[ObservedRequest]:
        """The requests that a wiped broker may have held, and nobody else."""
        ends = [each.at for each in self.injections if each.action == "wipe" and each.undone]
        return [e for e in self.accepted if e.submitted.at <= max(ends, default=-1.0)]

    def logs_on(self, route: str) -> list[StoredLog]:
        """The token logs whose replies went to a route."""
        return [log for log in self.logs.values() if log.route == route]

    @property
    def kept(self) -> list[ObservedRequest]:
        """Those of which the brokers still had the whole log: they drop it with its age."""
        return [each for each in self.recent if each.accepted]

    @property
    def recent(self) -> list[ObservedRequest]:
        """Those that began so late that the brokers had not dropped their logs."""
        return [e for e in self.requests.values() if e.submitted.at >= self._kept_since]


def _whole(logs: dict[str, StoredLog]) -> dict[str, StoredLog]:
    """Without those whose beginning the brokers have lost."""
    return {name: log for name, log in logs.items() if log.chunks and not log.chunks[0][0]}


def _readers(strikes: list[FaultInjected]) -> dict[str, float]:
    """The clients that were told how to read; how many seconds each of them read nothing."""
    told = [strike for strike in strikes if strike.action in ("deafen", "dawdle")]
    seconds = dict.fromkeys((strike.target for strike in told), 0.0)
    for strike in told:
        if strike.action == "deafen":
            seconds[strike.target] += strike.at if strike.undone else -strike.at
    return seconds
