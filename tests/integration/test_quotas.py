"""Quotas: what was promised to a tenant holds over any number of gateways, and heals."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.checks import Amounts, Scope
from gateway.quotas import Quotas
from millstream.settings import UsageSettings
from millstream.usage import TenantNotFound
from millstream.usage import run as show
from registry.models import mock_model
from registry.store import Registry
from registry.tenants import Limits, Tenant
from streams import messages, subjects, topology, usage, windows
from streams.connection import Broker, Stored, connect
from streams.errors import BrokerUnavailable
from streams.messages import LedgerRecord
from streams.settings import KeySettings, TenantSettings
from streams.token_log import write_ledger
from streams.usage import TENANT, Meter
from tests.broker import NatsServer
from tests.eventually import eventually
from tests.integration.gateways import (
    KEY,
    OTHER_KEY,
    Answer,
    Gateway,
    Socket,
    cell,
    free_port,
    gateways,
    register,
    tenants,
)
from tests.integration.processes import process
from tests.integration.test_gateway_producers import producer

DEFAULT_TOKENS = mock_model().default_max_tokens
COST = 13  # "hello" and eight tokens of the mock model
ACME = Scope("acme", TENANT, Limits())


async def hammer(found: list[Gateway], count: int, **body: Any) -> list[Answer]:
    """So many requests at once, spread over the gateways."""
    asked = (found[i % len(found)].complete(**body) for i in range(count))
    return await asyncio.gather(*asked)


def statuses(answers: list[Answer]) -> Counter[int]:
    return Counter(answer.status for answer in answers)


async def outcomes(socket: Socket, count: int) -> list[str]:
    """The types, or codes, that so many requests on a new socket are answered with."""
    for number in range(count):
        await socket.generate(str(number))
    frames = [await socket.receive() for _ in range(count)]
    return sorted(frame.get("code", frame["type"]) for frame in frames)


async def outcome_at(gateway: Gateway) -> str:
    """That of one request, which stays open."""
    async with gateway.socket() as socket:
        return (await outcomes(socket, 1))[0]


async def accepts(gateway: Gateway) -> bool:
    return await outcome_at(gateway) == "accepted"


async def lives(gateway: Gateway) -> bool:
    try:
        return (await gateway.ask("GET", "/healthz", key=None)).status == 200
    except OSError:
        return False


async def today(broker: Broker, meter: Meter = Meter.TOKENS) -> int:
    return await usage.add(broker, ACME.usage(meter, windows.day(time.time())), 0)


async def opened(broker: Broker) -> int:
    """How many of acme's requests are counted as open."""
    leases = windows.leases(time.time())
    return max([await usage.add(broker, ACME.rate(Meter.OPEN, lease), 0) for lease in leases])


async def asked(broker: Broker) -> int:
    """How many requests of acme are counted for this minute and the last one."""
    slot = windows.minute(time.time())
    counted = [ACME.rate(Meter.REQUESTS, each) for each in (slot - 1, slot)]
    return sum([await usage.add(broker, subject, 0) for subject in counted])


async def ledger(broker: Broker) -> list[LedgerRecord]:
    stored = await broker.read_subject(topology.LEDGER, "infer.ledger.acme.*")
    return [messages.known(LedgerRecord, messages.unpack(m.data)) for m in stored]


async def settled(broker: Broker, count: int) -> bool:
    """True when so many requests have ended and the day's tokens are those of the ledger."""
    records = await ledger(broker)
    used = sum(record.prompt_tokens + record.completion_tokens for record in records)
    return len(records) == count and await today(broker) == used


async def price(broker: Broker, **prices: float) -> None:
    """What a million tokens of the mock model cost; all gateways know it."""
    registry = await Registry.open(broker)
    model = registry.models["mock"].model_copy(update=prices)
    await registry.put(model)
    await registry.close()


async def counters(broker: Broker) -> list[str]:
    """All that anything is counted on."""
    day = subjects.usage_on(windows.day(time.time()))
    streams = ((topology.USAGE, day), (topology.RATES, subjects.ALL_RATES))
    return [m.subject for each in streams for m in await broker.read_subject(*each)]


