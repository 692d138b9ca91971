"""A worker's identity for one model, as claims, heartbeats and ledger records give it. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerIdentity:
    """One worker as the server of one model version; the fields are what it reports of itself.

    `worker` is the worker's id, `shards` the number of streams over which token logs are spread.
    `type` names the kind of machine, empty if it has no name, and `price` is a packed
    `WorkerPrice`, empty if it has none.
    """

    model: str
    version: str
    worker: str
    shards: int
    type: str = ""
    price: str = ""
