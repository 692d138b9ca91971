"""Requests to an API that takes one input per call.

Such an answer comes whole. A request that an earlier attempt has stored the text of is complete.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from gpu_worker.detokenizer import StopStrings
from gpu_worker.engine import Output, Sequence
from gpu_worker.engines.remote import single
from gpu_worker.engines.remote.caller import Answered, Caller
from gpu_worker.engines.remote.generation import UNKNOWN_TOKEN, text_of
from gpu_worker.engines.remote.streaming import Emit, seed
from gpu_worker.engines.remote.upstream import Upstream
from gpu_worker.engines.remote.vectors import packed
from registry.models import BYTES_PER_TOKEN


@dataclass(frozen=True)
class Items:
    """At most `fan_out` inputs of one request are under way at once: others have their turns."""

    upstream: Upstream
    caller: Caller
    fan_out: int

    async def generate(self, sequence: Sequence, emit: Emit) -> None:
        """Emit a request's output, whole. Raises `EngineError`."""
        if sequence.text:
            await emit(Output(sequence.request_id, finish="stop"))
            return
        body = single.generation(text_of(sequence.prompt), sequence.sampling, seed(sequence))

        async def act(answered: Answered) -> str:
            text = single.generated(await self.upstream.ask("", body))
            answered()
            return text

        await emit(_output(sequence, await self.caller.persist(act)))

    async def embed(self, sequence: Sequence) -> list[bytes]:
        """The vectors of a request's inputs, in order. Raises `EngineError`."""
        inputs = enumerate(sequence.inputs)
        rows: dict[int, bytes] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(min(self.fan_out, len(sequence.inputs))):
                    share = self._share(inputs, sequence.dimensions, rows)
                    tasks.create_task(share, name=f"embed-{sequence.request_id}-{number}")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # of inputs that fail, one says it for all
        return [rows[index] for index in range(len(rows))]

    async def _share(
        self,
        inputs: Iterator[tuple[int, list[int]]],
        dimensions: int | None,
        rows: dict[int, bytes],
    ) -> None:
        """Take inputs, one by one, for as long as there are any."""
        for index, tokens in inputs:
            rows[index] = packed(await self._vector(text_of(tokens)), dimensions)

    async def _vector(self, text: str) -> list[float]:
        async def act(answered: Answered) -> list[float]:
            vector = single.vector(await self.upstream.ask("", single.embedding(text)))
            answered()
            return vector

        return await self.caller.persist(act)


def _output(sequence: Sequence, text: str) -> Output:
    """Up to the first stop string, which such APIs leave in; its tokens are an estimate."""
    stops = StopStrings(sequence.sampling.stop)
    text = stops.push(text) + stops.flush()
    estimate = -(-len(text.encode()) // BYTES_PER_TOKEN)
    tokens = [UNKNOWN_TOKEN] * min(estimate, sequence.sampling.max_tokens)
    return Output(sequence.request_id, tokens, text, finish="stop")
