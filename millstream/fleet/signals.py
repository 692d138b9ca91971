"""`millstream fleet signals`: prints what the fleet service's leader knows now."""

import asyncio
import json
from typing import Any

from millstream.admin.console_output import ANSWER_SECONDS, make_console
from millstream.fleet.settings import SignalsSettings
from millstream.fleet.signal_tables import render_signals
from streams import subjects
from streams.broker.broker_client import Broker, connect
from streams.errors import MillstreamError


class FleetNotAnswering(MillstreamError):
    """No fleet service leads, or the one that does is not answering."""


async def run(settings: SignalsSettings, stop: asyncio.Event) -> None:
    """Print the signals, as tables or as one JSON object; raises `FleetNotAnswering`."""
    async with connect(settings.nats, "fleet-signals", settings.nats_files) as broker:
        report = await request_signals(broker)
    if settings.as_json:
        print(json.dumps(report, indent=2))
    else:
        make_console().print(render_signals(report))


async def request_signals(broker: Broker) -> dict[str, Any]:
    """Return the report of the fleet service's leader, as `SignalReport.pack` has it.

    Raises `FleetNotAnswering` if none comes within 2 s.
    """
    answer = await broker.request(subjects.SIGNALS_REPORT, b"", ANSWER_SECONDS)
    if answer is None:
        raise FleetNotAnswering(
            f"no fleet service answered within {ANSWER_SECONDS:g} s: start `millstream fleet`, or "
            "`millstream up` with a table [fleet] in its configuration file"
        )
    report: dict[str, Any] = json.loads(answer)
    return report
