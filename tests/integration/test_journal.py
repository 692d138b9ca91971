"""What a dead worker held goes to others as soon as its death is known, not an ack wait later."""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

import dispatcher.service
from dispatcher import fleet
from streams import journal
from streams.connection import Broker
from streams.journal import Journal, JournalTaken, Owner, release
from streams.pull import Delivery
from tests.eventually import eventually
from tests.integration.processes import Service, a_worker_process
from tests.integration.services import Client, a_dispatcher, client, running

PATIENT = {"beat_seconds": 0.2, "ack_wait_seconds": 60}  # nobody can wait for that
SLOW = {"ttft_ms": 5, "itl_ms": 10}
START = "You are a helpful assistant, and your name is Millicent. " * 4
OWNER = Owner("w1", 60)


@asynccontextmanager
async def cell(nats_url: str) -> AsyncIterator[Client]:
    async with client(nats_url, **SLOW) as c, running(dispatcher.service, a_dispatcher(nats_url)):
        yield c


def worker(nats_url: str, home: Path, name: str) -> AbstractContextManager[Service]:
    """A worker with a journal."""
    told = {"id": name, "journal": home / f"{name}.journal", **PATIENT}
    return a_worker_process(nats_url, home / f"{name}.log", **told)


async def begun(c: Client, prompt: str = "a prompt") -> tuple[str, str]:
    """A long request with its first tokens, and which worker made them."""
    request = await c.send(prompt, max_tokens=4000)
    await eventually(lambda: c.kinds(request)["chunk"] > 3)
    return request, str(c.records[request][0]["worker"])


async def goes_on(c: Client, request: str) -> None:
    """Wait until another attempt has added tokens, behind those that there were; then end it."""
    index = len(c.tokens(request))
    await eventually(lambda: c.attempts(request) == [1, 2] and len(c.tokens(request)) > index + 3)
    await ended(c, request)
    chunks = [record for record in c.records[request] if record["type"] == "chunk"]
    assert all(a["index"] + a["count"] == b["index"] for a, b in pairwise(chunks))


async def ended(c: Client, request: str) -> None:
    await c.cancel(request)
    await eventually(lambda: c.terminal(request))
    await eventually(c.at_rest)


def delivery(broker: Broker, number: int) -> Delivery:
    return Delivery(broker, "work", b"", {}, number, 1, f"reply.{number}")


async def test_what_a_dead_worker_held_goes_on_at_another_at_once(
    nats_url: str, tmp_path: Path
) -> None:
    """Whoever has reaped the process says so; the claim keeps it exact."""
    async with cell(nats_url) as c:
        with worker(nats_url, tmp_path, "w1") as w1, worker(nats_url, tmp_path, "w2") as w2:
            await eventually(lambda: w1.said("model_ready") and w2.said("model_ready"))
            request, holder = await begun(c)
            {"w1": w1, "w2": w2}[holder].kill()
            assert await release(c.broker, tmp_path / f"{holder}.journal") == 1
            assert await release(c.broker, tmp_path / f"{holder}.journal") == 0
            await goes_on(c, request)
        assert set((await c.ledger()).values()) == {1}


async def test_a_worker_that_is_started_in_its_place_gives_it_back_first(
    nats_url: str, tmp_path: Path
) -> None:
    """A container that is restarted has no other supervisor."""
    async with cell(nats_url) as c:
        with worker(nats_url, tmp_path, "w1") as w1:
            request, _ = await begun(c)
            w1.kill()
        with worker(nats_url, tmp_path, "w1"):
            await goes_on(c, request)


async def test_a_living_worker_keeps_what_it_holds(nats_url: str, tmp_path: Path) -> None:
    """The kernel knows whether it lives; whoever asks need not."""
    async with cell(nats_url) as c:
        with worker(nats_url, tmp_path, "w1"):
            request, _ = await begun(c)
            assert await release(c.broker, tmp_path / "w1.journal") == 0
            await ended(c, request)
            assert c.attempts(request) == [1]


async def test_what_was_placed_on_a_dead_worker_alone_goes_on_at_another(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher is told too: nobody else pulls from that lane, and silence takes its time."""
    monkeypatch.setattr(fleet, "STALE_SECONDS", 60)
    async with cell(nats_url) as c:
        with worker(nats_url, tmp_path, "w1") as w1, worker(nats_url, tmp_path, "w2") as w2:
            await eventually(lambda: w1.said("model_ready") and w2.said("model_ready"))
            first = await c.send(START)
            await eventually(lambda: c.terminal(first))
            holder = str(c.records[first][0]["worker"])
            await eventually(lambda: knows(c, holder))
            request, again = await begun(c, START)
            assert again == holder
            {"w1": w1, "w2": w2}[holder].kill()
            assert await release(c.broker, tmp_path / f"{holder}.journal") == 1
            await goes_on(c, request)


async def knows(c: Client, worker: str) -> bool:
    """Whether the dispatcher has heard that a worker holds something in its cache."""
    report = await c.report()
    return any(w["worker"] == worker and w["marks"] for w in report["workers"]) if report else False


async def test_what_others_have_by_now_is_left_to_them(nats_url: str, tmp_path: Path) -> None:
    """After the ack wait it would be taken from who goes on with it."""
    async with client(nats_url) as c:
        path = tmp_path / "journal"
        kept = Journal(path, OWNER)
        kept.hold(delivery(c.broker, 1))
        kept.close()
        os.utime(path, (0, 0))
        assert await release(c.broker, path) == 0


async def test_what_was_settled_is_not_given_back(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the file was written anew, so that it does not grow for ever."""
    monkeypatch.setattr(journal, "_MOST_LINES", 10)
    path = tmp_path / "journal"
    async with client(nats_url) as c:
        kept = Journal(path, OWNER)
        for number in range(100):
            kept.hold(delivery(c.broker, number))
            if number % 10:
                kept.let_go(delivery(c.broker, number))
        kept.close()
        assert len(path.read_text().splitlines()) < 30
        assert await release(c.broker, path) == 10


def test_two_workers_cannot_share_one(tmp_path: Path) -> None:
    """The death of one would take from the other what it holds."""
    kept = Journal(tmp_path / "journal", OWNER)
    with pytest.raises(JournalTaken, match="journal"):
        Journal(tmp_path / "journal", OWNER)
    kept.close()
