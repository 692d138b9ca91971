"""`millstream dead`: an operator sees what died, and has it run once more or removes it."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

import dispatcher.service
import gpu_worker.service
from millstream.dead import commands, replays
from millstream.dead.commands import DeadLetterNotFound, NotConfirmed
from millstream.dead.settings import DeadChangeSettings, DeadListSettings, DeadShowSettings
from streams import messages, subjects, topology
from streams.broker.responses import StoredMessage
from streams.errors import LaneFull
from streams.headers import EXPECTED_LAST, ItemRef
from streams.messages import Request, Sampling
from streams.records import dead_letters
from streams.records.attempt_history import AttemptHistory, FaultScope, PastAttempt
from streams.records.dead_letters import EXHAUSTED, MALFORMED, DeadLetter
from streams.subjects import PoolKey, Priority
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    command_settings,
    dispatcher_settings,
    running,
    worker_settings,
)

STOP = asyncio.Event()
SECRET = "the secret of the prompt"
TRIED = AttemptHistory(
    (
        PastAttempt(1, "w1", FaultScope.SHARED, "the first error", at=1),
        PastAttempt(2, "w2", FaultScope.NONE),
        PastAttempt(3, "w3", FaultScope.OWN, "the [last] error", at=2),
    )
)


@pytest.fixture(autouse=True)
def only_the_commands_print() -> Iterator[None]:
    """The services of a test are in its process, and would log to the same output."""
    with capture_logs():
        yield


async def a_letter(
    c: BrokerClient, *, tenant: str = "acme", model: str = "mock", item: ItemRef | None = None
) -> DeadLetter:
    """As a worker leaves it."""
    sampling = Sampling(max_tokens=8, temperature=0.0, stop=[SECRET])
    prompt = messages.pack_tokens(list(SECRET.encode()))
    payload = Request("generate", prompt, sampling=sampling).pack()
    envelope = replace(c.envelope(len(SECRET), 8, tenant=tenant), item=item)
    subject = subjects.work(PoolKey(model, "1", Priority.BATCH))
    work = StoredMessage(1, subject, payload, envelope.to_headers())
    await dead_letters.store_dead_letter(c.broker, work, envelope, EXHAUSTED, TRIED)
    (letter,) = [
        e for e in await dead_letters.read_dead_letters(c.broker) if e.name == envelope.request_id
    ]
    return letter


def changing(nats_url: str, **chosen: Any) -> DeadChangeSettings:
    return DeadChangeSettings(**command_settings(nats_url), **chosen)


async def listed(capsys: pytest.CaptureFixture[str], nats_url: str, **chosen: Any) -> Any:
    """What `dead list --json` prints."""
    capsys.readouterr()
    await commands.list_letters(
        DeadListSettings(**command_settings(nats_url), as_json=True, **chosen), STOP
    )
    return json.loads(capsys.readouterr().out)


async def test_a_letter_is_listed_with_who_when_and_why(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people and for programs, of all or of one tenant, model, or time."""
    async with broker_client(nats_url) as c:
        letter, other = await a_letter(c), await a_letter(c, tenant="other", model="x.y")
        (row,) = await listed(capsys, nats_url, tenant="acme", since=60)
        assert row["request_id"] == letter.name
        assert (row["tenant"], row["model"], row["priority"]) == ("acme", "mock", "batch")
        assert (row["attempts"], row["worker"]) == (3, "w3")
        assert (row["first_error"], row["last_error"]) == ("the first error", "the [last] error")
        assert [r["request_id"] for r in await listed(capsys, nats_url, model="x.y")] == [
            other.name
        ]
        assert await listed(capsys, nats_url, since=0) == []
        await commands.list_letters(DeadListSettings(**command_settings(nats_url)), STOP)
        text = capsys.readouterr().out
        assert "attempts_exhausted" in text
        assert "the [last] error" in text


