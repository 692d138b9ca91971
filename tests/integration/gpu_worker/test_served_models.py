"""Models and versions come and go on a running worker, as the registry and records say."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

import dispatcher.service
import gpu_worker.service
from gpu_worker.engines.mock import MockEngine
from gpu_worker.settings import WorkerSettings
from registry.model_inspection import model_from
from registry.models import Model, mock_model
from streams.accounts.access import UserClass
from tests.engine.tiny_models import expected, model, save
from tests.support.accounts_server import process_settings, worker_pins
from tests.support.eventually import eventually
from tests.support.service_process import worker_process
from tests.support.services import (
    BrokerClient,
    broker_client_of,
    dispatcher_settings,
    running,
    worker_settings,
)
from tests.support.versions import make_version

QUICK = {"ttft_ms": 1, "itl_ms": 2}
SLOW = {"ttft_ms": 1, "itl_ms": 20}


def mock_version(name: str, version: str, **options: Any) -> Model:
    """A model of the mock engine with one version of this id."""
    made = mock_model(name, **options)
    only = make_version(version, options=options)
    return made.model_copy(update={"versions": {version: only}, "default_version": version})


def given(nats_url: str, *models: str, **settings: Any) -> WorkerSettings:
    """A worker of the type `small`, whose user is for these models and any version of them."""
    pins = worker_pins("w1", models)
    user = process_settings(nats_url, UserClass.WORKER, "w1", pins)
    return WorkerSettings(**{"nats": nats_url, "id": "w1", "type": "small", **user, **settings})


@pytest.fixture
def said() -> Iterator[list[Any]]:
    """Log events of the worker in this process."""
    with capture_logs() as events:
        yield events


def find(said: list[Any], event: str, model_name: str) -> list[Any]:
    return [each for each in said if each["event"] == event and each["model"] == model_name]


@asynccontextmanager
async def dispatched(nats_url: str, *models: Model) -> AsyncIterator[BrokerClient]:
    async with broker_client_of(nats_url, models[0]) as c:
        for other in models[1:]:
            await c.registry.add_model(other)
        async with running(dispatcher.service, dispatcher_settings(nats_url)):
            yield c


async def states(c: BrokerClient, name: str) -> dict[str, bool]:
    """The versions of a model that are served, and whether they are loaded."""
    report = await c.report(name)
    return {w["version"]: w["resident"] for w in report["workers"]} if report else {}


async def test_a_model_comes_and_goes_on_a_running_worker_beside_another(
    nats_url: str, said: list[Any]
) -> None:
    """The stream of the other model, and the one that was there before, go on as if alone."""
    a, b = mock_model("a", **SLOW), mock_model("b", **QUICK)
    async with (
        dispatched(nats_url, a, b) as c,
        running(gpu_worker.service, given(nats_url, "a", "b")),
    ):
        await c.registry.serve("small", "a")
        steady = await c.send(model="a", max_tokens=300)
        await eventually(lambda: c.tokens(steady) if steady in c.records else None)
        await c.registry.serve("w1", "b")
        for rounds in (1, 2):  # comes, goes, and comes again
            request = await c.send(model="b", max_tokens=30)
            await eventually(partial(c.terminal, request))
            assert len(c.tokens(request)) == 30
            await c.registry.stop_serving("w1", "b")
            await eventually_served(c, "b", {})
            assert len(find(said, "model_removed", "b@1")) == rounds
            await c.registry.serve("w1", "b")
            await eventually_served(c, "b", {"1": True})
        terminal = await eventually(lambda: c.terminal(steady))
        assert (terminal["finish_reason"], len(c.tokens(steady))) == ("length", 300)
        assert c.attempts(steady) == [1]
        await eventually(c.is_idle)


async def eventually_served(c: BrokerClient, name: str, expected_states: dict[str, bool]) -> None:
    async def is_so() -> bool:
        return await states(c, name) == expected_states

    await eventually(is_so)


async def test_a_new_version_replaces_the_old_one_without_a_restart(
    nats_url: str, said: list[Any]
) -> None:
    """A stream of the old version ends on it; what comes later has the new one."""
    async with (
        dispatched(nats_url, mock_version("a", "1", **SLOW)) as c,
        running(gpu_worker.service, given(nats_url, "a", model=("a",))),
    ):
        old = await c.send(model="a", max_tokens=150)
        await eventually(lambda: c.tokens(old) if old in c.records else None)
        await c.registry.add_model(mock_version("a", "2", **QUICK))
        await eventually_served(c, "a", {"2": True})
        terminal = await eventually(lambda: c.terminal(old))
        assert (terminal["finish_reason"], len(c.tokens(old))) == ("length", 150)
        new = await c.send(model="a", max_tokens=5)
        await eventually(lambda: c.terminal(new))
        assert [r["version"] for r in c.records[new] if "version" in r][:1] == ["2"]
        order = [
            (e["event"], e["model"]) for e in said if e["event"] in ("model_ready", "model_removed")
        ]
        assert order.index(("model_removed", "a@1")) > max(
            n for n, (event, _) in enumerate(order) if event == "model_ready"
        ), "the new version is loaded before the old one goes"


async def test_a_new_version_that_cannot_be_loaded_leaves_the_old_one_in_place(
    nats_url: str, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it can be: then it takes over."""
    load, is_away = MockEngine.load, True

    def maybe_load(folder: Path | None = None, **options: Any) -> MockEngine:
        if options["itl_ms"] == SLOW["itl_ms"] and is_away:
            raise OSError("the disk is away")
        return load(folder, **options)

    monkeypatch.setattr(MockEngine, "load", maybe_load)
    async with (
        dispatched(nats_url, mock_version("a", "1", **QUICK)) as c,
        running(gpu_worker.service, given(nats_url, "a", model=("a",))),
    ):
        await eventually_served(c, "a", {"1": True})
        await c.registry.add_model(mock_version("a", "2", **SLOW))
        await eventually(lambda: find(said, "model_not_loaded", "a@2"))
        await eventually_served(c, "a", {"1": True, "2": False})
        request = await c.send(model="a", version="1")
        await eventually(lambda: c.terminal(request))
        is_away = False
        await eventually_served(c, "a", {"2": True})
        request = await c.send(model="a")
        await eventually(lambda: c.terminal(request))


