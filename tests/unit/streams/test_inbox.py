"""Who asked the broker gets the answer, or an error in time; nobody else's and none twice."""

import asyncio
import gc
from typing import Any

import pytest

from streams.broker.inbox import Inbox
from streams.broker.responses import PendingPubAck, PubAck
from streams.errors import BrokerUnavailable

STORED = b'{"stream":"S","seq":5}'


async def test_each_answer_goes_to_who_asked_for_it() -> None:
    inbox, first, second = Inbox(9), PendingPubAck(), PendingPubAck()
    inbox.expect(first, "s")
    inbox.receive(inbox.expect(second, "s").encode(), STORED, b"")
    assert second.future.result() == PubAck(5, duplicate=False)
    assert not first.future.done()


async def test_each_that_is_not_answered_in_time_fails() -> None:
    """One timer looks after all: it must come back for those that were asked later."""
    inbox, early, late = Inbox(0.02), PendingPubAck(), PendingPubAck()
    inbox.expect(early, "s")
    for answer in (early, late):
        with pytest.raises(BrokerUnavailable):
            await answer.future
        if answer is early:
            inbox.expect(late, "s")


async def test_an_answer_after_its_time_means_nothing() -> None:
    """Its asker has gone on."""
    inbox, answer = Inbox(9), PendingPubAck()
    subject = inbox.expect(answer, "s")
    inbox.discard(subject)
    inbox.receive(subject.encode(), STORED, b"")
    assert not answer.future.done()
    assert len(inbox) == 0


async def test_what_may_be_asked_again_is_until_the_answer_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker's leader dies with what it was asked, and the next one knows nothing of it."""
    monkeypatch.setattr("streams.broker.inbox.REPEAT_SECONDS", 0.01)
    inbox, answer, asked = Inbox(9), PendingPubAck(), asyncio.Queue[None]()
    answer.resend = lambda: asked.put_nowait(None)
    subject = inbox.expect(answer, "s")
    assert not answer.repeated
    await asked.get()
    await asked.get()
    inbox.receive(subject.encode(), STORED, b"")
    inbox.discard(subject)
    assert answer.repeated


async def test_a_lost_connection_fails_all_that_is_awaited() -> None:
    inbox, answers = Inbox(9), [PendingPubAck() for _ in range(3)]
    for answer in answers:
        inbox.expect(answer, "s")
    inbox.fail(BrokerUnavailable("the connection was lost"))
    failures = await asyncio.gather(*(a.future for a in answers), return_exceptions=True)
    assert [type(failure) for failure in failures] == [BrokerUnavailable] * 3


async def test_a_refusal_of_a_subject_fails_what_was_asked_there_alone() -> None:
    """The server names the subject in its message, and nats-py makes that lower case."""
    inbox, refused, other = Inbox(9), PendingPubAck(), PendingPubAck()
    inbox.expect(refused, "infer.DEAD.a")
    inbox.expect(other, "infer.dead.b")
    inbox.refuse("infer.dead.a", BrokerUnavailable)
    with pytest.raises(BrokerUnavailable, match="infer.DEAD.a"):
        await refused.future
    assert not other.future.done()


async def test_a_failure_that_nobody_waits_for_is_no_complaint() -> None:
    """Who cannot even publish gives up at about the time at which its answer is due."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said))
    inbox = Inbox(9)
    inbox.discard(failed(inbox))
    gc.collect()
    assert complaints == []


def failed(inbox: Inbox) -> str:
    subject = inbox.expect(PendingPubAck(), "s")
    inbox.fail(BrokerUnavailable("the connection was lost"))
    return subject
