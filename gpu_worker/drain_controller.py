"""A worker's drain: the deadline that a signal or `millstream drain` sets, and the final report."""

import asyncio
import json
from typing import NamedTuple

import structlog
from nats.aio.msg import Msg

from streams import subjects
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class DrainReport(NamedTuple):
    """Counts of the requests that a worker held when its drain began, by what became of them.

    `finished` ended on this worker; `handed_over` were returned to the broker for other workers.
    """

    finished: int = 0
    handed_over: int = 0


class DrainController:
    """The drain deadline of one worker process; `started` is set once there is a deadline.

    The process's stop signal and operators' requests each set a deadline, of which the soonest
    counts. An operator's drain request gets two replies: the seconds left as soon as the request
    arrives, and the `DrainReport` when the worker is empty.
    """

    def __init__(self, broker: Broker, worker: str) -> None:
        self.started = asyncio.Event()
        self._broker, self._worker = broker, worker
        self._deadline = float("inf")  # loop time
        self._reply_subjects: list[str] = []

    async def listen(self) -> None:
        """Subscribe to operators' drain requests, until the connection closes.

        Returns once subscribed. Raises `BrokerUnavailable` if the broker does not confirm the
        subscription.
        """
        await self._broker.subscribe(subjects.drain(self._worker), self._on_drain)

    async def drain_on_stop(self, stop: asyncio.Event, seconds: float) -> None:
        """Wait until `stop` is set, then start a drain that ends within `seconds`, and return.

        Returns without waiting for the drain's end. Cancelling this before `stop` is set starts no
        drain.
        """
        await stop.wait()
        self.start_within(seconds)

    def start_within(self, seconds: float) -> None:
        """Start a drain that has to end within `seconds` from now; returns at once.

        While a drain is under way, this can only move its deadline to an earlier time.
        """
        self._deadline = min(self._deadline, asyncio.get_running_loop().time() + seconds)
        self.started.set()

    def seconds_left(self) -> float:
        """Return the seconds until the deadline: never below zero, infinite before a drain."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def send_report(self, report: DrainReport) -> None:
        """Send the report to every operator who has asked for the drain.

        Best effort: if the broker is unavailable, that is logged and nothing is raised.
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
