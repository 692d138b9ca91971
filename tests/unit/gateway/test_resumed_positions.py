"""Wherever a stream is cut and resumed, what came before and after is the whole text, once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.entrypoints.websocket_reply import ResultFrame, WebSocketReply
from gateway.metrics import RequestMetrics
from gateway.replies.log_cursor import LogCursor
from gateway.replies.log_subscription import (
    LogSource,
    LogSubscription,
    Sink,
    StoredRecord,
    discard_record,
)
from gateway.replies.send_buffer import EncodedFrame
from gateway.replies.subscription_deadlines import SubscriptionDeadlines
from gpu_worker.attempt.output_buffer import OutputBuffer
from gpu_worker.engines.detokenizer import TextStream
from gpu_worker.engines.engine import Output
from streams import messages
from streams.records.token_log_cache import RecordsQuery, TokenLogCache

START = messages.started_record("m", "1", 1, "w")
DONE = messages.done_record("stop", messages.openai_usage(1, 0), {})
STOPS = ["ST\U0001f600P", "\n\nUser:"]
PIECES = ["a", "S", "ST", "\n", "\n\nUs", "é", "€", "\U0001f600", "ST\U0001f600", "\U0001f600ST"]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join)
CUTS = st.lists(st.integers(1, 4), min_size=60, max_size=60)


class Utf8:
    """Every byte is a token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


def outputs(text: str) -> list[Output]:
    """The outputs of an engine for a text, token by token; the last has the text held back."""
    stream = TextStream(Utf8(), [], STOPS)
    made = [Output("r", [token], stream.push(token)) for token in text.encode()]
    return [*made, Output("r", [], stream.finish(), finish="cancelled")]


def log_of(text: str, sizes: list[int]) -> list[dict[str, Any]]:
    """Its token log, so many outputs to a chunk; what was held back is behind the last token."""
    left, index, characters, log = outputs(text), 0, 0, [START]
    for size in sizes:
        buffer = OutputBuffer()
        for output in left[:size]:
            buffer.add(output)
        left = left[size:]
        for chunk in buffer.iter_chunks(index, characters):
            log.append(chunk)
            index, characters = index + chunk["count"], characters + len(chunk["text"])
    return [*log, DONE]


@dataclass
class Client:
    """A client of the WebSocket: the frames of one request, and how far it has come."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    frames: list[dict[str, Any]] = field(default_factory=list)
    after: int = -1
    text: str = ""

    def receive(self, frame: dict[str, Any] | EncodedFrame) -> bool:
        assert isinstance(frame, dict)
        self.frames.append(frame)
        if frame["type"] == "chunk":
            self.chunks.append(frame)
            self.after, self.text = frame["index"] + frame["count"] - 1, self.text + frame["text"]
        return True

    @classmethod
    def cut_after(cls, frames: list[dict[str, Any]]) -> "Client":
        client = cls()
        for frame in frames:
            client.receive(frame)
        return client


def subscribe(sink: Sink, after: int, characters: int | None) -> LogSubscription:
    cursor = LogCursor(after_index=after, after_characters=characters)
    source, deadlines = LogSource("acme", "r", "s", "f"), SubscriptionDeadlines(0.0, expires_at=9.0)
    return LogSubscription(source, sink, deadlines, cursor)


def read(log: list[dict[str, Any]], after: int, characters: int | None, writer: bool) -> Client:
    """A client that has resumed there, served by the broker or by the log's writer."""
    client = Client()
    subscription = subscribe(discard_record, after, characters)
    request = WebSocketReply("a", client.receive, ResultFrame("json"), after)
    request.accept(subscription, RequestMetrics.for_resumed("acme"), 0.0)
    subscription.sink = request.receive_record
    stored = [StoredRecord(seq, messages.pack(each)) for seq, each in enumerate(log, start=1)]
    if writer:
        cache = TokenLogCache()
        for record in stored:
            cache.add(*record, is_claim=record.seq == 1)
        page = cache.read_page(RecordsQuery("acme", "r", 1, after, 1 << 20))
        stored = [StoredRecord(*record) for record in page.records]
    subscription.consume_page(stored, 0.0)
    assert client.frames[-1]["type"] == "done"
    return client


