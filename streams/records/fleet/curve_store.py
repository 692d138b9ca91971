"""The bucket `curves`: what was measured, and what workers at their work tell since."""

from collections.abc import Iterable
from dataclasses import replace

from streams import subjects, topology
from streams.broker.broker_client import Broker
from streams.records.cas.cas_records import CasRecords
from streams.records.fleet.curves import Curve


class CurveStore:
    """Curves by their names. Measured and live ones have subjects, and writers, of their own.

    Every method raises `BrokerUnavailable`.
    """

    def __init__(self, broker: Broker) -> None:
        self._records = CasRecords(broker, topology.CURVES, Curve.unpack)

    async def read_all(self) -> dict[str, Curve]:
        """Return the curves that hold now, by name: see `merge`."""
        return merge(await self._records.list(subjects.ALL_CURVES))

    async def read_measured(self, curve: Curve) -> Curve | None:
        """Return what was measured of the same model version and type; None if nothing was."""
        return await self._records.read_newest(_subject(curve, is_live=False))

    async def write_measured(self, curve: Curve) -> Curve:
        """Store a curve in place of an older one of the same name; raises `StorageFull`."""
        return await self._write(_subject(curve, is_live=False), curve)

    async def write_live(self, curve: Curve) -> Curve:
        """Store what workers at their work tell of a curve; raises `StorageFull`."""
        return await self._write(_subject(curve, is_live=True), curve)

    async def _write(self, subject: str, curve: Curve) -> Curve:
        known = await self._records.read_newest(subject) or curve
        newest = replace(curve, revision=known.revision)
        return (
            await self._records.change(
                subject, newest, lambda found: replace(curve, revision=found.revision)
            )
            or curve
        )


def merge(curves: Iterable[Curve]) -> dict[str, Curve]:
    """Return the curves that hold, by name.

    What workers tell counts in place of what was measured before it, and not of what was measured
    since.
    """
    newest: dict[str, Curve] = {}
    for curve in curves:
        known = newest.get(curve.name)
        if known is None or curve.measured_at >= known.measured_at:
            newest[curve.name] = curve
    return newest


def _subject(curve: Curve, is_live: bool) -> str:
    make = subjects.live_curve if is_live else subjects.measured_curve
    return make(curve.model, curve.version, curve.type)
