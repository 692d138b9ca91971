"""What a worker does about a model that is not registered, or whose record decides too much."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpu_worker import service
from gpu_worker.models import registration
from gpu_worker.models.record_checks import ModelRefused
from gpu_worker.models.registration import NotRegistered, describe_missing, wait_for_models
from registry.models import Adapter, mock_model
from registry.remote_models import RemoteServer, remote_model
from registry.store import Registry
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.services import always, model_with_versions, worker_settings

NO_TIME, LONG = 0.05, 3600.0


@pytest.fixture
async def registry(nats_url: str) -> AsyncIterator[Registry]:
    """An empty registry."""
    async with connect(nats_url, "test") as broker:
        opened = await Registry.open(broker, declares=always)
        yield opened
        await opened.close()


def set_waits(monkeypatch: pytest.MonkeyPatch, *, empty: float, others: float) -> None:
    monkeypatch.setattr(registration, "EMPTY_WAIT_SECONDS", empty)
    monkeypatch.setattr(registration, "WAIT_SECONDS", others)


async def test_a_worker_says_which_model_it_waits_for_and_at_last_what_there_is(
    nats_url: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a typo would look like a worker that hangs, and then like a broker that does."""
    await registry.add_model(mock_model())
    set_waits(monkeypatch, empty=LONG, others=NO_TIME)
    with (
        capture_logs() as events,
        pytest.raises(NotRegistered, match=r"'mokc' \(did you mean 'mock'\?\).*models add"),
    ):
        await service.run(worker_settings(nats_url, model=("mokc",)), asyncio.Event())
    (waiting,) = (each for each in events if each["event"] == "waiting_for_model")
    assert waiting["model"] == "mokc"
    assert "it has 'mock'" in waiting["reason"]


async def test_an_empty_registry_gets_more_time(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one of a cell that is being made; a model among others is more likely a typo."""
    set_waits(monkeypatch, empty=NO_TIME, others=LONG)
    with pytest.raises(NotRegistered, match="no model 'mock', it has none"):
        await wait_for_models(registry, ["mock"])


@pytest.mark.parametrize("others", [0, 1])
async def test_a_worker_that_starts_before_its_models_are_registered_serves_them(
    registry: Registry, others: int
) -> None:
    """As where all services of a cell start at once; each model is said, and waited for."""
    for number in range(others):
        await registry.add_model(mock_model(f"other-{number}"))
    with capture_logs() as events:
        waiting = asyncio.create_task(wait_for_models(registry, ["a", "b@1"]))
        await eventually(lambda: len(events) == 2)
        for name in ("a", "b"):
            await registry.add_model(mock_model(name))
        assert list(await waiting) == ["a@1", "b@1"]


async def test_it_says_what_the_registry_has_instead(registry: Registry) -> None:
    """A version that is not there, an adapter, an alias; and no more names than can be read."""
    await registry.add_model(model_with_versions("1", "2"))
    await registry.set_alias("chat", "mock")
    adapter = Adapter(
        name="sql",
        model="mock",
        directory="/",
        files={},
        digest="",
        rank=1,
        parameters=1,
        targets=[],
    )
    await registry.add_adapter(adapter)
    assert "no version '3', it has '1', '2'" in describe_missing(registry, "chat@3")
    assert "'chat:sql' is an adapter" in describe_missing(registry, "chat:sql")
    assert "it has 'mock', 'chat'" in describe_missing(registry, "nope")
    for number in range(registration.MOST_NAMES):
        await registry.add_model(mock_model(f"many-{number}"))
    assert describe_missing(registry, "nope").endswith(" and 2 more")


async def test_a_record_that_decides_too_much_stops_the_worker_by_the_models_name(
    nats_url: str, registry: Registry
) -> None:
    """Whoever wrote it wants prompts and a variable's value; a worker without models is no use."""
    server = RemoteServer(url="https://evil.example.com", model="m", api_key_variable="HOME")
    await registry.add_model(remote_model(server, "far", context=9))
    with pytest.raises(ModelRefused, match=r"'far@\w+' is refused: .* --upstream-host evil"):
        await service.run(worker_settings(nats_url, model=("far",)), asyncio.Event())


async def test_a_directory_outside_the_roots_is_not_read(
    nats_url: str, registry: Registry, tmp_path: Path
) -> None:
    """Not even the size of its weights."""
    version = mock_model().default.model_copy(update={"directory": str(tmp_path / "other")})
    model = mock_model("m").model_copy(update={"versions": {version.id: version}})
    await registry.add_model(model)
    settings = worker_settings(nats_url, model=("m",), model_root=(tmp_path / "models",))
    with pytest.raises(ModelRefused, match="--model-root"):
        await service.run(settings, asyncio.Event())
