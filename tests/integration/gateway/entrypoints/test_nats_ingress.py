"""Producers that publish to NATS themselves: one request each, an end on their route, always."""

import json
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StorageType
from structlog.testing import capture_logs

import dispatcher.service
import gpu_worker.service
from registry import kv_view
from streams import topology
from streams.base_settings import TenantSettings
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable
from streams.topology import Scale
from tests.support.accounts_server import connect, producer_client
from tests.support.eventually import eventually
from tests.support.gateways import cell, gateways, register, tenants
from tests.support.nats_server import NatsServer
from tests.support.services import dispatcher_settings, running, worker_settings

JSON = "application/json"
LANE = "infer.submit.acme.mock.batch"


class Producer:
    """Publishes on one route and collects what comes back, by request."""

    def __init__(self, client: Client) -> None:
        self._client, self._js = client, client.jetstream()
        self.replies: dict[str, list[dict[str, Any]]] = {}
        self.routes: dict[str, str] = {}

    async def open(self) -> None:
        await self._client.subscribe("infer.reply.acme.*.>", cb=self._on_reply)
        await self._client.flush()

    async def _on_reply(self, msg: Msg) -> None:
        route, request_id = msg.subject.split(".")[-2:]
        if request_id.startswith("copy-"):  # of one request there may be several
            request_id += f"-{route}"
        self.routes[request_id] = route
        self.replies.setdefault(request_id, []).append(msgpack.unpackb(msg.data))

    async def submit(self, body: Any, key: str = "", lane: str = LANE, **headers: str) -> bool:
        """Publish; False if the broker has dropped it as a repetition."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        wanted = {"Route": "bar", "Content-Type": JSON, **named}
        wanted |= {"Nats-Msg-Id": key} if key else {}
        return not (await self._js.publish(lane, data, headers=wanted)).duplicate

    def ended(self) -> list[dict[str, Any]]:
        """The terminals that have come."""
        lasts = [records[-1] for records in self.replies.values()]
        return [last for last in lasts if last["type"] in ("done", "error")]


@asynccontextmanager
async def producer(nats_url: str) -> AsyncIterator[Producer]:
    async with producer_client(nats_url) as client, connect(nats_url, "test") as broker:
        made = Producer(client)
        await made.open()
        await eventually(lambda: ingress_is_there(broker))
        yield made


async def ingress_is_there(broker: Broker) -> bool:
    names = [info.config.name for info in await broker.js.streams_info()]
    return topology.ingress_stream_name("acme") in names


async def test_a_submission_is_answered_on_its_route(nats_url: str) -> None:
    """In JSON and in msgpack, a prompt and an embedding; `accepted` names the producer's key."""
    async with cell(nats_url) as _, producer(nats_url) as p:
        await p.submit({"prompt": "hi", "max_tokens": 5}, "a")
        packed = msgpack.packb({"prompt": "hi", "max_tokens": 5})
        await p.submit(packed, "b", Content_Type="application/msgpack")
        await p.submit({"input": ["x", "y"]}, "c", "infer.submit.acme.vectors.standard")
        await eventually(lambda: len(p.ended()) == 3)
        by_key = {records[0]["id"]: records for records in p.replies.values()}
        for key in "ab":
            kinds = [record["type"] for record in by_key[key]]
            assert kinds[:2] == ["accepted", "started"]
            assert by_key[key][-1]["usage"]["completion_tokens"] == 5
        vectors = [v for record in by_key["c"] for v in record.get("vectors", ())]
        assert [len(vector) for vector in vectors] == [8 * 4] * 2


BAD: dict[str, tuple[Any, dict[str, str], str]] = {
    "no JSON": (b"{", {}, "invalid_request"),
    "a list": ([], {}, "invalid_request"),
    "unknown field": ({"prompt": "x", "colour": 1}, {}, "unknown_field"),
    "another model": ({"prompt": "x", "model": "other"}, {}, "invalid_request"),
    "another tongue": ({"prompt": "x"}, {"Content_Type": "text/plain"}, "invalid_request"),
    "another charset": (
        {"prompt": "x"},
        {"Content_Type": "application/json; charset=latin-1"},
        "invalid_request",
    ),
    "half a type": ({"prompt": "x"}, {"Content_Type": "json"}, "invalid_request"),
    "not msgpack": ({"prompt": "x"}, {"Content_Type": "application/msgpack"}, "invalid_request"),
    "unknown model": ({"prompt": "x"}, {"lane": "infer.submit.acme.no.batch"}, "model_not_found"),
    "unknown priority": (
        {"prompt": "x"},
        {"lane": "infer.submit.acme.mock.now"},
        "invalid_request",
    ),
    "broken escape": ({"prompt": "x"}, {"lane": "infer.submit.acme._ff.batch"}, "invalid_request"),
    "long prompt": ({"prompt": "x" * 9000}, {}, "context_length_exceeded"),
    "late deadline": ({"prompt": "x", "deadline_ms": 10**7}, {}, "invalid_request"),
}


