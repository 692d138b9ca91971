"""Resume, the grace period, and what happens to requests whose clients have gone."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

import dispatcher.service
import gpu_worker.service
from streams import topology
from streams.broker.nats_client import PatchedNatsClient
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.fixed_text_engine import (
    CHARACTERS_PER_STEP,
    TextBehindEngine,
    fixed_text_gateway,
)
from tests.support.gateways import (
    OTHER_KEY,
    GatewaySocket,
    RunningGateway,
    cell,
    gateways,
    text_of,
    token_indices,
)
from tests.support.services import broker_client, dispatcher_settings, running, worker_settings

LONG: dict[str, Any] = {"max_tokens": 400, "seed": 3}
SLOW = {"ttft_ms": 1, "itl_ms": 1}
Frames = list[dict[str, Any]]


async def drop(socket: GatewaySocket) -> None:
    """Without a goodbye, as a lost network does."""
    socket.connection.transport.abort()
    await socket.connection.wait_closed()


async def begin(gateway: RunningGateway, tokens: int = 20, **options: Any) -> tuple[str, Frames]:
    """The id and the frames of a request whose socket drops after some tokens."""
    async with gateway.socket() as socket:
        await socket.generate("first", **{**LONG, **options})
        frames = await socket.receive_until("first", "accepted")
        while not token_indices(frames) or token_indices(frames)[-1] < tokens:
            frames += await socket.receive_until("first", "chunk")
        await drop(socket)
    return frames[0]["request_id"], frames


async def resume(socket: GatewaySocket, request_id: str, after: int, id: str = "again") -> Frames:
    await socket.send(type="resume", id=id, request_id=request_id, after=after)
    return await socket.receive_rest(id)


def tokens_behind(frames: Frames, after: int) -> list[int]:
    """Tokens behind `after`; it may lie in the middle of the first chunk, which is sent whole."""
    first = next(frame for frame in frames if frame["type"] == "chunk")
    assert first["index"] + first["count"] > after + 1
    return [index for index in token_indices(frames) if index > after]


async def whole(gateway: RunningGateway) -> str:
    return (await gateway.complete(max_tokens=400, seed=3)).text


async def test_a_dropped_stream_goes_on_at_any_gateway(nats_url: str) -> None:
    """The text is that of an undisturbed run, each token once, wherever it is resumed."""
    async with cell(nats_url, 2, mock=SLOW) as gateways:
        wanted = await whole(gateways[0])
        for other in gateways:
            request_id, frames = await begin(gateways[0])
            async with other.socket() as socket:
                frames += await resume(socket, request_id, token_indices(frames)[-1])
            assert frames[-1]["type"] == "done"
            assert token_indices(frames) == list(range(400))
            assert text_of(frames) == wanted
        for each in gateways:
            await eventually(lambda each=each: nothing_left(each))  # type: ignore[misc]


async def nothing_left(gateway: RunningGateway) -> bool:
    return await gateway.followed_requests() == 0


async def test_an_ended_request_can_be_resumed_too(nats_url: str) -> None:
    """It may end while the train is in the tunnel; behind any chunk, as often as one likes."""
    async with cell(nats_url) as (gateway,), gateway.socket() as socket:
        await socket.generate("a", max_tokens=30)
        frames = await socket.receive_rest("a")
        ends = [token_indices([frame])[-1] for frame in frames if frame["type"] == "chunk"]
        for after in (-1, ends[len(ends) // 2], 29):
            again = await resume(socket, frames[0]["request_id"], after)
            assert token_indices(again) == list(range(after + 1, 30))
            assert again[-1]["usage"] == frames[-1]["usage"]


async def test_a_chunk_that_holds_the_last_token_comes_again_whole(nats_url: str) -> None:
    """A text cannot be cut between two tokens; `index` tells what comes twice."""
    async with cell(nats_url) as (gateway,), gateway.socket() as socket:
        await socket.generate("a", max_tokens=30)
        frames = await socket.receive_rest("a")
        for after in range(30):
            again = await resume(socket, frames[0]["request_id"], after, id=str(after))
            held = [f for f in frames if f["type"] == "chunk" and token_indices([f])[-1] > after]
            assert [f["index"] for f in again if f["type"] == "chunk"] == [f["index"] for f in held]


async def test_text_behind_the_last_token_comes_to_whoever_lacks_it(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of that token does not say who has it; a number of characters does."""
    text = "all is well 🙂 that ends é"
    engine = TextBehindEngine
    async with (
        fixed_text_gateway(nats_url, monkeypatch, text, engine=engine) as gateway,
        gateway.socket() as socket,
    ):
        await socket.generate("a", max_tokens=30)
        frames = list[dict[str, Any]]()
        while len(text_of(frames)) + CHARACTERS_PER_STEP < len(text):
            frames += await socket.receive_until("a", "chunk")
        before = len(text_of(frames))
        engine.may_end.set()
        frames += await socket.receive_rest("a")
        *_, behind, done = frames
        assert (behind["count"], done["finish_reason"], text_of(frames)) == (0, "stop", text)
        request_id, after = frames[0]["request_id"], behind["index"] - 1
        places = [({}, before), *(({"characters": n}, n) for n in range(before, len(text) + 1))]
        for number, (had, begin) in enumerate(places):
            id = f"again-{number}"
            await socket.send(type="resume", id=id, request_id=request_id, after=after, **had)
            again = await socket.receive_rest(id)
            assert (text_of(again), again[-1]["type"]) == (text[begin:], "done")


