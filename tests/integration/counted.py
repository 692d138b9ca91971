"""What tenant acme asks for, and what the brokers have counted of it."""

import asyncio
import time
from collections import Counter
from typing import Any

from gateway.checks import Scope
from registry.tenants import Limits
from streams import messages, subjects, topology, usage, windows
from streams.connection import Broker
from streams.messages import LedgerRecord
from streams.usage import TENANT, Meter
from tests.integration.gateways import (
    Answer,
    Gateway,
    Socket,
)

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


async def today(broker: Broker, meter: Meter = Meter.TOKENS) -> int:
    return await usage.add(broker, ACME.usage(meter, windows.day(time.time())), 0)


async def opened(broker: Broker) -> int:
    """How many of acme's requests are counted as open."""
    leases = windows.leases(time.time())
    return max([await usage.add(broker, ACME.rate(Meter.OPEN, lease), 0) for lease in leases])


async def ledger(broker: Broker) -> list[LedgerRecord]:
    stored = await broker.read_subject(topology.LEDGER, "infer.ledger.acme.*")
    return [messages.known(LedgerRecord, messages.unpack(m.data)) for m in stored]


async def settled(broker: Broker, count: int) -> bool:
    """True when so many requests have ended and the day's tokens are those of the ledger."""
    records = await ledger(broker)
    used = sum(record.prompt_tokens + record.completion_tokens for record in records)
    return len(records) == count and await today(broker) == used


async def counters(broker: Broker) -> list[str]:
    """All that anything is counted on."""
    day = subjects.usage_on(windows.day(time.time()))
    streams = ((topology.USAGE, day), (topology.RATES, subjects.ALL_RATES))
    return [m.subject for each in streams for m in await broker.read_subject(*each)]
