"""Idempotency keys: one request, however often and wherever it is asked for."""

import asyncio
import threading
from typing import Any

import pytest

import dispatcher.service
import gpu_worker.service
from api.submission.json_hash import sha256_of_json
from gateway.admission.idempotency import IdempotencyStore
from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, PubAck, StoredMessage, StoreRefused
from streams.errors import BrokerUnavailable
from streams.records import request_queue
from streams.topology import Scale
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import (
    OTHER_KEY,
    HttpResponse,
    RunningGateway,
    cell,
    gateways,
    register,
    tenants,
    token_indices,
)
from tests.support.services import dispatcher_settings, running, worker_settings

SLOW = {"ttft_ms": 1, "itl_ms": 2}


async def keyed(
    gateway: RunningGateway, key: str, prompt: str = "hello", **body: Any
) -> HttpResponse:
    return await gateway.complete(prompt, headers={"Idempotency-Key": key}, **body)


async def ledger(nats_url: str) -> int:
    async with connect(nats_url, "test") as broker:
        return len(await broker.read_subject(topology.LEDGER, "infer.ledger.>"))


async def begun(nats_url: str) -> bool:
    async with connect(nats_url, "test") as broker:
        return len(await broker.read_subject(topology.token_stream_name(0), "infer.token.>")) > 10


async def test_a_large_request_is_compared_beside_the_event_loop(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other clients' streams go on meanwhile. A small one is not worth the way to a thread."""
    threads = list[str]()

    def noted(value: object) -> str:
        threads.append(threading.current_thread().name.partition("_")[0])
        return sha256_of_json(value)

    monkeypatch.setattr("api.submission.submission_record.sha256_of_json", noted)
    async with cell(nats_url) as (gateway,):
        for key, prompt in (("small", "hello"), ("large", "h" * 8190)):
            answers = [await keyed(gateway, key, prompt, max_tokens=2) for _ in range(2)]
            assert len({answer.json["id"] for answer in answers}) == 1
            other = await keyed(gateway, key, prompt[:-1] + "!", max_tokens=2)
            assert other.json["error"]["code"] == "idempotency_conflict"
    assert threads == 3 * ["MainThread"] + 3 * ["offload"]


async def test_one_key_is_one_request_over_two_gateways(nats_url: str) -> None:
    """At the same time, at another gateway and after the end: the same id and text, billed once."""
    async with cell(nats_url, 2, mock=SLOW) as gateways:
        asking = [keyed(gateways[i % 2], "k", max_tokens=50) for i in range(10)]
        answers = await asyncio.gather(*asking)
        answers += [await keyed(gateway, "k", max_tokens=50) for gateway in gateways]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.json["id"] for answer in answers}) == 1
        assert len({answer.text for answer in answers}) == 1
        assert await ledger(nats_url) == 1


async def test_a_second_stream_begins_at_the_first_token(nats_url: str) -> None:
    """Whoever attaches has seen nothing yet."""
    async with cell(nats_url, 2, mock=SLOW) as (first, second):
        async with first.socket() as one, second.socket() as two:
            await one.generate("a", max_tokens=300, idempotency_key="k")
            frames = await one.receive_until("a", "chunk")
            await two.generate("b", max_tokens=300, idempotency_key="k")
            later = await two.receive_rest("b")
            frames += await one.receive_rest("a")
            assert frames[0]["request_id"] == later[0]["request_id"]
            assert token_indices(frames) == token_indices(later) == list(range(300))
        streamed = await keyed(second, "k", max_tokens=300, stream=True)
        assert streamed.headers["x-request-id"] == frames[0]["request_id"]
        assert streamed.text == "".join(f["text"] for f in later if f["type"] == "chunk")


async def test_the_same_key_with_another_request_is_a_409(nats_url: str) -> None:
    """It would get an answer to a question that it did not ask."""
    async with cell(nats_url) as (gateway,), gateway.socket() as socket:
        assert (await keyed(gateway, "k")).status == 200
        for answer in (await keyed(gateway, "k", "another"), await keyed(gateway, "k", seed=1)):
            assert (answer.status, answer.error["code"]) == (409, "idempotency_conflict")
        await socket.generate("a", "another", idempotency_key="k")
        assert (await socket.receive_rest("a"))[-1]["code"] == "idempotency_conflict"


async def test_keys_are_the_tenants_own(nats_url: str) -> None:
    """Two tenants that count from 1 are two tenants."""
    async with cell(nats_url) as (gateway,):
        mine = await keyed(gateway, "1")
        headers = {"Idempotency-Key": "1"}
        theirs = await gateway.complete("another", key=OTHER_KEY, headers=headers)
        assert (mine.status, theirs.status) == (200, 200)


