"""Knows the state of the streams from what the service that declares them says."""

from collections.abc import Callable, Iterable, Mapping

import structlog
from nats.aio.msg import Msg

from streams import subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.messages import StreamReport

log = structlog.get_logger()

_REPORT_SECONDS = 0.5  # for the declarer to answer at the start; its next report comes anyway


class StreamMonitor:
    """The state of the streams, for a process that does not declare them.

    `unusable` has the streams that the broker refuses to make as they are declared, each with its
    reason; `on_change` is called when it has changed, `on_replaced` with the name of a stream that
    is another one than before. `lane_limit` is the limit of queued requests in a lane. All stay as
    they are while nobody declares streams.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._created: Mapping[str, float] = {}
        self.unusable: Mapping[str, str] = {}
        self.lane_limit = 1
        self.on_change: Callable[[], None] = lambda: None
        self.on_replaced: Callable[[str], None] = lambda stream: None

    async def open(self, streams: Iterable[str]) -> None:
        """Wait until all these streams exist, and follow their state until the connection closes.

        Raises `TopologyMismatch`, as `declaration.wait_for_stream`, and `BrokerUnavailable`.
        """
        for stream in streams:
            info = await declaration.wait_for_stream(self._broker, stream)
            if stream == topology.REQUESTS:
                self.lane_limit = info.config.max_msgs_per_subject or 0
        await self._broker.subscribe(subjects.STREAMS, self._on_report)
        if answer := await self._broker.request(subjects.DECLARE, b"", _REPORT_SECONDS):
            self._apply(StreamReport.unpack(answer))

    async def _on_report(self, msg: Msg) -> None:
        self._apply(StreamReport.unpack(msg.data))

    def _apply(self, report: StreamReport) -> None:
        self.lane_limit = report.lane_limit
        before, self._created = self._created, {**self._created, **report.created}
        for stream in report.created.keys() & before.keys():
            if report.created[stream] != before[stream]:
                log.warning("stream_replaced", stream=stream)
                self.on_replaced(stream)
        # A tenant's own stream is needed by nobody else
        unusable = {s: r for s, r in report.unusable.items() if not topology.is_of_tenant(s)}
        if unusable != self.unusable:
            self.unusable = unusable
            self.on_change()