async def test_two_gateways_accept_no_more_than_the_limit(nats_url: str) -> None:
    """Each alone knows half of the story; the broker's counters have all of it."""
    async with cell(nats_url, 2, tenants=tenants(requests_per_minute=5)) as found:
        answers = await hammer(found, 20)
        assert statuses(answers).keys() == {200, 429}
        assert statuses(answers)[200] <= 5
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.error["code"] == "rate_limit_exceeded"
        assert refused.error["param"] == "requests_per_minute"
        assert 1 <= int(refused.headers["retry-after"]) <= 120

        async def has_all() -> bool:
            answers.append(await found[len(answers) % 2].complete())
            return statuses(answers)[200] == 5

        await eventually(has_all)  # the rest of it is there for the asking


async def test_clients_one_after_the_other_are_never_too_many(nats_url: str) -> None:
    """A request does not count as open any more when its client has the answer."""
    limits = tenants(max_concurrent=1)
    async with cell(nats_url, 1, tenants=limits) as (gateway,):
        assert statuses([await gateway.complete() for _ in range(10)]) == {200: 10}
        assert set(statuses(await hammer([gateway], 10))) == {200, 429}


async def test_a_killed_gateway_holds_nothing_for_long(nats_url: str, tmp_path: Path) -> None:
    """Its requests are open with its lease; nobody has to notice its death."""
    await register(nats_url)
    config = tmp_path / "millstream.toml"
    config.write_text(f"[tenants.acme]\nkeys = ['{KEY}']\nmax_concurrent = 2\n")
    port = free_port()
    settings = {"port": port, "config": config}
    async with gateways(nats_url, tenants={"acme": tenants(max_concurrent=2)["acme"]}) as (living,):
        with process("gateway", nats_url, tmp_path / "log", **settings) as service:
            doomed = Gateway(port, asyncio.Event())
            await eventually(lambda: lives(doomed), 30)
            async with doomed.socket() as socket:
                assert await outcomes(socket, 3) == ["accepted", "accepted", "rate_limit_exceeded"]
                assert await outcome_at(living) == "rate_limit_exceeded"
                service.kill()
            assert await eventually(lambda: accepts(living), 30)
            assert await outcome_at(living) == "accepted"
            assert await outcome_at(living) == "rate_limit_exceeded"


