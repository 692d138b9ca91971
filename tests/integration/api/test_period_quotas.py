"""Quotas of days and months: never passed by one token, used to the end, and told once."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from api.submission.quota_checks import RequestAmounts
from api.submission.quotas import Quotas
from millstream.admin.settings import UsageSettings
from millstream.admin.usage import run as show
from registry.tenant_records import Tenant
from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.broker.broker_client import Broker
from streams.errors import QuotaSpent
from streams.messages import LedgerRecord
from streams.quota_windows import QuotaPeriod
from streams.records import usage_counters
from streams.records.token_log import write_ledger_record
from streams.usage_accounts import Meter, Price
from tests.integration.api.usage_counters import (
    ACME,
    COST,
    complete_concurrently,
    read_ledger,
    statuses,
)
from tests.support.accounts_server import connect, process_settings
from tests.support.eventually import eventually
from tests.support.gateways import (
    KEY,
    RunningGateway,
    cell,
    gateways,
    tenants,
)
from tests.support.keys import operator, pepper_file
from tests.support.ports import free_port
from tests.support.service_process import service_process

PLACES = 7
LIMIT = PLACES * COST + COST - 1  # one token less than for another request


async def used(broker: Broker, period: QuotaPeriod, now: float | None = None) -> int:
    name = period.name_at(time.time() if now is None else now)
    counter = ACME.usage_subject(Meter.TOKENS, name)
    return await usage_counters.add_to_counter(broker, counter, 0)


async def billed(broker: Broker) -> int:
    return sum(r.prompt_tokens + r.completion_tokens for r in await read_ledger(broker))


async def served_to_the_end(found: list[RunningGateway]) -> int:
    """Ask until there is room for none more; how many got an answer."""
    served, refused_in_a_row = 0, 0
    while refused_in_a_row < 3:
        answers = await complete_concurrently(found, 6)
        served += statuses(answers)[200]
        assert statuses(answers).keys() <= {200, 429}
        refused_in_a_row = 0 if statuses(answers)[200] else refused_in_a_row + 1
    return served


async def test_a_month_is_never_passed_and_is_used_to_the_end(nats_url: str) -> None:
    """Whatever two gateways are asked at once; what an answer did not need comes back."""
    async with (
        cell(nats_url, 2, tenants=tenants(tokens_per_month=LIMIT)) as found,
        connect(nats_url, "test") as broker,
    ):
        assert (await found[0].complete(max_tokens=LIMIT)).error["code"] == "larger_than_quota"
        asked_at = time.time()
        answers = await complete_concurrently(found, 40)
        assert statuses(answers)[200] <= PLACES
        assert await billed(broker) <= LIMIT
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.error["code"] == "insufficient_quota"
        assert refused.error["param"] == "tokens_per_month"
        opens = QuotaPeriod.MONTH.end_after(time.time())
        assert f"at {opens:%Y-%m-%dT%H:%M:%SZ}" in refused.error["message"]
        assert int(refused.headers["retry-after"]) <= opens.timestamp() - asked_at + 2
        served = statuses(answers)[200] + await served_to_the_end(found)
        assert served == PLACES
        assert await billed(broker) == PLACES * COST

        async def is_settled() -> bool:
            return await used(broker, QuotaPeriod.MONTH) == PLACES * COST

        await eventually(is_settled)


async def test_what_a_killed_gateway_held_is_settled(nats_url: str, tmp_path: Path) -> None:
    """By whoever ends its requests: the rest of the month is there for the others."""
    limit = 100 * COST
    limits = tenants(tokens_per_month=limit)
    async with cell(nats_url, 1, mock={"itl_ms": 20}, tenants=limits) as (living,):
        port = free_port()
        creds = process_settings(nats_url, UserClass.GATEWAY, "doomed")
        with service_process("gateway", nats_url, tmp_path / "log", port=port, **creds) as service:
            doomed = RunningGateway(port, asyncio.Event())
            await eventually(doomed.is_ready, 30)
            async with doomed.socket() as socket:
                for number in range(3):
                    await socket.generate(str(number), max_tokens=400)
                    await socket.receive_until(str(number), "accepted")
                assert (await living.complete(max_tokens=200)).status == 429
                service.kill()
        async with connect(nats_url, "test") as broker:

            async def is_settled() -> bool:
                records = await read_ledger(broker)
                total = await used(broker, QuotaPeriod.MONTH)
                return len(records) == 3 and total == await billed(broker)

            await eventually(is_settled, 60)
            left = limit - await billed(broker)
            if left < COST:
                assert (await living.complete()).status == 429
            else:
                assert await served_to_the_end([living]) == left // COST
            assert limit - COST < await billed(broker) <= limit


async def has_used(broker: Broker, tokens: int, now: float) -> bool:
    """True once what was refused is given back, too."""
    return {await used(broker, period, now) for period in QuotaPeriod} == {tokens}


class FakeClock:
    """The brokers' clock, at a time that a test sets."""

    def __init__(self, at: datetime) -> None:
        self.seconds = at.timestamp()

    def now(self) -> float:
        return self.seconds


