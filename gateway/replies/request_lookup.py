"""Asks over NATS whether anybody knows of a request that has no log.

Gateways and workers answer for requests that they have; a queued one is known to nobody but the
leader of its model.
"""

import asyncio
import json

from streams import subjects
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable
from streams.records import request_queue

ANSWER_SECONDS = 0.3  # short, since a client waits for it


async def is_request_known(broker: Broker, tenant: str, request_id: str) -> bool:
    """Return True if any service answers that it has the request, queued or running.

    A worker that is about to write a lost log again answers, too. False if nobody answers within
    `ANSWER_SECONDS`, which does not prove that nobody has the request.
    """
    find_subject = subjects.find(tenant, request_id)
    return await broker.request(find_subject, b"", ANSWER_SECONDS) is not None


async def ensure_unknown(broker: Broker, tenant: str, request_id: str) -> None:
    """Return only if it is certain that nobody has the request; else raise `BrokerUnavailable`.

    The dispatcher of each model for which the request may wait is asked. One that does not answer
    may have the request in its queue, so that counts as uncertain.
    """
    await _ensure_no_queue_holds(broker, tenant, request_id)
    # Ask again: somebody may have begun to lead after the first question
    if await is_request_known(broker, tenant, request_id):
        raise BrokerUnavailable(f"the request {request_id!r} was found just now: try again")


async def _ensure_no_queue_holds(broker: Broker, tenant: str, request_id: str) -> None:
    """Raise `BrokerUnavailable` while nobody leads a model for which the request may wait."""
    models = sorted(await request_queue.list_models_of(broker, tenant))
    question = json.dumps({"request_id": request_id}).encode()
    answers = await asyncio.gather(
        *(broker.request(subjects.report(model), question, ANSWER_SECONDS) for model in models)
    )
    for model, answer in zip(models, answers, strict=True):
        if answer is None:
            raise BrokerUnavailable(f"the queue of {model!r} cannot be asked just now: try again")
