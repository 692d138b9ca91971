"""Handlers of the operations on the fleet; they return JSON objects."""

from collections.abc import Mapping
from dataclasses import replace

from admin.audit_trail import AuditTrail
from admin.fleet.fleet_answer import describe_fleet
from admin.fleet.fleet_override import FleetOverride, FleetPause
from admin.operation_table import FleetArguments, FleetPageArguments, FleetPauseArguments
from admin.operations import Handler, JsonBody
from registry.kv_view import RecordChange
from registry.store import Registry
from streams import subjects
from streams.broker.broker_client import Broker
from streams.errors import BadRequest, NotFound
from streams.records.fleet.fleet_orders import MachineOrder
from streams.records.fleet.fleet_store import FleetStore
from streams.records.fleet.machine_list import MachineList


class FleetOperations:
    """The operations on the fleet; they raise `NotFound` where there is none.

    An order holds once it is stored; the fleet service plans by it, and the provider acts, after
    that.
    """

    def __init__(self, broker: Broker, registry: Registry, trail: AuditTrail) -> None:
        self._broker, self._registry, self._trail = broker, registry, trail
        self._store = FleetStore(broker)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The coroutine function of each operation in the table, by its name."""
        return {"fleet.show": self._show, "fleet.set": self._set, "fleet.pause": self._pause}

    async def _show(self, _: FleetPageArguments) -> JsonBody:
        known, plan = await self._read_machines(), await self._store.read_plan()
        orders, now = await self._store.read_orders(), self._broker.clock.now()
        return describe_fleet(known, plan, orders, self._registry.models, now)

    async def _set(self, arguments: FleetArguments) -> JsonBody:
        known = await self._read_machines()
        if arguments.name not in known.types:
            there_are = ", ".join(known.types)
            raise NotFound(f"there is no machine type {arguments.name!r}; there are: {there_are}")
        if arguments.model not in self._registry.models:
            raise self._registry.not_found(arguments.model)
        _check_bounds(known, arguments)
        now = self._broker.clock.now()
        order = MachineOrder(
            arguments.name, arguments.model, arguments.count, now + arguments.seconds
        )
        async with self._trail.record(await self._describe_change(order, now)):
            await self._store.change_orders(lambda orders: orders.with_order(order, now))
        return vars(order)

    async def _pause(self, arguments: FleetPauseArguments) -> JsonBody:
        await self._read_machines()
        until = self._broker.clock.now() + arguments.seconds
        before = (await self._store.read_orders()).paused_until
        change = RecordChange(
            subjects.FLEET_ORDERS,
            FleetPause(until=before) if before else None,
            FleetPause(until=until),
        )
        async with self._trail.record(change):
            await self._store.change_orders(lambda orders: replace(orders, paused_until=until))
        return {"paused_until": until}

    async def _describe_change(
        self, order: MachineOrder, now: float
    ) -> RecordChange[FleetOverride]:
        """Return the change for the audit log, with the order before of the type and model."""
        orders = await self._store.read_orders()
        before = [
            FleetOverride(**vars(each))
            for each in orders.valid_at(now)
            if (each.type, each.model) == (order.type, order.model)
        ]
        after = FleetOverride(**vars(order))
        return RecordChange(subjects.FLEET_ORDERS, before[0] if before else None, after)

    async def _read_machines(self) -> MachineList:
        """Return the provider's list; raises `NotFound` if there is no provider."""
        known = await self._store.read_machines()
        if not known.types:
            raise NotFound(
                "there is no fleet: workers are not started by a plan here; start `millstream up` "
                "with a table [fleet.types.NAME] in its configuration file"
            )
        return known


def _check_bounds(known: MachineList, arguments: FleetArguments) -> None:
    """Raise `BadRequest` for more machines than the model may have workers."""
    most = known.policy_of(arguments.model).max_workers
    if arguments.count > most:
        raise BadRequest(
            f"{arguments.model!r} may have {most} workers, not {arguments.count}: raise "
            f"max_workers in the table [fleet.models.{arguments.model}]",
            "count",
        )
