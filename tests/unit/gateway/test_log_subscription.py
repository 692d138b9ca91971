"""One reader's view of a log: whatever happens to the replies, each record once and in order."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replies.log_subscription import (
    LogSource,
    LogSubscription,
    Reply,
    StoredRecord,
)
from gateway.replies.subscription_deadlines import SubscriptionDeadlines
from streams import messages
from streams.messages import Record

DONE = messages.done_record("length", messages.openai_usage(1, 0), {})
START = messages.started_record("m", "1", 1, "w")


def chunk(index: int, count: int = 1) -> dict[str, Any]:
    before, text = (
        "".join(map(word, tokens)) for tokens in (range(index), range(index, index + count))
    )
    place = {"type": "chunk", "index": index, "count": count, "characters": len(before)}
    return place | {"text": text, "tokens": [1] * count}


def word(index: int) -> str:
    """A token's text; some have none, as the first half of a character."""
    return "" if index % 5 == 3 else f"{index} "


def records(counts: list[int]) -> list[dict[str, Any]]:
    """A claim, chunks of these sizes and a terminal."""
    chunks = [chunk(sum(counts[:i]), count) for i, count in enumerate(counts)]
    return [START, *chunks, DONE]


def in_other_pieces(tokens: int, counts: list[int]) -> list[dict[str, Any]]:
    """`records` of so many tokens, as far as possible in chunks of these sizes."""
    pieces = list[int]()
    while (left := tokens - sum(pieces)) > 0:
        pieces.append(min(left, counts.pop()))
    return records(pieces)


@dataclass
class Sink:
    """Takes records; has room for `room` of them."""

    taken: list[Record] = field(default_factory=list)
    room: int = 1000

    def __call__(self, record: Record, size: int) -> bool:
        self.taken.append(record)
        self.room -= 1
        return self.room > 0


def following(sink: Sink) -> LogSubscription:
    source = LogSource("t", "r", "TOKENS_0", "f")
    return LogSubscription(source, sink, SubscriptionDeadlines(0.0, expires_at=900.0))


@dataclass
class Log:
    """What the broker holds: records under sequences with gaps, for other requests."""

    stored: list[StoredRecord]

    @classmethod
    def of(cls, contents: list[dict[str, Any]], first: int = 3, step: int = 2) -> "Log":
        packed = map(messages.pack, contents)
        return cls([StoredRecord(first + i * step, data) for i, data in enumerate(packed)])

    def reply(self, place: int) -> Reply:
        before = self.stored[place - 1].seq if place else 0
        return self.stored[place].seq, before, self.stored[place].data

    def read(self, seq: int, size: int = 5) -> list[StoredRecord]:
        return [stored for stored in self.stored if stored.seq >= seq][:size]


def catch_up(reader: LogSubscription, log: Log, *, meanwhile: list[Reply]) -> None:
    """What the relay does, with replies that come while it reads."""
    reader.begin_reading()
    for reply in meanwhile:
        reader.receive_reply(*reply)
    while reader.takes_records:
        before = reader.cursor.last_seq
        page = log.read(reader.cursor.read_from_seq)
        wanted = reader.consume_page(page, 0.0)
        if not wanted or (len(page) < 5 and reader.cursor.last_seq >= before):
            break
    reader.finish_reading()


EVENT = st.tuples(
    st.sampled_from(["reply", "catch up", "room"]), st.integers(0, 30), st.integers(0, 9)
)


@given(
    counts=st.lists(st.integers(1, 4), max_size=20),
    events=st.lists(EVENT, max_size=60),
    room=st.integers(1, 30),
)
def test_each_record_is_taken_once_and_in_order(
    counts: list[int], events: list[tuple[str, int, int]], room: int
) -> None:
    """Replies lost, repeated, in any order, between and during catch-ups, with a full sink too."""
    contents = records(counts)
    log, sink = Log.of(contents), Sink(room=room)
    reader = following(sink)
    for kind, place, more in events:
        if kind == "reply":
            reader.receive_reply(*log.reply(place % len(contents)))
        elif kind == "room":
            sink.room = more + 1
            reader.unpause()
        else:
            meanwhile = [log.reply((place + i) % len(contents)) for i in range(more)]
            catch_up(reader, log, meanwhile=meanwhile)
        assert sink.taken == contents[: len(sink.taken)]
    sink.room = 1000
    reader.unpause()
    catch_up(reader, log, meanwhile=[])
    assert sink.taken == contents
    assert reader.is_ended


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    seen=st.integers(1, 20),
    first=st.integers(1, 60),
    replies=st.lists(st.integers(0, 21), max_size=20),
)
def test_a_log_that_was_put_back_goes_on_where_it_was(
    counts: list[int], seen: int, first: int, replies: list[int]
) -> None:
    """The broker lost its memory; the copy has other sequences and the same records."""
    contents = records(counts)
    log, sink = Log.of(contents, first=30), Sink()
    reader = following(sink)
    for place in range(min(seen, len(contents) - 1)):
        reader.receive_reply(*log.reply(place))
    copy = Log.of(contents, first=first, step=1)
    reader.mark_stale()
    for place in replies:
        reader.receive_reply(*copy.reply(place % len(contents)))
    catch_up(reader, copy, meanwhile=[copy.reply(place % len(contents)) for place in replies])
    assert sink.taken == contents


