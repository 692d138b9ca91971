"""When a worker has to be gone: a signal says so, or an operator by `millstream drain`."""

import asyncio
import json
from typing import NamedTuple

import structlog
from nats.aio.msg import Msg

from streams import subjects
from streams.broker.connection import Broker
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class DrainReport(NamedTuple):
    """What became of the requests that a worker had when it began to leave."""

    finished: int = 0
    handed_over: int = 0


class DrainController:
    """The time that is left, once `begun`; of several that were told the soonest counts.

    Who drains this worker is answered twice: when it was heard, and when the worker is empty.
    """

    def __init__(self, broker: Broker, worker: str) -> None:
        self.started = asyncio.Event()
        self._broker, self._worker = broker, worker
        self._deadline = float("inf")  # loop time
        self._reply_subjects: list[str] = []

    async def listen(self) -> None:
        """Until the connection closes. Raises `BrokerUnavailable`."""
        await self._broker.subscribe(subjects.drain(self._worker), self._on_drain)

    async def drain_on_stop(self, stop: asyncio.Event, seconds: float) -> None:
        """Leave within so many seconds of `stop`."""
        await stop.wait()
        self.start_within(seconds)

    def start_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, asyncio.get_running_loop().time() + seconds)
        self.started.set()

    def seconds_left(self) -> float:
        """Not below zero."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def send_report(self, drained: DrainReport) -> None:
        """Tell those who asked that the worker is empty."""
        report = json.dumps(drained._asdict()).encode()
        try:
            for asker in self._reply_subjects:
                await self._broker.publish(asker, report)
        except BrokerUnavailable as error:
            log.warning("drain_not_reported", reason=str(error))

    async def _on_drain(self, msg: Msg) -> None:
        self.start_within(json.loads(msg.data)["within"])
        self._reply_subjects.append(msg.reply)
        heard = json.dumps({"within": round(self.seconds_left(), 1)}).encode()
        await self._broker.publish(msg.reply, heard)
