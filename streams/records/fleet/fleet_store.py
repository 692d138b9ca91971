"""The plan and the provider's list in the broker: two records in the bucket `fleet`."""

from collections.abc import Callable

from streams import subjects, topology
from streams.broker.broker_client import Broker
from streams.records.cas.cas_records import CasRecords
from streams.records.fleet.fleet_plan import FleetPlan
from streams.records.fleet.machine_list import MachineList


class FleetStore:
    """The bucket `fleet`. Every method raises `BrokerUnavailable`."""

    def __init__(self, broker: Broker) -> None:
        self._plans = CasRecords(broker, topology.FLEET, FleetPlan.unpack)
        self._lists = CasRecords(broker, topology.FLEET, MachineList.unpack)

    async def read_plan(self) -> FleetPlan:
        """Return the plan; one without machines if there is none."""
        return await self._plans.read_newest(subjects.FLEET_PLAN) or FleetPlan()

    async def change_plan(self, apply: Callable[[FleetPlan], FleetPlan]) -> FleetPlan:
        """Store `apply` of the plan as it is then, and return it; raises `StorageFull`."""
        plan = await self.read_plan()
        return await self._plans.change(subjects.FLEET_PLAN, plan, apply) or plan

    async def read_machines(self) -> MachineList:
        """Return the provider's list; one without types if there is no provider."""
        return await self._lists.read_newest(subjects.FLEET_MACHINES) or MachineList()

    async def write_machines(self, machines: MachineList) -> MachineList:
        """Store the provider's list in place of the one with its revision, and return it.

        Raises `RecordChanged` if another process has stored one since, or `StorageFull`.
        """
        return await self._lists.write(subjects.FLEET_MACHINES, machines)