async def test_what_is_open_stays_counted_from_lease_to_lease(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may run for longer than a lease, which is shorter here."""
    monkeypatch.setattr(windows, "LEASE_SECONDS", 3.0)
    await register(nats_url)
    limits = {"acme": tenants(max_concurrent=1)["acme"]}
    async with (
        gateways(nats_url, 2, tenants=limits) as (first, second),
        connect(nats_url, "test") as broker,
        first.socket() as socket,
    ):
        assert await outcomes(socket, 1) == ["accepted"]
        counted = windows.leases(time.time())[-1]
        await eventually(lambda: windows.leases(time.time())[0] > counted, 30)
        assert await opened(broker) == 1
        assert await outcome_at(second) == "rate_limit_exceeded"


async def test_the_ledger_settles_what_was_reserved(nats_url: str) -> None:
    """At rest the day's counters are the ledger's sums, in tokens and in money."""
    quotas = {"tokens_per_minute": 20_000, "tokens_per_day": 10_000, "spend_per_day": 1.0}
    async with (
        cell(nats_url, 2, mock={"ttft_ms": 1, "itl_ms": 5}, tenants=tenants(**quotas)) as found,
        connect(nats_url, "test") as broker,
    ):
        await price(broker, prompt_price=1.0, completion_price=2.0)
        async with found[0].socket() as socket:
            await socket.generate("long", max_tokens=8000)
            await socket.until("long", "chunk")
            assert await today(broker) == 8005
            refused = await found[1].complete(max_tokens=2000)
            assert refused.error["code"] == "insufficient_quota"
            assert int(refused.headers["retry-after"]) <= windows.DAY_SECONDS + 1
            await socket.send(type="cancel", id="long")
            await socket.finish("long")
        await eventually(lambda: settled(broker, 1))
        assert (await found[1].complete(max_tokens=2000, deadline_ms=300)).status == 504
        answer = await found[1].complete()
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 20_000 - 8000
        await eventually(lambda: settled(broker, 3))
        spent = [r.prompt_tokens + 2 * r.completion_tokens for r in await ledger(broker)]
        assert await today(broker, Meter.SPEND) == sum(spent) * 10**6


async def test_nobody_spends_more_than_the_cap(nats_url: str) -> None:
    """A request is refused by what it might come to; the price is the model's."""
    cost = 5 * 10 + 8 * 20  # in millionths
    limits = tenants(spend_per_day=3 * cost / 1e6)
    async with cell(nats_url, 2, tenants=limits) as found, connect(nats_url, "test") as broker:
        await price(broker, prompt_price=10.0, completion_price=20.0)
        answers = await hammer(found, 12)
        assert statuses(answers)[200] <= 3
        assert {a.error["code"] for a in answers if a.status != 200} == {"insufficient_quota"}
        answer = await found[0].complete(max_tokens=100)
        assert (answer.status, answer.error["code"]) == (400, "larger_than_quota")
        assert answer.error["param"] == "spend_per_day"


async def test_a_key_may_have_quotas_of_its_own(nats_url: str) -> None:
    """Below those of its tenant, which count for all keys together."""
    keys = (KEY, KeySettings(key=OTHER_KEY, name="ci", requests_per_minute=1))
    acme = TenantSettings.model_validate({"keys": keys, "requests_per_minute": 3})
    async with cell(nats_url, tenants={"acme": acme}) as (gateway,):
        asked = [await gateway.complete(key=OTHER_KEY) for _ in range(2)]
        assert [answer.status for answer in asked] == [200, 429]
        assert asked[0].headers["x-ratelimit-limit-requests"] == "1"
        asked = [await gateway.complete() for _ in range(3)]
        assert [answer.status for answer in asked] == [200, 200, 429]
        assert asked[0].headers["x-ratelimit-remaining-requests"] == "1"


async def test_every_answer_says_what_is_left(nats_url: str) -> None:
    """Whole, streamed, refused or wrong; and none of it to a tenant without quotas."""
    limits = tenants(requests_per_minute=2, tokens_per_minute=1000)
    async with cell(nats_url, tenants=limits) as (gateway,), connect(nats_url, "test") as broker:
        free = await gateway.complete(key=OTHER_KEY)
        assert not any(name.startswith("x-ratelimit") for name in free.headers)
        assert not await counters(broker)
        answers = [
            await gateway.complete(max_tokens=-1),
            await gateway.complete(),
            await gateway.complete(stream=True),
            await gateway.complete(),
        ]
        assert [answer.status for answer in answers] == [400, 200, 200, 429]
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert left == ["2", "1", "0", "0"]
        assert all(answer.headers["x-ratelimit-limit-tokens"] == "1000" for answer in answers)
        assert answers[1].headers["x-ratelimit-reset-requests"].endswith("s")


async def test_a_socket_is_told_when_to_come_again(nats_url: str) -> None:
    await register(nats_url)
    async with gateways(nats_url, tenants=tenants(requests_per_minute=1)) as (gateway,):
        async with gateway.socket() as socket:
            assert await outcomes(socket, 1) == ["accepted"]
            await socket.generate("again")
            frame = await socket.receive()
            assert (frame["id"], frame["code"]) == ("again", "rate_limit_exceeded")
            assert 0 < frame["retry_after_ms"] <= 120_000


async def test_what_does_not_come_in_is_given_back(nats_url: str) -> None:
    """A full lane is no use of a quota, and a repeated request is the same one."""
    await register(nats_url)
    quotas = {"requests_per_minute": 10, "max_concurrent": 10, "tokens_per_day": 1000}
    async with (
        gateways(nats_url, 2, tenants=tenants(max_queued=2, **quotas)) as (first, second),
        connect(nats_url, "test") as broker,
        first.socket() as socket,
        second.socket() as other,
    ):
        await socket.generate("a", idempotency_key="one")
        await other.generate("a", idempotency_key="one")
        assert {(await each.receive())["type"] for each in (socket, other)} == {"accepted"}
        await other.generate("b")
        await other.generate("c")
        found = [await other.receive() for _ in "bc"]
        assert sorted(each.get("code", each["type"]) for each in found) == [
            "accepted",
            "queue_full",
        ]

        async def two_are_counted() -> bool:
            found = (await asked(broker), await opened(broker), await today(broker))
            return found == (2, 2, 2 * (5 + DEFAULT_TOKENS))

        await eventually(two_are_counted)


async def test_a_request_whose_confirmation_got_lost_stays_counted(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker calls the repetition a duplicate: of the very request that the quotas are for."""
    store = Broker.store
    confirmed: list[str] = []

    async def losing(
        self: Broker,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        *,
        repeats: bool = False,
    ) -> Stored:
        stored = await store(self, subject, payload, headers, repeats=repeats)
        if subject.startswith("infer.request."):
            confirmed.append(subject)
            if len(confirmed) == 1:
                raise BrokerUnavailable("the confirmation got lost")
        return stored

    monkeypatch.setattr(Broker, "store", losing)
    await register(nats_url)
    async with gateways(nats_url, tenants=tenants(max_concurrent=1)) as (gateway,):
        async with gateway.socket() as socket:
            assert await outcomes(socket, 1) == ["accepted"]
            assert len(confirmed) == 2
            await socket.generate("another")
            assert (await socket.receive())["code"] == "rate_limit_exceeded"


async def test_a_ledger_record_settles_once(nats_url: str) -> None:
    """It is written again by whoever finds a terminal and cannot know."""
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        day = windows.day(time.time())
        account = usage.Account("acme", (TENANT,), day, 100, 0, usage.Price())
        record = LedgerRecord(
            "r1", "acme", "mock", "1", "stop", 10, 5, 1, "w", 0, 0, account=account.pack()
        )
        await usage.add_once(broker, account.reserved, "r1.reserved", 5)
        for _ in range(3):
            await write_ledger(broker, record)
        assert await today(broker) == 15


async def test_a_reservation_that_nobody_ends_expires(nats_url: str) -> None:
    """The request may never have been stored; if it was, its ledger record has settled it."""
    quotas = Limits(max_concurrent=1, tokens_per_day=100)
    tenant = Tenant(name="acme", **quotas.model_dump())
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        made = Quotas(broker)
        running = asyncio.create_task(made.run())
        asked = Amounts(5, 8, usage.Price())
        assert await made.reserve(tenant, "r1", asked, seconds=0)
        assert await today(broker) == COST

        async def nothing_is_held() -> bool:
            return (await opened(broker), await today(broker)) == (0, 0)

        await eventually(nothing_is_held)
        assert await made.reserve(tenant, "r2", asked, seconds=60)
        running.cancel()


async def test_a_reservation_without_an_answer_is_taken_back(nats_server: NatsServer) -> None:
    """Whether it was counted or not: the day is none the poorer for it."""
    tenant = Tenant(name="acme", tokens_per_day=100)
    async with gateways(nats_server.url), connect(nats_server.url, "test") as broker:
        made = Quotas(broker)
        running = asyncio.create_task(made.run())
        nats_server.freeze()
        with pytest.raises(BrokerUnavailable):
            await made.reserve(tenant, "r1", Amounts(5, 8, usage.Price()), seconds=60)
        nats_server.thaw()

        async def taken_back() -> bool:
            """Counted, counted again under the same id, and taken back."""
            return bool(await counters(broker)) and not await today(broker)

        await eventually(taken_back)
        running.cancel()


async def test_producers_wait_for_a_place_and_are_told_of_a_spent_day(nats_url: str) -> None:
    """Waiting is durable, but not until tomorrow."""
    limits = tenants(max_concurrent=1, tokens_per_day=3 * COST)
    async with cell(nats_url, tenants=limits), producer(nats_url) as p:
        for number in range(4):
            await p.submit({"prompt": "hello", "max_tokens": 8}, f"s{number}")
        await eventually(lambda: len(p.ended()) == 4, 30)
        ends = sorted(end.get("code", end["type"]) for end in p.ended())
        assert ends == ["done", "done", "done", "insufficient_quota"]


async def test_an_operator_sees_what_is_used(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of those with quotas; the others are not counted."""
    limits = tenants(requests_per_minute=5, tokens_per_day=1000)
    async with cell(nats_url, tenants=limits) as (gateway,), connect(nats_url, "test") as broker:
        assert statuses([await gateway.complete() for _ in range(2)]) == {200: 2}
        await eventually(lambda: settled(broker, 2))
        capsys.readouterr()
        await show(UsageSettings(nats=nats_url, as_json=True), asyncio.Event())
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["tenant"], row["scope"]) == ("acme", "tenant")
        assert row["requests_per_minute"] == {"used": 2, "limit": 5}
        assert row["tokens_per_day"] == {"used": 2 * COST, "limit": 1000}
        await show(UsageSettings(nats=nats_url, tenant="acme"), asyncio.Event())
        assert "26 of 1,000" in capsys.readouterr().out
        with pytest.raises(TenantNotFound):
            await show(UsageSettings(nats=nats_url, tenant="nobody"), asyncio.Event())
