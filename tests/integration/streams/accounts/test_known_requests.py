"""Three servers: asking whether a request was queued stores nothing, and is in nobody's way."""

import pytest

from streams.accounts.access import UserClass
from streams.accounts.rights import Pins
from streams.broker.broker_client import STORE_SECONDS, connect
from streams.connection_files import ConnectionFiles
from streams.headers import MESSAGE_ID
from streams.records import request_queue
from streams.subjects import Lane, Priority
from tests.support.accounts_cell import AccountsCell

LANE = Lane("acme", "mock", Priority.STANDARD)


@pytest.mark.parametrize("node", [0, 1, 2])
async def test_an_unknown_request_is_queued_after_somebody_has_asked_for_it(
    three: AccountsCell, node: int
) -> None:
    """A cluster notes an id when a message is proposed, whether it is stored then or not."""
    await three.declare()
    creds = three.directory.add_user("gateway", UserClass.GATEWAY, pins=Pins(id="gateway"))
    async with connect(three.nodes[node].url, "g", ConnectionFiles(creds=creds)) as broker:
        for _ in range(2):
            assert not await request_queue.has_been_queued(broker, LANE, "r1")
        headers = {MESSAGE_ID: "r1"}
        stored = await request_queue.enqueue(broker, LANE, b"x", headers, STORE_SECONDS)
        assert not stored.duplicate
        assert await request_queue.has_been_queued(broker, LANE, "r1")
        assert await request_queue.count_queued(broker, LANE) == 1
