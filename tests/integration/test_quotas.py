"""Quotas: what was promised to a tenant holds over any number of gateways, and heals."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.checks import Scope
from registry.models import mock_model
from registry.store import Registry
from registry.tenants import Limits
from streams import messages, subjects, topology, usage, windows
from streams.connection import Broker, connect
from streams.headers import MESSAGE_ID
from streams.messages import LedgerRecord
from streams.settings import KeySettings, TenantSettings
from streams.usage import TENANT, Meter
from tests.eventually import eventually
from tests.integration.gateways import (
    KEY,
    OTHER_KEY,
    Answer,
    Gateway,
    cell,
    free_port,
    gateways,
    register,
    tenants,
)
from tests.integration.processes import process

COST = 13  # "hello" and eight tokens of the mock model
ACME = Scope("acme", TENANT, Limits())


async def hammer(found: list[Gateway], count: int, **body: Any) -> list[Answer]:
    """So many requests at once, spread over the gateways."""
    return await asyncio.gather(
        *(found[i % len(found)].complete(**body) for i in range(count))
    )


def statuses(answers: list[Answer]) -> Counter[int]:
    return Counter(answer.status for answer in answers)


async def total(broker: Broker, subject: str) -> int:
    """What a counter says."""
    return await usage.add(broker, subject, 0)


async def today(broker: Broker, scope: str = TENANT, meter: Meter = Meter.TOKENS) -> int:
    return await total(broker, subjects.usage("acme", scope, meter, windows.day(time.time())))


async def opened(broker: Broker) -> int:
    """How many of acme's requests are counted as open."""
    return max([await total(broker, ACME.rate(Meter.OPEN, n)) for n in windows.leases(time.time())])


async def used(broker: Broker) -> int:
    """The tokens of acme that the ledger has."""
    stored = await broker.read_subject(topology.LEDGER, "infer.ledger.acme.*")
    records = [messages.known(LedgerRecord, messages.unpack(m.data)) for m in stored]
    return sum(record.prompt_tokens + record.completion_tokens for record in records)


async def test_two_gateways_accept_no_more_than_the_limit(nats_url: str) -> None:
    """Each alone knows half of the story; the broker's counter has all of it."""
    async with cell(nats_url, 2, tenants=tenants(requests_per_minute=5)) as found:
        answers = await hammer(found, 20)
        assert statuses(answers)[200] <= 5
        assert set(statuses(answers)) <= {200, 429}
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.error["code"] == "rate_limit_exceeded"
        assert refused.error["param"] == "requests_per_minute"
        assert 1 <= int(refused.headers["retry-after"]) <= 120


async def test_what_is_promised_can_be_used(nats_url: str) -> None:
    async with cell(nats_url, 2, tenants=tenants(requests_per_minute=4)) as found:
        answers = [await found[i % 2].complete() for i in range(6)]
        assert [answer.status for answer in answers] in ([200] * 4 + [429] * 2,)