async def test_an_alias_that_moves_moves_what_is_served(nats_url: str) -> None:
    """By one record of the alias, and without a word to the worker."""
    a, b = mock_model("a", **QUICK), mock_model("b", **QUICK)
    async with dispatched(nats_url, a, b) as c:
        await c.registry.set_alias("best", "a")
        await c.registry.serve("small", "best")
        async with running(gpu_worker.service, given(nats_url, "a", "b")):
            await eventually_served(c, "a", {"1": True})
            await c.registry.set_alias("best", "b")
            await eventually_served(c, "b", {"1": True})
            await eventually_served(c, "a", {})


async def test_streams_of_a_model_that_goes_are_handed_over_token_for_token(nats_url: str) -> None:
    """To a worker that still serves it; here the time for the drain is too short to end them."""
    async with dispatched(nats_url, mock_model("a", **SLOW)) as c:
        await c.registry.serve("w1", "a")
        async with running(gpu_worker.service, given(nats_url, "a", drain_seconds=1)):
            request = await c.send(model="a", max_tokens=400)
            await eventually(lambda: c.tokens(request) if request in c.records else None)
            async with running(gpu_worker.service, worker_settings(nats_url, model=("a",))):
                await c.registry.stop_serving("w1", "a")
                terminal = await eventually(lambda: c.terminal(request))
                assert (terminal["finish_reason"], len(c.tokens(request))) == ("length", 400)
                assert c.attempts(request) == [1, 2]
                await eventually(c.is_idle)
                assert await c.ledger_counts() == {request: 1}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model("llama"), tmp_path_factory.mktemp("tiny") / "llama")


async def test_a_model_with_weights_is_loaded_beside_another_and_its_memory_counted(
    nats_url: str, directory: Path, said: list[Any]
) -> None:
    """What is too large alone is refused with the numbers, and leaves the others as they are."""
    tiny = model_from(directory, "tiny")
    settings = given(
        nats_url,
        *("mock", "tiny"),
        model=("mock",),
        memory=64 * 2**20,
        adapter_bytes=1,
        max_sequences=4,
        threads=1,
    )
    async with (
        dispatched(nats_url, mock_model("mock", **QUICK), tiny) as c,
        running(gpu_worker.service, settings),
    ):
        await c.registry.serve("small", "tiny")
        request = await c.send("hello", model="tiny", max_tokens=8)
        await eventually(lambda: c.terminal(request))
        assert c.tokens(request) == expected("llama", list(b"hello"), 8)
        await c.registry.stop_serving("small", "tiny")
        await eventually_served(c, "tiny", {})
        beside = await c.send(model="mock")
        await eventually(lambda: c.terminal(beside))


async def reasons_of(c: BrokerClient, names: set[str]) -> dict[str, str]:
    """Why a worker of the model `mock` serves nothing of these names, once it says so of all."""

    async def told() -> dict[str, str]:
        report = await c.report("mock")
        found: dict[str, str] = (
            report["workers"][0]["not_loaded"] if report and report["workers"] else {}
        )
        return found if found.keys() == names else {}

    return await eventually(told)


