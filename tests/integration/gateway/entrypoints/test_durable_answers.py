"""Durable answers: stored once by whoever ends a request, read with nothing but a NATS client."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client

import dispatcher.service
import gpu_worker.service
from dispatcher import model_dispatcher
from gateway.admission import answer_space
from gpu_worker.attempt.attempt import Attempt
from gpu_worker.attempt.finished_logs import FinishedLogs
from millstream.dead import replays
from millstream.tenants.examples import durable
from streams import messages, subjects, topology
from streams.broker.broker_client import Broker
from streams.broker.pull_loop import Delivery
from streams.errors import BrokerUnavailable
from streams.records import part_messages
from streams.records.dead_letters import read_dead_letters
from streams.records.token_log import TokenLog
from tests.integration.dispatcher.test_dead_letters import a_bad_worker
from tests.integration.gateway.entrypoints.test_nats_ingress import Producer, is_empty, producer
from tests.support.accounts_server import AccountsServer, connect, producer_client
from tests.support.eventually import eventually
from tests.support.gateways import cell, gateways, register, tenants
from tests.support.services import dispatcher_settings, running, worker_settings

STREAM, API = "ANSWERS_acme", "ANSWERS.API"
JSON = "application/json"
VECTORS = "infer.submit.acme.vectors.standard"


async def read(client: Client, key: str) -> dict[str, Any] | None:
    """The answer under a producer's id, as nats-py reads it, with the tenant's rights."""
    try:
        found = await client.jetstream(prefix=API).get_msg(
            STREAM, subject=f"infer.answer.acme.{key}", direct=True
        )
    except nats.js.errors.NotFoundError:
        return None
    assert found.data is not None
    return messages.unpack_record(found.data)


async def read_back(nats_url: str, key: str) -> dict[str, Any]:
    async with producer_client(nats_url) as client:
        answer = await read(client, key)
    assert answer
    return answer


def text_of(records: list[dict[str, Any]]) -> str:
    return "".join(record.get("text", "") for record in records)


async def test_an_answer_is_there_when_all_processes_and_the_broker_are_not(
    tmp_path: Path,
) -> None:
    """The producer was away; hours later it reads what it has computed, from the broker alone."""
    server = AccountsServer(tmp_path)
    try:
        async with cell(server.url) as _, producer(server.url) as p:
            await p.submit({"prompt": "hi", "max_tokens": 5}, "a", Answer="durable")
            await eventually(p.ended)
            (records,) = p.replies.values()
        server.kill()
        server.start()
        answer = await read_back(server.url, "a")
    finally:
        server.kill()
    done = records[-1]
    assert {name: answer[name] for name in done} == done
    assert (answer["text"], answer["id"]) == (text_of(records), "a")
    assert answer["request_id"] == records[0]["request_id"]


async def test_replies_and_answers_come_as_json(nats_url: str) -> None:
    """`Accept: application/json`: text, log probabilities, and vectors in base64."""
    async with cell(nats_url) as _, producer_client(nats_url) as client:
        raw: dict[str, list[dict[str, Any]]] = {}

        async def on_reply(msg: Any) -> None:
            raw.setdefault(msg.subject.split(".")[3], []).append(json.loads(msg.data))

        await client.subscribe("infer.reply.acme.*.>", cb=on_reply)
        p = Producer(client)
        body = {"prompt": "hi", "max_tokens": 3, "logprobs": 1}
        await eventually(lambda: accepts(p, body))
        await p.submit(
            {"input": ["x", "y"]}, "v", VECTORS, Accept=JSON, Answer="durable", Route="v"
        )
        await eventually(lambda: sum(r[-1]["type"] == "done" for r in raw.values()) == 2)
        chunks = [record for record in raw["t"] if record["type"] == "chunk"]
        assert all(record["logprobs"] for record in chunks)
        (result,) = [record for record in raw["v"] if record["type"] == "result"]
        assert [len(base64.b64decode(vector)) for vector in result["vectors"]] == [32, 32]
        question = f"infer.records.acme.t.{raw['t'][0]['request_id']}"
        page = await client.request(question, b"", timeout=5, headers={"Accept": JSON})
        assert [record for _, record in json.loads(page.data)["records"]] == raw["t"]
        found = await client.jetstream(prefix=API).get_msg(
            STREAM, subject="infer.answer.acme.v", direct=True
        )
        assert json.loads(found.data or b"")["vectors"] == result["vectors"]


async def accepts(p: Producer, body: dict[str, Any]) -> bool:
    """Submit as soon as there is a stream to publish to."""
    try:
        await p.submit(body, "t", Accept=JSON, Answer="durable", Route="t")
    except (nats.js.errors.NoStreamResponseError, nats.errors.TimeoutError):
        return False
    return True


async def test_errors_are_answers(nats_url: str) -> None:
    """Refused by the gateway, ended by the dispatcher: late, or cancelled in the queue."""
    await register(nats_url)
    async with (
        gateways(nats_url, tenants=tenants()),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        producer(nats_url) as p,
        producer_client(nats_url) as client,
    ):
        wish = {"Answer": "durable"}
        await p.submit({"prompt": "x", "colour": 1}, "refused", **wish)
        await p.submit({"prompt": "x", "deadline_ms": 1000}, "late", **wish)
        await p.submit({"prompt": "x"}, "cancelled", **wish)
        cancelled = await eventually(lambda: request_of(p, "cancelled"))
        await eventually(lambda: cancels(client, cancelled))
        await eventually(lambda: len(p.ended()) == 3)
        assert (await read_back(nats_url, "refused"))["code"] == "unknown_field"
        assert (await read_back(nats_url, "late"))["code"] == "deadline_exceeded"
        assert (await read_back(nats_url, "cancelled"))["finish_reason"] == "cancelled"


def request_of(p: Producer, key: str) -> str | None:
    firsts = [records[0] for records in p.replies.values()]
    return next((r["request_id"] for r in firsts if r["id"] == key and "request_id" in r), None)


async def cancels(client: Client, request_id: str) -> bool:
    await client.jetstream().publish(f"infer.cancel.acme.{request_id}", b"")
    return await read(client, "cancelled") is not None


@pytest.mark.parametrize(
    ("headers", "message"),
    [({"Answer": "soon"}, "durable"), ({"Answer": "durable", "Nats_Msg_Id": ""}, "Nats-Msg-Id")],
)
async def test_a_wrong_wish_is_refused(
    nats_url: str, headers: dict[str, str], message: str
) -> None:
    """A word that nobody knows, or no id under which the answer could be found."""
    async with cell(nats_url) as _, producer(nats_url) as p:
        headers = {k: v for k, v in headers.items() if v}
        await p.submit({"prompt": "x"}, "" if "Nats-Msg-Id" in message else "k", **headers)
        await eventually(p.ended)
        assert p.ended()[0]["code"] == "invalid_request"
        assert message in p.ended()[0]["message"]


async def test_a_worker_that_died_behind_its_answer_computes_nothing_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the terminal and the ledger are missing, which tells of the attempt that answered."""
    appended, append = [], TokenLog.append

    async def lose_the_first(self: TokenLog, record: Any, *rest: Any) -> None:
        if record["type"] == "done":
            appended.append(record)
            if len(appended) == 1:
                raise BrokerUnavailable("this worker is cut off")
        await append(self, record, *rest)

    monkeypatch.setattr(TokenLog, "append", lose_the_first)
    added, add = [], Attempt._add_to_engine

    def count(self: Attempt, before: Any) -> None:
        added.append(self.envelope.request_id)
        add(self, before)

    monkeypatch.setattr(Attempt, "_add_to_engine", count)
    async with cell(nats_url) as _, producer(nats_url) as p:
        await p.submit({"prompt": "hi", "max_tokens": 5}, "a", Answer="durable")
        await eventually(p.ended)
        assert len(added) == 1
        assert len(appended) == 2
        assert text_of(next(iter(p.replies.values()))) == (await read_back(nats_url, "a"))["text"]
        async with connect(nats_url, "test") as broker:
            await eventually(lambda: _is_billed(broker))
            (stored,) = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
        record = messages.LedgerRecord.unpack(stored.data)
        assert record.attempts == 1
        assert record.accepted < record.first <= record.finished


