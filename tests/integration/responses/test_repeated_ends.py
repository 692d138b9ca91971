"""A response whose worker dies between the steps of its end: it ends once, and as it was."""

from collections.abc import Mapping
from typing import Any

import pytest

from streams import subjects, topology
from streams.errors import BrokerUnavailable
from streams.messages import TERMINAL_TYPES, LedgerRecord
from streams.records.token_log import TokenLog
from tests.integration.responses.test_responses_sdk import sdk
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import cell


async def test_a_result_without_a_terminal_gets_the_one_it_stands_for(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader waits for that: the next attempt stores it, and generates nothing."""
    append = TokenLog.append
    refused: list[str] = []

    async def refuse_once(log: TokenLog, record: Mapping[str, Any], *more: Any) -> None:
        if record["type"] in TERMINAL_TYPES and not refused:
            refused.append(log.subject)
            raise BrokerUnavailable("as a worker that dies here")
        await append(log, record, *more)

    monkeypatch.setattr(TokenLog, "append", refuse_once)
    async with (
        cell(nats_url) as (gateway,),
        sdk(gateway) as client,
        connect(nats_url, "test") as broker,
    ):
        made = await client.responses.create(model="mock", input="hi", max_output_tokens=8)
        assert refused
        assert (made.status, made.usage and made.usage.output_tokens) == ("incomplete", 8)
        assert await client.responses.retrieve(made.id) == made

        async def is_billed() -> bool:
            found = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
            records = [LedgerRecord.unpack(message.data) for message in found]
            return [each.completion_tokens for each in records] == [8]

        await eventually(is_billed)
