"""A worker's identity for one model, as claims, heartbeats and ledger records give it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from registry.models import LatencyGoals
from streams.subjects import Priority


@dataclass(frozen=True)
class WorkerIdentity:
    """A worker's id, the model version that it serves, the token log shards and latency goals."""

    model: str
    version: str
    worker: str
    shards: int
    goals: Mapping[Priority, LatencyGoals] = field(default_factory=dict)