async def test_a_request_is_cancelled_when_its_grace_period_is_over(nats_url: str) -> None:
    """Nobody came back, so nobody pays for the rest."""
    async with cell(nats_url, grace_seconds=0.2, mock=SLOW) as (gateway,):
        request_id, _ = await begin(gateway, max_tokens=8000)
        await eventually(lambda: nothing_left(gateway))
        async with gateway.socket() as socket:
            frames = await resume(socket, request_id, -1)
        assert frames[-1]["finish_reason"] == "cancelled"
        assert 20 < frames[-1]["usage"]["completion_tokens"] < 8000


async def test_who_resumes_keeps_the_request_alive(nats_url: str) -> None:
    """The grace period of the first gateway ends while another one streams: no cancel."""
    async with cell(nats_url, 2, grace_seconds=2, mock=SLOW) as (first, second):
        request_id, frames = await begin(first, max_tokens=5000)
        async with second.socket() as socket:
            frames += await resume(socket, request_id, token_indices(frames)[-1])
        assert frames[-1]["finish_reason"] == "length"
        assert token_indices(frames) == list(range(5000))


async def test_two_may_read_one_request_and_either_may_leave(nats_url: str) -> None:
    """The one that stays must not be cancelled with the one that leaves."""
    async with cell(nats_url, 2, grace_seconds=0.2, mock=SLOW) as (first, second):
        for leaver, stayer in ((first, second), (second, first)):
            async with leaver.socket() as leaving, stayer.socket() as staying:
                await leaving.generate("a", max_tokens=500)
                accepted = (await leaving.receive_until("a", "chunk"))[0]
                await staying.send(
                    type="resume", id="b", request_id=accepted["request_id"], after=-1
                )
                frames = await staying.receive_until("b", "chunk")
                await drop(leaving)
                frames += await staying.receive_rest("b")
            assert frames[-1]["finish_reason"] == "length"
            assert token_indices(frames) == list(range(500))


async def test_a_queued_request_can_be_resumed(nats_url: str) -> None:
    """It has no token log yet; that it waits in a queue is known all the same."""
    async with cell(nats_url, 2, mock={**SLOW, "sequences": 1}) as (first, second):
        async with first.socket() as socket:
            await socket.generate("runs", max_tokens=600)
            await socket.receive_until("runs", "chunk")
            async with first.socket() as dropped:
                for i in range(5):  # more than a worker takes ahead
                    await dropped.generate(str(i), max_tokens=5)
                    request_id = (await dropped.receive_until(str(i), "accepted"))[0]["request_id"]
                await drop(dropped)
            async with second.socket() as again:
                frames = await resume(again, request_id, -1)
            assert frames[-1]["finish_reason"] == "length"
            assert token_indices(frames) == list(range(5))


async def test_a_queued_request_is_not_denied_while_nobody_leads(nats_url: str) -> None:
    """Its gateway and its leader are gone: nobody knows of it, and it is safe all the same."""
    async with broker_client(nats_url, **SLOW) as c, gateways(nats_url) as (gateway,):
        request_id = await c.send(max_tokens=5)
        async with gateway.socket() as socket:
            refused = (await resume(socket, request_id, -1))[-1]
            assert refused["code"] == "broker_unavailable"
            assert refused["retry_after_ms"] > 0
            async with (
                running(dispatcher.service, dispatcher_settings(nats_url)),
                running(gpu_worker.service, worker_settings(nats_url)),
            ):
                await eventually(lambda: c.terminal(request_id))
                assert token_indices(await resume(socket, request_id, -1)) == list(range(5))
                assert (await resume(socket, 32 * "0", -1))[-1]["code"] == "request_not_found"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is read of token logs."""
    asked, offer = list[dict[str, Any]](), PatchedNatsClient.try_publish_now

    def noting(
        self: PatchedNatsClient,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None,
        reply: str,
    ) -> bool:
        if subject.startswith("$JS.API.DIRECT.GET.TOKENS"):
            asked.append(orjson.loads(payload))
        return offer(self, subject, payload, headers, reply)

    monkeypatch.setattr(PatchedNatsClient, "try_publish_now", noting)
    return asked


async def test_no_resume_makes_the_broker_search_its_stream(
    nats_url: str, asked: list[dict[str, Any]]
) -> None:
    """Read by a pattern, a log of 400 records kept everybody's tokens back for 30 ms each time."""
    async with cell(nats_url, mock={**SLOW, "sequences": 2}) as (gateway,):
        request_id, _ = await begin(gateway)
        async with gateway.socket() as socket:
            for id in ("running", "ended"):
                assert token_indices(await resume(socket, request_id, -1, id)) == list(range(400))
            unknown = await resume(socket, 32 * "0", -1)
            assert unknown[-1]["code"] == "request_not_found"
    assert len([query for query in asked if "last_by_subj" in query]) == 3
    (read,) = {query["next_by_subj"] for query in asked if "next_by_subj" in query}
    assert "*" not in read


