"""What tenant acme asks for, and what the brokers have counted of it."""

import asyncio
import time
from collections import Counter
from typing import Any

from api.submission.quota_checks import QuotaScope
from registry.tenant_records import QuotaLimits
from streams import messages, quota_windows, subjects, topology
from streams.broker.broker_client import Broker
from streams.messages import LedgerRecord
from streams.records import usage_counters
from streams.usage_accounts import TENANT_SCOPE, Meter
from tests.support.gateways import GatewaySocket, HttpResponse, RunningGateway

COST = 13  # "hello" and eight tokens of the mock model
ACME = QuotaScope("acme", TENANT_SCOPE, QuotaLimits())


async def complete_concurrently(
    found: list[RunningGateway], count: int, **body: Any
) -> list[HttpResponse]:
    """So many requests at once, spread over the gateways."""
    asked = (found[i % len(found)].complete(**body) for i in range(count))
    return await asyncio.gather(*asked)


def statuses(answers: list[HttpResponse]) -> Counter[int]:
    return Counter(answer.status for answer in answers)


async def socket_outcomes(socket: GatewaySocket, count: int) -> list[str]:
    """The types, or codes, that so many requests on a new socket are answered with."""
    for number in range(count):
        await socket.generate(str(number))
    frames = [await socket.receive() for _ in range(count)]
    return sorted(frame.get("code", frame["type"]) for frame in frames)


async def outcome_of_one(gateway: RunningGateway) -> str:
    """That of one request, which stays open."""
    async with gateway.socket() as socket:
        return (await socket_outcomes(socket, 1))[0]


async def used_today(broker: Broker, meter: Meter = Meter.TOKENS) -> int:
    return await usage_counters.add_to_counter(
        broker, ACME.usage_subject(meter, quota_windows.utc_day(time.time())), 0
    )


async def open_requests(broker: Broker) -> int:
    """How many of acme's requests are counted as open."""
    leases = quota_windows.open_slots(time.time())
    return max(
        [
            await usage_counters.add_to_counter(broker, ACME.rate_subject(Meter.OPEN, lease), 0)
            for lease in leases
        ]
    )


async def read_ledger(broker: Broker) -> list[LedgerRecord]:
    stored = await broker.read_subject(topology.LEDGER, "infer.ledger.acme.*")
    return [messages.from_wire(LedgerRecord, messages.unpack(m.data)) for m in stored]


async def is_settled(broker: Broker, count: int) -> bool:
    """True when so many requests have ended and the day's tokens are those of the ledger."""
    records = await read_ledger(broker)
    used = sum(record.prompt_tokens + record.completion_tokens for record in records)
    return len(records) == count and await used_today(broker) == used


async def counter_subjects(broker: Broker) -> list[str]:
    """All that anything is counted on."""
    day = subjects.usage_on(quota_windows.utc_day(time.time()))
    streams = ((topology.USAGE, day), (topology.RATES, subjects.ALL_RATES))
    return [m.subject for each in streams for m in await broker.read_subject(*each)]
