"""A worker's identity for one model, as claims, heartbeats and ledger records give it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from registry.models import LatencyGoals
from streams.subjects import Priority


@dataclass(frozen=True)
class WorkerIdentity:
    """One worker as the server of one model version; the fields are what it reports of itself.

    `worker` is the worker's id, `shards` the number of streams over which token logs are spread,
    and `goals` the model's wanted time to first token for each priority that has one.
    """

    model: str
    version: str
    worker: str
    shards: int
    goals: Mapping[Priority, LatencyGoals] = field(default_factory=dict)
