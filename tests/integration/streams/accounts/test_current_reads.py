"""Three servers: what a process was told is stored, another one finds at any of them.

A replica is behind for a moment that no test can hold: so direct gets here find nothing new a few
times, as one would that has not applied it yet. What the leader answers is real.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from streams.accounts.access import UserClass
from streams.accounts.rights import Pins
from streams.broker.broker_client import Broker, connect
from streams.broker.responses import MessagePage
from streams.connection_files import ConnectionFiles
from streams.headers import ItemRef
from streams.records.jobs.item_results import ItemResult
from streams.records.jobs.result_store import read_current_result, store_result
from streams.records.webhooks.endpoint_records import WebhookEndpoint
from streams.records.webhooks.endpoint_store import EndpointStore
from tests.support.accounts_cell import AccountsCell

STALE_READS = 3


@pytest.fixture
async def brokers(three: AccountsCell) -> AsyncIterator[list[Broker]]:
    """A jobs service's connection to each of the servers."""
    await three.declare()
    creds = three.directory.add_user("jobs", UserClass.JOBS, pins=Pins(id="jobs"))
    async with AsyncExitStack() as stack:
        opened = [connect(each.url, "jobs", ConnectionFiles(creds=creds)) for each in three.nodes]
        yield [await stack.enter_async_context(each) for each in opened]


@pytest.fixture
def stale_replicas(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the first direct gets find nothing; the result counts them."""
    reads, read = list[int](), Broker._read

    async def read_stale(self: Broker, *args: Any, **named: Any) -> MessagePage:
        page = await read(self, *args, **named)
        reads.append(len(page.messages))
        return MessagePage([], 0) if len(reads) <= STALE_READS else page

    monkeypatch.setattr(Broker, "_read", read_stale)
    return reads


async def test_a_record_is_in_the_list_as_soon_as_it_is_stored(
    brokers: list[Broker], stale_replicas: list[int]
) -> None:
    """A client lists at another gateway what it has just made, or deleted."""
    stores = [EndpointStore(broker) for broker in brokers]
    made = await stores[0].create(_endpoint(1))
    for store in stores:
        stale_replicas.clear()
        assert [each.id for each in await store.list_of("acme")] == [made.id]
        assert len(stale_replicas) > STALE_READS
    await stores[0].change(made, WebhookEndpoint.as_deleted)
    assert not await stores[1].list_of("acme")
    assert not await stores[2].list_of("other")


@pytest.mark.usefixtures("stale_replicas")
async def test_a_result_is_there_as_soon_as_it_is_stored(brokers: list[Broker]) -> None:
    """A response is retrieved right after the answer to its request, anywhere."""
    result = ItemResult("r", 1, 1, text="hello")
    await store_result(brokers[0], "acme", ItemRef("job", 0, 1, True), result)
    for broker in brokers:
        assert await read_current_result(broker, "acme", "job", 0) == result
        assert await read_current_result(broker, "acme", "job", 1) is None


def _endpoint(number: int) -> WebhookEndpoint:
    kinds = ("batch.completed",)
    return WebhookEndpoint("acme", f"we_{number}", "", "https://example.com", kinds, 1, 1)
