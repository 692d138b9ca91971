"""Refusals are counted in the ledger, and a full ledger refuses without stopping what runs."""

from collections import Counter

from streams import messages, subjects, topology
from streams.broker.broker_client import Broker
from streams.messages import RefusalCounts
from streams.topology import MIB
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway, cell

SLOW = {"ttft_ms": 1, "itl_ms": 5}


async def stored_counts(broker: Broker) -> Counter[tuple[str, ...]]:
    """All refusals that are stored, by tenant, model, code, version and priority."""
    found = Counter[tuple[str, ...]]()
    for message in await broker.read_subject(topology.LEDGER, subjects.ALL_OUTCOMES):
        record = RefusalCounts.unpack(message.data)
        for *kind, count in record.counts:
            found[record.tenant, record.model, *map(str, kind)] += count
    return found


async def fill_ledger(broker: Broker, size: int) -> None:
    """Store records that take so many bytes."""
    empty = vars(RefusalCounts("g", "other", subjects.OTHER, 0, 0, []))
    filler = messages.pack({**empty, "of_a_later_release": b"x" * (size // 10)})
    for _ in range(10):
        await broker.store(subjects.outcome("other", None), filler)


async def test_refusals_are_counted_by_the_second(nats_url: str) -> None:
    """By code, model, version and priority; a stranger's names make no subject of their own."""
    async with connect(nats_url, "test") as broker, cell(nats_url) as (gateway,):
        for name in ("nobody", "nothing"):
            assert (await gateway.complete(model=name)).status == 404
        assert (await gateway.complete(max_tokens=10**6)).status == 400
        async with gateway.socket() as socket:
            await socket.generate("a", max_tokens=10**6, priority="batch")
            assert (await socket.receive())["code"] == "context_length_exceeded"

        async def all_stored() -> bool:
            return (await stored_counts(broker)).total() == 4

        await eventually(all_stored)
        assert await stored_counts(broker) == {
            ("acme", "_other", "model_not_found", "", "standard"): 2,
            ("acme", "mock", "context_length_exceeded", "1", "standard"): 1,
            ("acme", "mock", "context_length_exceeded", "1", "batch"): 1,
        }


async def test_a_gateway_that_drains_stores_what_it_has_counted(nats_url: str) -> None:
    """A rolling update loses no count."""
    async with connect(nats_url, "test") as broker:
        async with cell(nats_url) as (gateway,):
            assert (await gateway.complete(model="nobody")).status == 404
        assert (await stored_counts(broker)).total() == 1


async def test_a_full_ledger_refuses_and_what_runs_gets_its_record(nats_url: str) -> None:
    """The last tenth is for what was accepted before; with room again, requests come in."""
    async with (
        connect(nats_url, "test") as broker,
        cell(nats_url, mock=SLOW, ledger_bytes=MIB, ledger_days=0) as (gateway,),
        gateway.socket() as socket,
    ):
        await socket.generate("early", max_tokens=400)
        await socket.receive_until("early", "chunk")
        await fill_ledger(broker, round(0.92 * MIB))
        await eventually(lambda: refuses(gateway))
        refused = await gateway.complete()
        assert (refused.status, refused.error["code"]) == (503, "ledger_full")
        assert "retry-after" in refused.headers
        assert await gateway.metric("millstream_ledger_used_ratio") > 0.9
        ended = (await socket.receive_rest("early"))[-1]
        assert ended["usage"]["completion_tokens"] == 400

        async def is_acknowledged() -> bool:
            info = await broker.js.stream_info(topology.WORK)
            return not info.state.messages

        await eventually(is_acknowledged)
        stored = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
        assert 400 in [messages.unpack(each.data)["completion_tokens"] for each in stored]
        assert not await stored_counts(broker)  # they wait for room

        await broker.purge(topology.LEDGER, subjects.outcome("other", None), stored[-1].seq)
        await eventually(lambda: accepts(gateway))

        async def are_counted() -> bool:
            counts = await stored_counts(broker)
            return counts["acme", "mock", "ledger_full", "1", "standard"] > 0

        await eventually(are_counted)


async def refuses(gateway: RunningGateway) -> bool:
    return (await gateway.complete()).status == 503


async def accepts(gateway: RunningGateway) -> bool:
    return (await gateway.complete()).status == 200


async def test_a_smaller_ledger_keeps_what_it_holds(nats_url: str) -> None:
    """The broker would delete what is above the new limit; what is billed is never dropped."""
    async with connect(nats_url, "test") as broker:
        async with cell(nats_url, ledger_bytes=4 * MIB):
            await fill_ledger(broker, 2 * MIB)
        before = (await broker.js.stream_info(topology.LEDGER)).state.messages
        async with cell(nats_url, ledger_bytes=MIB) as (gateway,):
            await eventually(lambda: refuses(gateway))
        info = await broker.js.stream_info(topology.LEDGER)
        assert info.state.messages >= before
        assert info.config.max_bytes is not None
        assert info.config.max_bytes >= 2 * MIB