async def test_a_letter_is_shown_whole_but_for_what_its_client_wrote(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator's terminal is no place for somebody else's prompt."""
    async with broker_client(nats_url) as c:
        letter = await a_letter(c)
        await commands.show(
            DeadShowSettings(**command_settings(nats_url), request_id=letter.name), STOP
        )
        text = capsys.readouterr().out
        settings = DeadShowSettings(
            **command_settings(nats_url), request_id=letter.name, as_json=True
        )
        await commands.show(settings, STOP)
        facts = json.loads(capsys.readouterr().out)
        assert facts["payload"]["prompt_tokens"] == len(SECRET)
        assert facts["payload"]["sampling"]["stop_strings"] == 1
        assert [each["fault"] for each in facts["tries"]] == ["shared", "none", "own"]
        assert facts["headers"]["Route"] == "test"
        assert "the [last] error" in text
        assert not any(name.startswith("Nats-") for name in facts["headers"])
        assert SECRET not in text + json.dumps(facts)
        with pytest.raises(DeadLetterNotFound):
            await commands.show(
                DeadShowSettings(**command_settings(nats_url), request_id="none"), STOP
            )


async def test_a_replay_is_a_new_request_and_happens_once(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old one has ended for its client; a second command must not bill it twice."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        letter = await a_letter(c)
        for _ in range(2):
            await commands.replay(changing(nats_url, request_id=letter.name), STOP)
        said = capsys.readouterr().out.splitlines()
        first, second = (line for line in said if letter.name in line)
        new = first.split()[-1]
        assert first == f"{letter.name} is replayed as {new}"
        assert second == f"{letter.name} was already replayed as {new}"
        terminal = await eventually(lambda: c.terminal(new))
        assert (terminal["finish_reason"], len(c.tokens(new))) == ("length", 8)
        (row,) = await listed(capsys, nats_url)
        assert row["replayed_as"] == new
        await eventually(c.is_idle)
        assert await c.ledger_counts() == {new: 1}


async def test_a_replay_that_dies_again_names_the_letter_that_it_came_from(nats_url: str) -> None:
    """Two letters, one story."""
    async with broker_client(nats_url) as c:
        letter = await a_letter(c)
        became, _ = await replays.replay(c.broker, letter)
        (queued,) = await c.broker.read_subject(topology.REQUESTS, "infer.request.>")
        assert queued.subject == "infer.request.acme.mock.batch"
        envelope = dead_letters.parse_envelope(queued.headers)
        assert envelope
        assert envelope.request_id == became.request_id != letter.name
        assert envelope.deadline - envelope.accepted == 60_000
        assert envelope.accepted >= letter.ended
        work = StoredMessage(2, "infer.work.mock.1.batch.any", queued.data, queued.headers)
        await dead_letters.store_dead_letter(c.broker, work, envelope, EXHAUSTED, TRIED)
        assert [e.replay_of for e in await dead_letters.read_dead_letters(c.broker)] == [
            "",
            letter.name,
        ]


async def test_what_finds_no_place_is_not_replayed_and_can_be_later(nats_url: str) -> None:
    """A full lane is no reason to lose it."""
    async with broker_client(nats_url) as c:
        letter = await a_letter(c)
        info = await c.broker.js.stream_info(topology.REQUESTS)
        full, free = (info.config.evolve(max_msgs_per_subject=most) for most in (1, 100_000))
        await c.broker.js.update_stream(full)
        await c.broker.store("infer.request.acme.mock.batch", b"")
        with pytest.raises(LaneFull):
            await replays.replay(c.broker, letter)
        assert await replays.read_replays(c.broker) == {}
        await c.broker.js.update_stream(free)
        assert (await replays.replay(c.broker, letter))[1]


async def test_a_replay_that_was_cut_off_is_completed_soon_and_later_left_alone(
    nats_url: str,
) -> None:
    """Between the record and the lane; when the broker may have forgotten it, it is not doubled."""
    async with broker_client(nats_url) as c:
        letters = [await a_letter(c), await a_letter(c)]
        now = letters[0].ended
        for letter, at in zip(letters, (now, now - topology.LOG_SECONDS * 1000), strict=True):
            record = messages.pack({"request_id": f"new-{at}", "at": at})
            await c.broker.store(subjects.replay(letter.name), record, {EXPECTED_LAST: "0"})
        made = [await replays.replay(c.broker, letter) for letter in letters]
        assert [now for _, now in made] == [True, False]
        assert await c.message_count(topology.REQUESTS) == 1


async def test_a_line_of_a_batch_is_left_to_its_batch(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has its result, or another try: a replay would be computed and billed for nobody."""
    async with broker_client(nats_url) as c:
        letter = await a_letter(c, item=ItemRef("batch_1", 7, 3, is_last=True))
        assert await commands.replay(changing(nats_url, request_id=letter.name), STOP) == 1
        said = capsys.readouterr().err
        assert "item 7 of batch_1" in said
        assert "millstream batch retry" in said
        assert await replays.read_replays(c.broker) == {}
        assert await c.message_count(topology.REQUESTS) == 0


async def test_many_are_changed_only_when_that_is_meant(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A filter may match more than its author thought."""
    async with broker_client(nats_url) as c:
        letters = [await a_letter(c) for _ in range(3)]
        await a_letter(c, tenant="other")
        for command in (commands.replay, commands.drop):
            with pytest.raises(NotConfirmed, match="3 dead letters"):
                await command(changing(nats_url, tenant="acme"), STOP)
        await commands.drop(changing(nats_url, request_id=letters[0].name), STOP)
        await commands.drop(changing(nats_url, tenant="acme", yes=True), STOP)
        assert [row["tenant"] for row in await listed(capsys, nats_url)] == ["other"]
        with pytest.raises(DeadLetterNotFound):
            await commands.drop(changing(nats_url, tenant="acme", yes=True), STOP)


async def test_work_that_nobody_can_read_is_shown_and_dropped_but_not_replayed(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is there because of what is wrong with it."""
    async with broker_client(nats_url) as c:
        work = StoredMessage(7, "infer.work.mock.1.batch.any", b"\xc1", {"Cost": "much"})
        await dead_letters.store_dead_letter(c.broker, work, None, MALFORMED, AttemptHistory())
        (row,) = await listed(capsys, nats_url)
        name = row["request_id"]
        assert (row["tenant"], row["reason"]) == ("unknown", "malformed")
        await commands.show(DeadShowSettings(**command_settings(nats_url), request_id=name), STOP)
        assert "unreadable" in capsys.readouterr().out
        assert await commands.replay(changing(nats_url, request_id=name), STOP) == 1
        await commands.drop(changing(nats_url, request_id=name), STOP)
        assert await listed(capsys, nats_url) == []