async def test_what_cannot_be_accepted_ends_with_an_error(nats_url: str) -> None:
    """On its route, with the producer's key; it leaves the stream, and the next one is served."""
    async with cell(nats_url) as _, producer(nats_url) as p:
        for what, (body, options, _) in BAD.items():
            await p.submit(body, what, **options)
        await eventually(lambda: len(p.ended()) == len(BAD))
        codes = {record["id"]: record["code"] for record in p.ended()}
        assert codes == {what: code for what, (_, _, code) in BAD.items()}
        await p.submit({"prompt": "x", "max_tokens": 2}, "good")
        await eventually(lambda: p.ended()[-1]["type"] == "done")
        await eventually(lambda: is_empty(nats_url))


async def is_empty(nats_url: str) -> bool:
    async with connect(nats_url, "test") as broker:
        info = await broker.js.stream_info(topology.ingress_stream_name("acme"))
    return info.state.messages == 0


@pytest.mark.parametrize("route", ["a.b", "*", ">", "UPPER", "", "x" * 64])
async def test_a_bad_route_is_answered_on_the_default_one(nats_url: str, route: str) -> None:
    """Silence would leave the producer waiting; the next submission is served."""
    async with cell(nats_url) as _, producer(nats_url) as p:
        await p.submit({"prompt": "x"}, "bad", Route=route)
        await p.submit({"prompt": "x", "max_tokens": 2}, "good")
        await eventually(lambda: len(p.ended()) == 2)
        await eventually(lambda: is_empty(nats_url))
        by_key = {record["id"]: record for records in p.replies.values() for record in records[:1]}
        assert (by_key["bad"]["code"], by_key["good"]["type"]) == ("invalid_request", "accepted")
        assert sorted(p.routes.values()) == ["bar", "none"]


async def test_a_known_key_on_another_route_gets_the_replies_there(nats_url: str) -> None:
    """Copied as they come, also when all are there; nothing is computed twice."""
    async with cell(nats_url, mock={"itl_ms": 20}) as _, producer(nats_url) as p:
        await p.submit({"prompt": "x", "max_tokens": 40}, "k")
        await eventually(lambda: p.replies)
        again = {"prompt": "x", "max_tokens": 40}
        await eventually(lambda: p.submit(again, "k", Route="elsewhere"))
        await eventually(lambda: len(p.ended()) == 2)
        await eventually(lambda: p.submit(again, "k", Route="third"))
        await eventually(lambda: len(p.ended()) == 3)
        by_route = {p.routes[name]: records for name, records in p.replies.items()}
        assert by_route["elsewhere"] == by_route["third"] == by_route["bar"]
        assert [record["type"] for record in by_route["bar"]].count("started") == 1
        await eventually(lambda: is_empty(nats_url))


async def test_a_known_key_with_another_body_is_refused(nats_url: str) -> None:
    """It is no repetition; the request that has the key is left alone."""
    async with cell(nats_url, mock={"itl_ms": 20}) as _, producer(nats_url) as p:
        await p.submit({"prompt": "x", "max_tokens": 40}, "k")
        await eventually(lambda: p.replies)
        await eventually(lambda: p.submit({"prompt": "other", "max_tokens": 40}, "k"))
        await eventually(lambda: len(p.ended()) == 2)
        by_type = {record["type"]: record for record in p.ended()}
        assert by_type["error"]["code"] == "idempotency_conflict"
        assert by_type["done"]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json; charset=utf-8",
        "Application/JSON;charset=UTF-8",
        'application/json; v="1"',
    ],
)
async def test_parameters_of_a_content_type_change_nothing(
    nats_url: str, content_type: str
) -> None:
    """Many HTTP libraries add the charset that JSON has anyway."""
    async with cell(nats_url) as _, producer(nats_url) as p:
        await p.submit({"prompt": "x", "max_tokens": 2}, "k", Content_Type=content_type)
        await eventually(p.ended)
        assert p.ended()[0]["type"] == "done"


async def test_the_same_key_is_one_request(nats_url: str) -> None:
    """Within the broker's memory of keys, and when a submission is delivered twice."""
    async with cell(nats_url) as _, producer(nats_url) as p:
        for _ in range(3):
            await p.submit({"prompt": "x", "max_tokens": 3}, "k")
        await p.submit({"prompt": "x", "max_tokens": 3}, "l")
        await eventually(lambda: len(p.ended()) == 2)
        assert sorted(records[0]["id"] for records in p.replies.values()) == ["k", "l"]


async def test_keys_of_producers_and_of_headers_do_not_meet(nats_url: str) -> None:
    """A service that counts its messages and one that counts its calls may both begin at 1."""
    async with cell(nats_url) as (gateway,), producer(nats_url) as p:
        answer = await gateway.complete("one", headers={"Idempotency-Key": "1"})
        assert answer.status == 200
        await p.submit({"prompt": "another", "max_tokens": 2}, "1")
        await eventually(p.ended)
        assert p.ended()[0]["type"] == "done"


