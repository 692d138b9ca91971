"""A worker's drain: the deadline that a signal or `millstream drain` sets, and the final report."""

import asyncio

import structlog

from streams import signals, subjects
from streams.broker.broker_client import Broker
from streams.coordination.signal_handler import SignalHandler
from streams.errors import BrokerUnavailable
from streams.signals import DrainAccepted, DrainReport

log = structlog.get_logger()


class DrainController:
    """The drain deadline of one worker process; `started` is set once there is a deadline.

    The process's stop signal and operators' orders each set a deadline, of which the soonest
    counts. An order is answered twice on `subjects.draining`: with the seconds left
    (`DrainAccepted`) as soon as it is heard, and with the `DrainReport` when the worker is empty.
    """

    def __init__(self, broker: Broker, worker: str) -> None:
        self.started = asyncio.Event()
        self.is_reclaimed = False  # the drain began because the machine is taken back
        self._broker, self._worker = broker, worker
        self._deadline = float("inf")  # loop time
        self._answers_to = subjects.draining(worker)

    async def listen(self) -> None:
        """Subscribe to operators' drain orders, until the connection closes.

        Returns once subscribed. Raises `BrokerUnavailable` if the broker does not confirm the
        subscription.
        """
        handler = SignalHandler(signals.parse_drain, self._on_order)
        await self._broker.subscribe(subjects.heard(subjects.drain(self._worker)), handler.receive)

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

    def start_reclaim(self, seconds: float) -> None:
        """Start a drain as `start_within` does, because the machine is taken back."""
        self.is_reclaimed = not self.started.is_set()
        self.start_within(seconds)

    def seconds_left(self) -> float:
        """Return the seconds until the deadline: never below zero, infinite before a drain."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def send_report(self, report: DrainReport) -> None:
        """Tell the report to every operator who has ordered the drain.

        Best effort: if the broker is unavailable, that is logged and nothing is raised.
        """
        await self._answer(report)

    async def _on_order(self, seconds: float) -> None:
        self.start_within(seconds)
        await self._answer(DrainAccepted(round(self.seconds_left(), 1)))

    async def _answer(self, answer: DrainAccepted | DrainReport) -> None:
        try:
            await self._broker.publish(self._answers_to, signals.pack_drain_answer(answer))
        except BrokerUnavailable as error:
            log.warning("drain_not_reported", reason=str(error))
