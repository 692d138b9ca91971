"""Whether a request may wait that nobody knows of: only the leader of its model knows its queue."""

import asyncio
import json

from streams import lanes, subjects
from streams.connection import Broker
from streams.errors import BrokerUnavailable

ANSWER_SECONDS = 0.3  # a client waits for it


async def check(broker: Broker, tenant: str, request_id: str) -> None:
    """Raises `BrokerUnavailable` while nobody leads a model for which the request may wait."""
    models = sorted(await lanes.models_of(broker, tenant))
    question = json.dumps({"request_id": request_id}).encode()
    answers = await asyncio.gather(
        *(broker.request(subjects.report(model), question, ANSWER_SECONDS) for model in models)
    )
    for model, answer in zip(models, answers, strict=True):
        if answer is None:
            raise BrokerUnavailable(f"the queue of {model!r} cannot be asked just now: try again")
