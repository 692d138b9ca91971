"""Curves follow live workers: corrected where they were measured, learnt where they were not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from fleet.live_curves import LiveCurves
from fleet.signals.signal_report import ModelSignals, PrioritySignals, SignalReport
from millstream.admin.admin_client import HttpAdminClient
from millstream.curves.commands import fetch_curves, put_curve
from registry.models import mock_model
from streams import topology
from streams.accounts.access import UserClass
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.messages import Heartbeat
from streams.records.fleet.curves import Curve, CurveSource
from streams.records.fleet.step_times import RequestShape, StepTimes
from tests.support.accounts_server import connect
from tests.support.admins import running_admin

VERSION = next(iter(mock_model("m").versions))
SHAPE = RequestShape(100, 50)
TIMES = StepTimes(step_seconds=0.02, sequence_seconds=0.001)
MEASURED = Curve("m", VERSION, "l4", CurveSource.BENCH, 5.0, TIMES, 32, 10_000)
RUNNING = 8


@asynccontextmanager
async def cell(nats_url: str) -> AsyncIterator[tuple[HttpAdminClient, Broker]]:
    """An admin service with the model `m`, and the fleet service's connection."""
    with capture_logs():
        async with (
            running_admin(nats_url) as admin,
            connect(nats_url, UserClass.FLEET) as broker,
        ):
            record = mock_model("m").model_dump(mode="json")
            await admin.call("models.put", name="m", model=record)
            await declaration.wait_for_stream(broker, topology.CURVES)
            yield admin, broker


async def live_minute(curves: LiveCurves, since: float, seconds_per_token: float) -> None:
    """A minute in which eight requests run on a worker, and each waits so long for a token."""
    for second in range(61):
        tokens = int(1e6 + second * RUNNING / seconds_per_token)
        beat = Heartbeat("w", "m", VERSION, 0, 0, RUNNING, 0, 32, 10_000, tokens, 0.0, type="l4")
        curves.add_heartbeat(beat, since + second)
    ended = PrioritySignals(
        "standard", ended={"done": 10}, prompt_tokens=1000, completion_tokens=500
    )
    await curves.update(SignalReport(since + 60, 60.0, [ModelSignals("m", [ended], [])], []))


async def test_a_measured_curve_is_corrected_and_says_so(nats_url: str) -> None:
    """Workers at their work are slower than a bench; a change of a few per cent is none."""
    expected = TIMES.request_seconds(RUNNING, SHAPE) / SHAPE.output_tokens
    async with cell(nats_url) as (admin, broker):
        await put_curve(admin, MEASURED)
        curves = LiveCurves(broker)
        await live_minute(curves, 1000.0, 1.4 * expected)
        (found,) = await fetch_curves(admin)
        assert found.source is CurveSource.LIVE
        assert found.live_factor == pytest.approx(1.4, rel=0.01)
        assert found.measured_at == 1060
        factor = REGISTRY.get_sample_value(
            "millstream_fleet_curve_factor", {"model": "m", "version": VERSION, "type": "l4"}
        )
        assert factor == found.live_factor
        assert found.times.step_seconds == pytest.approx(1.4 * 0.02, rel=0.01)
        await live_minute(curves, 1060.0, 1.42 * expected)
        assert await fetch_curves(admin) == [found]
        await live_minute(curves, 1120.0, 1.0 * expected)
        (found,) = await fetch_curves(admin)
        assert found.live_factor == pytest.approx(1.0, rel=0.01)
        await put_curve(admin, again := replace(MEASURED, measured_at=2000.0))
        assert await fetch_curves(admin) == [again]


async def test_a_curve_that_nobody_has_measured_is_learnt_in_a_minute(nats_url: str) -> None:
    """A planner without any number could only guess."""
    async with cell(nats_url) as (admin, broker):
        await live_minute(LiveCurves(broker), 1000.0, 0.05)
        (found,) = await fetch_curves(admin)
        assert found.source is CurveSource.LIVE
        assert found.name == f"l4/m@{VERSION}"
        assert found.times.decode_seconds(RUNNING, SHAPE) == pytest.approx(0.05, rel=0.01)
        assert found.max_sequences == 2 * RUNNING
