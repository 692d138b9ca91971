"""A machine that is taken back: its metadata service is asked, and its worker leaves in time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

import dispatcher.service
import gpu_worker.service
from gpu_worker.metrics import METADATA_ERRORS
from gpu_worker.reclaim.metadata_client import MetadataUnavailable
from gpu_worker.reclaim.notice_sources import Provider, make_source
from streams import subjects
from streams.messages import Heartbeat
from tests.integration.gpu_worker.test_worker_death import gap_free
from tests.support.eventually import eventually
from tests.support.metadata_services import (
    AwsService,
    AzureService,
    GcpService,
    MetadataService,
    metadata_service,
)
from tests.support.services import (
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)

SLOW = {"ttft_ms": 1, "itl_ms": 5}
PROVIDERS = {
    AwsService: Provider.AWS,
    GcpService: Provider.GCP,
    AzureService: Provider.AZURE,
}
FAULTS = [500, 404, 302, b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n<html>", b"x" * 10**6, b""]


def take_back(service: MetadataService, seconds: float = 30.0) -> None:
    """Have the provider say that it takes the machine back."""
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    if isinstance(service, AwsService):
        time = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        action = f'{{"action": "terminate", "time": "{time}"}}'.encode()
        service.documents["spot/instance-action"] = action
    elif isinstance(service, GcpService):
        service.preempt()
    elif isinstance(service, AzureService):
        service.schedule("Preempt", service.name, format_datetime(at, usegmt=True))


class Watched:
    """A worker on a machine with a metadata service, and its last heartbeat."""

    def __init__(self, task: "asyncio.Task[None]") -> None:
        self.task = task
        self.beats: list[Heartbeat] = []

    async def on_beat(self, msg: Msg) -> None:
        self.beats.append(Heartbeat.unpack(msg.data))


@asynccontextmanager
async def watched_worker(
    c: BrokerClient, nats_url: str, service: MetadataService
) -> AsyncIterator[Watched]:
    settings = worker_settings(
        nats_url,
        id="spot",
        reclaim_notices=PROVIDERS[type(service)],
        metadata_url=service.url,
        ack_wait_seconds=60,
    )
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        worker = Watched(tasks.create_task(gpu_worker.service.run(settings, stop)))
        await c.broker.subscribe(subjects.fleet("mock", "spot"), worker.on_beat)
        await eventually(lambda: worker.beats)
        yield worker
        stop.set()


@pytest.mark.parametrize("kind", PROVIDERS)
async def test_a_notice_drains_the_worker_and_others_go_on(
    nats_url: str, kind: type[MetadataService]
) -> None:
    """No token is lost or doubled, and the heartbeat says why it leaves."""
    staying = worker_settings(nats_url, id="stays", drain_seconds=0)
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=20) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        metadata_service(kind()) as service,
        watched_worker(c, nats_url, service) as worker,
    ):
        request = await c.send("long", max_tokens=4_000)  # longer than any notice
        await eventually(lambda: len(c.records.get(request, [])) > 5)
        async with running(gpu_worker.service, staying):
            take_back(service)
            await eventually(worker.task.done)
            assert worker.beats[-1].draining
            assert worker.beats[-1].reclaiming
            at_hand_over = len(c.tokens(request))
            await eventually(lambda: len(c.tokens(request)) > at_hand_over)
        assert c.attempts(request) == [1, 2]
        assert gap_free(c, request)
        if isinstance(service, AzureService):
            assert service.started == ["event-1"]  # so that Azure need not wait any longer


async def test_without_others_work_is_left_a_second_before_the_end(nats_url: str) -> None:
    """It waits in the broker until there is another worker."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        metadata_service(AwsService()) as service,
        watched_worker(c, nats_url, service) as worker,
    ):
        request = await c.send("long", max_tokens=1_000)
        await eventually(lambda: len(c.records.get(request, [])) > 5)
        with capture_logs() as logs:
            take_back(service, seconds=2.5)
            await eventually(worker.task.done)
        (notice,) = (each for each in logs if each["event"] == "reclaim_notice")
        assert notice["seconds_left"] <= 2.5
        (drain,) = (each for each in logs if each["event"] == "draining")
        assert drain["at_most_seconds"] <= 1.5
        assert c.terminal(request) is None
        async with running(gpu_worker.service, worker_settings(nats_url, id="next")):
            await eventually(lambda: c.terminal(request))
        assert len(c.tokens(request)) == 1_000