async def test_what_cannot_be_served_is_told_and_ends_nothing(
    nats_url: str, directory: Path, said: list[Any]
) -> None:
    """Too large, not permitted, not there: in the heartbeat, the metric, and once in the log."""
    settings = given(nats_url, "mock", "large", model=("mock",), memory=1000)
    large, before = model_from(directory, "large"), failures("large", "too_large")
    async with (
        dispatched(nats_url, mock_model("mock", **QUICK), large, mock_model("other")) as c,
        running(gpu_worker.service, settings),
    ):
        await c.registry.serve("small", "large")
        await c.registry.serve("small", "other")
        reasons = await reasons_of(c, {"large", "other"})
        assert "may take 1,000" in reasons["large"]
        assert "has no rights for 'other@1'" in reasons["other"]
        await c.registry.remove("other")

        async def is_gone() -> bool:
            return "no model 'other'" in (await reasons_of(c, {"large", "other"}))["other"]

        await eventually(is_gone)
        request = await c.send(model="mock")
        await eventually(lambda: c.terminal(request))
        assert len(find(said, "model_not_served", "large")) == 1
        assert failures("large", "too_large") == before + 1
        await c.registry.stop_serving("small", "large")
        await reasons_of(c, {"other"})


async def test_files_that_were_changed_are_not_loaded_and_the_load_is_not_repeated_at_once(
    nats_url: str, directory: Path, tmp_path: Path, said: list[Any]
) -> None:
    """Their hash is another one than the record's; once they are mended the model is served."""
    folder = tmp_path / "changed"
    shutil.copytree(directory, folder)
    changed, file = model_from(folder, "changed"), folder / "tokenizer.json"
    whole = file.read_bytes()
    file.write_bytes(b"{}")
    name = f"changed@{changed.default_version}"
    settings = given(nats_url, "mock", "changed", model=("mock",), threads=1)
    async with (
        dispatched(nats_url, mock_model("mock", **QUICK), changed) as c,
        running(gpu_worker.service, settings),
    ):
        await c.registry.serve("small", "changed")
        reasons = await reasons_of(c, {name})
        assert "tokenizer.json" in reasons[name]
        file.write_bytes(whole)
        request = await c.send("hello", model="changed", max_tokens=4)
        await eventually(lambda: c.terminal(request))
        assert c.tokens(request) == expected("llama", list(b"hello"), 4)
        pauses = [each["retry_after_seconds"] for each in find(said, "model_not_loaded", name)]
        assert pauses == [2.0**number for number in range(len(pauses))]


def failures(name: str, reason: str) -> float:
    labels = {"model": name, "reason": reason}
    return REGISTRY.get_sample_value("millstream_worker_load_failures_total", labels) or 0.0


async def test_a_record_that_is_garbage_changes_nothing(nats_url: str) -> None:
    """Only the admin service writes records; the worker stays at what it had, and goes on."""
    async with (
        dispatched(nats_url, mock_model("a", **QUICK)) as c,
        running(gpu_worker.service, given(nats_url, "a")),
    ):
        await c.registry.serve("small", "a")
        await eventually_served(c, "a", {"1": True})
        for garbage in (b"\xff", b"{}", json.dumps({"on": "*", "models": 7}).encode()):
            await c.broker.store("$KV.registry.served.w1", garbage, {})
        request = await c.send(model="a")
        await eventually(lambda: c.terminal(request))
        await c.registry.serve("w1", "a@1")
        await eventually_served(c, "a", {"1": True})


async def test_a_loaded_model_is_served_where_it_is_before_it_is_loaded_elsewhere(
    nats_url: str,
) -> None:
    """The second worker would have to load it: it leaves the work to the first, which has room."""
    async with dispatched(nats_url, mock_model("a", **QUICK)) as c:
        first = worker_settings(nats_url, model=("a",))
        async with running(gpu_worker.service, first):
            await eventually_served(c, "a", {"1": True})
            second = given(nats_url, "a", model=("a",))
            async with running(gpu_worker.service, second):
                requests = [await c.send(model="a") for _ in range(10)]
                await eventually(lambda: all(c.terminal(each) for each in requests))


async def test_a_worker_killed_in_mid_load_leaves_its_model_to_the_next(
    nats_url: str, directory: Path, tmp_path: Path
) -> None:
    """Nothing is lost: the request waits for whoever loads the model after it."""
    tiny = model_from(directory, "tiny")
    pins = worker_pins("doomed", ("mock", "tiny"))
    async with dispatched(nats_url, mock_model("mock", **QUICK), tiny) as c:
        with worker_process(nats_url, tmp_path / "log", id="doomed", type="small") as doomed:
            process_settings(nats_url, UserClass.WORKER, "doomed", pins)
            await eventually(lambda: doomed.has_logged("model_ready"))
            await c.registry.serve("small", "tiny")
            await eventually(lambda: doomed.has_logged("model_added"))
            request = await c.send("hello", model="tiny", max_tokens=8)
            doomed.kill()
        async with running(gpu_worker.service, given(nats_url, "tiny", "mock", threads=1)):
            await eventually(lambda: c.terminal(request))
            assert c.tokens(request) == expected("llama", list(b"hello"), 8)
            await eventually(c.is_idle)
