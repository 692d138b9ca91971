"""Ids of server-sent events: they say how far a stream has come, so that it can go on from there.

An id is `<created>-<choice>,<choice>,...-<end>`. `created` is the time in the stream's events, in
epoch seconds. A choice is `tokens.characters.events`: the output that is behind the client, and how
many events of the output that follows it has had already, since one record may become several.
`end` counts the events that follow the last choice's end. Pure.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streams.errors import BadRequest
from streams.messages import Record

HEADER = "last-event-id"
_ID = re.compile(r"\d{1,12}-\d{1,9}\.\d{1,9}\.\d{1,9}(,\d{1,9}\.\d{1,9}\.\d{1,9})*-\d")


class ChoicePosition(NamedTuple):
    """A client's place in one choice.

    It has received the output of whole records, and `events` events of the record after them.
    """

    tokens: int = 0
    characters: int = 0
    events: int = 0


@dataclass(frozen=True)
class StreamPosition:
    """A client's place in a stream: one in each choice.

    `end` counts the events that it has received after the last of all choices.
    """

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
        self._positions = [ChoicePosition()] * len(had.choices)
        self._end = 0

    def split(self, record: Record) -> Sequence[Record]:
        """Return the chunk `record` of a choice, as two if the client has had a part of it."""
        had, now = self._had.choices[record["choice"]], self._positions[record["choice"]]
        count, size = had.tokens - now.tokens, had.characters - now.characters
        if count <= 0 and size <= 0:
            return (record,)
        whole = record["count"], len(record["text"])
        if not (0 <= count <= whole[0] and 0 <= size <= whole[1]) or (count, size) == whole:
            return (record,)
        return _slice(record, 0, count, 0, size), _slice(record, count, whole[0], size, whole[1])

    def output(self, choice: int, events: bytes, record: Record) -> bytes:
        """Number the events of a chunk, which bring the choice to the chunk's end."""
        *earlier, last = _blocks(events) or [b""]
        numbered = b"".join([self._number(choice, block) for block in earlier])
        is_had = self._is_had(choice)
        tokens, characters, _ = self._positions[choice]
        self._positions[choice] = ChoicePosition(
            tokens + record["count"], characters + len(record["text"])
        )
        return numbered if is_had or not last else numbered + self._with_id(last)

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

    def _number(self, choice: int, block: bytes) -> bytes:
        is_had = self._is_had(choice)
        tokens, characters, events = self._positions[choice]
        self._positions[choice] = ChoicePosition(tokens, characters, events + 1)
        return b"" if is_had else self._with_id(block)

    def _is_had(self, choice: int) -> bool:
        """True if the client has had the next event of a choice."""
        had, now = self._had.choices[choice], self._positions[choice]
        if now.tokens < had.tokens or now.characters < had.characters:
            return True
        is_there = (now.tokens, now.characters) == (had.tokens, had.characters)
        return is_there and now.events < had.events

    def _with_id(self, block: bytes) -> bytes:
        choices = ",".join([f"{tokens}.{size}.{n}" for tokens, size, n in self._positions])
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
