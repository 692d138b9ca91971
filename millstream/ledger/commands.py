"""The commands `millstream ledger export` and `millstream ledger send`."""

import asyncio
from contextlib import closing

import structlog

from millstream.ledger.event_sender import EventSender, SentCursor, Sink
from millstream.ledger.export_directory import ExportDirectory
from millstream.ledger.exporter import ExportPlan, LedgerExporter
from millstream.ledger.settings import ExportSettings, SendSettings
from streams import topology
from streams.broker.broker_client import connect
from streams.broker.declaration import wait_for_stream
from streams.errors import MillstreamError
from streams.metrics_server import serve_metrics

log = structlog.get_logger()


class DirectoryMissing(MillstreamError):
    """The directory of segments does not exist."""


async def export(settings: ExportSettings, stop: asyncio.Event) -> None:
    """Write the ledger into segments, until `stop` is set or, with `once`, all of it is written.

    Raises `DirectoryInUse`, `SegmentsDamaged`, `LedgerGap`, OSError if a file cannot be written,
    and `BrokerUnavailable` if NATS does not answer at the start.
    """
    plan = ExportPlan(
        settings.segment_bytes,
        settings.segment_seconds,
        settings.remove_after,
        settings.accept_gap,
    )
    async with connect(
        settings.nats, f"ledger-export-{settings.id}", settings.nats_files
    ) as broker:
        await wait_for_stream(broker, topology.LEDGER)
        with (
            closing(ExportDirectory(settings.directory)) as directory,
            serve_metrics(settings, {"nats": lambda: broker.is_connected}),
        ):
            exporter = LedgerExporter(broker, directory, plan)
            log.info("exporting", directory=str(settings.directory), after=directory.last)
            if settings.once:
                await exporter.export_all()
            else:
                await exporter.run(stop)


async def send(settings: SendSettings, stop: asyncio.Event) -> None:
    """Send the requests in segments to a meter, until `stop` is set or, with `once`, all are sent.

    Raises `DirectoryMissing`, `SenderRuns`, `SegmentsDamaged`, and `EventsRefused` if the meter
    refuses events for good.
    """
    if not settings.directory.is_dir():
        raise DirectoryMissing(f"there is no directory {settings.directory}")
    token = settings.token_file.read_text().strip() if settings.token_file else ""
    sink = Sink(settings.to, settings.cell, token)
    with (
        closing(SentCursor(settings.directory, settings.to)) as cursor,
        serve_metrics(settings, {}),
    ):
        await EventSender(settings.directory, sink, cursor).run(stop, once=settings.once)
