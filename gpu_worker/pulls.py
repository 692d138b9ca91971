"""Where one pool's work comes from: the shared lanes, and what was placed on this worker."""

import asyncio
from collections.abc import Callable
from functools import partial

from nats.js.api import ConsumerConfig

from gpu_worker.outcome import Identity
from streams import declaration, topology
from streams.connection import Broker
from streams.patience import ended
from streams.pull import Delivery, Pull
from streams.subjects import Pool as Address
from streams.subjects import Priority

_CLOSING_SECONDS = 2.0

Room = Callable[[Priority], int]
Take = Callable[[Delivery], None]


class Pulls:
    """Pulls what there is `room` for; `take` is called with each delivery.

    `pulled` and `pulled_own` are the highest sequences that came, by priority and of what was
    placed here.
    """

    def __init__(self, broker: Broker, who: Identity, room: Room, take: Take) -> None:
        self.pulled: dict[str, int] = {}
        self.pulled_own = 0
        self._broker, self._who = broker, who
        self._room, self._take = room, take
        self._pulls: list[Pull] = []
        self._pulling: list[asyncio.Task[None]] = []

    async def begin(self, tasks: asyncio.TaskGroup, ack_wait_seconds: float) -> None:
        """Declare the consumers and pull from them, in tasks of the group."""
        self._pulls = [
            await self._own(ack_wait_seconds),
            *[await self._shared(priority, ack_wait_seconds) for priority in Priority],
        ]
        self._pulling = [tasks.create_task(pull.run(), name="pull") for pull in self._pulls]

    def wake(self) -> None:
        """There may be room where there was none."""
        for pull in self._pulls:
            pull.wake()

    def withdraw(self) -> None:
        """Take back what was asked for and has not come."""
        for pull in self._pulls:
            pull.withdraw()

    async def end(self) -> None:
        """Pull no more."""
        for pulling in self._pulling:
            pulling.cancel()
        await ended(self._pulling, _CLOSING_SECONDS)

    async def _shared(self, priority: Priority, ack_wait_seconds: float) -> Pull:
        address = Address(self._who.model, self._who.version, priority)
        consumer = topology.work_consumer(address, ack_wait_seconds)
        return await self._from(consumer, priority, partial(self._take_shared, priority))

    async def _own(self, ack_wait_seconds: float) -> Pull:
        """What was placed here is taken as soon as there is room for anything."""
        who = self._who
        consumer = topology.own_consumer(who.model, who.version, who.worker, ack_wait_seconds)
        return await self._from(consumer, Priority.INTERACTIVE, self._take_own)

    async def _from(self, consumer: ConsumerConfig, priority: Priority, take: Take) -> Pull:
        async def declare() -> None:
            await declaration.declare_consumer(self._broker, topology.WORK, consumer)

        await declare()
        assert consumer.durable_name
        room = partial(self._room, priority)
        return Pull(self._broker, topology.WORK, consumer.durable_name, room, take, declare)

    def _take_shared(self, priority: Priority, delivery: Delivery) -> None:
        self.pulled[priority] = max(self.pulled.get(priority, 0), delivery.seq)
        self._take(delivery)

    def _take_own(self, delivery: Delivery) -> None:
        self.pulled_own = max(self.pulled_own, delivery.seq)
        self._take(delivery)
