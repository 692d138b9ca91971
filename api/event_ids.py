"""Ids of server-sent events: they say how far a stream has come, so that it can go on from there.

An id is `<created>-<choice>,<choice>,...-<end>`. `created` is the time in the stream's events, in
epoch seconds. A choice is `tokens.characters.events`: the output that is behind the client, and how
many events of the output that follows it has had already, since one record may become several.
`end` counts the events that follow the last choice's end. Pure.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from streams.errors import BadRequest
from streams.messages import Record

HEADER = "last-event-id"
_ID = re.compile(r"\d{1,12}-\d{1,9}\.\d{1,9}\.\d{1,9}(,\d{1,9}\.\d{1,9}\.\d{1,9})*-\d")


class ChoicePosition(NamedTuple):
    """How much of one choice a client has: whole records' output, and events of the next one."""

    tokens: int = 0
    characters: int = 0
    events: int = 0


@dataclass(frozen=True)
class StreamPosition:
    """How much of a stream a client has, by choice; `end` of the events behind all choices."""

    created: int
    choices: tuple[ChoicePosition, ...]
    end: int = 0


def parse_event_id(event_id: str, choices: int) -> StreamPosition:
    """Return the position that an id says; raises `BadRequest` if no event of this stream has it.

    `choices` is the number of choices of the stream.
    """
    if _ID.fullmatch(event_id):
        created, positions, end = event_id.split("-")
        found = tuple(ChoicePosition(*map(int, each.split("."))) for each in positions.split(","))
        if len(found) == choices:
            return StreamPosition(int(created), found, int(end))
    raise BadRequest("this is not the id of an event of this stream", "Last-Event-ID")


class EventNumbering:
    """Gives the events of a stream their ids, and leaves out those that the client has had.

    Whoever goes on with a stream encodes all of it again and passes everything through here. So
    encoders, which have a state, need not know.
    """

    def __init__(self, had: StreamPosition) -> None:
        self._had = had
        self._tokens, self._characters, self._events = (
            [0] * len(had.choices),
            [0] * len(had.choices),
            [0] * len(had.choices),
        )
        self._end = 0

    def split(self, record: Record) -> Iterator[Record]:
        """Yield the chunk `record` of a choice, in two parts if the client has had a part of it."""
        had = self._had.choices[record["choice"]]
        tokens, characters = self._position(record["choice"])
        count, size = had.tokens - tokens, had.characters - characters
        is_within = 0 <= count <= record["count"] and 0 <= size <= len(record["text"])
        is_at_edge = (count, size) in ((0, 0), (record["count"], len(record["text"])))
        if is_within and not is_at_edge:
            yield _slice(record, 0, count, 0, size)
            yield _slice(record, count, record["count"], size, len(record["text"]))
        else:
            yield record

    def output(self, choice: int, events: bytes, record: Record) -> bytes:
        """Number the events of a chunk, which bring the choice to the chunk's end."""
        blocks = _blocks(events)
        numbered = [self._number(choice, block) for block in blocks[:-1]]
        is_had = self._is_had(choice)
        self._tokens[choice] += record["count"]
        self._characters[choice] += len(record["text"])
        self._events[choice] = 0
        if blocks and not is_had:
            numbered.append(self._with_id(blocks[-1]))
        return b"".join(numbered)

    def other(self, choice: int, events: bytes) -> bytes:
        """Number events of a choice that are no output, at its begin and at its end."""
        return b"".join(self._number(choice, block) for block in _blocks(events))

    def ending(self, events: bytes) -> bytes:
        """Number the events behind all choices."""
        numbered = []
        for block in _blocks(events):
            self._end += 1
            if self._end > self._had.end:
                numbered.append(self._with_id(block))
        return b"".join(numbered)

    def _position(self, choice: int) -> tuple[int, int]:
        return self._tokens[choice], self._characters[choice]

    def _number(self, choice: int, block: bytes) -> bytes:
        is_had = self._is_had(choice)
        self._events[choice] += 1
        return b"" if is_had else self._with_id(block)

    def _is_had(self, choice: int) -> bool:
        """True if the client has had the next event of a choice."""
        had = self._had.choices[choice]
        tokens, characters = self._position(choice)
        if tokens < had.tokens or characters < had.characters:
            return True
        is_there = (tokens, characters) == (had.tokens, had.characters)
        return is_there and self._events[choice] < had.events

    def _with_id(self, block: bytes) -> bytes:
        places = zip(self._tokens, self._characters, self._events, strict=True)
        choices = ",".join([f"{tokens}.{size}.{events}" for tokens, size, events in places])
        return f"id: {self._had.created}-{choices}-{self._end}\n".encode() + block


def _blocks(events: bytes) -> list[bytes]:
    """The single events of some encoded ones; JSON has no line breaks of its own."""
    return [block + b"\n\n" for block in events.split(b"\n\n")[:-1]]


def _slice(record: Record, first: int, last: int, begin: int, end: int) -> Record:
    """A chunk's tokens from `first` and characters from `begin` on."""
    part = record | {"count": last - first, "text": record["text"][begin:end]}
    if "logprobs" in record:
        part["logprobs"] = record["logprobs"][first:last]
    return part
