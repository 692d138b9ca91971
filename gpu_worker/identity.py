"""A worker's identity for one model, as claims, heartbeats and ledger records give it. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerIdentity:
    """One worker as the server of one model version; the fields are what it reports of itself.

    `worker` is the worker's id, `shards` the number of streams over which token logs are spread.
    """

    model: str
    version: str
    worker: str
    shards: int
