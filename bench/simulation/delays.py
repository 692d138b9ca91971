"""How long the steps between the services take; seconds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Delays:
    """Medians of a broker on the same network; the intervals are the services' own."""

    hop: float = 0.001  # a message on its way to whom it is for
    store: float = 0.001  # until the broker says that it has it
    fetch: float = 0.001  # a payload by its sequence
    beat_gap: float = 0.01
    beat: float = 1.0
    progress: float = 0.2  # the same while a worker runs something
    tell: float = 0.2
