"""Collects the fleet's signals while this process leads, and answers those who ask for them."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog
from nats.aio.msg import Msg

from fleet.ledger_reader import LedgerReader, stored_at
from fleet.live_curves import LiveCurves
from fleet.metrics import CURVE_FACTOR, LEDGER_BEHIND, SIGNALS
from fleet.signals.signal_report import SignalReport
from fleet.signals.signal_window import Goals, SignalWindow
from registry.store import Registry
from streams import subjects, topology
from streams.broker.broker_client import Broker, MessageHandler, StoredMessage, StoreRefused
from streams.broker.stream_monitor import StreamMonitor
from streams.coordination.gateway_beats import InvalidGatewayBeat, parse_gateway_beat
from streams.coordination.heartbeats import InvalidHeartbeat, parse_heartbeat
from streams.coordination.pressure_reports import InvalidPressure, parse_pressure
from streams.errors import BrokerUnavailable, StorageFull
from streams.messages import Heartbeat, Pressure, RefusalCounts
from streams.records.ledger_checks import ForgedRecord, unpack_stored_record

log = structlog.get_logger()

REPORT_SECONDS = 1.0


class SignalCollector:
    """The signals of the cell, as one leader collects them from the ledger and from what it hears.

    A new leader makes a new one. It reads the ledger of the last `window_seconds` first, so what it
    counts there is what its predecessor would have counted; rates are known from the second report
    of each sender on.
    """

    def __init__(
        self, broker: Broker, registry: Registry, streams: StreamMonitor, window_seconds: int
    ) -> None:
        self._broker, self._registry, self._streams = broker, registry, streams
        self._curves = LiveCurves(broker)
        self.window = SignalWindow(window_seconds)
        self.collected = asyncio.Event()  # set once the ledger is read
        # Called with each load report and heartbeat, in the order in which they are heard
        self.on_heard: Callable[[Pressure | Heartbeat], None] = lambda _: None
        # The second in which the window begins counts as a whole
        self._ledger = LedgerReader(broker, int(broker.clock.now()) - window_seconds)
        self._report: SignalReport | None = None

    async def run(self) -> None:
        """Collect and answer until cancelled; raises the broker's errors while it starts.

        It answers once it has read the ledger to its end. While the broker does not answer later,
        that is logged, and the last report stays, with its time in it.
        """
        async with AsyncExitStack() as stack:
            self._streams.on_replaced = self._on_replaced_stream
            for subject, handler in self._listeners.items():
                await self._subscribe(stack, subject, handler)
            await self._read_ledger()
            self._make_report()
            await self._subscribe(stack, subjects.SIGNALS_REPORT, self._on_question)
            stack.callback(_clear_metrics)
            self.collected.set()
            log.info("signals_collected", window_seconds=self.window.window_seconds)
            while True:
                await asyncio.sleep(REPORT_SECONDS)
                await self._refresh()

    @property
    def _listeners(self) -> dict[str, MessageHandler]:
        return {
            subjects.ALL_PRESSURE: self._on_pressure,
            subjects.ALL_HEARTBEATS: self._on_heartbeat,
            subjects.ALL_GATEWAYS: self._on_gateway_beat,
        }

    async def _subscribe(
        self, stack: AsyncExitStack, subject: str, handler: MessageHandler
    ) -> None:
        subscription = await self._broker.subscribe(subject, handler)
        stack.push_async_callback(subscription.unsubscribe)

    async def _refresh(self) -> None:
        try:
            await self._read_ledger()
        except BrokerUnavailable as error:
            log.warning("ledger_not_read", reason=str(error))
            if self._report:
                LEDGER_BEHIND.set(self._broker.clock.now() - self._report.at)
            return
        report = self._make_report()
        try:
            await self._curves.update(report)
        except (BrokerUnavailable, StorageFull, StoreRefused) as error:
            log.warning("curve_not_stored", reason=str(error))

    async def _read_ledger(self) -> None:
        while found := await self._ledger.read_page():
            for message in found:
                self._add_message(message)

    def _add_message(self, message: StoredMessage) -> None:
        """Count what a message of the ledger says; workers' own time is none of it."""
        try:
            if subjects.is_ledger(message.subject):
                record = unpack_stored_record(message.subject, message.data)
                self.window.add_record(record, stored_at(message))
            elif subjects.is_outcome(message.subject):
                refusals = RefusalCounts.unpack(message.data)
                self.window.add_refusals(refusals, stored_at(message))
        except (ForgedRecord, ValueError, TypeError) as error:
            log.error("ledger_record_unreadable", seq=message.seq, reason=str(error))

    def measure(self) -> SignalReport:
        """Return what is known now."""
        return self.window.report(self._broker.clock.now(), self._goals)

    def _make_report(self) -> SignalReport:
        report = self._report = SIGNALS.report = self.measure()
        LEDGER_BEHIND.set(0)
        return report

    @property
    def _goals(self) -> Goals:
        return {
            name: {
                str(priority)
                for priority, goals in model.goals.items()
                if goals.time_to_first_token_ms is not None
            }
            for name, model in self._registry.models.items()
        }

    def _on_replaced_stream(self, stream: str) -> None:
        if stream == topology.LEDGER:
            self._ledger.begin_anew()

    async def _on_pressure(self, msg: Msg) -> None:
        try:
            pressure = parse_pressure(msg.subject, msg.headers or {}, msg.data)
        except InvalidPressure as error:
            log.warning("pressure_ignored", subject=msg.subject, reason=str(error))
            return
        self.window.add_pressure(pressure, self._broker.clock.now())
        self.on_heard(pressure)

    async def _on_heartbeat(self, msg: Msg) -> None:
        try:
            beat = parse_heartbeat(msg.subject, msg.headers or {}, msg.data)
        except InvalidHeartbeat as error:
            log.warning("heartbeat_ignored", subject=msg.subject, reason=str(error))
            return
        now = self._broker.clock.now()
        self.window.add_heartbeat(beat, now)
        self._curves.add_heartbeat(beat, now)
        self.on_heard(beat)

    async def _on_gateway_beat(self, msg: Msg) -> None:
        try:
            beat = parse_gateway_beat(msg.subject, msg.headers or {}, msg.data)
        except InvalidGatewayBeat as error:
            log.warning("gateway_beat_ignored", subject=msg.subject, reason=str(error))
            return
        self.window.add_gateway_beat(beat, self._broker.clock.now())

    async def _on_question(self, msg: Msg) -> None:
        assert self._report
        await self._broker.publish(msg.reply, self._report.pack())


def _clear_metrics() -> None:
    SIGNALS.report = None
    LEDGER_BEHIND.set(0)
    CURVE_FACTOR.clear()
