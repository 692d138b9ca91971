"""Where one pool's work comes from: the shared lanes, and what was placed on this worker."""

import asyncio
from collections.abc import Callable
from functools import partial

from nats.js.api import ConsumerConfig

from gpu_worker.identity import WorkerIdentity
from streams import topology
from streams.broker import declaration
from streams.broker.connection import Broker
from streams.broker.pull_loop import Delivery, PullLoop
from streams.broker.retry import wait_for_tasks
from streams.subjects import PoolKey as Address
from streams.subjects import Priority

_STOP_SECONDS = 2.0

PullLimit = Callable[[Priority], int]
OnDelivery = Callable[[Delivery], None]


class PullLoops:
    """Pulls what there is `room` for; `take` is called with each delivery.

    `pulled` and `pulled_own` are the highest sequences that came, by priority and of what was
    placed here.
    """

    def __init__(
        self, broker: Broker, who: WorkerIdentity, room: PullLimit, take: OnDelivery
    ) -> None:
        self.pulled: dict[str, int] = {}
        self.pulled_own = 0
        self._broker, self._identity = broker, who
        self._pull_limit, self._on_delivery = room, take
        self._pulls: list[PullLoop] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, tasks: asyncio.TaskGroup, ack_wait_seconds: float) -> None:
        """Declare the consumers and pull from them, in tasks of the group."""
        self._pulls = [
            await self._create_own_pull(ack_wait_seconds),
            *[await self._create_shared_pull(priority, ack_wait_seconds) for priority in Priority],
        ]
        self._tasks = [tasks.create_task(pull.run(), name="pull") for pull in self._pulls]

    def wake(self) -> None:
        """There may be room where there was none."""
        for pull in self._pulls:
            pull.wake()

    def withdraw(self) -> None:
        """Take back what was asked for and has not come."""
        for pull in self._pulls:
            pull.withdraw()

    async def stop(self) -> None:
        """Pull no more."""
        for pulling in self._tasks:
            pulling.cancel()
        await wait_for_tasks(self._tasks, _STOP_SECONDS)

    async def _create_shared_pull(self, priority: Priority, ack_wait_seconds: float) -> PullLoop:
        address = Address(self._identity.model, self._identity.version, priority)
        consumer = topology.work_consumer(address, ack_wait_seconds)
        return await self._create_pull(
            consumer, priority, partial(self._on_shared_delivery, priority)
        )

    async def _create_own_pull(self, ack_wait_seconds: float) -> PullLoop:
        """What was placed here is taken as soon as there is room for anything."""
        who = self._identity
        consumer = topology.worker_consumer(who.model, who.version, who.worker, ack_wait_seconds)
        return await self._create_pull(consumer, Priority.INTERACTIVE, self._on_own_delivery)

    async def _create_pull(
        self, consumer: ConsumerConfig, priority: Priority, take: OnDelivery
    ) -> PullLoop:
        async def declare() -> None:
            await declaration.declare_consumer(self._broker, topology.WORK, consumer)

        await declare()
        assert consumer.durable_name
        room = partial(self._pull_limit, priority)
        return PullLoop(self._broker, topology.WORK, consumer.durable_name, room, take, declare)

    def _on_shared_delivery(self, priority: Priority, delivery: Delivery) -> None:
        self.pulled[priority] = max(self.pulled.get(priority, 0), delivery.seq)
        self._on_delivery(delivery)

    def _on_own_delivery(self, delivery: Delivery) -> None:
        self.pulled_own = max(self.pulled_own, delivery.seq)
        self._on_delivery(delivery)
