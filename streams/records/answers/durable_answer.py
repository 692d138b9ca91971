"""The durable answer to one request, as its worker and its dispatcher end it."""

from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from streams import messages
from streams.broker.broker_client import Broker, StreamMissing
from streams.errors import AnswerLost
from streams.headers import AnswerRef, Envelope
from streams.records.answers.answer_records import build_answer, end_of
from streams.records.answers.answer_store import read_answer, store_answer
from streams.records.log_contents import RequestEnd

log = structlog.get_logger()


class DurableAnswer:
    """The answer `ref`, which the producer of a request with this envelope wants."""

    def __init__(self, broker: Broker, envelope: Envelope, ref: AnswerRef) -> None:
        self._broker, self._envelope, self._ref = broker, envelope, ref

    async def read_end(self) -> RequestEnd | None:
        """Return how the request ended, by its stored answer; None while none can be read.

        Raises `BrokerUnavailable`.
        """
        try:
            found = await read_answer(self._broker, self._envelope.tenant, self._ref.key)
        except (StreamMissing, AnswerLost):  # it publishes no more, or has filled its stream
            return None
        is_own = found and found["request_id"] != self._ref.replaces
        return end_of(found) if found and is_own else None

    async def store_result(
        self, packed: Iterable[bytes], terminal: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Store the answer, given the token log's packed records, unless there is one. Idempotent.

        Returns the terminal that counts: the stored answer's. If the tenant has had no stream for
        `STORE_SECONDS`, it publishes no more, and there is nowhere to store its answer. Raises
        `BrokerUnavailable`, or `StoreRefused`.
        """
        envelope, clock = self._envelope, self._broker.clock
        records = [messages.unpack_record(each) for each in packed]
        answer = build_answer(self._ref, envelope.request_id, clock.now_ms(), records, terminal)
        try:
            is_first = await store_answer(
                self._broker,
                envelope.tenant,
                self._ref.key,
                answer,
                envelope.encoding,
                self._ref.replaces,
            )
        except StreamMissing as error:
            log.error("answer_not_stored", tenant=envelope.tenant, reason=str(error))
            return terminal
        end = None if is_first else await self.read_end()
        return end.terminal if end else terminal
