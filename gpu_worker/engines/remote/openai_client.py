"""The remote client of OpenAI-compatible servers; it continues a stream that breaks.

The next call then asks for what follows the prompt and everything emitted so far, with what is left
of `max_tokens`. Nothing is emitted twice.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from gpu_worker.engines.engine import FinishReason, Output, Sequence, UpstreamUsage
from gpu_worker.engines.remote.call_errors import RetryableError
from gpu_worker.engines.remote.http_client import HttpClient
from gpu_worker.engines.remote.openai_protocol import DONE, Delta, OpenAIProtocol, TextOrTokens
from gpu_worker.engines.remote.output_decoder import (
    OutputDecoder,
    TextOutputDecoder,
    TokenizerLike,
    TokenOutputDecoder,
    bytes_to_text,
    extend_sequence,
)
from gpu_worker.engines.remote.retrying_caller import MarkAnswered, RetryingCaller
from gpu_worker.engines.seeds import derive_seed

Emit = Callable[[Output], Awaitable[None]]
_EMPTY_DELTA = Delta()
SEED_LIMIT = 2**31  # derived seeds are below it: every server accepts these


def choose_seed(sequence: Sequence) -> int:
    """Return the client's sampling seed, else a number below 2^31 made from the request's id.

    Every attempt at the request gets the same one.
    """
    chosen = sequence.sampling.seed
    return derive_seed(sequence.request_id) % SEED_LIMIT if chosen is None else chosen


@dataclass(frozen=True)
class OpenAIClient:
    """Runs sequences against an OpenAI-compatible server, and continues streams that break.

    Without a tokeniser, prompts and inputs are sent as text. `eos_ids` are the end-of-sequence ids.
    """

    protocol: OpenAIProtocol
    http: HttpClient
    caller: RetryingCaller
    tokenizer: TokenizerLike | None
    eos_ids: frozenset[int] = frozenset()

    async def generate(self, sequence: Sequence, emit: Emit) -> None:
        """Await `emit` with each output of a request, and return after the one that finishes it.

        A stream that breaks is continued by another call; nothing is emitted twice. Raises
        `EngineError` if the server rejects the request or fails too often. Cancelling closes the
        connection.
        """
        await self.caller.call_with_retries(_OpenAICompletion(self, sequence, emit).stream)

    async def embed(self, sequence: Sequence) -> list[bytes]:
        """Return the vectors of a request's inputs, all from one call, in order.

        They are float32 little-endian rows. Failed calls are retried. Raises `EngineError` if the
        server rejects the request or fails too often.
        """
        inputs = [self._to_prompt(tokens) for tokens in sequence.inputs]
        body = self.protocol.embedding_body(inputs, sequence.dimensions)

        async def action(mark_answered: MarkAnswered) -> list[bytes]:
            answer = await self.http.post("/embeddings", body)
            rows = self.protocol.parse_embeddings(answer, len(inputs), sequence.dimensions)
            mark_answered()
            return rows

        return await self.caller.call_with_retries(action)

    def start_decoder(self, sequence: Sequence) -> OutputDecoder:
        """Return a decoder for the server's stream that continues a sequence.

        It decodes token ids if the server sends them and there is a tokeniser, else text.
        """
        if self.protocol.has_token_ids and self.tokenizer:
            return TokenOutputDecoder(sequence, self.tokenizer)
        return TextOutputDecoder(sequence, self.tokenizer)

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Return the reason if what was generated before already ends the sequence, else None.

        It is `stop` after an end-of-sequence id, `length` at `max_tokens`.
        """
        sampling, generated = sequence.sampling, sequence.generated
        eos_ids = () if sampling.ignore_eos else self.eos_ids
        if generated and generated[-1] in {*eos_ids, *sampling.stop_token_ids}:
            return "stop"
        return "length" if len(generated) >= sampling.max_tokens else None

    def _to_prompt(self, tokens: list[int]) -> TextOrTokens:
        return tokens if self.tokenizer else bytes_to_text(tokens)


class _OpenAICompletion:
    """One request over all of its calls; `_sequence` includes everything emitted so far."""

    def __init__(self, client: OpenAIClient, sequence: Sequence, emit: Emit) -> None:
        self._client, self._sequence, self._emit = client, sequence, emit
        self._finish: FinishReason | None = None
        self._usage: UpstreamUsage | None = None

    async def stream(self, mark_answered: MarkAnswered) -> None:
        """Make one call and emit its output; raises `RetryableError` if it ends too early."""
        stored_tokens = len(self._sequence.generated)
        decoder = self._client.start_decoder(self._sequence)
        self._finish = "stop" if decoder.is_stopped else self._client.finish_reason(self._sequence)
        if not self._finish:
            await self._relay(decoder, mark_answered)
        usage = self._usage and UpstreamUsage(
            max(0, self._usage.prompt_tokens - stored_tokens),
            self._usage.completion_tokens + stored_tokens,
        )
        await self._emit(replace(decoder.flush(), finish=self._finish, usage=usage or None))

    async def _relay(self, decoder: OutputDecoder, mark_answered: MarkAnswered) -> None:
        """Emit what the server streams, until it gives a finish reason or a stop string appears."""
        try:
            async with aclosing(self._deltas(decoder)) as deltas:
                async for delta in deltas:
                    mark_answered()
                    await self._emit_delta(decoder, delta)
                    if decoder.is_stopped:
                        break
        except RetryableError:
            if not self._finish:
                raise
        if not self._finish:
            raise RetryableError(
                "stream", "the stream ends before the output does", suspicious=True
            )

    async def _deltas(self, decoder: OutputDecoder) -> AsyncGenerator[Delta, None]:
        """Call the server and yield its events, without the empty ones."""
        sampling = self._sequence.sampling
        remaining = replace(
            sampling, max_tokens=sampling.max_tokens - len(self._sequence.generated)
        )
        body = self._client.protocol.completion_body(
            decoder.continuation_prompt(), remaining, choose_seed(self._sequence)
        )
        async with aclosing(self._client.http.stream_events("/completions", body)) as events:
            async for data in events:
                if data == DONE:
                    return
                if (delta := self._client.protocol.parse_event(data)) != _EMPTY_DELTA:
                    yield delta

    async def _emit_delta(self, decoder: OutputDecoder, delta: Delta) -> None:
        output = decoder.decode_delta(delta)
        self._finish = "stop" if decoder.is_stopped else delta.finish or self._finish
        self._usage = delta.usage or self._usage
        if output.tokens or output.text:
            self._sequence = extend_sequence(self._sequence, output)
            await self._emit(output)
