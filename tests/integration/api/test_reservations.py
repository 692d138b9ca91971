"""Reservations: what is open or promised is counted for as long as it is, and comes back."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from api.submission.open_reservations import Reservation
from api.submission.quota_checks import RequestAmounts
from api.submission.quotas import Quotas
from api.submission.reservation_journal import ReservationJournal
from registry.models import mock_model
from registry.tenant_records import QuotaLimits, Tenant
from streams import quota_windows, subjects, usage_accounts
from streams.broker.broker_client import Broker, PubAck
from streams.errors import BrokerUnavailable
from streams.messages import LedgerRecord
from streams.records import usage_counters
from streams.records.token_log import write_ledger_record
from streams.usage_accounts import TENANT_SCOPE, Meter
from tests.integration.api.usage_counters import (
    ACME,
    COST,
    complete_concurrently,
    counter_subjects,
    open_requests,
    outcome_of_one,
    socket_outcomes,
    statuses,
    used_today,
)
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, cell, gateways, register, tenants
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.service_process import service_process

DEFAULT_TOKENS = mock_model().default_max_tokens or 0


async def accepts(gateway: RunningGateway) -> bool:
    return await outcome_of_one(gateway) == "accepted"


async def lives(gateway: RunningGateway) -> bool:
    try:
        return (await gateway.request("GET", "/healthz", key=None)).status == 200
    except OSError:
        return False


async def asked(broker: Broker) -> int:
    """How many requests of acme are counted for this minute and the last one."""
    slot = quota_windows.minute_number(time.time())
    counted = [ACME.rate_subject(Meter.REQUESTS, each) for each in (slot - 1, slot)]
    return sum([await usage_counters.add_to_counter(broker, subject, 0) for subject in counted])


async def test_clients_one_after_the_other_are_never_too_many(nats_url: str) -> None:
    """A request does not count as open any more when its client has the answer."""
    limits = tenants(max_concurrent=1)
    async with cell(nats_url, 1, tenants=limits) as (gateway,):
        assert statuses([await gateway.complete() for _ in range(10)]) == {200: 10}
        assert set(statuses(await complete_concurrently([gateway], 10))) == {200, 429}


async def test_a_killed_gateway_holds_nothing_for_long(nats_url: str, tmp_path: Path) -> None:
    """Its requests are open with its lease; nobody has to notice its death."""
    await register(nats_url)
    config = tmp_path / "millstream.toml"
    config.write_text(f"[tenants.acme]\nkeys = ['{KEY}']\nmax_concurrent = 2\n")
    port = free_port()
    settings = {"port": port, "config": config}
    async with gateways(nats_url, tenants={"acme": tenants(max_concurrent=2)["acme"]}) as (living,):
        with service_process("gateway", nats_url, tmp_path / "log", **settings) as service:
            doomed = RunningGateway(port, asyncio.Event())
            await eventually(lambda: lives(doomed))
            async with doomed.socket() as socket:
                assert await socket_outcomes(socket, 3) == [
                    "accepted",
                    "accepted",
                    "rate_limit_exceeded",
                ]
                assert await outcome_of_one(living) == "rate_limit_exceeded"
                service.kill()
            assert await eventually(lambda: accepts(living))
            assert await outcome_of_one(living) == "accepted"
            assert await outcome_of_one(living) == "rate_limit_exceeded"


async def test_what_is_open_stays_counted_from_lease_to_lease(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may run for longer than a lease, which is shorter here."""
    monkeypatch.setattr(quota_windows, "SLOT_SECONDS", 3.0)
    await register(nats_url)
    limits = {"acme": tenants(max_concurrent=1)["acme"]}
    async with (
        gateways(nats_url, 2, tenants=limits) as (first, second),
        connect(nats_url, "test") as broker,
        first.socket() as socket,
    ):
        assert await socket_outcomes(socket, 1) == ["accepted"]
        counted = quota_windows.open_slots(time.time())[-1]
        await eventually(lambda: quota_windows.open_slots(time.time())[0] > counted)
        assert await open_requests(broker) == 1
        assert await outcome_of_one(second) == "rate_limit_exceeded"


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
            found = (await asked(broker), await open_requests(broker), await used_today(broker))
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
    ) -> PubAck:
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
            assert await socket_outcomes(socket, 1) == ["accepted"]
            assert len(confirmed) == 2
            await socket.generate("another")
            assert (await socket.receive())["code"] == "rate_limit_exceeded"


