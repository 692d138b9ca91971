"""A gateway on the virtual clock: the real admission, with what it heard last of the queue."""

from bench.simulation.clock import Clock
from bench.simulation.request import Asked, Fate
from gateway.waits import Waits, Wish
from streams.errors import Refused
from streams.messages import Pressure


class Gateway:
    """Lets requests in, or refuses them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits = Waits()

    def hear(self, pressure: Pressure) -> None:
        self._waits.hear(pressure, self._clock.now)

    def admits(self, fate: Fate) -> bool:
        """Notes the code of a refusal, or the wait that is told to the dispatcher."""
        try:
            fate.told_wait = self._waits.admit(_wish(fate.asked), self._clock.now)
        except Refused as refusal:
            fate.code = refusal.code
            return False
        return True


def _wish(asked: Asked) -> Wish:
    return Wish(
        asked.tenant,
        asked.priority,
        asked.prompt_tokens,
        asked.cost,
        asked.deadline_seconds,
        asked.goal_seconds,
    )