@pytest.mark.parametrize("kind", PROVIDERS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_wrong_answer_is_an_error_and_no_notice(
    kind: type[MetadataService], fault: int | bytes
) -> None:
    """AWS answers 404 where there is no notice, but never to the question for a token."""
    async with metadata_service(kind()) as service:
        source = make_source(PROVIDERS[kind], service.url, lambda: 0.0)
        service.fail(fault)
        for _ in range(2):
            with pytest.raises(MetadataUnavailable):
                await source.look()
        service.is_faulty = False
        assert await source.look() is None
        take_back(service)
        notice = await source.look()
        assert notice
        assert not notice.is_hint
        if kind is AzureService:
            service.fail(500)
            with pytest.raises(MetadataUnavailable):
                await source.acknowledge(notice)


async def test_a_service_that_fails_neither_ends_the_worker_nor_hides_the_notice(
    nats_url: str,
) -> None:
    """Each trouble is logged once, and counted each time."""
    async with broker_client(nats_url, **SLOW) as c, metadata_service(GcpService()) as service:
        service.fail(500)
        before = METADATA_ERRORS._value.get()
        with capture_logs() as logs:
            async with watched_worker(c, nats_url, service) as worker:
                await eventually(lambda: METADATA_ERRORS._value.get() >= before + 3)
                assert not worker.task.done()
                service.is_faulty = False
                take_back(service)
                await eventually(worker.task.done)
        assert [each["event"] for each in logs].count("metadata_unavailable") == 1


async def has_asked(service: MetadataService, count: int) -> bool:
    return len(service.questions) >= count


async def test_a_service_that_hangs_is_given_up_and_asked_again(nats_url: str) -> None:
    async with broker_client(nats_url, **SLOW) as c, metadata_service(AwsService()) as service:
        service.fail(None)
        async with watched_worker(c, nats_url, service) as worker:
            await eventually(partial(has_asked, service, 2))
            service.is_faulty = False
            take_back(service)
            await eventually(worker.task.done)


async def test_an_expired_token_is_replaced(nats_url: str) -> None:
    """IMDSv2 refuses it with 401 from one question to the next."""
    async with broker_client(nats_url, **SLOW) as c, metadata_service(AwsService()) as service:
        assert isinstance(service, AwsService)
        async with watched_worker(c, nats_url, service) as worker:
            await eventually(partial(has_asked, service, 2))
            service.token = "token-2"
            take_back(service)
            await eventually(worker.task.done)


async def test_a_hint_drains_nobody(nats_url: str) -> None:
    """A rebalance recommendation is logged once; the machine may stay."""
    async with broker_client(nats_url, **SLOW) as c, metadata_service(AwsService()) as service:
        assert isinstance(service, AwsService)
        hint = b'{"noticeTime": "2026-11-29T08:00:00Z"}'
        service.documents["events/recommendations/rebalance"] = hint
        with capture_logs() as logs:
            async with watched_worker(c, nats_url, service) as worker:
                await eventually(partial(has_asked, service, 8))
                assert not worker.task.done()
                assert not worker.beats[-1].draining
        assert [each["event"] for each in logs].count("reclaim_hint") == 1


async def test_azure_events_of_other_machines_and_kinds_drain_nobody(nats_url: str) -> None:
    async with broker_client(nats_url, **SLOW) as c, metadata_service(AzureService()) as service:
        assert isinstance(service, AzureService)
        at = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
        service.schedule("Preempt", "worker_4", at, "event-2")
        service.schedule("Reboot", service.name, at, "event-3")
        async with watched_worker(c, nats_url, service) as worker:
            await eventually(partial(has_asked, service, 4))
            assert not worker.task.done()
        assert service.started == []


def test_only_the_metadata_service_itself_is_believed(nats_url: str) -> None:
    """Whoever answers there ends the worker."""
    for url in ("http://10.0.0.1", "https://127.0.0.1", "http://169.254.169.254.example.com"):
        with pytest.raises(ValueError, match="whoever answers there ends this worker"):
            worker_settings(nats_url, metadata_url=url)
