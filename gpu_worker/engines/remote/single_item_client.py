"""The remote client of APIs that take one input per call.

Their answers come whole. So a request with text that an earlier attempt has stored is complete.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from gpu_worker.engines.detokenizer import StopStringFilter
from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.remote import single_item_protocol
from gpu_worker.engines.remote.embedding_bytes import pack_vector
from gpu_worker.engines.remote.group_gate import GroupGate
from gpu_worker.engines.remote.http_client import HttpClient
from gpu_worker.engines.remote.openai_client import Emit, choose_seed
from gpu_worker.engines.remote.output_decoder import UNKNOWN_TOKEN, bytes_to_text
from gpu_worker.engines.remote.retrying_caller import MarkAnswered, RetryingCaller
from registry.models import BYTES_PER_TOKEN


@dataclass(frozen=True)
class SingleItemClient:
    """Runs sequences against an API that takes one input per call and answers as a whole.

    At most `fan_out` inputs of one request are under way at once, so that other requests get turns.
    Requests begin by groups, as `gate` lets them.
    """

    http: HttpClient
    caller: RetryingCaller
    fan_out: int
    gate: GroupGate

    async def generate(self, sequence: Sequence, emit: Emit) -> None:
        """Await `emit` once, with a request's whole output.

        If an earlier attempt has stored text, that was the whole: no call is made. Failed calls are
        retried. Raises `EngineError` if the server rejects the request, fails too often, or does
        not support one of its parameters.
        """
        if sequence.text:
            await emit(Output(sequence.request_id, finish="stop"))
            return
        body = single_item_protocol.generation_body(
            bytes_to_text(sequence.prompt), sequence.sampling, choose_seed(sequence)
        )

        async def action(mark_answered: MarkAnswered) -> str:
            text = single_item_protocol.parse_text(await self.http.post("", body))
            mark_answered()
            return text

        async with self.gate.turn(1, sequence.goal):
            text = await self.caller.call_with_retries(action)
        await emit(_to_output(sequence, text))

    async def embed(self, sequence: Sequence) -> list[bytes]:
        """Return the vectors of a request's inputs, in order: float32 little-endian rows.

        Failed calls are retried. Raises the `EngineError` of the first input that cannot be
        embedded; the calls of the others are cancelled then.
        """
        async with self.gate.turn(len(sequence.inputs), sequence.goal):
            return await self._embed_all(sequence)

    async def _embed_all(self, sequence: Sequence) -> list[bytes]:
        inputs = enumerate(sequence.inputs)
        rows: dict[int, bytes] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(min(self.fan_out, len(sequence.inputs))):
                    worker = self._embed_inputs(inputs, sequence.dimensions, rows)
                    tasks.create_task(worker, name=f"embed-{sequence.request_id}-{number}")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the error of one input stands for all
        return [rows[index] for index in range(len(rows))]

    async def _embed_inputs(
        self,
        inputs: Iterator[tuple[int, list[int]]],
        dimensions: int | None,
        rows: dict[int, bytes],
    ) -> None:
        """Take inputs from the shared iterator, one by one, until there are none."""
        for index, tokens in inputs:
            rows[index] = pack_vector(await self._embed_text(bytes_to_text(tokens)), dimensions)

    async def _embed_text(self, text: str) -> list[float]:
        async def action(mark_answered: MarkAnswered) -> list[float]:
            vector = single_item_protocol.parse_vector(
                await self.http.post("", single_item_protocol.embedding_body(text))
            )
            mark_answered()
            return vector

        return await self.caller.call_with_retries(action)


def _to_output(sequence: Sequence, text: str) -> Output:
    """Return the output of a text, up to the first stop string, which such APIs leave in.

    The number of its tokens is an estimate from its bytes.
    """
    stops = StopStringFilter(sequence.sampling.stop)
    text = stops.push(text) + stops.flush()
    estimate = -(-len(text.encode()) // BYTES_PER_TOKEN)
    tokens = [UNKNOWN_TOKEN] * min(estimate, sequence.sampling.max_tokens)
    return Output(sequence.request_id, tokens, text, finish="stop", matched_stop=stops.matched)
