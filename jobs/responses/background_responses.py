"""Finds responses that need work, and brings each to its end while this process holds the lease."""

import asyncio
from asyncio import TaskGroup
from collections import Counter

import structlog
from nats.aio.msg import Msg

from jobs.batches.item_feeder import ItemFeeder
from jobs.metrics import PENDING_RESPONSES
from jobs.responses.response_runner import ResponseRunner
from registry.store import Registry
from streams import job_subjects, subjects
from streams.broker.broker_client import Broker, StoreRefused
from streams.coordination.lease import Lease
from streams.errors import MillstreamError
from streams.records.responses.response_store import ResponseStore

log = structlog.get_logger()

LOOK_SECONDS = 5.0
MAX_RUNNING = 2048  # each a task and a subscription; the others wait for their turn
MAX_OF_TENANT = 512  # of these, so that one whose model has no worker holds nobody else up
RETRY_SECONDS = 1.0
ResponseKey = tuple[str, str]  # tenant and id


class BackgroundResponses:
    """All tenants' responses that need work."""

    def __init__(
        self, broker: Broker, registry: Registry, feeder: ItemFeeder, lease: Lease
    ) -> None:
        self._broker, self._registry, self._feeder = broker, registry, feeder
        self._lease, self._store = lease, ResponseStore(broker)
        self._runners: dict[ResponseKey, ResponseRunner] = {}
        self._running: Counter[str] = Counter()  # responses of each tenant
        self._told: set[ResponseKey] = set()  # to be looked at
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Look every `LOOK_SECONDS` (5 s), and when a response is said to need work.

        Works whenever this process leads, until cancelled; whatever it does may be repeated by
        another one.
        """
        await self._broker.subscribe(job_subjects.ALL_RESPONSE_CHANGES, self._on_change)
        while True:
            await self._lease.gained.wait()
            await self._lease.run_while_held(self._work())

    def repeat_requests(self) -> None:
        """Publish the requests of all responses again that are under way. Returns at once.

        To be called when the stream that held them is another one.
        """
        for runner in self._runners.values():
            runner.repeat_request()

    async def _on_change(self, msg: Msg) -> None:
        key = subjects.parse_request_id(msg.subject)
        if runner := self._runners.get(key):
            runner.wake()
        elif self._lease.gained.is_set():
            self._told.add(key)
            self._changed.set()

    async def _work(self) -> None:
        async with TaskGroup() as tasks:
            while True:
                for key in await self._list_pending():
                    self._begin(tasks, key)
                until = asyncio.get_running_loop().time() + LOOK_SECONDS
                await self._begin_told(tasks, until)

    async def _begin_told(self, tasks: TaskGroup, until: float) -> None:
        """Begin with responses as they are told, until a time of the event loop's clock."""
        while True:
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                return
            self._changed.clear()
            told, self._told = self._told, set()
            for key in told:
                self._begin(tasks, key)

    async def _list_pending(self) -> list[ResponseKey]:
        try:
            return await self._store.list_pending()
        except MillstreamError as error:
            log.warning("responses_not_listed", reason=str(error))
            return []

    def _begin(self, tasks: TaskGroup, key: ResponseKey) -> None:
        """Begin with a response that is not under way, if there is room for it."""
        is_full = len(self._runners) >= MAX_RUNNING or self._running[key[0]] >= MAX_OF_TENANT
        if key in self._runners or is_full:
            return
        runner = ResponseRunner(self._broker, self._registry, self._feeder, *key)
        self._runners[key] = runner
        self._count(key[0], 1)
        tasks.create_task(self._run(key, runner), name=f"response-{key[1]}")

    def _count(self, tenant: str, change: int) -> None:
        self._running[tenant] += change
        PENDING_RESPONSES.set(len(self._runners))

    async def _run(self, key: ResponseKey, runner: ResponseRunner) -> None:
        """Run until the response needs no more work; what fails is taken up at the next look."""
        try:
            await runner.run()
        except (MillstreamError, StoreRefused) as error:
            log.warning("response_interrupted", response=key[1], reason=str(error))
            await asyncio.sleep(RETRY_SECONDS)
        except Exception:
            log.exception("response_broke", response=key[1])
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._runners.pop(key, None)
            self._count(key[0], -1)