async def test_a_full_lane_holds_submissions_back(nats_url: str) -> None:
    """They wait where waiting is durable, and are accepted when there is room again."""
    await register(nats_url)
    async with gateways(nats_url, tenants=tenants(max_queued=2)), producer(nats_url) as p:
        for i in range(6):
            await p.submit({"prompt": "x", "max_tokens": 2}, str(i))
        await eventually(lambda: waiting(nats_url, 4))
        async with (
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, worker_settings(nats_url)),
        ):
            await eventually(lambda: len(p.ended()) == 6)
        assert {record["type"] for record in p.ended()} == {"done"}


async def waiting(nats_url: str, count: int) -> bool:
    async with connect(nats_url, "test") as broker:
        info = await broker.js.stream_info(topology.ingress_stream_name("acme"))
    return info.state.messages == count


async def test_only_tenants_that_publish_have_a_stream(nats_url: str) -> None:
    """Ten thousand tenants that speak HTTP cost the broker nothing."""
    many = {f"tenant-{number}": TenantSettings() for number in range(300)}
    async with gateways(nats_url, tenants=many | tenants()), producer(nats_url):
        async with connect(nats_url, "test") as broker:
            names = [info.config.name or "" for info in await broker.js.streams_info()]
    assert [name for name in names if name.startswith("INGRESS")] == ["INGRESS_acme"]


async def test_streams_of_tenants_that_publish_no_more_are_removed(nats_url: str) -> None:
    """Earlier releases made one for each tenant; what is stored in one is nobody's to delete."""
    async with connect(nats_url, "test") as broker:
        for tenant in ("acme", "other", "gone"):
            await declaration.declare_stream(broker, topology.ingress_stream(tenant), Scale())
        await broker.store("infer.submit.gone.mock.batch", b"{}")
        settings = tenants(publishes=False) | {"late": TenantSettings(publishes=True)}
        async with gateways(nats_url, tenants=settings):
            await eventually(lambda: _has_ingresses(broker, {"INGRESS_gone", "INGRESS_late"}))
            with pytest.raises(BrokerUnavailable):
                await broker.store("infer.submit.gone.mock.batch", b"{}")
        async with gateways(nats_url, tenants=settings | {"gone": TenantSettings(publishes=True)}):
            await eventually(lambda: _accepts(broker, "infer.submit.gone.mock.batch"))


async def _has_ingresses(broker: Broker, wanted: set[str]) -> bool:
    names = {info.config.name or "" for info in await broker.js.streams_info()}
    return {name for name in names if topology.tenant_of_ingress(name)} == wanted


async def _accepts(broker: Broker, subject: str) -> bool:
    try:
        await broker.store(subject, b"{}")
    except BrokerUnavailable:
        return False
    return True


async def test_a_refused_ingress_stream_is_told_of_once(tmp_path: Path) -> None:
    """In the broker's words, by who declares it; everybody else is served."""
    topology_bytes = sum(
        config.max_bytes or 0
        for config in topology.stream_configs(Scale(), 1)
        if config.storage is StorageType.FILE
    )
    buckets = 5 * kv_view.MAX_BYTES  # registry, tenants, keys, accounts, prices
    room = topology_bytes + buckets + topology.INGRESS_BYTES // 2
    configuration = tmp_path / "nats.conf"
    store = json.dumps(str(tmp_path / "nats"))
    configuration.write_text(f"jetstream {{ store_dir: {store}, max_file_store: {room} }}")
    (tmp_path / "nats").mkdir()
    server = NatsServer(tmp_path / "nats", configuration=configuration)
    try:
        with capture_logs() as logged:
            async with cell(server.url) as (gateway,):
                assert (await gateway.complete()).status == 200
                await eventually(lambda: _refusals(logged))
                for _ in range(5):
                    assert (await gateway.complete()).status == 200
        (refused,) = [each for each in _refusals(logged) if each["stream"] != "ANSWERS_acme"]
        assert refused["stream"] == "INGRESS_acme"
        assert "insufficient storage" in refused["reason"]
    finally:
        server.kill()


def _refusals(logged: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [event for event in logged if event["event"] == "stream_unusable"]


async def test_a_wait_is_logged_once_with_its_ids(nats_url: str) -> None:
    """A submission that waits for a minute is tried sixty times."""
    await register(nats_url)
    with capture_logs() as logged:
        async with gateways(nats_url, tenants=tenants(max_queued=1)), producer(nats_url) as p:
            await p.submit({"prompt": "x", "max_tokens": 2}, "first")
            await eventually(lambda: is_empty(nats_url))
            await p.submit({"prompt": "x", "max_tokens": 2}, "second")
            await eventually(lambda: was_tried(nats_url, 3))
    waits = [event for event in logged if event["event"] == "submission_delayed"]
    assert [(event["tenant"], event["id"], event["code"]) for event in waits] == [
        ("acme", "second", "queue_full")
    ]


async def was_tried(nats_url: str, times: int) -> bool:
    async with connect(nats_url, "test") as broker:
        info = await broker.js.consumer_info(topology.ingress_stream_name("acme"), "gateways")
    return info.delivered is not None and info.delivered.consumer_seq > times
