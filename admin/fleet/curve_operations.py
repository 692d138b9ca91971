"""Handlers of the operations on curves; they return JSON objects."""

from collections.abc import Mapping
from dataclasses import replace

from admin.audit_trail import AuditTrail
from admin.fleet.curve_change import CurveChange
from admin.operation_table import CurveArguments, PageArguments
from admin.operations import Handler, JsonBody, make_page
from registry.kv_view import RecordChange
from registry.store import Registry
from streams.broker.broker_client import Broker
from streams.errors import ModelNotFound, NotFound
from streams.records.fleet.curve_store import CurveStore
from streams.records.fleet.curves import Curve


class CurveOperations:
    """The operations on curves. A curve is answered once it is stored."""

    def __init__(self, broker: Broker, registry: Registry, trail: AuditTrail) -> None:
        self._broker, self._registry, self._trail = broker, registry, trail
        self._store = CurveStore(broker)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The coroutine function of each operation in the table, by its name."""
        return {"curves.list": self._list, "curves.put": self._put}

    async def _list(self, page: PageArguments) -> JsonBody:
        curves = await self._store.read_all()
        return make_page(
            curves, lambda name: describe_curve(curves[name]), after=page.after, limit=page.limit
        )

    async def _put(self, arguments: CurveArguments) -> JsonBody:
        """Store a curve with the time of now; raises `NotFound` for a model that is not there."""
        given = arguments.curve
        model = self._registry.models.get(given.model)
        if model is None:
            raise ModelNotFound(given.model)
        if given.version not in model.versions:
            there_are = ", ".join(model.versions)
            raise NotFound(
                f"the model {given.model!r} has no version {given.version!r}; it has: {there_are}"
            )
        measured_at = given.measured_at or self._broker.clock.now()
        curve = replace(given, revision=0, live_factor=1.0, measured_at=measured_at)
        before = await self._store.read_measured(curve.model, curve.version, curve.type)
        change = RecordChange(
            curve.name, CurveChange.of(before) if before else None, CurveChange.of(curve)
        )
        async with self._trail.record(change):
            return describe_curve(await self._store.write_measured(curve))


def describe_curve(curve: Curve) -> JsonBody:
    """Return a curve as a map of its fields, with its name."""
    facts = {key: value for key, value in vars(curve).items() if key != "revision"}
    points = [vars(point) for point in curve.points]
    return {"name": curve.name, **facts, "times": vars(curve.times), "points": points}
