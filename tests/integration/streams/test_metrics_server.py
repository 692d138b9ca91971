"""The metrics port of a service: what it answers where, and when its probes fail."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import admin.service
import dispatcher.service
import gateway.service
import gpu_worker.service
from gateway.settings import GatewaySettings
from streams import metrics_server
from streams.base_settings import ServiceSettings
from streams.metrics_server import MetricsAddressUnusable, serve_metrics
from tests.support.eventually import eventually
from tests.support.gateways import gateway_settings, gateways, register
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.services import admin_settings, dispatcher_settings, running, worker_settings


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()
    except OSError:
        return 0, ""


async def get(port: int, path: str) -> tuple[int, str]:
    """The status and body of an answer; 0 where nobody listens."""
    return await asyncio.to_thread(_get, port, path)


async def readiness(port: int) -> tuple[int, dict[str, Any]]:
    status, text = await get(port, "/readyz")
    return status, json.loads(text or "{}")


async def until_ready(port: int, wanted: int = 200) -> None:
    async def is_so() -> bool:
        return (await get(port, "/readyz"))[0] == wanted

    await eventually(is_so)


async def test_three_paths_are_answered_and_no_other() -> None:
    """A probe of a path that is not there must not pass."""
    settings = ServiceSettings(metrics_port=free_port())
    ready = True
    with serve_metrics(settings, {"part": lambda: ready}):
        port = settings.metrics_port
        status, text = await get(port, "/metrics")
        assert (status, "python_info" in text) == (200, True)
        assert (await get(port, "/healthz"))[0] == 200
        assert await readiness(port) == (200, {"ok": True, "event_loop": True, "part": True})
        ready = False
        assert await readiness(port) == (503, {"ok": False, "event_loop": True, "part": False})
        assert (await get(port, "/healthz"))[0] == 200
        for path in ("/", "/metric", "/metrics/x", "/favicon.ico"):
            assert (await get(port, path))[0] == 404
    assert (await get(port, "/metrics"))[0] == 0


async def test_a_hanging_event_loop_fails_both_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a service answers nobody, though its process lives."""
    monkeypatch.setattr(metrics_server, "LOOP_SECONDS", 0.1)
    settings = ServiceSettings(metrics_port=free_port())
    paths = ("/healthz", "/readyz")
    with serve_metrics(settings, {}), ThreadPoolExecutor() as threads:
        probes = [threads.submit(_get, settings.metrics_port, path) for path in paths]
        while not all(probe.done() for probe in probes):
            time.sleep(0.01)  # noqa: ASYNC251 - so the event loop hangs
        assert [probe.result()[0] for probe in probes] == [503, 503]


async def test_it_listens_where_it_is_told() -> None:
    """On loopback unless told otherwise; an address of another machine is an error that says so."""
    settings = ServiceSettings(metrics_port=free_port())
    with serve_metrics(settings, {}), pytest.raises(MetricsAddressUnusable, match="in use"):
        with serve_metrics(settings, {}):
            pass
    assert settings.metrics_host == "127.0.0.1"
    elsewhere = ServiceSettings(metrics_host="192.0.2.1", metrics_port=free_port())
    with pytest.raises(MetricsAddressUnusable, match=r"192\.0\.2\.1.*assign"):
        with serve_metrics(elsewhere, {}):
            pass


async def test_services_are_ready_when_they_can_serve(nats_url: str) -> None:
    """A worker once its models are loaded, a dispatcher once it campaigns."""
    ports = free_port(), free_port()
    waiting = worker_settings(nats_url, model=("mock",), metrics_port=ports[0])
    async with gateways(nats_url):
        async with running(gpu_worker.service, waiting):
            # No model of this name is registered yet
            await until_ready(ports[0], 503)
            assert (await get(ports[0], "/healthz"))[0] == 200
            await register(nats_url)
            await until_ready(ports[0])
        settings = dispatcher_settings(nats_url, metrics_port=ports[1])
        async with running(dispatcher.service, settings):
            await until_ready(ports[1])
            assert "millstream_" in (await get(ports[1], "/metrics"))[1]


async def test_a_lost_broker_is_seen(nats_server: NatsServer) -> None:
    """A service without its broker serves nobody."""
    port = free_port()
    async with gateways(nats_server.url):
        settings = dispatcher_settings(nats_server.url, metrics_port=port)
        async with running(dispatcher.service, settings):
            await until_ready(port)
            nats_server.kill()
            await until_ready(port, 503)
            assert (await readiness(port))[1]["nats"] is False
            nats_server.start()
            await until_ready(port)


@pytest.mark.parametrize("public", [False, True])
async def test_strangers_do_not_see_tenants_names(nats_url: str, public: bool) -> None:
    """A gateway that others can reach has its metrics on the metrics port, unless told so."""
    settings = gateway_settings(
        nats_url, host="0.0.0.0", metrics_port=free_port(), public_metrics=public
    )
    async with (
        running(admin.service, admin_settings(nats_url)),
        running(gateway.service, settings),
    ):
        await eventually(lambda: _answers(settings.metrics_port))
        await eventually(lambda: _answers(settings.port))
        text = (await get(settings.metrics_port, "/metrics"))[1]
        assert "millstream_followed_requests" in text
        assert (await get(settings.port, "/metrics"))[0] == (200 if public else 404)
        told = json.loads((await get(settings.port, "/readyz"))[1])
        assert told.keys() - {"ready"} == (
            {"nats", "unusable_streams", "workers"} if public else set()
        )
        assert (await readiness(settings.metrics_port))[1]["nats"] is True


async def _answers(port: int) -> bool:
    return (await get(port, "/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("host", "public"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_keeps_metrics_on_the_public_port(host: str, public: bool) -> None:
    """There, everybody who can ask may ask; benchmark tools look for them there."""
    assert GatewaySettings(host=host).has_public_metrics is public