async def test_a_ledger_record_settles_once(nats_url: str) -> None:
    """It is written again by whoever finds a terminal and cannot know."""
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        day = quota_windows.utc_day(time.time())
        account = usage_accounts.Account(
            "acme", (TENANT_SCOPE,), (day,), 100, 0, usage_accounts.Price()
        )
        record = LedgerRecord(
            "r1", "acme", "mock", "1", "stop", 10, 5, 1, "w", 0, 0, account=account.pack()
        )
        await usage_counters.add_once(broker, account.reserved, "r1.reserved", 5)
        for _ in range(3):
            await write_ledger_record(broker, record)
        assert await used_today(broker) == 15


async def test_a_reservation_that_nobody_ends_expires(nats_url: str) -> None:
    """The request was never stored, and its gateway was not told."""
    quotas = QuotaLimits(max_concurrent=1, tokens_per_day=100)
    tenant = Tenant(name="acme", **quotas.model_dump())
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        made = Quotas(broker)
        running = asyncio.create_task(made.run())
        asked = RequestAmounts(5, 8, usage_accounts.Price())
        assert await made.reserve(tenant, "mock", "r1", asked, seconds=0)
        assert await used_today(broker) == COST

        async def nothing_is_held() -> bool:
            return (await open_requests(broker), await used_today(broker)) == (0, 0)

        await eventually(nothing_is_held)
        assert await made.reserve(tenant, "mock", "r2", asked, seconds=60)
        running.cancel()


async def test_a_reservation_without_an_answer_is_taken_back(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was counted or not: the day is none the poorer for it."""
    tenant = Tenant(name="acme", tokens_per_day=100)
    add = ReservationJournal.add

    async def add_and_freeze(self: ReservationJournal, reservation: Reservation) -> None:
        await add(self, reservation)
        nats_server.freeze()

    monkeypatch.setattr(ReservationJournal, "add", add_and_freeze)
    async with gateways(nats_server.url), connect(nats_server.url, "test") as broker:
        made = Quotas(broker)
        running = asyncio.create_task(made.run())
        with pytest.raises(BrokerUnavailable):
            await made.reserve(
                tenant, "mock", "r1", RequestAmounts(5, 8, usage_accounts.Price()), seconds=60
            )
        nats_server.thaw()

        async def taken_back() -> bool:
            """Counted, counted again under the same id, and taken back."""
            return bool(await counter_subjects(broker)) and not await used_today(broker)

        await eventually(taken_back)
        running.cancel()


async def test_a_request_is_settled_by_a_record_of_its_own_tenant_and_model(
    nats_url: str,
) -> None:
    """A stolen worker of another model knows ids, and must not give quota back by them."""
    tenant = Tenant(name="acme", **QuotaLimits(max_concurrent=1).model_dump())
    asked = RequestAmounts(5, 8, usage_accounts.Price())
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        made = Quotas(broker)
        await made.open()
        for name in ("r1", "last"):
            assert await made.reserve(
                Tenant(**{**tenant.model_dump(), "name": f"{name}-t"}), "mock", name, asked, 60
            )
        record = LedgerRecord("r1", "r1-t", "stolen", "1", "stop", 5, 8, 1, "w", 0, 0)
        for data in (record.pack(), replace(record, model="mock").pack(), b"\xc1"):
            await broker.store(subjects.ledger("r1-t", "stolen"), data)
        await broker.store(subjects.ledger("r1-t", "mock"), record.pack())
        last = replace(record, request_id="last", tenant="last-t", model="mock")
        await broker.store(subjects.ledger("last-t", "mock"), last.pack())
        await eventually(lambda: made.find("last") is None)  # the others were heard before
        assert made.find("r1")
