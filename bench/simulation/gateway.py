"""A gateway on the virtual clock: the real admission, with what it heard last of the queue."""

from bench.simulation.virtual_clock import VirtualClock
from gateway.admission.load_shedding import LatencyTarget, LoadShedder
from simulation.request import RequestSpec, SimulatedRequest
from streams.errors import Refused
from streams.messages import Pressure


class SimulatedGateway:
    """Lets requests in, or refuses them."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._waits = LoadShedder()

    def receive_pressure(self, pressure: Pressure) -> None:
        self._waits.update(pressure, self._clock.now)

    def try_admit(self, fate: SimulatedRequest) -> bool:
        """Notes the code of a refusal, or the wait that is told to the dispatcher."""
        try:
            fate.estimated_wait = self._waits.admit(_wish(fate.spec), self._clock.now)
        except Refused as refusal:
            fate.code = refusal.code
            return False
        return True


def _wish(asked: RequestSpec) -> LatencyTarget:
    return LatencyTarget(
        asked.tenant,
        asked.priority,
        asked.prompt_tokens,
        asked.cost,
        asked.deadline_seconds,
        asked.goal_seconds,
    )