async def _is_billed(broker: Broker) -> bool:
    return bool(await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS))


async def test_a_stored_answer_is_repeated_when_its_log_is_gone(nats_url: str) -> None:
    """Also on the route of the first, and never for another body."""
    async with (
        cell(nats_url) as _,
        producer(nats_url) as p,
        connect(nats_url, "test") as broker,
    ):
        wish = {"Answer": "durable"}
        body = {"prompt": "hi", "max_tokens": 5}
        await p.submit(body, "a", **wish)
        await p.submit({"input": ["x"] * 70}, "v", VECTORS, **wish)
        await eventually(lambda: len(p.ended()) == 2)
        await eventually(lambda: is_empty(nats_url))
        firsts = dict(p.replies)
        p.replies.clear()
        await forget(broker)
        await eventually(lambda: p.submit(body, "a", Route="bar", **wish))
        many = {"input": ["x"] * 70}
        await eventually(lambda: p.submit(many, "v", VECTORS, Route="new", **wish))
        other = body | {"prompt": "other"}
        await eventually(lambda: p.submit(other, "a", Route="other", **wish))
        await eventually(lambda: len(p.ended()) == 3)
        by_route = {p.routes[name]: records for name, records in p.replies.items()}
        text, vectors = firsts.values()
        assert text_of(by_route["bar"]) == text_of(text)
        assert by_route["bar"][0] == text[0]
        assert by_route["bar"][-1] == text[-1]
        rows = [row for record in by_route["new"] for row in record.get("vectors", ())]
        assert rows == [row for record in vectors for row in record.get("vectors", ())]
        assert by_route["other"][0]["code"] == "idempotency_conflict"


