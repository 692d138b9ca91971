"""Exported requests reach a meter whatever it answers: nothing is lost, and ids tell repeats."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from millstream.ledger import commands, event_sender
from millstream.ledger.commands import DirectoryMissing
from millstream.ledger.event_sender import EventsRefused, SenderRuns, SentCursor
from millstream.ledger.lines import to_line
from millstream.ledger.segments import SegmentWriter
from millstream.ledger.settings import SendSettings
from streams import subjects
from streams.messages import LedgerRecord
from tests.support.eventually import eventually
from tests.support.services import running
from tests.support.stub_upstream import (
    Responder,
    StubUpstream,
    UpstreamCall,
    respond_status,
    running_upstream,
)

PATH = "/api/v1/events"
OK = respond_status(204)
DOWN = respond_status(500, {"error": "down"})


class Service:
    run = staticmethod(commands.send)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_sender, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(event_sender, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(event_sender, "BATCH_EVENTS", 4)


def write_segment(path: Path, first: int, count: int) -> None:
    """A segment of requests `r<sequence>`."""
    writer = SegmentWriter(path, first)
    for seq in range(first, first + count):
        record = LedgerRecord(f"r{seq}", "acme", "m", "1", "stop", 5, seq, 1, "w", 1000, 2000)
        writer.add([to_line(seq, subjects.ledger("acme", "m"), record.pack())])
    writer.close(first + count - 1)


def settings(path: Path, meter: StubUpstream, **more: Any) -> SendSettings:
    return SendSettings(directory=path, to=meter.url + PATH, **more)


async def send_once(path: Path, meter: StubUpstream, **more: Any) -> None:
    await commands.send(settings(path, meter, once=True, **more), asyncio.Event())


def ids(call: UpstreamCall) -> list[str]:
    events: Any = call.body
    return [event["id"] for event in events]


@contextmanager
def meter_of(*acts: Responder) -> Iterator[StubUpstream]:
    with running_upstream(*acts) as meter:
        yield meter


async def test_each_request_is_an_event(tmp_path: Path) -> None:
    """In batches, with the token as a bearer's; a second run has nothing to send."""
    write_segment(tmp_path, 1, 6)
    write_segment(tmp_path, 7, 3)
    token = tmp_path / "token"
    token.write_text("om-secret\n")
    with meter_of(OK) as meter:
        await send_once(tmp_path, meter, token_file=token, cell="cell-1")
        assert [ids(call) for call in meter.calls] == [
            ["r1", "r2", "r3", "r4"],
            ["r5", "r6"],
            ["r7", "r8", "r9"],
        ]
        first: Any = meter.calls[0].body
        assert {event["source"] for event in first} == {"cell-1"}
        assert meter.calls[0].headers["content-type"] == "application/cloudevents-batch+json"
        assert meter.calls[0].headers["authorization"] == "Bearer om-secret"
        assert meter.calls[0].path == PATH
        await send_once(tmp_path, meter)
        assert len(meter.calls) == 3


async def test_a_meter_that_is_down_loses_nothing(tmp_path: Path) -> None:
    """It answers 500, resets the connection, asks to come again; then it is back."""
    write_segment(tmp_path, 1, 6)
    acts = (DOWN, UpstreamCall.reset, respond_status(429), respond_status(503), OK)
    with meter_of(*acts) as meter, capture_logs() as logged:
        await send_once(tmp_path, meter)
        reasons = [each["reason"] for each in logged if each["event"] == "events_not_sent"]
        assert reasons[0].startswith("the meter answers 500 ")
        assert reasons[1] == f"no meter answers at {meter.url} (Connection reset by peer)"
        assert all(each["remedy"] for each in logged if each["event"] == "events_not_sent")
        assert [ids(call) for call in meter.calls] == 5 * [["r1", "r2", "r3", "r4"]] + [
            ["r5", "r6"]
        ]


async def test_a_meter_that_hangs_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_sender, "POST_SECONDS", 0.2)
    write_segment(tmp_path, 1, 2)

    def hang(call: UpstreamCall) -> None:
        call.server.is_ending.wait()

    with meter_of(hang, OK) as meter:
        await send_once(tmp_path, meter)
        assert [ids(call) for call in meter.calls] == [["r1", "r2"]] * 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 302])
async def test_a_refusal_stops_and_is_told(tmp_path: Path, status: int) -> None:
    """The reason and the sequences are said; once it is put right the same events are sent."""
    write_segment(tmp_path, 1, 6)
    with meter_of(OK, respond_status(status, {"error": "not so"}), OK) as meter:
        with pytest.raises(EventsRefused, match=f"sequences 5 to 6 with {status} .*not so"):
            await send_once(tmp_path, meter)
        await send_once(tmp_path, meter)
        assert [ids(call) for call in meter.calls][1:] == [["r5", "r6"]] * 2


async def test_a_sender_follows_the_segments_and_stops_while_a_meter_is_down(
    tmp_path: Path,
) -> None:
    write_segment(tmp_path, 1, 2)
    with meter_of(OK) as meter:
        async with running(Service, settings(tmp_path, meter)):
            await eventually(lambda: len(meter.calls) == 1)
            write_segment(tmp_path, 3, 2)
            await eventually(lambda: len(meter.calls) == 2)
    write_segment(tmp_path, 5, 2)
    with meter_of(DOWN) as meter:
        async with running(Service, settings(tmp_path, meter)):
            await eventually(lambda: meter.calls)


async def test_what_was_posted_before_a_kill_is_posted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meter knows the ids; nothing is skipped."""
    write_segment(tmp_path, 1, 6)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with meter_of(OK) as meter:
        with monkeypatch.context() as patched:
            patched.setattr(SentCursor, "advance", killed)
            with pytest.raises(KeyboardInterrupt):
                await send_once(tmp_path, meter)
        await send_once(tmp_path, meter)
        sent = [name for call in meter.calls for name in ids(call)]
        assert sent == ["r1", "r2", "r3", "r4"] * 2 + ["r5", "r6"]


async def test_wrong_use_is_told(tmp_path: Path) -> None:
    with meter_of(OK) as meter:
        with pytest.raises(DirectoryMissing, match="there is no directory"):
            await send_once(tmp_path / "nowhere", meter)
        url = meter.url + PATH
        with closing(SentCursor(tmp_path, url)), pytest.raises(SenderRuns):
            SentCursor(tmp_path, url)
    for url in ("ftp://meter", "http://", "https://u:secret@meter/"):
        with pytest.raises(ValidationError) as refused:
            SendSettings(directory=tmp_path, to=url)
        assert "secret" not in str(refused.value.errors(include_input=False))
