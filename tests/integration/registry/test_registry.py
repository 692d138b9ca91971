"""The registry as services see it: live, mergeable, and there while the broker is not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from registry.models import Adapter, Model, mock_model
from registry.store import NameTaken, Registry, VersionExists
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable, ModelNotFound, PayloadTooLarge
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer
from tests.support.services import always
from tests.support.versions import make_version, with_facts


@asynccontextmanager
async def registry_of(broker: Broker) -> AsyncIterator[Registry]:
    registry = await Registry.open(broker, declares=always)
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def registry_at(url: str) -> AsyncIterator[Registry]:
    async with connect(url, "test") as broker, registry_of(broker) as registry:
        yield registry


def model(name: str, version: str, digest: str = "d") -> Model:
    made = make_version(version, digest=digest)
    fields = mock_model(name).model_dump() | {"versions": {version: made}}
    return Model.model_validate(fields | {"default_version": version})


async def test_every_service_sees_a_new_model(nats_url: str) -> None:
    """A gateway must not be restarted for a model to appear."""
    async with registry_at(nats_url) as writer, registry_at(nats_url) as reader:
        await writer.add_model(mock_model("Qwen/Qwen2.5-0.5B"))
        assert "Qwen/Qwen2.5-0.5B" in writer.models  # one's own write is seen at once
        await reader.wait_until(lambda: "Qwen/Qwen2.5-0.5B" in reader.models)
        await writer.remove("Qwen/Qwen2.5-0.5B")
        await reader.wait_until(lambda: not reader.models)


async def test_a_registry_opens_with_what_was_there(nats_url: str) -> None:
    """A service that starts late knows as much as the others."""
    async with connect(nats_url, "a") as broker:
        async with registry_of(broker) as writer:
            for name in ("b", "a", "gone"):
                await writer.add_model(mock_model(name))
            await writer.remove("gone")
        async with registry_of(broker) as reader:
            assert list(reader.models) == ["a", "b"]


async def test_opening_never_shows_less_than_there_is(nats_url: str) -> None:
    """nats-py's watcher sometimes does: a gateway would answer 404 for a model that exists."""
    async with connect(nats_url, "a") as broker:
        async with registry_of(broker) as writer:
            await writer.add_model(mock_model("m"))
        for _ in range(50):
            async with registry_of(broker) as reader:
                assert "m" in reader.models


async def test_a_bucket_of_another_maker_is_followed_too(nats_url: str) -> None:
    """An operator may have created the bucket with the `nats` command."""
    async with connect(nats_url, "a") as broker:
        bucket = await broker.js.create_key_value(bucket="registry")
        async with registry_of(broker) as registry:
            await bucket.put("model.m", mock_model("m").model_dump_json().encode())
            await registry.wait_until(lambda: "m" in registry.models, 5)
            await bucket.delete("model.m")
            await registry.wait_until(lambda: not registry.models, 5)


async def test_versions_of_concurrent_writers_merge(nats_url: str) -> None:
    """Two operators who add versions at once must not undo each other."""
    async with registry_at(nats_url) as first, registry_at(nats_url) as second:
        adds = [
            r.add_model(model("m", f"{i}{j}"))
            for i in range(5)
            for j, r in enumerate((first, second))
        ]
        await asyncio.gather(*adds)
        await second.wait_until(lambda: len(second.models["m"].versions) == 10)


async def test_a_version_never_changes(nats_url: str) -> None:
    """Requests in flight and their second attempts rely on one set of files per version."""
    async with registry_at(nats_url) as registry:
        await registry.add_model(model("m", "1", "abc"))
        with pytest.raises(VersionExists, match="'1' of 'm'"):
            await registry.add_model(model("m", "1", "def"))
        assert registry.models["m"].default.digest == "abc"