async def test_a_running_stream_is_told_by_its_writer(
    nats_url: str, asked: list[dict[str, Any]]
) -> None:
    """Of the broker only its first record is asked, and what is behind its writer's last."""
    async with cell(nats_url, 2, mock={"ttft_ms": 1, "itl_ms": 5}) as (one, other):
        request_id, frames = await begin(one, tokens=250)
        records = sum(frame["type"] == "chunk" for frame in frames)
        async with other.socket() as socket:
            frames += await resume(socket, request_id, token_indices(frames)[-1])
    assert token_indices(frames) == list(range(400))
    first, *behind = [query for query in asked if "next_by_subj" in query]
    assert (first["seq"], "batch" in first) == (1, False)
    assert all(query["seq"] > records / 2 for query in behind)


@asynccontextmanager
async def without_its_beginning(nats_url: str) -> AsyncIterator[tuple[RunningGateway, str, Frames]]:
    """A stream that runs, and of whose log the broker has dropped the beginning."""
    async with (
        cell(nats_url, 2, mock={"ttft_ms": 1, "itl_ms": 20}) as (one, other),
        connect(nats_url, "test") as broker,
    ):
        request_id, frames = await begin(one, tokens=250)
        info = await broker.js.stream_info(topology.token_stream_name(0))
        await broker.js.update_stream(info.config, max_bytes=info.state.bytes // 2)
        yield other, request_id, frames


@pytest.mark.parametrize("after", [-1, 20, 240])
async def test_the_writer_knows_what_the_broker_has_dropped(nats_url: str, after: int) -> None:
    """The broker drops the oldest records when its memory is full, also of what still runs."""
    async with (
        without_its_beginning(nats_url) as (gateway, request_id, _),
        gateway.socket() as socket,
    ):
        frames = await resume(socket, request_id, after)
        assert tokens_behind(frames, after) == list(range(after + 1, 400))


async def test_who_has_the_beginning_needs_no_writer(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the log is enough, while it runs and when it has ended."""
    monkeypatch.setattr("gpu_worker.pool.model_server.ModelServer.read_cached_log", lambda *_: None)
    # or more is dropped meanwhile
    monkeypatch.setattr("gateway.replies.worker_replay.ANSWER_SECONDS", 0.05)
    async with (
        without_its_beginning(nats_url) as (gateway, request_id, frames),
        gateway.socket() as socket,
    ):
        frames += await resume(socket, request_id, token_indices(frames)[-1])
        assert token_indices(frames) == list(range(400))
        after = token_indices(frames[:-2])[-1]  # the last chunk but one ends there
        again = await resume(socket, request_id, after, id="ended")
        assert token_indices(again) == list(range(after + 1, 400))
        lacking = await resume(socket, request_id, -1, id="lacking")
        assert lacking[-1]["code"] == "log_lost"


async def test_a_request_is_its_tenants_own(nats_url: str) -> None:
    """Neither resumed nor cancelled nor read by another one, even if it knows the id."""
    async with cell(nats_url, mock=SLOW) as (gateway,):
        async with gateway.socket() as mine, gateway.socket(key=OTHER_KEY) as theirs:
            await mine.generate("a", max_tokens=300)
            accepted = (await mine.receive_until("a", "chunk"))[0]
            answer = await resume(theirs, accepted["request_id"], -1)
            assert answer[-1]["code"] == "request_not_found"
            await theirs.send(type="cancel", id="a")
            assert (await theirs.receive())["code"] == "request_not_found"
            assert (await mine.receive_rest("a"))[-1]["finish_reason"] == "length"


async def test_a_slow_socket_may_drop_and_resume_with_many_requests(nats_url: str) -> None:
    """All requests of a socket live on, each with its own place."""
    async with cell(nats_url, 2, mock=SLOW) as (first, second):
        async with first.socket() as socket:
            for i in range(20):
                await socket.generate(str(i), f"prompt {i}", max_tokens=100)
            frames: Frames = []
            while len(token_indices(frames)) < 200:
                frames.append(await socket.receive())
            await drop(socket)
        async with second.socket() as socket:
            for i in range(20):
                mine = [frame for frame in frames if frame["id"] == str(i)]
                request_id = mine[0]["request_id"]
                after = max(token_indices(mine), default=-1)
                mine += await resume(socket, request_id, after, str(i))
                assert token_indices(mine) == list(range(100))
