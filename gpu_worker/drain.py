"""A worker's drain: the deadline that a signal or `millstream drain` sets, and the final report."""

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
    """Counts of the requests held when the drain began: finished here, and handed over."""

    finished: int = 0
    handed_over: int = 0


class DrainController:
    """The worker's drain deadline; `started` is set once there is one.

    Of several deadlines the soonest counts. An operator's drain request gets two replies: the
    seconds left as soon as it arrives, and the `DrainReport` when the worker is empty.
    """

    def __init__(self, broker: Broker, worker: str) -> None:
        self.started = asyncio.Event()
        self._broker, self._worker = broker, worker
        self._deadline = float("inf")  # loop time
        self._reply_subjects: list[str] = []

    async def listen(self) -> None:
        """Subscribe to drain requests until the connection closes. Raises `BrokerUnavailable`."""
        await self._broker.subscribe(subjects.drain(self._worker), self._on_drain)

    async def drain_on_stop(self, stop: asyncio.Event, seconds: float) -> None:
        """Wait for `stop`, then start a drain that ends within `seconds`."""
        await stop.wait()
        self.start_within(seconds)

    def start_within(self, seconds: float) -> None:
        """Start draining now, to end within `seconds`, or sooner if an earlier call said so."""
        self._deadline = min(self._deadline, asyncio.get_running_loop().time() + seconds)
        self.started.set()

    def seconds_left(self) -> float:
        """Return the seconds until the deadline: never below zero, infinite without a drain."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def send_report(self, report: DrainReport) -> None:
        """Send the report to every operator who asked for the drain.

        Best effort: without a broker it is only logged that the report was not sent.
        """
        payload = json.dumps(report._asdict()).encode()
        try:
            for reply_subject in self._reply_subjects:
                await self._broker.publish(reply_subject, payload)
        except BrokerUnavailable as error:
            log.warning("drain_not_reported", reason=str(error))

    async def _on_drain(self, msg: Msg) -> None:
        self.start_within(json.loads(msg.data)["within"])
        self._reply_subjects.append(msg.reply)
        answer = json.dumps({"within": round(self.seconds_left(), 1)}).encode()
        await self._broker.publish(msg.reply, answer)
