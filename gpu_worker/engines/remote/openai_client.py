"""The remote client of OpenAI-compatible servers; it resumes a stream that breaks.

The next call asks for what follows the prompt and everything emitted so far, or, where that would
be another answer, for all of it again (`stream_resumption`). Nothing is emitted twice.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from gpu_worker.engines.engine import EngineError, FinishReason, Output, Sequence, UpstreamUsage
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
from gpu_worker.engines.remote.stream_resumption import (
    ReplayDiffers,
    ResumeMode,
    StoredPrefix,
    choose_resume_mode,
    find_output_dependent,
    resume_failure,
)
from gpu_worker.engines.seeds import derive_seed
from streams.messages import Sampling

Emit = Callable[[Output], Awaitable[None]]
_EMPTY_DELTA = Delta()
SEED_LIMIT = 2**31  # derived seeds are below it: every server accepts these


def choose_seed(sequence: Sequence) -> int:
    """Return the client's sampling seed, else a number below 2^31 made from the request's id.

    Every attempt at the request gets the same one. Behind generated tokens it is another, made from
    that and their number: a server would draw the numbers of the first tokens once more, and tend
    to repeat them.
    """
    chosen, count = sequence.sampling.seed, len(sequence.generated)
    seed = derive_seed(sequence.request_id) % SEED_LIMIT if chosen is None else chosen
    return derive_seed(f"{seed}:{count}") % SEED_LIMIT if count else seed


@dataclass(frozen=True)
class OpenAIClient:
    """Runs sequences against an OpenAI-compatible server, and resumes streams that break.

    Without a tokeniser, prompts and inputs are sent as text. `eos_ids` are the end-of-sequence ids.
    """

    protocol: OpenAIProtocol
    http: HttpClient
    caller: RetryingCaller
    tokenizer: TokenizerLike | None
    eos_ids: frozenset[int] = frozenset()

    @property
    def has_token_ids(self) -> bool:
        """True if the tokens of the output are known, False if only its text is."""
        return self.protocol.has_token_ids and self.tokenizer is not None

    async def generate(self, sequence: Sequence, emit: Emit) -> None:
        """Await `emit` with each output of a request, and return after the one that finishes it.

        A stream that breaks is resumed by another call; nothing is emitted twice. Raises
        `EngineError` if the server rejects the request or fails too often, or if the answer cannot
        be resumed exactly. Cancelling closes the connection.
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
        if self.has_token_ids and self.tokenizer:
            return TokenOutputDecoder(sequence, self.tokenizer)
        return TextOutputDecoder(sequence, self.tokenizer)

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Return the reason if what was generated before already ends the sequence, else None.

        It is `stop` after an end-of-sequence id, where ids are known, and `length` at `max_tokens`.
        """
        sampling, generated = sequence.sampling, sequence.generated
        eos_ids = () if sampling.ignore_eos else self.eos_ids
        ends = {*eos_ids, *sampling.stop_token_ids} if self.has_token_ids else ()
        if generated and generated[-1] in ends:
            return "stop"
        return "length" if len(generated) >= sampling.max_tokens else None

    def _to_prompt(self, tokens: list[int]) -> TextOrTokens:
        return tokens if self.tokenizer else bytes_to_text(tokens)


@dataclass(frozen=True)
class _Call:
    """One call to the server: what it continues, and what its output must repeat first.

    `begun` is the sequence behind which the server is asked to go on.
    """

    begun: Sequence
    decoder: OutputDecoder
    prefix: StoredPrefix

    def decode_delta(self, delta: Delta) -> Output:
        """Return what an event adds to the stored output; raises `ReplayDiffers`."""
        return self.prefix.drop(self.decoder.decode_delta(delta))

    def flush(self) -> Output:
        """Return the output held back, at the end of the stream.

        Raises `ReplayDiffers` if the answer ends before all that is stored was repeated.
        """
        output = self.prefix.drop(self.decoder.flush())
        if not self.prefix.is_complete:
            raise ReplayDiffers
        return output

    def total_usage(self, usage: UpstreamUsage) -> UpstreamUsage:
        """Return the server's count for this call as that of the whole request."""
        count = len(self.begun.generated)
        return UpstreamUsage(max(0, usage.prompt_tokens - count), usage.completion_tokens + count)