@asynccontextmanager
async def two_at(
    broker: Broker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[Quotas]]:
    """The quotas of two gateways, which have the same clock."""
    monkeypatch.setattr(broker.clock, "now", clock.now)
    made = [Quotas(broker), Quotas(broker)]
    tasks = [asyncio.create_task(each.run()) for each in made]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_new_month_begins_at_midnight_of_utc(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is of the period in which it was accepted, and is settled there later."""
    clock = FakeClock(datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC))
    tenant = Tenant(name="acme", tokens_per_day=2 * COST, tokens_per_month=2 * COST)
    amounts = RequestAmounts(5, 8, Price())
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        async with two_at(broker, clock, monkeypatch) as (one, other):
            old = clock.seconds
            first = await one.reserve(tenant, "mock", "r1", amounts, 600)
            assert first
            assert first.account
            assert await other.reserve(tenant, "mock", "r2", amounts, 600)
            with pytest.raises(QuotaSpent, match="at 2026-12-01T00:00:00Z"):
                await other.reserve(tenant, "mock", "r3", amounts, 600)
            await eventually(lambda: has_used(broker, 2 * COST, old))
            clock.seconds += 1
            for number, quotas in enumerate((one, other)):
                assert await quotas.reserve(tenant, "mock", f"n{number}", amounts, 600)
            with pytest.raises(QuotaSpent, match="at 2027-01-01T00:00:00Z|at 2026-12-02T00"):
                await one.reserve(tenant, "mock", "n3", amounts, 600)
            account = first.account.pack()
            record = LedgerRecord(
                "r1", "acme", "mock", "1", "stop", 5, 1, 1, "w", 0, 0, account=account
            )
            await write_ledger_record(broker, record)
            for period in QuotaPeriod:
                assert await used(broker, period, old) == COST + 6
            await eventually(lambda: has_used(broker, 2 * COST, clock.seconds))


async def test_a_day_may_be_spent_while_the_month_is_not(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Midnight inside a month opens the day alone, and the month goes on counting."""
    clock = FakeClock(datetime(2026, 11, 10, 23, 59, 59, tzinfo=UTC))
    tenant = Tenant(name="acme", tokens_per_day=COST, tokens_per_month=2 * COST)
    amounts = RequestAmounts(5, 8, Price())
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        async with two_at(broker, clock, monkeypatch) as (one, other):
            assert await one.reserve(tenant, "mock", "r1", amounts, 600)
            with pytest.raises(QuotaSpent, match="tokens_per_day.*2026-11-11T00"):
                await other.reserve(tenant, "mock", "r2", amounts, 600)
            await eventually(lambda: has_used(broker, COST, clock.seconds))
            clock.seconds += 1
            assert await other.reserve(tenant, "mock", "r3", amounts, 600)
            with pytest.raises(QuotaSpent, match="tokens_per_month.*2026-12-01T00"):
                await one.reserve(tenant, "mock", "r4", amounts, 600)


async def test_thresholds_are_told_once_over_all_gateways(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A soft quota refuses nothing; half, four fifths and all of it are events."""
    limits = tenants(tokens_per_month=5 * COST, soft_quotas=["tokens_per_month"])
    with capture_logs() as events:
        async with (
            cell(nats_url, 2, tenants=limits) as found,
            connect(nats_url, "test") as broker,
        ):
            assert statuses(await complete_concurrently(found, 10)) == {200: 10}

            async def all_are_stored() -> bool:
                stored = await broker.read_subject(
                    topology.THRESHOLDS, subjects.thresholds_of(None)
                )
                return len(stored) == 3

            await eventually(all_are_stored)
            assert statuses(await complete_concurrently(found, 4)) == {200: 4}
            capsys.readouterr()
            creds = process_settings(nats_url, UserClass.OPERATOR, "operator")
            for told in ({"as_json": True}, {}):
                await show(
                    UsageSettings(nats=nats_url, thresholds=True, **creds, **told), asyncio.Event()
                )
            *lines, _, _, _, _ = capsys.readouterr().out.splitlines()
    told_of = [json.loads(line) for line in lines[:3]]
    assert [each["data"]["percent"] for each in told_of] == [50, 80, 100]
    assert {each["type"] for each in told_of} == {"quota.threshold_reached"}
    assert len({each["id"] for each in told_of}) == 3
    assert {each["data"]["period"] for each in told_of} == {QuotaPeriod.MONTH.name_at(time.time())}
    logged = [e["percent"] for e in events if e["event"] == "quota_threshold_reached"]
    assert sorted(logged) == [50, 80, 100]


async def test_a_threshold_that_another_gateway_told_is_not_told_again(nats_url: str) -> None:
    """Also after a restart, which forgets what was told."""
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        tenant = Tenant(name="acme", tokens_per_day=2 * COST)
        for number in range(2):
            quotas = Quotas(broker)
            running = asyncio.create_task(quotas.run())
            await quotas.reserve(tenant, "mock", f"r{number}", RequestAmounts(5, 8, Price()), 600)
            wanted = (1, 3)[number]

            async def are_stored(wanted: int = wanted) -> bool:
                pattern = subjects.thresholds_of("acme")
                return len(await broker.read_subject(topology.THRESHOLDS, pattern)) == wanted

            await eventually(are_stored)
            running.cancel()


async def test_a_managed_key_has_a_month_of_its_own(nats_url: str, tmp_path: Path) -> None:
    """Below its tenant's, which the tenant's other keys go on using."""
    settings: Any = {"key_pepper_file": pepper_file(tmp_path), "tenants": tenants()}
    async with operator(nats_url) as keys:
        key, _ = await keys.create(name="ci", tokens_per_month=2 * COST)
    async with cell(nats_url, 2, **settings) as found, connect(nats_url, "test") as broker:
        answers = [await found[n % 2].complete(key=key) for n in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[2].error["param"] == "tokens_per_month"
        assert (await found[0].complete(key=KEY)).status == 200
        counter = subjects.usage(
            "acme", "key-ci", Meter.TOKENS, QuotaPeriod.MONTH.name_at(time.time())
        )
        assert await usage_counters.add_to_counter(broker, counter, 0) == 2 * COST
