"""A gateway on the virtual clock: the real load shedding, with the last pressure it received."""

from bench.simulation.virtual_clock import VirtualClock
from gateway.admission.load_shedding import LatencyTarget, LoadShedder
from simulation.request import RequestSpec, SimulatedRequest
from streams.errors import Refused
from streams.messages import Pressure


class SimulatedGateway:
    """Admits or refuses requests by the last pressure report."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._load_shedder = LoadShedder()

    def receive_pressure(self, pressure: Pressure) -> None:
        """Take in a pressure report of the leader."""
        self._load_shedder.update(pressure, self._clock.now)

    def try_admit(self, request: SimulatedRequest) -> bool:
        """True if a request is admitted; notes its estimated wait, or the code of the refusal."""
        try:
            request.estimated_wait = self._load_shedder.admit(
                _latency_target(request.spec), self._clock.now
            )
        except Refused as refusal:
            request.code = refusal.code
            return False
        return True


def _latency_target(spec: RequestSpec) -> LatencyTarget:
    return LatencyTarget(
        spec.tenant,
        spec.priority,
        spec.prompt_tokens,
        spec.cost,
        spec.deadline_seconds,
        spec.goal_seconds,
    )
