"""Keeps a set of streams as they are declared: makes missing ones anew, and resets edited ones."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import structlog
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from streams import subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.broker.declaration import TopologyMismatch
from streams.errors import BrokerUnavailable
from streams.messages import StreamReport
from streams.topology import Scale

log = structlog.get_logger()

CHECK_SECONDS = 5.0
MIN_PAUSE_SECONDS = 1.0  # between two checks, however many processes ask for one
_DELETED = "$JS.EVENT.ADVISORY.STREAM.DELETED."

MakeConfigs = Callable[[], Iterable[StreamConfig]]


class StreamReconciler:
    """Declares streams for as long as `run` runs, at the times when `is_declarer()` returns True.

    They are checked every `CHECK_SECONDS`, and within `MIN_PAUSE_SECONDS` when some process misses
    one (`infer.declare`), when the broker says that one was deleted, after a reconnect and after
    `wake`. `unusable` has the streams that the broker refuses to make as they are declared, each
    with its reason. What was found is published on `infer.streams` after each check, and is the
    answer to a request on `infer.declare`. `on_change` is called when `unusable` has changed,
    `on_deleted` with the name of any stream that was deleted.
    """

    def __init__(
        self,
        broker: Broker,
        scale: Scale,
        make_configs: MakeConfigs,
        is_declarer: Callable[[], bool],
    ) -> None:
        self._broker, self._scale, self._make_configs = broker, scale, make_configs
        self._is_declarer = is_declarer
        self._lane_limit = 1
        self._created: dict[str, float] = {}  # when each stream was created, in epoch seconds
        self._unusable: dict[str, str] = {}
        self._refused: dict[str, str] = {}  # at the last check
        self._wakeup = asyncio.Event()
        self._report: StreamReport | None = None  # of the last whole check as the declarer
        self.on_change: Callable[[], None] = lambda: None
        self.on_deleted: Callable[[str], None] = lambda stream: None

    @property
    def unusable(self) -> Mapping[str, str]:
        """The streams that cannot be used, with the broker's reason."""
        return self._unusable

    def wake(self) -> None:
        """Have the streams checked soon: what is to be declared may have changed."""
        self._wakeup.set()

    async def run(self) -> None:
        """Keep the streams until cancelled; the first check is made at once."""
        self._broker.on_reconnect.append(self.wake)
        asked = await self._broker.subscribe(subjects.DECLARE, self._on_request)
        deleted = await self._broker.subscribe(f"{_DELETED}*", self._on_deleted)
        try:
            while True:
                self._wakeup.clear()
                checked_at = time.monotonic()
                if self._is_declarer():
                    await self._check()
                await asyncio.sleep(max(0.0, checked_at + self._pause_seconds - time.monotonic()))
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._wakeup.wait()
        finally:
            self._broker.on_reconnect.remove(self.wake)
            await asked.unsubscribe()
            await deleted.unsubscribe()

    @property
    def _pause_seconds(self) -> float:
        """Seconds between two checks: more while a stream is refused, as asking cannot help."""
        if not self._is_declarer():
            return 0.0
        return CHECK_SECONDS if self._unusable else MIN_PAUSE_SECONDS

    async def _on_request(self, msg: Msg) -> None:
        self.wake()
        if msg.reply and self._report and self._is_declarer():
            await self._broker.publish(msg.reply, self._report.pack())

    async def _on_deleted(self, msg: Msg) -> None:
        stream = msg.subject.removeprefix(_DELETED)
        self.on_deleted(stream)
        self.wake()

    async def _check(self) -> None:
        """Declare all streams, and note which ones the broker refuses at two checks in a row."""
        found: dict[str, str] = {}
        configs = list(self._make_configs())
        names = {config.name for config in configs}
        self._created = {name: at for name, at in self._created.items() if name in names}
        for config in configs:
            assert config.name
            try:
                await self._declare(config)
            except TopologyMismatch as refusal:
                found[config.name] = str(refusal)
            except BrokerUnavailable as error:
                log.warning("streams_not_checked", stream=config.name, reason=str(error))
                return
        refused_again = {name: reason for name, reason in found.items() if name in self._refused}
        self._refused = found
        self._note_unusable(refused_again)
        if found.keys() - refused_again.keys():
            self.wake()  # the next check will tell
        else:
            await self._publish_report()

    async def _declare(self, config: StreamConfig) -> None:
        assert config.name
        created = await declaration.declare_stream(self._broker, config, self._scale)
        made_at = created.timestamp() if created else 0.0
        if self._created.get(config.name, made_at) != made_at:
            log.warning("stream_replaced", stream=config.name)
        self._created[config.name] = made_at
        if config.name == topology.REQUESTS:
            self._lane_limit = config.max_msgs_per_subject or 0

    def _note_unusable(self, found: dict[str, str]) -> None:
        if found == self._unusable:
            return
        for name in found.keys() - self._unusable.keys():
            log.error("stream_unusable", stream=name, reason=found[name])
        for name in self._unusable.keys() - found.keys():
            log.info("stream_usable", stream=name)
        self._unusable = found
        self.on_change()

    async def _publish_report(self) -> None:
        self._report = StreamReport(self._created, self._unusable, self._lane_limit)
        with suppress(BrokerUnavailable):  # the next one comes in a few seconds
            await self._broker.publish(subjects.STREAMS, self._report.pack())