async def test_a_refused_request_may_be_tried_again_with_its_key(nats_url: str) -> None:
    """The key stands for a request that was never accepted; the second try is accepted."""
    await register(nats_url)
    async with gateways(nats_url, tenants=tenants(max_queued=1)) as (gateway,):
        async with gateway.socket() as socket:
            await socket.generate("a")
            await socket.receive_until("a", "accepted")
            refused = await keyed(gateway, "k")
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            async with (
                running(dispatcher.service, dispatcher_settings(nats_url)),
                running(gpu_worker.service, worker_settings(nats_url)),
            ):
                await socket.receive_rest("a")
                assert (await keyed(gateway, "k")).status == 200


async def test_a_request_that_was_not_confirmed_can_be_asked_for_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 503 says to try again; what is then found must not have been cancelled meanwhile."""
    enter = request_queue.enqueue

    async def unheard(*args: Any) -> PubAck:
        await enter(*args)
        monkeypatch.setattr(request_queue, "enqueue", enter)
        raise BrokerUnavailable("the confirmation got lost")

    async with cell(nats_url, mock=SLOW) as (gateway,):
        monkeypatch.setattr(request_queue, "enqueue", unheard)
        refused = await keyed(gateway, "k", max_tokens=300)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        answer = await keyed(gateway, "k", max_tokens=300)
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 300
        assert await ledger(nats_url) == 1


async def test_a_repeated_submission_that_is_under_way_is_not_told_twice(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A confirmation got lost with its connection; by the second one the answer has begun."""
    enter = request_queue.enqueue

    async def repeated(*args: Any) -> PubAck:
        first = await enter(*args)
        await eventually(lambda: begun(nats_url))
        return PubAck(first.seq, duplicate=True)

    async with cell(nats_url, mock=SLOW) as (gateway,), gateway.socket() as socket:
        monkeypatch.setattr(request_queue, "enqueue", repeated)
        await socket.generate("a", max_tokens=300)
        frames = await socket.receive_rest("a")
        assert token_indices(frames) == list(range(300))
        assert [frame["type"] for frame in frames].count("started") == 1


async def test_a_key_that_is_being_bound_elsewhere_is_found(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster refuses the second one with another code while the first is on its way."""
    async with connect(nats_url, "test") as broker:
        await declaration.declare(broker, Scale(), 1)
        keys = IdempotencyStore(broker)
        await keys.claim("acme", "k", "0a", "digest")

        async def refuse(*_: object) -> PubAck:
            raise StoreRefused(10164, "wrong last sequence")

        monkeypatch.setattr(broker, "store_retrying", refuse)
        known = await keys.claim("acme", "k", "0b", "digest")
        assert (known.request_id, known.is_first) == ("0a", False)


async def test_who_is_refused_meanwhile_has_a_whole_grace_period_to_come_back(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was stored though nobody said so; brokers may be away for longer than that."""
    monkeypatch.setattr("gateway.admission.client_requests.ACCEPT_SECONDS", 0.4)
    store = Broker.store

    async def losing(self: Broker, subject: str, *words: Any, **options: Any) -> PubAck:
        stored = await store(self, subject, *words, **options)
        if subject.startswith("infer.request."):
            raise BrokerUnavailable("the confirmation got lost")
        return stored

    async def silent(*_: object) -> list[StoredMessage]:
        raise BrokerUnavailable("nobody answers")

    async with cell(nats_url, mock={"ttft_ms": 1, "itl_ms": 10}, grace_seconds=3) as (gateway,):
        with monkeypatch.context() as broken:
            broken.setattr(Broker, "store", losing)
            assert (await keyed(gateway, "k", max_tokens=400)).status == 503
            broken.setattr(Broker, "read", silent)
            for _ in range(10):  # longer than the grace period
                assert (await keyed(gateway, "k", max_tokens=400)).status == 503
        answer = await keyed(gateway, "k", max_tokens=400)
        assert answer.json["choices"][0]["finish_reason"] == "length"


async def test_a_second_try_finds_the_first_while_the_keys_have_no_leader(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers take seconds to elect one, and the others know by then what the key stands for."""
    enter, store = request_queue.enqueue, Broker.store

    async def unheard(*words: Any) -> PubAck:
        await enter(*words)
        raise BrokerUnavailable("the confirmation got lost")

    async def leaderless(self: Broker, subject: str, *words: Any, **options: Any) -> PubAck:
        if subject.startswith("$KV.idempotency."):
            raise BrokerUnavailable("nobody leads")
        return await store(self, subject, *words, **options)

    async with cell(nats_url, mock=SLOW) as (gateway,):
        with monkeypatch.context() as broken:
            broken.setattr(request_queue, "enqueue", unheard)
            assert (await keyed(gateway, "k", max_tokens=300)).status == 503
            broken.setattr(Broker, "store", leaderless)
            answer = await keyed(gateway, "k", max_tokens=300)
        assert answer.json["usage"]["completion_tokens"] == 300
        assert await ledger(nats_url) == 1
