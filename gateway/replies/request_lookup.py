"""Who knows of a request that has no log: only the leader of its model knows its queue."""

import asyncio
import json

from streams import subjects
from streams.broker.connection import Broker
from streams.errors import BrokerUnavailable
from streams.records import lanes

ANSWER_SECONDS = 0.3  # a client waits for it


async def is_request_known(broker: Broker, tenant: str, request_id: str) -> bool:
    """True if somebody says in time that a request waits or runs, or has its lost log."""
    found = subjects.find(tenant, request_id)
    return await broker.request(found, b"", ANSWER_SECONDS) is not None


async def ensure_unknown(broker: Broker, tenant: str, request_id: str) -> None:
    """Raises `BrokerUnavailable` if a leader may know of it, or knows of it by now."""
    await _ensure_no_queue_holds(broker, tenant, request_id)
    if await is_request_known(
        broker, tenant, request_id
    ):  # by who began to lead after the first question
        raise BrokerUnavailable(f"the request {request_id!r} was found just now: try again")


async def _ensure_no_queue_holds(broker: Broker, tenant: str, request_id: str) -> None:
    """Raises `BrokerUnavailable` while nobody leads a model for which the request may wait."""
    models = sorted(await lanes.list_models_of(broker, tenant))
    question = json.dumps({"request_id": request_id}).encode()
    answers = await asyncio.gather(
        *(broker.request(subjects.report(model), question, ANSWER_SECONDS) for model in models)
    )
    for model, answer in zip(models, answers, strict=True):
        if answer is None:
            raise BrokerUnavailable(f"the queue of {model!r} cannot be asked just now: try again")
