"""Frames that nobody would write: each gets its answer, and the gateway goes on."""

import pytest

from tests.integration.gateway.entrypoints.frame_fuzzer import UNLIMITED, fuzz
from tests.support.eventually import eventually
from tests.support.gateways import JSON, MSGPACK, cell, tenants

FRAMES, SEED = 4_000, 1


@pytest.mark.parametrize("subprotocol", [JSON, MSGPACK])
async def test_every_mutated_frame_is_answered(nats_url: str, subprotocol: str) -> None:
    """By `accepted` or an error that is the client's own; the socket lives, and nothing is left."""
    async with cell(nats_url, tenants=tenants(**UNLIMITED), grace_seconds=0) as (gateway,):
        found = await fuzz(gateway, subprotocol, SEED, FRAMES)
        assert not found.faults
        assert found.accepted > FRAMES / 100
        assert len(found.refused) > 5

        async def forgotten() -> bool:
            return await gateway.followed_requests() == 0

        await eventually(forgotten)
