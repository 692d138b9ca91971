"""What the ledger says of a request that came through a gateway."""

from pydantic import SecretStr

from registry.models import LatencyGoals, mock_model
from registry.price_book import PriceBook
from registry.store import Registry
from streams import subjects, topology
from streams.base_settings import KeySettings, TenantSettings
from streams.broker.broker_client import Broker
from streams.messages import LedgerRecord
from streams.subjects import Priority
from streams.usage_accounts import Price, PriceEntry
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, QUICK, cell

USD = Price(150_000, 600_000, 75_000)


async def records(broker: Broker, count: int) -> list[LedgerRecord]:
    """All ledger records, once there are so many."""

    async def read() -> list[LedgerRecord] | None:
        stored = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
        found = [LedgerRecord.unpack(message.data) for message in stored]
        return found if len(found) >= count else None

    found = await eventually(read)
    assert found
    return found


async def test_a_record_has_key_user_goal_and_price(nats_url: str) -> None:
    """All of it as it was when the request was accepted."""
    named = {"acme": TenantSettings(keys=(KeySettings(key=SecretStr(KEY), name="ci"),))}
    async with connect(nats_url, "test") as broker, cell(nats_url, tenants=named) as (gateway,):
        registry, prices = await Registry.open(broker), await PriceBook.open(broker)
        goals = {Priority.INTERACTIVE: LatencyGoals(time_to_first_token_ms=5000)}
        await registry.add_model(mock_model("mock", **QUICK).model_copy(update={"goals": goals}))
        await prices.set_price("mock", "USD", USD)

        async def is_known() -> bool:
            answer = await gateway.complete(user="jane@example.org", service_tier="priority")
            assert answer.status == 200
            last = (await records(broker, 1))[-1]
            return last.price != PriceEntry().pack() and last.goal_ms is not None

        await eventually(is_known)
        found = (await records(broker, 1))[-1]
        await registry.close()
        await prices.close()
    assert (found.key, found.priority, found.goal_ms) == ("ci", "interactive", 5000)
    assert found.price_entry == PriceEntry(1, "USD", USD)
    assert found.charge == USD.spend_for(5, 8)
    assert len(found.user) == 16
    assert "jane" not in found.user
    assert found.deadline == found.accepted + 600_000
    assert found.warm
    assert found.accepted <= found.first <= found.finished
    assert 0 <= found.worker_ms <= found.finished - found.accepted


async def test_a_price_change_does_not_reach_what_was_accepted(nats_url: str) -> None:
    """Two requests run while the price doubles: each costs what it was when it came."""
    slow = {"ttft_ms": 1, "itl_ms": 20}
    async with connect(nats_url, "test") as broker, cell(nats_url, mock=slow) as (gateway,):
        prices = await PriceBook.open(broker)
        await prices.set_price("mock", "USD", Price(1, 1))

        async with gateway.socket() as socket:
            await socket.generate("before", max_tokens=100)
            await socket.receive_until("before", "chunk")
            await prices.set_price("mock", "USD", Price(2, 2))
            await socket.receive_rest("before")

        async def is_doubled() -> bool:
            await gateway.complete()
            return (await records(broker, 2))[-1].price_entry.price == Price(2, 2)

        await eventually(is_doubled)
        found = await records(broker, 2)
        await prices.close()
    early = [each for each in found if each.completion_tokens == 100]
    assert [each.charge for each in early] == [105 * early[0].price_entry.price.prompt]
    assert early[0].price_entry.price != Price(2, 2)
