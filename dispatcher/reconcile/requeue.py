"""Takes work back that its worker does not serve, and sends it to any.

It asks the worker's own consumer, so that the broker decides who has a message: what comes was
delivered to nobody, or to one that has let the ack wait pass. Hence work of a worker that is only
slow to beat stays there, and whoever comes back too late is fenced as with any other work.
"""

from collections.abc import Mapping

import structlog

from dispatcher.dispatching.metrics import observe_requeue
from dispatcher.dispatching.model_state import ModelState
from dispatcher.workers.placements import StrandedWork
from streams import subjects, topology
from streams.broker import declaration
from streams.broker.connection import Broker
from streams.broker.pull_loop import Delivery, pull_one
from streams.errors import BrokerUnavailable
from streams.headers import MESSAGE_ID
from streams.records.dead_letters import dead_letter_malformed, parse_work_envelope

log = structlog.get_logger()

ACK_WAIT_SECONDS = 5.0  # of a consumer that is gone and made again


def build_requeue_id(request_id: str, seq: int) -> str:
    """The message id of work that was stored as `seq` before it was moved."""
    return f"{request_id}.{seq}"


def parse_requeue_origin(headers: Mapping[str, str]) -> int | None:
    """The sequence that a message of WORK had before it was moved, if it was."""
    _, _, seq = headers.get(MESSAGE_ID, "").partition(".")
    return int(seq) if seq.isdecimal() else None


class Requeuer:
    """Moves messages of one model from workers' own lanes to the lane of all."""

    def __init__(self, broker: Broker, books: ModelState) -> None:
        self._broker, self._state = broker, books

    async def requeue(self, stray: StrandedWork) -> None:
        """Move what the broker gives out. Raises `BrokerUnavailable` or `StoreRefused`.

        Safe to repeat and to cancel: what was not moved is given out again after the ack wait.
        """
        for _ in range(stray.count):
            delivery = await self._take_next(stray)
            if delivery is None:
                return
            await self._requeue_one(delivery, stray)

    async def _take_next(self, stray: StrandedWork) -> Delivery | None:
        model, version, worker = self._state.model, stray.version, stray.worker
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

    async def _requeue_one(self, delivery: Delivery, stray: StrandedWork) -> None:
        """Store it for any worker, and only then acknowledge it.

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
        observe_requeue(self._state.model, stray.why)
        log.info("work_requeued", request_id=request_id, worker=stray.worker, reason=stray.why)
