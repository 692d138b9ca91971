"""A history put in order: each request's events together, what was stored beside them. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from streams.topology import LOG_SECONDS
from tests.chaos.history import (
    Accepted,
    Began,
    Billed,
    Cancelled,
    Chunk,
    Dropped,
    Ended,
    Event,
    Held,
    Left,
    Logged,
    Probed,
    Refused,
    Started,
    Stray,
    Struck,
    Submitted,
    Unknown,
)

E = TypeVar("E", bound=Event)
READ_SECONDS = 120.0  # from the last end until all that is stored has been read


@dataclass
class Stream:
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


class Story:
    """All of one run."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = list(events)
        self.began = self.all(Began)[0]
        self.streams = {each.request: Stream(each) for each in self.all(Submitted)}
        self._tell()
        self.logs = {log.request_id: log for log in self.all(Logged)}
        self.whole_logs = _whole(self.logs) if self.began.forgets else self.logs
        self.bills: dict[str, list[Billed]] = defaultdict(list)
        for bill in self.all(Billed):
            self.bills[bill.request_id].append(bill)
        self.probes, self.left = self.all(Probed), self.all(Left)
        self.held, self.strikes = self.all(Held), self.all(Struck)
        self.unknown, self.strays = self.all(Unknown), self.all(Stray)
        self.dropped, self.readers = self.all(Dropped), _readers(self.strikes)
        read_at = max((end.at for end in self.all(Ended)), default=0.0) + READ_SECONDS
        self._kept_since = read_at - LOG_SECONDS

    def _tell(self) -> None:
        """Give each stream its events."""
        for event in self._events:
            match event:
                case Accepted():
                    self.streams[event.request].accepted.append(event)
                case Refused():
                    self.streams[event.request].refused.append(event)
                case Started():
                    self.streams[event.request].started.append(event)
                case Chunk():
                    self.streams[event.request].chunks.append(event)
                case Cancelled():
                    self.streams[event.request].cancelled.append(event)
                case Ended():
                    self.streams[event.request].ended.append(event)

    def all(self, kind: type[E]) -> list[E]:
        """Every event of one kind, in the order of the history."""
        return [event for event in self._events if isinstance(event, kind)]

    @property
    def accepted(self) -> list[Stream]:
        """The requests to which something was promised."""
        return [stream for stream in self.streams.values() if stream.accepted]

    @property
    def kept(self) -> list[Stream]:
        """Those of which the brokers still had the whole log: they drop it with its age."""
        return [each for each in self.accepted if each.submitted.at >= self._kept_since]


def _whole(logs: dict[str, Logged]) -> dict[str, Logged]:
    """Without those whose beginning the brokers have lost."""
    return {name: log for name, log in logs.items() if log.chunks and not log.chunks[0][0]}


def _readers(strikes: list[Struck]) -> dict[str, float]:
    """The clients that were told how to read; how many seconds each of them read nothing."""
    told = [strike for strike in strikes if strike.deed in ("deafen", "dawdle")]
    seconds = dict.fromkeys((strike.whom for strike in told), 0.0)
    for strike in told:
        if strike.deed == "deafen":
            seconds[strike.whom] += strike.at if strike.undone else -strike.at
    return seconds
