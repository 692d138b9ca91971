"""Event ids: a stream that is cut anywhere, and goes on, is the stream that was not cut."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import completion_events
from api.event_ids import ChoicePosition, EventNumbering, StreamPosition, parse_event_id
from api.tool_calls import HERMES, ToolParser
from streams.errors import BadRequest

CALL = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
TEXTS = (["one ", "two", " three"], ["Say: ", CALL[:9], CALL[9:], CALL, " end"])


def chunks(choice: int, texts: list[str]) -> list[dict[str, Any]]:
    return [
        {"type": "chunk", "choice": choice, "index": 2 * i, "count": 2, "text": text}
        for i, text in enumerate(texts)
    ]


def stream(had: StreamPosition, texts: tuple[list[str], ...] = TEXTS) -> list[bytes]:
    """The events of a chat with two choices, the second of which may call tools."""
    numbering = EventNumbering(had)
    plain = completion_events.ChatEvents("r", "m", had.created, 0)
    tools = completion_events.ToolCallEvents(
        ToolParser(HERMES, "r", True, {"look"}), "r", "m", had.created, 1
    )
    found = b"".join(numbering.other(i, each.opening()) for i, each in enumerate((plain, tools)))
    for choice, events in enumerate((plain, tools)):
        for record in chunks(choice, texts[choice]):
            for part in numbering.split(record):
                found += numbering.output(choice, events.text(part["text"]), part)
        found += numbering.other(choice, events.finish("stop"))
    found += numbering.ending(plain.usage({"total_tokens": 1}) + completion_events.DONE)
    return [event + b"\n\n" for event in found.split(b"\n\n")[:-1]]


BEGIN = StreamPosition(7, (ChoicePosition(), ChoicePosition()))


def event_id(event: bytes) -> str:
    return event.partition(b"\n")[0].removeprefix(b"id: ").decode()


def test_a_cut_behind_any_event_leaves_nothing_out_and_repeats_nothing() -> None:
    """Also between the events of one record: a call has two, the end of a choice may have more."""
    whole = stream(BEGIN)
    assert len(whole) > 12
    for cut in range(1, len(whole) + 1):
        had = parse_event_id(event_id(whole[cut - 1]), 2)
        assert whole[:cut] + stream(had) == whole


PIECES = ["", "a", "é", "\U0001f600", "ST", CALL[:9], CALL[9:], CALL]
RECORDS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(PIECES)), max_size=8)


@given(RECORDS)
@pytest.mark.parametrize("kind", ["completion", "chat", "tools"])
def test_text_without_tokens_and_tokens_without_text_come_once(
    kind: str, pieces: list[tuple[int, str]]
) -> None:
    """Half a character has no text; what a stop string held back has no token."""
    made = [each for each in pieces if each != (0, "")]
    begin = StreamPosition(7, (ChoicePosition(),))
    whole = choice_stream(kind, begin, made)
    ids = list(map(event_id, whole))
    assert len(set(ids)) == len(ids)
    for cut in range(1, len(whole) + 1):
        assert whole[:cut] + choice_stream(kind, parse_event_id(ids[cut - 1], 1), made) == whole


def choice_stream(kind: str, had: StreamPosition, pieces: list[tuple[int, str]]) -> list[bytes]:
    """The events of a stream of one choice, whose chunks have so many tokens and this text."""
    numbering, head = EventNumbering(had), ("r", "m", had.created)
    events: completion_events.ChoiceEvents = completion_events.ChatEvents(*head)
    if kind == "completion":
        events = completion_events.CompletionEvents(*head)
    elif kind == "tools":
        events = completion_events.ToolCallEvents(ToolParser(HERMES, "r", True, {"look"}), *head)
    found = numbering.other(0, events.opening())
    for index, (count, text) in enumerate(pieces):
        record = {"type": "chunk", "choice": 0, "index": index, "count": count, "text": text}
        for part in numbering.split(record):
            found += numbering.output(0, events.text(part["text"]), part)
    found += numbering.other(0, events.finish("stop")) + numbering.ending(completion_events.DONE)
    return [event + b"\n\n" for event in found.split(b"\n\n")[:-1]]


def test_every_event_has_an_id_of_its_own() -> None:
    ids = list(map(event_id, stream(BEGIN)))
    assert all(before != after for before, after in pairwise(ids))


def text_of(events: list[bytes]) -> str:
    data = [event.partition(b'"content":"')[2].partition(b'"')[0].decode() for event in events]
    return "".join(data)


def test_other_records_with_the_same_output_are_cut_where_the_client_is() -> None:
    """After a failure the same tokens may be stored in other pieces."""
    whole = stream(BEGIN)
    had = parse_event_id(event_id(whole[3]), 2)  # behind "one " and "two"
    assert had.choices[0] == (4, 7, 0)
    other = (["one", "  two three".replace("  ", " ", 1)], TEXTS[1])
    pieces = {"type": "chunk", "choice": 0, "index": 0, "count": 6, "text": "one two three"}
    parts = list(EventNumbering(had).split(pieces))
    assert [(part["count"], part["text"]) for part in parts] == [(4, "one two"), (2, " three")]
    assert other


@pytest.mark.parametrize("wrong", ["", "x", "7-1.2.3-0", "7-1.2.3,1.2-0", "7-1.2.3,1.2.3", "-1"])
def test_what_is_no_id_of_this_stream_is_a_bad_request(wrong: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_event_id(wrong, 2)
    assert error.value.field == "Last-Event-ID"