async def forget(broker: Broker) -> None:
    """Remove all logs and idempotency keys, as time does."""
    for stream in (topology.token_stream_name(0), f"KV_{topology.IDEMPOTENCY_BUCKET}"):
        await broker.js.purge_stream(stream)


async def test_requests_wait_while_answers_have_no_room(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted requests keep their answers; a producer that purges what it has read goes on."""
    monkeypatch.setattr(topology, "ANSWERS_BYTES", 4096)
    monkeypatch.setattr(answer_space, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(answer_space, "_RETRY_SECONDS", 0.2)
    async with cell(nats_url) as _, producer(nats_url) as p, producer_client(nats_url) as client:
        for number in range(20):
            await p.submit({"prompt": "x" * 50, "max_tokens": 20}, f"n{number}", Answer="durable")
        await eventually(lambda: held_back(nats_url))
        answered = len(p.ended())
        assert 0 < answered < 20
        while answered < 20:
            for number in range(20):
                if await read(client, f"n{number}"):
                    await purge(client, f"n{number}")
            await eventually(lambda known=answered: len(p.ended()) > known)  # type: ignore[misc]
            answered = len(p.ended())
        assert {record["type"] for record in p.ended()} == {"done"}
        assert len(p.ended()) == 20


async def purge(client: Client, key: str) -> None:
    for subject in (f"infer.answer.acme.{key}", f"infer.answer.acme.{key}.>"):  # and its parts
        await client.jetstream(prefix=API).purge_stream(STREAM, subject=subject)


async def held_back(nats_url: str) -> bool:
    async with connect(nats_url, "test") as broker:
        info = await broker.js.stream_info(topology.ingress_stream_name("acme"))
        answers = await broker.js.stream_info(STREAM)
    used = answers.state.bytes / 4096
    return used >= answer_space.FULL_RATIO and info.state.messages > 0


async def test_a_full_stream_drops_its_oldest_answers(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No producer that removes nothing holds up a worker."""
    monkeypatch.setattr(topology, "ANSWERS_BYTES", 4096)
    monkeypatch.setattr(answer_space, "FULL_RATIO", 9.0)
    async with cell(nats_url) as _, producer(nats_url) as p, producer_client(nats_url) as client:
        for number in range(20):
            await p.submit({"prompt": "x", "max_tokens": 20}, f"n{number}", Answer="durable")
        await eventually(lambda: len(p.ended()) == 20)
        kept = [number for number in range(20) if await read(client, f"n{number}")]
        assert 0 < len(kept) < 20


async def test_an_id_is_free_once_its_answer_was_purged(nats_url: str) -> None:
    """So a producer tries again after an error; nobody waits for an answer that was removed."""
    bodies = [{"prompt": "hi", "max_tokens": 5}] * 2 + [{"prompt": "ho", "max_tokens": 4}]
    async with cell(nats_url) as _, producer(nats_url) as p, producer_client(nats_url) as client:
        answers: list[dict[str, Any]] = []
        for body in bodies:
            await submit_again(p, body)
            await eventually(lambda: len(p.ended()) > len(answers))
            answers.append(await read_back(nats_url, "a"))
            await purge(client, "a")
        assert len({answer["request_id"] for answer in answers}) == 3
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [5, 5, 4]


async def submit_again(p: Producer, body: dict[str, Any], key: str = "a") -> None:
    """Submit as soon as the broker does not take it for a repetition."""
    await eventually(lambda: p.submit(body, key, Answer="durable"))


@pytest.fixture
def forgetful_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if newer logs had taken the place of those that a worker keeps."""
    monkeypatch.setattr(FinishedLogs, "add", lambda *_: None)


async def drop_logs(broker: Broker) -> None:
    """Remove all token logs, as a full stream does with its oldest ones."""
    await broker.js.purge_stream(topology.token_stream_name(0))


async def check_free(nats_url: str) -> None:
    """Submit, read and purge an answer, drop the log, and submit again."""
    body = {"prompt": "hi", "max_tokens": 5}
    async with (
        cell(nats_url) as _,
        producer(nats_url) as p,
        producer_client(nats_url) as client,
        connect(nats_url, "test") as broker,
    ):
        await p.submit(body, "a", Answer="durable")
        await eventually(p.ended)
        first = await read_back(nats_url, "a")
        await purge(client, "a")
        await drop_logs(broker)
        await submit_again(p, body)
        again = await eventually(lambda: read(client, "a"))
        assert again["request_id"] != first["request_id"]
        await eventually(lambda: p.replies[again["request_id"]][-1]["type"] == "done")
        assert p.replies[again["request_id"]][0]["type"] == "accepted"
        await eventually(lambda: is_empty(nats_url))


@pytest.mark.usefixtures("forgetful_workers")
async def test_an_id_is_free_though_the_log_of_its_request_was_dropped(nats_url: str) -> None:
    """By full token logs, within the time for which the broker knows the request's id."""
    await check_free(nats_url)


async def test_an_id_is_free_though_the_log_of_its_request_is_put_back(nats_url: str) -> None:
    """By its worker, which is asked for it: that is no later end of the request."""
    await check_free(nats_url)


@pytest.mark.usefixtures("forgetful_workers")
async def test_replies_that_were_dropped_are_an_error(nats_url: str) -> None:
    """Without a durable answer nothing is left of them; a repetition is not left waiting."""
    body = {"prompt": "hi", "max_tokens": 5}
    async with (
        cell(nats_url) as _,
        producer(nats_url) as p,
        connect(nats_url, "test") as broker,
    ):
        await p.submit(body, "a")
        await eventually(p.ended)
        await eventually(lambda: is_empty(nats_url))
        await drop_logs(broker)
        await eventually(lambda: p.submit(body, "a"))
        await eventually(lambda: len(p.ended()) == 2)
        assert (p.ended()[-1]["code"], p.ended()[-1]["id"]) == ("answer_lost", "a")
        await eventually(lambda: is_empty(nats_url))


async def test_what_was_submitted_before_the_end_is_no_new_request(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery whose acknowledgement was lost comes again when the answer was read and purged."""
    purged, acks, ack = asyncio.Event(), [], Delivery.ack

    async def lose_the_first(self: Delivery) -> None:
        is_submission = self.subject.startswith("infer.submit.")
        if is_submission:
            acks.append(self.num_delivered)
        if is_submission and len(acks) == 1:
            await purged.wait()
            await self.nak()
        else:
            await ack(self)

    monkeypatch.setattr(Delivery, "ack", lose_the_first)
    async with cell(nats_url) as _, producer(nats_url) as p, producer_client(nats_url) as client:
        await p.submit({"prompt": "hi", "max_tokens": 5}, "a", Answer="durable")
        await eventually(p.ended)
        await purge(client, "a")
        purged.set()
        await eventually(lambda: is_empty(nats_url))
        assert len(acks) > 1
        assert await read(client, "a") is None
        async with connect(nats_url, "test") as broker:
            assert len(await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)) == 1


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the broker took messages of 512 bytes of an answer."""
    monkeypatch.setattr(part_messages, "MAX_HEADER_BYTES", 2**20 - 512)


@pytest.mark.usefixtures("small_messages")
async def test_an_answer_in_parts_is_read_by_the_program_that_is_given_to_producers(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins them, and says so when one is gone."""
    monkeypatch.setattr(durable, "TENANT", "acme")
    wish = {"Answer": "durable", "Accept": JSON}
    async with cell(nats_url) as _, producer(nats_url) as p, producer_client(nats_url) as client:
        await p.submit({"prompt": "hi", "max_tokens": 300}, "a", Route="json", **wish)
        answer = await eventually(lambda: durable.read_answer(client, "a"))
        assert answer["usage"]["completion_tokens"] == 300
        await remove_first_part(client, "a")
        with pytest.raises(RuntimeError, match="gone"):
            await durable.read_answer(client, "a")


async def remove_first_part(client: Client, key: str) -> None:
    """As a full stream does with its oldest message."""
    js = client.jetstream(prefix=API)
    last = await js.get_msg(STREAM, subject=f"infer.answer.acme.{key}", direct=True)
    assert last.headers
    first = f"infer.answer.acme.{key}.{last.headers['Nonce']}-0"
    await js.purge_stream(STREAM, subject=first)


@pytest.mark.usefixtures("small_messages")
async def test_an_answer_that_has_lost_parts_is_an_error_until_it_is_purged(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its submission is told so at once, and is not tried again for ever."""
    body = {"prompt": "hi", "max_tokens": 300}
    async with (
        cell(nats_url) as _,
        producer(nats_url) as p,
        producer_client(nats_url) as client,
        connect(nats_url, "test") as broker,
    ):
        await p.submit(body, "a", Answer="durable")
        await eventually(p.ended)
        first = text_of(next(iter(p.replies.values())))
        await forget(broker)
        await submit_again(p, body)  # repeated from its parts
        await eventually(lambda: len(p.replies) == 2 and len(p.ended()) == 2)
        assert {text_of(records) for records in p.replies.values()} == {first}
        await remove_first_part(client, "a")
        monkeypatch.setattr(part_messages, "REPLICATION_SECONDS", 0.0)
        await submit_again(p, body)
        await eventually(lambda: len(p.ended()) == 3)
        assert p.ended()[-1]["code"] == "answer_lost"
        await purge(client, "a")
        await submit_again(p, body)
        await eventually(lambda: len(p.ended()) == 4)
        assert (await read_first(client, "a"))["Parts"] > "1"


async def read_first(client: Client, key: str) -> dict[str, str]:
    """The headers of the message by which an answer is found."""
    found = await client.jetstream(prefix=API).get_msg(
        STREAM, subject=f"infer.answer.acme.{key}", direct=True
    )
    return dict(found.headers or {})


async def test_the_answer_to_a_replay_takes_the_place_of_its_dead_letters(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator has mended the workers; the producer looks where it has always looked."""
    monkeypatch.setattr(model_dispatcher, "RECONCILE_SECONDS", 0.2)
    await register(nats_url)
    body = {"prompt": "hi", "max_tokens": 5}
    async with (
        gateways(nats_url, tenants=tenants()),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        producer(nats_url) as p,
        connect(nats_url, "test") as broker,
    ):
        async with a_bad_worker(nats_url):
            await p.submit(body, "a", "infer.submit.acme.mock.standard", Answer="durable")
            await eventually(p.ended)
        died = await read_back(nats_url, "a")
        assert died["code"] == "attempts_exhausted"
        (letter,) = await read_dead_letters(broker)
        replayed, _ = await replays.replay(broker, letter)
        async with running(gpu_worker.service, worker_settings(nats_url)):
            await eventually(lambda: len(p.ended()) == 2)
        answer = await read_back(nats_url, "a")
        assert (answer["type"], answer["request_id"]) == ("done", replayed.request_id)
        assert answer["text"] == text_of(p.replies[replayed.request_id])
        state = await broker.js.stream_info(STREAM)
        assert state.state.messages == 1
