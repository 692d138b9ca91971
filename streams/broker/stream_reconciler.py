"""Keeps a set of streams as they are declared: makes missing ones anew, and resets edited ones."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime

import structlog
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from streams import subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.broker.declaration import TopologyMismatch
from streams.errors import BrokerUnavailable
from streams.topology import Scale

log = structlog.get_logger()

CHECK_SECONDS = 5.0
MIN_PAUSE_SECONDS = 1.0  # between two checks, however many processes ask for one
_DELETED = "$JS.EVENT.ADVISORY.STREAM.DELETED."

MakeConfigs = Callable[[], Iterable[StreamConfig]]


class StreamReconciler:
    """Declares streams for as long as `run` runs; any number of processes may do so at once.

    They are checked every `CHECK_SECONDS`, and within `MIN_PAUSE_SECONDS` when some process misses
    one (`infer.declare`), when the broker says that one was deleted, after a reconnect and after
    `wake`. `unusable` has the streams that the broker refuses to make as they are declared, each
    with its reason; `on_change` is called when it has changed, `on_deleted` with the name of any
    stream that was deleted, `on_replaced` with that of a stream that is another one than before.
    `lane_limit` is the limit of queued requests in a lane: it is never lowered, since the broker
    would delete the requests above it.
    """

    def __init__(self, broker: Broker, scale: Scale, make_configs: MakeConfigs) -> None:
        self._broker, self._scale, self._make_configs = broker, scale, make_configs
        self.lane_limit = 1
        self._created: dict[str, datetime | None] = {}  # when each stream was created
        self._unusable: dict[str, str] = {}
        self._refused: dict[str, str] = {}  # at the last check
        self._wakeup = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        self.on_deleted: Callable[[str], None] = lambda stream: None
        self.on_replaced: Callable[[str], None] = lambda stream: None

    @property
    def unusable(self) -> Mapping[str, str]:
        """The streams that cannot be used, with the broker's reason."""
        return self._unusable

    def wake(self) -> None:
        """Have the streams checked soon: what is to be declared may have changed."""
        self._wakeup.set()

    async def declare_all(self) -> None:
        """Declare all streams once; raises as `declaration.declare_stream`."""
        for config in self._make_configs():
            await self._declare(config)

    async def _declare(self, config: StreamConfig) -> None:
        assert config.name
        created = await declaration.declare_stream(self._broker, config, self._scale)
        known = self._created.get(config.name, created)
        self._created[config.name] = created
        if known != created:
            log.warning("stream_replaced", stream=config.name)
            self.on_replaced(config.name)
        if config.name == topology.REQUESTS:
            self.lane_limit = config.max_msgs_per_subject

    async def run(self) -> None:
        """Keep the streams until cancelled."""
        self._broker.on_reconnect.append(self.wake)
        asked = await self._broker.subscribe(subjects.DECLARE, self._on_request)
        deleted = await self._broker.subscribe(f"{_DELETED}*", self._on_deleted)
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._wakeup.wait()
                self._wakeup.clear()
                checked_at = time.monotonic()
                await self._check()
                await asyncio.sleep(max(0.0, checked_at + self._pause_seconds - time.monotonic()))
        finally:
            self._broker.on_reconnect.remove(self.wake)
            await asked.unsubscribe()
            await deleted.unsubscribe()

    @property
    def _pause_seconds(self) -> float:
        """Seconds between two checks: more while a stream is refused, as asking cannot help."""
        return CHECK_SECONDS if self._unusable else MIN_PAUSE_SECONDS

    async def _on_request(self, msg: Msg) -> None:
        self.wake()

    async def _on_deleted(self, msg: Msg) -> None:
        stream = msg.subject.removeprefix(_DELETED)
        self.on_deleted(stream)
        self.wake()

    async def _check(self) -> None:
        """Declare all streams, and note which ones the broker refuses at two checks in a row."""
        found: dict[str, str] = {}
        for config in self._make_configs():
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
        self._report(refused_again)
        if found.keys() - refused_again.keys():
            self.wake()

    def _report(self, found: dict[str, str]) -> None:
        if found == self._unusable:
            return
        for name in found.keys() - self._unusable.keys():
            log.error("stream_unusable", stream=name, reason=found[name])
        for name in self._unusable.keys() - found.keys():
            log.info("stream_usable", stream=name)
        self._unusable = found
        self.on_change()