async def test_names_aliases_and_pins_resolve(nats_url: str) -> None:
    """Clients name a model, an alias of it, or a version of either."""
    async with registry_at(nats_url) as registry:
        await registry.add_model(model("m", "1"))
        await registry.add_model(model("m", "2"))
        await registry.set_alias("chat", "m")
        await registry.set_alias("stable", "m", "1")
        asked = ["m", "m@1", "chat", "chat@1", "stable", "stable@2"]
        assert [registry.resolve(name)[1].id for name in asked] == ["2", "1", "2", "1", "1", "2"]


@pytest.mark.parametrize("name", ["nope", "m@3", "m@", "@1", "", "*", "no.such>*", "m@1@1"])
async def test_an_unknown_name_is_told_as_it_came(nats_url: str, name: str) -> None:
    """Whatever a stranger sends is a lookup, nothing else."""
    async with registry_at(nats_url) as registry:
        await registry.add_model(model("m", "1"))
        with pytest.raises(ModelNotFound) as refused:
            registry.resolve(name)
        assert refused.value.name == name


def adapter(name: str, of: str = "m", digest: str = "d") -> Adapter:
    files = {"adapter_config.json": digest}
    made = {"name": name, "model": of, "directory": "/a", "files": files, "digest": digest}
    return Adapter.model_validate({**made, "rank": 8, "parameters": 64, "targets": ["q_proj"]})


async def test_an_adapter_is_named_behind_its_model(nats_url: str) -> None:
    """Whatever leads to the model leads to its adapters; a model with a colon is itself."""
    async with registry_at(nats_url) as registry:
        await registry.add_model(model("m", "1"))
        await registry.add_model(model("m", "2"))
        await registry.add_model(model("m:8b", "1"))
        await registry.set_alias("stable", "m", "1")
        await registry.add_adapter(adapter("x"))
        await registry.add_adapter(adapter("x", "m:8b"))
        found = [registry.resolve_target(name) for name in ("m:x", "m@1:x", "stable:x", "m:8b:x")]
        assert [(t.version.id, t.adapter and t.adapter.id) for t in found] == [
            ("2", "m:x"),
            ("1", "m:x"),
            ("1", "m:x"),
            ("1", "m:8b:x"),
        ]
        assert [registry.resolve_target(name).adapter for name in ("m", "m@1", "m:8b")] == [
            None
        ] * 3


@pytest.mark.parametrize("name", ["m:y", "m:", ":x", "m:x@1", "m@3:x", "n:x", "m:x:x", "x"])
async def test_an_unknown_adapter_is_told_as_it_came(nats_url: str, name: str) -> None:
    """It must never become the model without it."""
    async with registry_at(nats_url) as registry:
        await registry.add_model(model("m", "1"))
        await registry.add_model(model("n", "1"))
        await registry.add_adapter(adapter("x"))
        with pytest.raises(ModelNotFound) as refused:
            registry.resolve_target(name)
        assert refused.value.name == name


async def test_an_adapter_is_no_model_to_serve(nats_url: str) -> None:
    """A worker that was told to serve one would serve its base instead."""
    async with registry_at(nats_url) as registry:
        await registry.add_model(model("m", "1"))
        await registry.add_adapter(adapter("x"))
        with pytest.raises(ModelNotFound, match="'m:x'"):
            registry.resolve("m:x")


async def test_an_adapter_needs_a_model_and_a_name_of_its_own(nats_url: str) -> None:
    """Otherwise nobody could ask for it."""
    async with registry_at(nats_url) as registry:
        with pytest.raises(ModelNotFound, match="'m'"):
            await registry.add_adapter(adapter("x"))
        await registry.add_model(model("m", "1"))
        await registry.add_model(model("m:x", "1"))
        with pytest.raises(NameTaken, match="'m:x'"):
            await registry.add_adapter(adapter("x"))


