"""`GET /v1/usage`: a tenant sees what it has used, and nobody else's."""

import asyncio
import json

import pytest

from millstream.admin.settings import UsageSettings
from millstream.admin.usage import WrongDays
from millstream.admin.usage import run as show
from registry.price_book import PriceBook
from registry.tenants import TenantNotFound, hash_key
from streams.usage_accounts import Price
from tests.integration.gateway.test_ledger_record import records
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, OTHER_KEY, RunningGateway, cell
from tests.support.services import command_settings

STOP = asyncio.Event()


async def requests_of(gateway: RunningGateway, key: str) -> int:
    answer = await gateway.request("GET", "/v1/usage", key=key)
    return sum(row["requests"] for row in answer.json["data"])


async def test_usage_is_the_tenants_own(nats_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By day, model and key; the command line says the same."""
    async with connect(nats_url, "test") as broker, cell(nats_url) as (gateway,):
        prices = await PriceBook.open(broker)
        await prices.set_price("mock", "USD", Price(150_000, 600_000))
        await prices.close()
        for _ in range(3):
            assert (await gateway.complete()).status == 200
        assert (await gateway.complete(key=OTHER_KEY)).status == 200

        async def has_all() -> bool:
            return [await requests_of(gateway, key) for key in (KEY, OTHER_KEY)] == [3, 1]

        await eventually(has_all)
        billed = [each for each in await records(broker, 4) if each.tenant == "acme"]
        for by, name in (("model", "mock"), ("key", hash_key(KEY)[:8])):
            answer = await gateway.request("GET", f"/v1/usage?by={by}")
            rows = [row for row in answer.json["data"] if row["currency"] == "USD"]
            assert {row[by] for row in answer.json["data"]} == {name}
            assert sum(row["charge"] for row in rows) == sum(each.charge for each in billed)
            settings = UsageSettings(
                **command_settings(nats_url), tenant="acme", by=by, as_json=True
            )
            capsys.readouterr()
            await show(settings, STOP)
            lines = capsys.readouterr().out.splitlines()
            shown = [json.loads(line) for line in lines if line.startswith("{")]
            assert shown == [{"tenant": "acme", **row} for row in answer.json["data"]]
        await show(UsageSettings(**command_settings(nats_url), tenant="acme", by="day"), STOP)
        assert "requests" in capsys.readouterr().out
        told = command_settings(nats_url)
        costs = UsageSettings(**told, by="model", costs=True, as_json=True)
        await show(costs, STOP)
        [told] = [
            json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] == "{"
        ]
        assert told["nanoseconds"]["requests"] == sum(
            e.compute_ns for e in await records(broker, 4)
        )
        await show(costs.model_copy(update={"as_json": False}), STOP)
        assert "requests" in capsys.readouterr().out
        wrong = UsageSettings(
            **command_settings(nats_url),
            tenant="acme",
            by="day",
            start="2026-11-20",
            end="2026-11-10",
        )
        with pytest.raises(WrongDays, match="are -9 days"):
            await show(wrong, STOP)
        with pytest.raises(WrongDays, match="'now' is no day: write 2026-11-28"):
            await show(wrong.model_copy(update={"end": "now"}), STOP)


async def test_a_tenant_that_is_not_there_is_told(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table without rows would say that it has used nothing; so it does of one that is there."""
    told = command_settings(nats_url)
    async with cell(nats_url):
        for asked in ({"by": "day"}, {"thresholds": True}):
            await show(UsageSettings(**told, tenant="acme", **asked, as_json=True), STOP)
            assert capsys.readouterr().out == ""
            with pytest.raises(TenantNotFound, match="no tenant 'acne': `millstream tenants list`"):
                await show(UsageSettings(**told, tenant="acne", **asked), STOP)
        await show(UsageSettings(**told, tenant="acme"), STOP)
        assert "--tenant acme --by day" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("by=user", "by"),
        ("start=yesterday", "start"),
        ("start=2026-11-02&end=2026-11-01", "start"),
        ("month=2026-11", "month"),
    ],
)
async def test_wrong_parameters_are_named(nats_url: str, query: str, field: str) -> None:
    async with cell(nats_url) as (gateway,):
        answer = await gateway.request("GET", f"/v1/usage?{query}")
        assert (answer.status, answer.error["param"]) == (400, field)
        assert (await gateway.request("GET", "/v1/usage", key="sk-wrong")).status == 401