@given(text=TEXTS, sizes=CUTS, others=CUTS, writer=st.booleans())
def test_a_client_that_says_what_it_has_gets_the_rest_exactly(
    text: str, sizes: list[int], others: list[int], writer: bool
) -> None:
    """Behind any frame, also of a log that another attempt has divided otherwise."""
    frames = read(log_of(text, sizes), -1, None, writer=False).frames
    whole = Client.cut_after(frames).text
    assert whole == "".join(output.text for output in outputs(text))
    for cut in range(len(frames)):
        before = Client.cut_after(frames[:cut])
        for log in (log_of(text, sizes), log_of(text, others)):
            rest = read(log, before.after, len(before.text), writer)
            assert before.text + rest.text == whole
            tokens = [frame["index"] + n for frame in rest.chunks for n in range(frame["count"])]
            assert tokens == list(range(before.after + 1, len(text.encode())))


@given(text=TEXTS, sizes=CUTS, writer=st.booleans())
def test_a_client_that_says_only_its_last_token_lacks_nothing(
    text: str, sizes: list[int], writer: bool
) -> None:
    """Text behind that token comes again to one that had it: a chunk of the same index, of none."""
    log = log_of(text, sizes)
    frames = read(log, -1, None, writer=False).frames
    whole = Client.cut_after(frames).text
    for cut in range(len(frames)):
        before = Client.cut_after(frames[:cut])
        rest = read(log, before.after, None, writer)
        had_text_behind = bool(before.chunks) and before.chunks[-1]["count"] == 0
        repeated = rest.chunks[0]["text"] if had_text_behind else ""
        assert before.text + rest.text.removeprefix(repeated) == whole
        assert repeated == "" or rest.chunks == before.chunks[-1:]


@given(text=TEXTS, sizes=CUTS, writer=st.booleans())
def test_from_any_token_on_the_text_is_whole(text: str, sizes: list[int], writer: bool) -> None:
    """Within a chunk, too, which then comes again whole; its index says what comes twice."""
    log = log_of(text, sizes)
    all_chunks = read(log, -1, None, writer=False).chunks
    for after in range(-1, len(text.encode())):
        held = [c for c in all_chunks if c["index"] + max(c["count"], 1) > after + 1]
        assert read(log, after, None, writer).chunks == held


@pytest.mark.parametrize("characters", [0, 100])
def test_a_number_of_characters_that_does_not_fit_is_an_error(characters: int) -> None:
    """A text with a hole, or with a piece of it twice, must not look whole."""
    log, taken = log_of("abcdef", [1] * 60), list[dict[str, Any]]()

    def sink(record: dict[str, Any], size: int) -> bool:
        taken.append(record)
        return True

    subscription = subscribe(sink, 1, characters)
    stored = [StoredRecord(seq, messages.pack(each)) for seq, each in enumerate(log, start=1)]
    subscription.consume_page(stored, 0.0)
    assert taken[-1]["code"] == "log_lost"


def test_text_before_the_first_token_counts_as_well() -> None:
    """A chunk may have text alone, and the reader a part of it."""
    texts, taken = ["hello", "abc", "def"], list[str]()

    def sink(record: dict[str, Any], size: int) -> bool:
        taken.append(record.get("text", record["type"]))
        return True

    chunks = [
        messages.pack({"type": "chunk", "index": 0, "count": 0, "text": text, "characters": before})
        for text, before in zip(texts, (0, 5, 8), strict=True)
    ]
    stored = [StoredRecord(seq, data) for seq, data in enumerate(chunks, start=1)]
    subscribe(sink, -1, 3).consume_page(stored, 0.0)
    assert taken == ["lo", "abc", "def"]