async def test_an_adapter_is_replaced_and_removed(nats_url: str) -> None:
    """A training run's next result takes the name; a model that goes takes its adapters along."""
    async with registry_at(nats_url) as registry:
        await registry.add_model(model("m", "1"))
        for made in (adapter("x"), adapter("x", digest="e"), adapter("y"), adapter("z")):
            await registry.add_adapter(made)
        assert [a.digest for a in registry.adapters.values()] == ["e", "d", "d"]
        await registry.remove("m:y")
        assert list(registry.adapters) == ["m:x", "m:z"]
        await registry.remove("m")
        assert not registry.adapters


async def test_an_alias_needs_a_target_and_a_name_of_its_own(nats_url: str) -> None:
    """A typing error must not hide a model or lead nowhere."""
    async with registry_at(nats_url) as registry:
        await registry.add_model(mock_model("m"))
        with pytest.raises(ModelNotFound):
            await registry.set_alias("chat", "nope")
        with pytest.raises(NameTaken):
            await registry.set_alias("m", "m")


async def test_a_removed_model_takes_its_aliases_with_it(nats_url: str) -> None:
    """An alias that leads nowhere would answer for a model of that name later."""
    async with registry_at(nats_url) as registry:
        await registry.add_model(mock_model("m"))
        await registry.set_alias("chat", "m")
        await registry.remove("m")
        assert (dict(registry.models), dict(registry.aliases)) == ({}, {})
        await registry.add_model(mock_model("m"))  # behind a delete marker
        assert registry.resolve("m")


async def test_an_unreadable_record_harms_nobody_else(nats_url: str) -> None:
    """One bad record, or one of a newer release, must not take all models away."""
    async with connect(nats_url, "a") as broker, registry_of(broker) as registry:
        await broker.store("$KV.registry.model.bad", b"{")
        await broker.store("$KV.registry.colour.blue", b"{}")
        await registry.add_model(mock_model("m"))
        assert list(registry.models) == ["m"]
        await registry.add_model(mock_model("bad"))  # and can be put right
        assert list(registry.models) == ["bad", "m"]


async def test_observers_hear_of_each_change(nats_url: str) -> None:
    """The worker that waits for its model and the gateway's caches need to know."""
    async with registry_at(nats_url) as registry:
        seen: list[list[str]] = []
        registry.on_change(lambda: seen.append(list(registry.models)))
        await registry.add_model(mock_model("a"))
        await registry.add_model(mock_model("a"))  # changes nothing
        await registry.add_model(mock_model("b"))
        assert seen == [["a"], ["a", "b"]]


async def test_the_view_survives_a_broker_restart(nats_server: NatsServer) -> None:
    """Models stay known while the broker is away, and changes arrive when it is back."""
    url = nats_server.url
    async with (
        connect(url, "a") as broker,
        registry_of(broker) as writer,
        registry_at(url) as reader,
    ):
        await writer.add_model(mock_model("before"))
        await reader.wait_until(lambda: "before" in reader.models)
        nats_server.kill()
        await eventually(lambda: not broker.is_connected)
        assert "before" in reader.models
        nats_server.restart()
        await eventually(lambda: broker.is_connected)
        await writer.add_model(mock_model("after"))
        await reader.wait_until(lambda: list(reader.models) == ["after", "before"])


async def test_opening_without_a_broker_ends_in_an_error(nats_server: NatsServer) -> None:
    """A service that cannot know its models must say so, not wait for ever."""
    async with connect(nats_server.url, "a") as broker:
        nats_server.kill()
        with pytest.raises(BrokerUnavailable, match="registry"):
            await Registry.open(broker, seconds=0.5)
        nats_server.restart()  # for an orderly end


async def test_a_record_that_nats_does_not_carry_is_refused(nats_url: str) -> None:
    """NATS would close the connection of whoever sends it."""
    async with connect(nats_url, "a") as broker, registry_of(broker) as registry:
        large = with_facts(mock_model("large"), chat_template="x" * 1_100_000)
        with pytest.raises(PayloadTooLarge, match="larger than the limit"):
            await registry.add_model(large)
        await registry.add_model(mock_model("small"))
        assert list(registry.models) == ["small"]
