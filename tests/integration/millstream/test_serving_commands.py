"""`millstream models serve`, `unserve` and `served`: what operators say, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

import admin.service
from millstream.admin.admin_client import AdminRefused
from millstream.models.serving import list_served, serve, unserve
from millstream.models.settings import ListSettings, ServeSettings
from registry import store
from registry.models import mock_model
from registry.store import Registry
from tests.support.accounts_server import connect
from tests.support.services import admin_settings, command_settings, opened_registry, running

STOP = asyncio.Event()


@pytest.fixture
async def registry(nats_url: str) -> AsyncIterator[Registry]:
    """The registry of a cell with an admin service and two models."""
    async with (
        running(admin.service, admin_settings(nats_url)),
        connect(nats_url) as broker,
        opened_registry(broker) as opened,
    ):
        for name in ("a", "b"):
            await opened.add_model(mock_model(name))
        yield opened


def settings(url: str, model: str, on: str) -> ServeSettings:
    told = {**command_settings(url), "model": model, "on": on, "json": True}
    return ServeSettings.model_validate(told)


async def test_a_record_grows_and_shrinks_by_what_operators_say(
    nats_url: str, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each change is one object of the record as it is then; a record without models is gone."""
    await serve(settings(nats_url, "a", "l4"), STOP)
    await serve(settings(nats_url, "b@1", "l4"), STOP)
    await serve(settings(nats_url, "a", "l4"), STOP)
    await unserve(settings(nats_url, "a", "l4"), STOP)
    await list_served(
        ListSettings.model_validate({**command_settings(nats_url), "json": True}), STOP
    )
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["models"] for each in told] == [
        ["a"],
        ["a", "b@1"],
        ["a", "b@1"],
        ["b@1"],
        ["b@1"],
    ]
    assert told[-1] == {"on": "l4", "models": ["b@1"], "workers": []}
    await unserve(settings(nats_url, "b@1", "l4"), STOP)
    await registry.wait_until(lambda: not registry.served)
    await list_served(ListSettings.model_validate(command_settings(nats_url)), STOP)


async def test_what_is_not_there_or_too_much_is_refused(
    nats_url: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what there is instead, and the limit."""
    monkeypatch.setattr(store, "MAX_SERVED", 1)
    with pytest.raises(AdminRefused, match="'none'"):
        await serve(settings(nats_url, "none", "l4"), STOP)
    with pytest.raises(AdminRefused, match="'a@2'"):
        await serve(settings(nats_url, "a@2", "l4"), STOP)
    await serve(settings(nats_url, "a", "l4"), STOP)
    with pytest.raises(AdminRefused, match="'b' is not a model that 'l4' has to serve: a"):
        await unserve(settings(nats_url, "b", "l4"), STOP)
    with pytest.raises(AdminRefused, match="has 1 models to serve, the limit"):
        await serve(settings(nats_url, "b", "l4"), STOP)


async def test_writers_at_once_lose_no_model(nats_url: str, registry: Registry) -> None:
    """Each adds its own to the record that it finds."""
    names = [f"a{number}" for number in range(5)]
    for name in names:
        await registry.set_alias(name, "a")
    await asyncio.gather(*(serve(settings(nats_url, name, "w1"), STOP) for name in names))
    await registry.wait_until(lambda: {*registry.served["w1"].models} == {*names})
