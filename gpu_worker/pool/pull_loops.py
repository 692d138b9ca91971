"""The pull loops of one model server: shared work by priority, and work placed on this worker."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from nats.js.api import ConsumerConfig

from gpu_worker.identity import WorkerIdentity
from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.broker.pull_loop import Delivery, PullLoop
from streams.broker.retry import retry_forever, wait_for_tasks
from streams.subjects import PoolKey, Priority

_STOP_SECONDS = 2.0
_CHECK_SECONDS = 0.2  # between two looks at what waits to be pulled
_EMPTY_CHECKS = 2  # in a row: what was on its way to the broker at the first is there at the second

PullLimit = Callable[[Priority], int]
OnDelivery = Callable[[Delivery], None]


class PullLoops:
    """Pulls one model server's work from the broker and calls `on_delivery` with each message.

    `pull_limit` returns how many messages of a priority to ask for at once. `pulled` has, by
    priority, the highest stream sequence pulled of the work that all workers of the model share.
    `pulled_own` is that of the work which the dispatcher has placed on this worker.
    """

    def __init__(
        self,
        broker: Broker,
        identity: WorkerIdentity,
        pull_limit: PullLimit,
        on_delivery: OnDelivery,
    ) -> None:
        self.pulled: dict[str, int] = {}
        self.pulled_own = 0
        self._broker, self._identity = broker, identity
        self._pull_limit, self._on_delivery = pull_limit, on_delivery
        self._pulls: list[PullLoop] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, tasks: asyncio.TaskGroup, ack_wait_seconds: float) -> None:
        """Declare the consumers on the broker, then pull from each in a task of the group `tasks`.

        Returns once the tasks are started; waits while the broker does not answer. A consumer
        redelivers a message that was not acknowledged for `ack_wait_seconds`. Raises
        `TopologyMismatch` if the broker refuses its configuration.
        """
        self._pulls = [
            await self._create_own_pull(ack_wait_seconds),
            *[await self._create_shared_pull(priority, ack_wait_seconds) for priority in Priority],
        ]
        self._tasks = [tasks.create_task(pull.run(), name="pull") for pull in self._pulls]

    def wake(self) -> None:
        """Make the loops that wait for credit ask for their pull limits again; returns at once."""
        for pull in self._pulls:
            pull.wake()

    def withdraw(self) -> None:
        """Give up the outstanding pulls, because there is no longer credit for what they asked for.

        Returns at once. Each loop pulls again when its limit allows it. Messages that still come
        for a pull given up are redelivered after their ack wait.
        """
        for pull in self._pulls:
            pull.withdraw()

    async def wait_until_empty(self, seconds: float) -> None:
        """Pull until nothing that was sent to the pool or this worker waits to be pulled.

        Returns after `seconds` at the latest. Raises `BrokerUnavailable`.
        """
        empty_checks = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while empty_checks < _EMPTY_CHECKS:
                    await asyncio.sleep(_CHECK_SECONDS)
                    empty_checks = 0 if await self._has_waiting() else empty_checks + 1

    async def _has_waiting(self) -> bool:
        infos = [
            await declaration.consumer_info(self._broker, topology.WORK, pull.consumer)
            for pull in self._pulls
        ]
        return any(info.num_pending for info in infos if info)

    async def stop(self) -> None:
        """Cancel the pull tasks and wait up to two seconds for them to end; raises nothing."""
        for task in self._tasks:
            task.cancel()
        await wait_for_tasks(self._tasks, _STOP_SECONDS)

    async def _create_shared_pull(self, priority: Priority, ack_wait_seconds: float) -> PullLoop:
        key = PoolKey(self._identity.model, self._identity.version, priority)
        consumer = topology.work_consumer(key, ack_wait_seconds)
        return await self._create_pull(
            consumer, priority, partial(self._on_shared_delivery, priority)
        )

    async def _create_own_pull(self, ack_wait_seconds: float) -> PullLoop:
        """Pull the work placed on this worker, as soon as there is credit for the top priority."""
        own = self._identity
        consumer = topology.worker_consumer(own.model, own.version, own.worker, ack_wait_seconds)
        return await self._create_pull(consumer, Priority.INTERACTIVE, self._on_own_delivery)

    async def _create_pull(
        self, consumer: ConsumerConfig, priority: Priority, on_delivery: OnDelivery
    ) -> PullLoop:
        async def declare() -> None:
            await declaration.declare_consumer(self._broker, topology.WORK, consumer)

        await retry_forever(declare)
        assert consumer.durable_name
        limit = partial(self._pull_limit, priority)
        return PullLoop(
            self._broker, topology.WORK, consumer.durable_name, limit, on_delivery, declare
        )

    def _on_shared_delivery(self, priority: Priority, delivery: Delivery) -> None:
        self.pulled[priority] = max(self.pulled.get(priority, 0), delivery.seq)
        self._on_delivery(delivery)

    def _on_own_delivery(self, delivery: Delivery) -> None:
        self.pulled_own = max(self.pulled_own, delivery.seq)
        self._on_delivery(delivery)
