"""Corrects curves by the pace of live workers, and learns those that nobody has measured."""

import structlog

from fleet.metrics import CURVE_FACTOR
from fleet.planning_state import mean_shape
from fleet.signals.live_pace import (
    MAX_OBSERVED,
    LivePace,
    ObservedPace,
    WorkerPool,
    correction_factor,
    learn_curve,
)
from fleet.signals.signal_report import SignalReport
from streams.broker.broker_client import Broker
from streams.messages import Heartbeat
from streams.records.fleet.curve_store import CurveStore
from streams.records.fleet.curves import Curve, CurveSource
from streams.records.fleet.step_times import RequestShape

log = structlog.get_logger()

MIN_CHANGE = 0.05  # of a factor or a pace: a smaller one is not stored


class LiveCurves:
    """The curves as live workers show them, once a minute for each pool that is busy.

    Workers without a machine type have none.
    """

    def __init__(self, broker: Broker) -> None:
        self._store = CurveStore(broker)
        self._paces: dict[WorkerPool, LivePace] = {}
        self._learnt: dict[WorkerPool, list[ObservedPace]] = {}

    def add_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take a heartbeat of a worker; `now` is epoch seconds."""
        if beat.type:
            pool = WorkerPool(beat.model, beat.version, beat.type)
            if pool not in self._paces:
                self._paces[pool] = LivePace(now)
            self._paces[pool].add(beat, now)

    async def update(self, report: SignalReport) -> None:
        """Store what the minutes have shown that are over at the time of the report.

        Raises `BrokerUnavailable`, `StorageFull` or `StoreRefused`.
        """
        shapes = {each.model: mean_shape(each) for each in report.models}
        for pool, pace in self._paces.items():
            if observed := pace.close_minute(report.at):
                await self._store_observed(pool, observed, shapes.get(pool.model), report.at)

    async def _store_observed(
        self, pool: WorkerPool, observed: ObservedPace, shape: RequestShape | None, now: float
    ) -> None:
        known = (await self._store.read_all()).get(f"{pool.type}/{pool.model}@{pool.version}")
        measured = await self._store.read_measured(*pool)
        if measured is None:
            paces = self._learnt.setdefault(pool, [])
            paces.append(observed)
            del paces[:-MAX_OBSERVED]
            curve = learn_curve(pool, paces, now)
        elif shape:
            curve = measured.corrected(correction_factor(measured, shape, observed), now)
            CURVE_FACTOR.labels(*pool).set(curve.live_factor)
        else:
            return
        if known is None or known.source is not CurveSource.LIVE or _differs(known, curve):
            await self._store.write_live(curve)
            log.info(
                "curve_corrected" if measured else "curve_learnt",
                curve=curve.name,
                factor=round(curve.live_factor, 3),
                batch=round(observed.batch, 1),
                ms_per_token=round(1000 * observed.seconds_per_token, 2),
            )


def _differs(known: Curve, curve: Curve) -> bool:
    """True if the pace of a batch of the known curve's size is another by `MIN_CHANGE` or more."""
    shape = RequestShape(1, 1)
    before, after = (
        each.times.decode_seconds(known.max_sequences, shape) for each in (known, curve)
    )
    is_larger = curve.max_sequences > known.max_sequences
    return is_larger or abs(after / before - 1) >= MIN_CHANGE
