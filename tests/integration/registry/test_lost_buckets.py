"""Known records stay known: over lost buckets, other ones in their place, unreadable values."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.js.api import KeyValueConfig
from structlog.testing import capture_logs

from registry import kv_view
from registry.kv_view import Declares, never
from registry.models import mock_model
from registry.store import BUCKET, Registry
from streams import subjects
from streams.broker.broker_client import Broker
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.services import always

OLD_KEY = f"$KV.{BUCKET}.model.old"


@pytest.fixture(autouse=True)
def quick_resync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_view, "RESYNC_SECONDS", 0.2)


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "test") as broker:
        yield broker


@asynccontextmanager
async def opened(broker: Broker, declares: Declares = always) -> AsyncIterator[Registry]:
    registry = await Registry.open(broker, declares=declares)
    try:
        yield registry
    finally:
        await registry.close()


async def stored_keys(broker: Broker) -> set[str]:
    found = await broker.read_subject(f"KV_{BUCKET}", f"$KV.{BUCKET}.>")
    return {message.subject.removeprefix(f"$KV.{BUCKET}.") for message in found}


async def test_a_lost_bucket_comes_back_with_all_it_had(broker: Broker) -> None:
    """A broker that lost its disk would leave a fleet without models until somebody adds them."""
    async with opened(broker) as registry, opened(broker, never) as reader:
        await registry.add_model(mock_model("old"))
        await registry.set_alias("short", "old")
        await reader.wait_until(lambda: "short" in reader.aliases)
        await broker.js.delete_key_value(BUCKET)
        registry.check_bucket(f"KV_{BUCKET}")
        async with connect(broker.url, "other") as other, opened(other, never) as late:
            await late.wait_until(lambda: bool(late.models and late.aliases))
        await registry.add_model(mock_model("new"))
        await reader.wait_until(lambda: list(reader.models) == ["new", "old"])


async def test_what_was_written_meanwhile_is_not_replaced(broker: Broker) -> None:
    """An operator who sets up the new bucket by hand knows better than a view of the old one."""
    async with opened(broker) as registry:
        await registry.add_model(mock_model("old", ttft_ms=1))
        await registry.add_model(mock_model("kept"))
        newer = mock_model("old", ttft_ms=2)
        await broker.js.delete_key_value(BUCKET)
        await broker.js.create_key_value(KeyValueConfig(bucket=BUCKET))
        await broker.store(OLD_KEY, newer.model_dump_json().encode())
        await registry.wait_until(lambda: registry.models["old"].default == newer.default)
        await eventually(lambda: _has_keys(broker, {"model.old", "model.kept"}))
        assert list(registry.models) == ["kept", "old"]


async def _has_keys(broker: Broker, keys: set[str]) -> bool:
    return await stored_keys(broker) == keys


async def test_only_who_declares_makes_a_lost_bucket_anew(broker: Broker) -> None:
    """A worker may not make records; it keeps what it knows, and asks whoever declares."""
    asked = []
    async with opened(broker) as writer:
        await writer.add_model(mock_model("old"))
    async with opened(broker, never) as reader:

        async def on_request(msg: object) -> None:
            asked.append(msg)

        await broker.subscribe(subjects.DECLARE, on_request)
        await broker.js.delete_key_value(BUCKET)
        await eventually(lambda: asked)
        assert list(reader.models) == ["old"]
        names = await broker.js.streams_info()
        assert f"KV_{BUCKET}" not in {info.config.name for info in names}


async def test_an_unreadable_record_takes_nothing_away(broker: Broker) -> None:
    """One bad write would end a model's requests everywhere, and again after each restart."""
    async with opened(broker) as registry:
        await registry.add_model(mock_model("old"))
        await broker.store(OLD_KEY, b"{broken")
        await broker.store(OLD_KEY, b'{"name": 3}')
        await registry.add_model(mock_model("new"))
        assert list(registry.models) == ["new", "old"]
        async with opened(broker) as late:
            assert list(late.models) == ["new", "old"]
            await late.add_model(mock_model("old"))  # the same record, and readable again
        newest = await broker.read(f"KV_{BUCKET}", {"last_by_subj": OLD_KEY})
        assert b'"name":"old"' in newest[0].data
        await registry.remove("old")
        await registry.wait_until(lambda: list(registry.models) == ["new"])
        async with opened(broker) as late:
            assert list(late.models) == ["new"]


async def test_the_log_has_nothing_of_an_unreadable_record(broker: Broker) -> None:
    """A tenant's record has hashes of keys, a model's the URL of a server."""
    with capture_logs() as events:
        async with opened(broker):
            await broker.store(OLD_KEY, b'{"name": ["hunter2"]}')
            await eventually(lambda: [e for e in events if e["event"] == "record_unreadable"])
    assert "hunter2" not in str(events)


async def test_a_bucket_without_history_gets_one(broker: Broker) -> None:
    """Buckets of earlier releases kept one value of each key."""
    await broker.js.create_key_value(KeyValueConfig(bucket=BUCKET, history=1))
    async with opened(broker):
        info = await broker.js.stream_info(f"KV_{BUCKET}")
    assert info.config.max_msgs_per_subject == kv_view.HISTORY
