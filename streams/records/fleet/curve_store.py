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

    async def read_measured(self, model: str, version: str, type_name: str) -> Curve | None:
        """Return what was measured of a model version on a type; None if nothing was."""
        subject = subjects.measured_curve(model, version, type_name)
        return await self._records.read_newest(subject)

    async def write_measured(self, curve: Curve) -> Curve:
        """Store a curve in place of an older one of the same name; raises `StorageFull`."""
        return await self._write(
            subjects.measured_curve(curve.model, curve.version, curve.type), curve
        )

    async def write_live(self, curve: Curve) -> Curve:
        """Store what workers at their work tell of a curve; raises `StorageFull`."""
        return await self._write(subjects.live_curve(curve.model, curve.version, curve.type), curve)

    async def _write(self, subject: str, curve: Curve) -> Curve:
        known = await self._records.read_newest(subject)
        first = replace(curve, revision=known.revision if known else 0)
        written = await self._records.change(
            subject, first, lambda found: replace(curve, revision=found.revision)
        )
        return written or curve


def merge(curves: Iterable[Curve]) -> dict[str, Curve]:
    """Return the curves that hold, by name: of each the one that was stored last.

    So what workers tell counts in place of what was measured before, until it is measured again.
    """
    newest: dict[str, Curve] = {}
    for curve in curves:
        known = newest.get(curve.name)
        if known is None or curve.revision > known.revision:
            newest[curve.name] = curve
    return newest
