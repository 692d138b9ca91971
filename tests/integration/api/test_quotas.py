"""Quotas: what was promised to a tenant holds over any number of gateways, and is told."""

import asyncio
import json

import pytest

from millstream.admin.settings import UsageSettings
from millstream.admin.usage import run as show
from registry.store import Registry
from registry.tenants import TenantNotFound
from streams import quota_windows
from streams.base_settings import KeySettings, TenantSettings
from streams.broker.broker_client import Broker
from streams.usage_accounts import Meter
from tests.integration.api.usage_counters import (
    COST,
    complete_concurrently,
    counter_subjects,
    is_settled,
    read_ledger,
    socket_outcomes,
    statuses,
    used_today,
)
from tests.integration.gateway.entrypoints.test_nats_ingress import producer
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, OTHER_KEY, cell, gateways, register, tenants
from tests.support.services import always


async def price(broker: Broker, **prices: float) -> None:
    """What a million tokens of the mock model cost; all gateways know it."""
    registry = await Registry.open(broker, declares=always)
    model = registry.models["mock"].model_copy(update=prices)
    await registry.add_model(model)
    await registry.close()


async def test_two_gateways_accept_no_more_than_the_limit(nats_url: str) -> None:
    """Each alone knows half of the story; the broker's counters have all of it."""
    async with cell(nats_url, 2, tenants=tenants(requests_per_minute=5)) as found:
        answers = await complete_concurrently(found, 20)
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
            await socket.receive_until("long", "chunk")
            assert await used_today(broker) == 8005
            refused = await found[1].complete(max_tokens=2000)
            assert refused.error["code"] == "insufficient_quota"
            assert int(refused.headers["retry-after"]) <= quota_windows.DAY_SECONDS + 1
            await socket.send(type="cancel", id="long")
            await socket.receive_rest("long")
        await eventually(lambda: is_settled(broker, 1))
        assert (await found[1].complete(max_tokens=2000, deadline_ms=300)).status == 504
        answer = await found[1].complete()
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 20_000 - 8000
        await eventually(lambda: is_settled(broker, 3))
        spent = [r.prompt_tokens + 2 * r.completion_tokens for r in await read_ledger(broker)]
        assert await used_today(broker, Meter.SPEND) == sum(spent) * 10**6


async def test_nobody_spends_more_than_the_cap(nats_url: str) -> None:
    """A request is refused by what it might come to; the price is the model's."""
    cost = 5 * 10 + 8 * 20  # in millionths
    limits = tenants(spend_per_day=3 * cost / 1e6)
    async with cell(nats_url, 2, tenants=limits) as found, connect(nats_url, "test") as broker:
        await price(broker, prompt_price=10.0, completion_price=20.0)
        answers = await complete_concurrently(found, 12)
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
        assert not await counter_subjects(broker)
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
            assert await socket_outcomes(socket, 1) == ["accepted"]
            await socket.generate("again")
            frame = await socket.receive()
            assert (frame["id"], frame["code"]) == ("again", "rate_limit_exceeded")
            assert 0 < frame["retry_after_ms"] <= 120_000


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
        await eventually(lambda: is_settled(broker, 2))
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