class _OpenAICompletion:
    """One request over all of its calls; `_sequence` includes everything emitted so far."""

    def __init__(self, client: OpenAIClient, sequence: Sequence, emit: Emit) -> None:
        self._client, self._sequence, self._emit = client, sequence, emit
        self._dependent = find_output_dependent(sequence.sampling, client.protocol.output_dependent)
        self._replay_differed = False
        self._finish: FinishReason | None = None
        self._usage: UpstreamUsage | None = None
        self._matched_stop = ""  # by the server's word, where it cuts the text itself

    async def stream(self, mark_answered: MarkAnswered) -> None:
        """Make one call and emit its output; raises `RetryableError` if it ends too early.

        A call that was to repeat what is stored, and did not, is followed by one that continues it.
        Raises `EngineError` if that would be another answer.
        """
        self._usage = None
        decoder = self._client.start_decoder(self._sequence)
        matched = decoder.matched_stop
        self._finish = "stop" if matched else self._client.finish_reason(self._sequence)
        if self._finish:
            end = replace(decoder.flush(), finish=self._finish, matched_stop=matched)
            await self._emit(end)
            return
        try:
            await self._run(self._prepare_call(decoder), mark_answered)
        except ReplayDiffers:
            self._replay_differed = True
            await self.stream(mark_answered)

    def _prepare_call(self, decoder: OutputDecoder) -> _Call:
        """Return the next call; `decoder` continues the sequence. Raises `EngineError` if none."""
        mode = choose_resume_mode(
            self._sequence,
            can_continue=not self._dependent and _can_encode(decoder),
            replay_differed=self._replay_differed,
        )
        has_token_ids = self._client.has_token_ids
        if mode is ResumeMode.FAIL:
            raise resume_failure(self._dependent)
        if mode is not ResumeMode.REPLAY:
            return _Call(self._sequence, decoder, StoredPrefix([], "", has_token_ids))
        begun = replace(self._sequence, generated=[], text="")
        prefix = StoredPrefix(self._sequence.generated, self._sequence.text, has_token_ids)
        return _Call(begun, self._client.start_decoder(begun), prefix)

    async def _run(self, call: _Call, mark_answered: MarkAnswered) -> None:
        """Make a call and emit its output up to the end of the answer."""
        await self._relay(call, mark_answered)
        output = call.flush()
        usage = self._usage and call.total_usage(self._usage)
        matched = call.decoder.matched_stop or self._matched_stop
        await self._emit(replace(output, finish=self._finish, usage=usage, matched_stop=matched))

    async def _relay(self, call: _Call, mark_answered: MarkAnswered) -> None:
        """Emit what the server streams, until it gives a finish reason or a stop string appears.

        A replay counts as answered only once it brings something new: otherwise a server that
        breaks in the same place each time would be asked until the deadline.
        """
        try:
            async with aclosing(self._deltas(call)) as deltas:
                async for delta in deltas:
                    if call.prefix.is_complete:
                        mark_answered()
                    await self._emit_delta(call, delta)
                    if call.decoder.matched_stop:
                        break
        except RetryableError:
            if not self._finish:
                raise
        if not self._finish:
            raise RetryableError(
                "stream", "the stream ends before the output does", suspicious=True
            )

    async def _deltas(self, call: _Call) -> AsyncGenerator[Delta, None]:
        """Call the server and yield its events, without the empty ones."""
        body = self._client.protocol.completion_body(
            call.decoder.continuation_prompt(),
            _remaining_sampling(call.begun),
            choose_seed(call.begun),
        )
        async with aclosing(self._client.http.stream_events("/completions", body)) as events:
            async for data in events:
                if data == DONE:
                    return
                if (delta := self._client.protocol.parse_event(data)) != _EMPTY_DELTA:
                    yield delta

    async def _emit_delta(self, call: _Call, delta: Delta) -> None:
        output = call.decode_delta(delta)
        self._finish = "stop" if call.decoder.matched_stop else delta.finish or self._finish
        self._matched_stop = delta.matched_stop or self._matched_stop
        self._usage = delta.usage or self._usage
        if output.tokens or output.text:
            self._sequence = extend_sequence(self._sequence, output)
            await self._emit(output)


def _can_encode(decoder: OutputDecoder) -> bool:
    """True if what is stored can be put behind the prompt exactly."""
    try:
        decoder.continuation_prompt()
    except EngineError:
        return False
    return True


def _remaining_sampling(begun: Sequence) -> Sampling:
    """Return the sampling parameters for what follows a sequence: its tokens count as output."""
    sampling, count = begun.sampling, len(begun.generated)
    return replace(
        sampling,
        max_tokens=sampling.max_tokens - count,
        min_tokens=max(0, sampling.min_tokens - count),
    )
