"""Takes work back from a worker that does not serve it, and publishes it for any worker.

It asks the worker's own consumer, so that the broker decides who has a message: a message that
comes was delivered to nobody, or to a worker that has let the ack wait pass. Hence work of a worker
whose heartbeats are only slow stays there, and a worker that comes back too late is fenced as with
any other work.
"""

from collections.abc import Mapping

import structlog

from dispatcher.dispatching.metrics import observe_requeue
from dispatcher.dispatching.model_state import ModelState
from dispatcher.workers.placed_requests import StrandedWork
from streams import subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.broker.pull_loop import Delivery, pull_one
from streams.errors import BrokerUnavailable
from streams.headers import MESSAGE_ID
from streams.records.dead_letters import dead_letter_malformed, parse_work_envelope

log = structlog.get_logger()

ACK_WAIT_SECONDS = 5.0  # of a worker's consumer that was removed and is made again


def build_requeue_id(request_id: str, seq: int) -> str:
    """Return the message id under which a request that was stored as `seq` is published again.

    If it is published twice with this id, the broker keeps only the first message.
    """
    return f"{request_id}.{seq}"


def parse_requeue_origin(headers: Mapping[str, str]) -> int | None:
    """Return the sequence that a message of WORK had before it was requeued.

    None if its message id is not one of `build_requeue_id`, so that it was never requeued.
    """
    _, _, seq = headers.get(MESSAGE_ID, "").partition(".")
    return int(seq) if seq.isdecimal() else None


class Requeuer:
    """Takes requests back from workers that do not serve them, so that any worker can pull them.

    A request that was placed on one worker has a subject of that worker in the stream WORK;
    requeueing publishes it on the subject from which all workers of its version pull.
    """

    def __init__(self, broker: Broker, state: ModelState) -> None:
        self._broker, self._state = broker, state

    async def requeue(self, stranded: StrandedWork) -> None:
        """Move at most `stranded.count` requests from a worker's own subject to that of any worker.

        Only requests that the broker gives out are moved: those delivered to nobody, and those
        whose worker has let the ack wait pass. Returns when the broker gives out no more. Raises
        `BrokerUnavailable` or `StoreRefused`. Safe to repeat and to cancel: a request that was not
        moved is given out again after the ack wait.
        """
        for _ in range(stranded.count):
            delivery = await self._take_next(stranded)
            if delivery is None:
                return
            await self._requeue_one(delivery, stranded)

    async def _take_next(self, stranded: StrandedWork) -> Delivery | None:
        """Pull the next message of a worker's own consumer; None if the broker gives none out.

        A consumer that the broker has removed is made again, for the next time.
        """
        model, version, worker = self._state.model, stranded.version, stranded.worker
        consumer = topology.worker_consumer(model, version, worker, ACK_WAIT_SECONDS)
        assert consumer.durable_name
        name, broker = consumer.durable_name, self._broker
        try:
            return await pull_one(broker, topology.WORK, name)
        except BrokerUnavailable:
            if await declaration.consumer_info(broker, topology.WORK, name) is None:
                # the broker removes it when nobody has pulled for long
                await declaration.declare_consumer(broker, topology.WORK, consumer)
            raise

    async def _requeue_one(self, delivery: Delivery, stranded: StrandedWork) -> None:
        """Store a message for any worker, and only then acknowledge it.

        A crash between repeats with the same message id, which the broker recognises.
        """
        envelope = parse_work_envelope(delivery)
        if envelope is None:
            await dead_letter_malformed(self._broker, delivery)
            return
        request_id = envelope.request_id
        kept = {k: v for k, v in delivery.headers.items() if not k.startswith("Nats-")}
        headers = kept | {MESSAGE_ID: build_requeue_id(request_id, delivery.seq)}
        subject = subjects.work(subjects.parse_work(delivery.subject))
        stored = await self._broker.store(subject, delivery.data, headers)
        self._state.mark_requeued(request_id, delivery.seq, stored.seq)
        await delivery.ack()
        observe_requeue(self._state.model, stranded.why)
        log.info(
            "work_requeued", request_id=request_id, worker=stranded.worker, reason=stranded.why
        )