def test_a_missing_record_is_noticed_at_the_next() -> None:
    """The reply names the record before it."""
    log, reader = Log.of(records([1, 1, 1])), following(Sink())
    assert reader.receive_reply(*log.reply(0))
    assert not reader.receive_reply(*log.reply(2))
    assert reader.receive_reply(*log.reply(0))  # an old one again says nothing


def test_a_log_made_anew_by_another_attempt_repeats_nothing() -> None:
    """A worker that begins again says the same tokens; the client has seen some of them."""
    sink = Sink()
    reader = following(sink)
    for place in range(3):
        reader.receive_reply(*Log.of(records([2, 3, 4]), first=50).reply(place))
    catch_up(reader, Log.of(records([1, 1, 1, 1, 1, 2, 2]), first=1), meanwhile=[])
    chunks = [(r["index"], r["count"]) for r in sink.taken if r["type"] == "chunk"]
    assert chunks == [(0, 2), (2, 3), (5, 2), (7, 2)]
    assert [r["type"] for r in sink.taken].count("started") == 1


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    others=st.lists(st.integers(1, 4), min_size=80),
    seen=st.integers(1, 20),
)
def test_another_attempt_may_say_it_in_other_pieces(
    counts: list[int], others: list[int], seen: int
) -> None:
    """How many tokens share a record is a matter of time; what the sink has had is cut off."""
    contents, sink = records(counts), Sink()
    reader = following(sink)
    for place in range(min(seen, len(contents) - 1)):
        reader.receive_reply(*Log.of(contents, first=500).reply(place))
    reader.mark_stale()
    catch_up(reader, Log.of(in_other_pieces(sum(counts), others), first=1), meanwhile=[])
    chunks = [record for record in sink.taken if record["type"] == "chunk"]
    assert [c["index"] for c in chunks] == [
        sum(len(c["tokens"]) for c in chunks[:i]) for i in range(len(chunks))
    ]
    assert "".join(c["text"] for c in chunks) == "".join(map(word, range(sum(counts))))
    assert sink.taken[-1] == DONE


def test_text_behind_the_last_token_comes_once() -> None:
    """What a stop string held back is told without a token; it is in the copy as well."""
    flush = {"type": "chunk", "index": 2, "count": 0, "text": "rest", "tokens": []}
    contents, sink = [START, chunk(0), chunk(1), flush, DONE], Sink()
    reader = following(sink)
    for place in range(4):
        reader.receive_reply(*Log.of(contents, first=50).reply(place))
    reader.mark_stale()
    catch_up(reader, Log.of(contents, first=1), meanwhile=[])
    assert sink.taken == contents


OTHER = {"type": "chunk", "index": 0, "count": 4, "text": "?", "tokens": [7] * 4}


@pytest.mark.parametrize("contents", [[START, chunk(3), DONE], [START, OTHER, DONE]])
def test_a_gap_or_another_text_ends_in_an_error(contents: list[dict[str, Any]]) -> None:
    """What does not go on where the sink is must not look as if it did."""
    sink = Sink()
    reader = following(sink)
    for place in range(3):
        reader.receive_reply(*Log.of([START, chunk(0), chunk(1)], first=50).reply(place))
    reader.mark_stale()
    catch_up(reader, Log.of(contents), meanwhile=[])
    assert sink.taken[-1]["code"] == "log_lost"
    assert reader.is_ended


def test_a_cut_head_of_a_log_is_noticed() -> None:
    """The broker drops the oldest records when its memory is full."""
    log, sink = Log.of(records([1] * 9)), Sink(room=3)
    reader = following(sink)
    for place in range(4):
        reader.receive_reply(*log.reply(place))
    sink.room = 100
    reader.unpause()
    log.stored = log.stored[6:]
    catch_up(reader, log, meanwhile=[])
    assert sink.taken[-1]["code"] == "log_lost"


