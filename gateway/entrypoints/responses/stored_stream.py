"""The stream of a stored response, from any event on, at any gateway.

While the response has no result, its events come from the log of the request that runs it; once it
has one, from the result: the same events with the same numbers. So the end always comes from the
result, and a stream outlives gateways, and the log.
"""

import asyncio
from contextlib import suppress

from starlette.requests import Request

from api.authentication.authenticator import Principal
from api.openai_bodies import JsonBody
from api.responses.conversation import find_model, head_of
from api.responses.response_bodies import ResponseEnd, response_not_found
from api.responses.response_events import ResponseEvents
from api.responses.stored_events import iterate_events, make_events
from gateway.context import GatewayContext
from gateway.entrypoints.choice_fanout import watch_client
from gateway.entrypoints.responses.response_stream import EventWriter, pinging
from gateway.replies.record_queue import RecordQueue
from streams.errors import BrokerUnavailable, Ended, MillstreamError
from streams.messages import TERMINAL_TYPES, Record
from streams.records.jobs.item_results import ItemResult
from streams.records.responses.response_records import StoredResponse

LOOK_SECONDS, MAX_LOOK_SECONDS = 0.05, 2.0  # for a result, or another request, behind a terminal
SILENT_SECONDS = 15.0  # of a log, before it is looked whether the response has ended otherwise
_BREATH_CHUNKS = 100  # encoded before others get a turn of the event loop: some 2 ms
LATE_SECONDS = 15.0  # so long after its deadline a request has ended or was never stored
_NEVER_ENDED = ("deadline_exceeded", "the deadline passed without an answer")


def end_without_result(response: StoredResponse, now: float) -> ResponseEnd | None:
    """Return the end of a response that has no result and gets none any more; None if it may."""
    if response.background or now < response.ends_at + LATE_SECONDS:
        return None
    return ResponseEnd.from_failure(*_NEVER_ENDED)


class StoredStream:
    """Sends the events of one stored response to one client."""

    def __init__(
        self,
        context: GatewayContext,
        response: StoredResponse,
        writer: EventWriter,
    ) -> None:
        self._context, self._response, self._writer = context, response, writer
        self._head = head_of(response)
        self._model = find_model(context.registry, self._head)
        self._live = self._make_events()

    def _make_events(self, version: str = "") -> ResponseEvents:
        return make_events(self._head, self._model, version)

    async def run(self, request: Request, principal: Principal) -> None:
        """Send all events that the client does not have, and return when the stream has ended.

        If the stream must end before the response does, an `error` event says why. Raises
        `ClientGone` if the client leaves; the response goes on.
        """
        queue = RecordQueue(lambda: None)
        await self._writer.begin()

        def cut(reason: MillstreamError) -> None:
            queue.close(Ended(reason.code, reason.message))

        context = self._context
        context.record_queues.add(queue)
        watching = asyncio.create_task(watch_client(request, queue), name="client")
        try:
            async with pinging(self._writer):
                with context.watching(principal, "infer", cut):
                    await self._writer.write(self._live.created())
                    await self._follow(queue)
        except MillstreamError as error:
            await self._writer.fail(error)
        finally:
            watching.cancel()
        await self._writer.end()

    async def _follow(self, queue: RecordQueue) -> None:
        pause = 0.0
        while not await self._try_to_end():
            await self._wait(queue, pause)
            has_ended = await self._send_log(queue)
            pause = min(MAX_LOOK_SECONDS, max(LOOK_SECONDS, 2 * pause)) if has_ended else 0.0

    async def _try_to_end(self) -> bool:
        """Send the end as `_send_end`; False also while the broker does not answer."""
        try:
            return await self._send_end()
        except BrokerUnavailable:
            return False

    async def _send_end(self) -> bool:
        """Send what is left of a response that has ended; False if it has not."""
        if result := await self._context.responses.find_result(self._response):
            await self._send_result(result)
            return True
        now = self._context.broker.clock.now()
        if end := end_without_result(self._response, now):
            await self._writer.write(self._live.end(end))
            return True
        return False

    async def _send_result(self, result: ItemResult) -> None:
        for number, events in enumerate(iterate_events(self._make_events(result.version), result)):
            await self._writer.write(events)
            if not number % _BREATH_CHUNKS:
                await asyncio.sleep(0)

    async def _send_log(self, queue: RecordQueue) -> bool:
        """Send the events of the log that is being written; True once it has its terminal.

        False if it is silent for long, or the broker does not answer.
        """
        response, relay = self._response, self._context.relay
        try:
            subscription = await relay.subscribe_existing(
                response.tenant, response.request_id, queue.put
            )
        except BrokerUnavailable:
            return False
        self._live = self._make_events()
        self._live.created()
        try:
            while True:
                relay.unpause(subscription)
                async with asyncio.timeout(SILENT_SECONDS):
                    record = await queue.next()
                if record["type"] in TERMINAL_TYPES:
                    return True
                await self._writer.write(self._encode(record))
        except TimeoutError:
            return False
        finally:
            await relay.unsubscribe(subscription)
            while queue.next_nowait():
                pass

    def _encode(self, record: Record) -> list[JsonBody]:
        if record["type"] == "chunk":
            return self._live.chunk(record["count"], record["text"], record.get("logprobs"))
        return self._live.started() if record["type"] == "started" else []

    async def _wait(self, queue: RecordQueue, seconds: float) -> None:
        """Wait, unless the client leaves; then learn which request runs the response by now."""
        if seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await queue.next()
        with suppress(BrokerUnavailable):
            response = self._response
            found = await self._context.responses.find(response.tenant, response.id)
            if found is None:
                raise response_not_found(self._head.told_id)
            self._response = found
