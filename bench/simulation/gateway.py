"""A gateway on the virtual clock: the real admission, with what it heard last of the queue."""

from bench.simulation.clock import Clock
from bench.simulation.request import Asked
from gateway import admission
from gateway.submission import Submission
from streams.errors import Overloaded
from streams.messages import Pressure


class Gateway:
    """Lets requests in, or refuses them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pressure: Pressure | None = None
        self._heard = 0.0

    def hear(self, pressure: Pressure) -> None:
        self._pressure, self._heard = pressure, self._clock.now

    def admits(self, asked: Asked) -> bool:
        submission = Submission("generate", "sim", asked.priority, None)
        age = self._clock.now - self._heard
        try:
            admission.check_wait(self._pressure, age, submission, asked.deadline_seconds)
        except Overloaded:
            return False
        return True