@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=20),
    others=st.lists(st.integers(1, 4), min_size=80),
    cut=st.integers(1, 19),
    seen=st.integers(0, 20),
)
def test_who_has_the_beginning_needs_only_the_rest(
    counts: list[int], others: list[int], cut: int, seen: int
) -> None:
    """Even if the broker loses the log later, and another attempt says it in other pieces."""
    contents, sink = records(counts), Sink()
    rest = contents[min(cut, len(counts)) :]
    begin = rest[0]["index"]
    reader = following(sink)
    reader.cursor.after_index = begin - 1
    reader.consume_page(Log.of(rest, first=500).stored[: min(seen, len(rest) - 1)], 0.0)
    reader.mark_stale()
    catch_up(reader, Log.of(in_other_pieces(sum(counts), others), first=1), meanwhile=[])
    chunks = [record for record in sink.taken if record["type"] == "chunk"]
    whole = "".join(map(word, range(sum(counts))))
    assert whole.endswith("".join(c["text"] for c in chunks))
    assert sum(c["count"] for c in chunks) >= sum(counts) - begin
    assert sink.taken[-1] == DONE


def test_who_has_got_on_when_a_log_is_begun_anew_hears_nothing_twice() -> None:
    """Its beginning was lost with the worker that knew it: the next attempt says it all again."""
    sink = Sink()
    reader = following(sink)
    contents = [START, chunk(0, 2), chunk(2), START | {"attempt": 2}, chunk(0), chunk(1, 4), DONE]
    log = Log.of(contents)
    for place in range(len(contents)):
        reader.receive_reply(*log.reply(place))
    chunks = [(r["index"], r["count"]) for r in sink.taken if r["type"] == "chunk"]
    assert chunks == [(0, 2), (2, 1), (3, 2)]
    assert "".join(r.get("text", "") for r in sink.taken) == "".join(map(word, range(5)))


def test_who_lacks_the_beginning_is_told_that_it_is_lost() -> None:
    """What the broker has dropped in the middle of what a reader wants is an error, not a leap."""
    sink = Sink()
    reader = following(sink)
    reader.cursor.after_index = 1
    reader.consume_page(Log.of(records([1] * 9)[4:]).stored, 0.0)
    assert sink.taken[-1]["code"] == "log_lost"


def test_looks_become_rare_while_nothing_is_said() -> None:
    """A thousand queued requests must not be read a thousand times a second."""
    reader, now, looks = following(Sink()), 0.0, 0
    deadlines = reader.deadlines
    while now < 600:
        now += 0.25
        if deadlines.needs_check(now):
            deadlines.mark_checked(now)
            looks += 1
    assert looks < 15
    reader.consume_record(1, messages.pack(START))
    deadlines.last_heard_at = now
    assert deadlines.needs_check(now + 5.25)


def test_cancels_become_rare_but_do_not_stop() -> None:
    """One may get lost, and a request that never was must not be cancelled for ever in a storm."""
    reader, now, cancels = following(Sink()), 0.0, []
    reader.deadlines.cancel_at = 0.0
    while now < 60:
        if reader.needs_cancel(now):
            reader.deadlines.mark_cancel_sent(now)
            cancels.append(now)
        now += 0.25
    assert cancels[:4] == [0.0, 0.25, 0.75, 1.75]
    assert 15 < len(cancels) < 25


def test_a_cancel_that_the_broker_did_not_take_is_sent_again_soon() -> None:
    """After an outage a client must not wait for as long as if the cancels had been heard."""
    deadlines = following(Sink()).deadlines
    for now in (0.0, 0.25, 0.75, 1.75):
        deadlines.mark_cancel_sent(now)
    deadlines.mark_cancel_failed(4.0)
    assert not deadlines.needs_cancel(4.2)
    assert deadlines.needs_cancel(4.25)


def test_only_one_end_is_told() -> None:
    """A failure of ours and the terminal may both come."""
    log, sink = Log.of(records([1])), Sink()
    reader = following(sink)
    reader.fail("deadline_exceeded", "late")
    reader.fail("log_lost", "gone")
    for place in range(3):
        reader.receive_reply(*log.reply(place))
    catch_up(reader, log, meanwhile=[])
    assert [record["type"] for record in sink.taken] == ["error"]
