"""Who a worker is: what its claims, heartbeats and ledger records say. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from registry.models import LatencyGoals
from streams.subjects import Priority


@dataclass(frozen=True)
class WorkerIdentity:
    """Who serves: what the claim and the ledger say."""

    model: str
    version: str
    worker: str
    shards: int
    goals: Mapping[Priority, LatencyGoals] = field(default_factory=dict)
