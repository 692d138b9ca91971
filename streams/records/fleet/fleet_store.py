"""Orders, plan and the provider's list in the broker: records of the bucket `fleet`."""

from collections.abc import Callable

from streams import subjects, topology
from streams.broker.broker_client import Broker
from streams.records.cas.cas_records import CasRecords
from streams.records.fleet.fleet_orders import FleetOrders
from streams.records.fleet.fleet_plan import FleetPlan
from streams.records.fleet.machine_list import MachineList


class FleetStore:
    """The bucket `fleet`. Every method raises `BrokerUnavailable`."""

    def __init__(self, broker: Broker) -> None:
        self._plans = CasRecords(broker, topology.FLEET, FleetPlan.unpack)
        self._orders = CasRecords(broker, topology.FLEET, FleetOrders.unpack)
        self._lists = CasRecords(broker, topology.FLEET, MachineList.unpack)

    async def read_plan(self) -> FleetPlan:
        """Return the plan; one without machines if there is none."""
        return await self._plans.read_sound(subjects.FLEET_PLAN) or FleetPlan()

    async def write_plan(self, plan: FleetPlan) -> FleetPlan:
        """Store the plan in place of the one with its revision, and return it.

        Raises `RecordChanged` if another process has stored one since, or `StorageFull`.
        """
        return await self._plans.write(subjects.FLEET_PLAN, plan)

    async def read_orders(self) -> FleetOrders:
        """Return what operators have ordered."""
        return await self._orders.read_sound(subjects.FLEET_ORDERS) or FleetOrders()

    async def change_orders(self, apply: Callable[[FleetOrders], FleetOrders]) -> FleetOrders:
        """Store `apply` of the orders as they are then, and return them; raises `StorageFull`."""
        orders = await self.read_orders()
        return await self._orders.change(subjects.FLEET_ORDERS, orders, apply) or orders

    async def read_machines(self) -> MachineList:
        """Return the provider's list; one without types if there is no provider."""
        return await self._lists.read_sound(subjects.FLEET_MACHINES) or MachineList()

    async def write_machines(self, machines: MachineList) -> MachineList:
        """Store the provider's list in place of the one with its revision, and return it.

        Raises `RecordChanged` if another process has stored one since, or `StorageFull`.
        """
        return await self._lists.write(subjects.FLEET_MACHINES, machines)
