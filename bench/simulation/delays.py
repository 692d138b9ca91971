"""Delays of messages between the services, and the intervals of their timers, in seconds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Delays:
    """Medians of a broker on the same network; the intervals are the services' own defaults."""

    hop: float = 0.001  # until a message reaches its receiver
    store: float = 0.001  # until the broker acknowledges a stored message
    fetch: float = 0.001  # until a payload is read by its sequence
    heartbeat_gap: float = 0.01  # the least time between two heartbeats
    heartbeat: float = 1.0  # between two heartbeats of an idle worker
    progress: float = 0.2  # between two heartbeats while the worker runs something
    pressure: float = 0.2  # between two pressure reports of the leader
