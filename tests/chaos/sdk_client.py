"""The client library under the same load: what its users see is recorded, not what it saw."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict

from millstream_client import Client, MillstreamError, Stream
from tests.chaos.history import Accepted, Cancelled, Chunk, Ended, Refused, Submitted
from tests.chaos.plan import PlannedRequest
from tests.chaos.recording_client import PATIENCE_SECONDS, Record


class SdkClient:
    """Takes the place of a recording client of `tests/chaos/recording_client.py`."""

    def __init__(
        self,
        name: str,
        tenant: str,
        key: str,
        gateways: Sequence[str],
        clock: Callable[[], float],
        record: Record,
    ) -> None:
        self.name, self.tenant = name, tenant
        urls = [url.replace("ws://", "http://").removesuffix("/v1/stream") for url in gateways]
        self._client = Client(urls, api_key=key, patience=PATIENCE_SECONDS)
        self._clock, self._record = clock, record
        self._streams: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        return not self._streams

    async def run(self) -> None:
        async with self._client:
            await asyncio.get_running_loop().create_future()

    async def submit(self, ask: PlannedRequest) -> None:
        """Ask for something; the library does the rest."""
        self._record(Submitted(self._clock(), ask.name, self.tenant, ask.words, self.name))
        stream = self._client.generate(
            model="mock", prompt=ask.prompt, max_tokens=ask.max_tokens, seed=ask.seed
        )
        reading = asyncio.create_task(self._read(stream, ask), name=ask.name)
        self._streams.add(reading)
        reading.add_done_callback(self._streams.discard)

    async def _read(self, stream: Stream, ask: PlannedRequest) -> None:
        if ask.cancel_after is not None:
            asyncio.get_running_loop().call_later(ask.cancel_after, self._cancel, stream, ask)
        try:
            async with stream:
                self._record(Accepted(self._clock(), ask.name, stream.request_id or ""))
                async for chunk in stream:
                    self._record(
                        Chunk(self._clock(), ask.name, chunk.index, chunk.count, chunk.text)
                    )
            self._ended(stream, ask)
        except MillstreamError as error:
            self._failed(stream, ask, error)

    def _cancel(self, stream: Stream, ask: PlannedRequest) -> None:
        if stream.done is None:
            self._record(Cancelled(self._clock(), ask.name))
            stream.cancel()

    def _ended(self, stream: Stream, ask: PlannedRequest) -> None:
        done = stream.done
        assert done
        used = done.usage.completion_tokens
        event = Ended(self._clock(), ask.name, done.finish_reason, used, asdict(done.timing))
        self._record(event)

    def _failed(self, stream: Stream, ask: PlannedRequest, error: MillstreamError) -> None:
        if stream.request_id:
            self._record(Ended(self._clock(), ask.name, error.code, None))
            return
        pause = None if error.retry_after is None else round(error.retry_after * 1000)
        self._record(Refused(self._clock(), ask.name, error.code, pause))
