"""Requests to an OpenAI-compatible server.

A stream that breaks after its first tokens is continued: the next call asks for what follows the
prompt and everything emitted so far, with what is left of `max_tokens`. Nothing is emitted twice.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from gpu_worker.engine import Finish, Output, Sequence, Usage
from gpu_worker.engines.remote.caller import Answered, Caller
from gpu_worker.engines.remote.faults import Fault
from gpu_worker.engines.remote.generation import (
    Generation,
    TextGeneration,
    TokenGeneration,
    Tokenizer,
    behind,
    text_of,
)
from gpu_worker.engines.remote.openai import DONE, Delta, OpenAI, Prompt
from gpu_worker.engines.remote.upstream import Upstream
from gpu_worker.seeds import seed_of

Emit = Callable[[Output], Awaitable[None]]
_NOTHING = Delta()
SEEDS = 2**31  # of seeds that are derived: every server takes so many


def seed(sequence: Sequence) -> int:
    """The client's seed, else one that any attempt at the request derives alike."""
    chosen = sequence.sampling.seed
    return seed_of(sequence.request_id) % SEEDS if chosen is None else chosen


@dataclass(frozen=True)
class Streaming:
    """Without a tokeniser prompts and inputs travel as text. `ends` are the ids that end a text."""

    api: OpenAI
    upstream: Upstream
    caller: Caller
    tokenizer: Tokenizer | None
    ends: frozenset[int] = frozenset()

    async def generate(self, sequence: Sequence, emit: Emit) -> None:
        """Emit a request's output to its end. Raises `EngineError`."""
        await self.caller.persist(_Completion(self, sequence, emit).stream)

    async def embed(self, sequence: Sequence) -> list[bytes]:
        """The vectors of a request's inputs, all by one call. Raises `EngineError`."""
        inputs = [self._prompt(tokens) for tokens in sequence.inputs]
        body = self.api.embedding(inputs, sequence.dimensions)

        async def act(answered: Answered) -> list[bytes]:
            answer = await self.upstream.ask("/embeddings", body)
            rows = self.api.rows(answer, len(inputs), sequence.dimensions)
            answered()
            return rows

        return await self.caller.persist(act)

    def generation(self, sequence: Sequence) -> Generation:
        if self.api.knows_tokens and self.tokenizer:
            return TokenGeneration(sequence, self.tokenizer)
        return TextGeneration(sequence, self.tokenizer)

    def finished(self, sequence: Sequence) -> Finish | None:
        """Why nothing can follow what was emitted before, if nothing can."""
        sampling, generated = sequence.sampling, sequence.generated
        if generated and generated[-1] in self.ends and not sampling.ignore_eos:
            return "stop"
        return "length" if len(generated) >= sampling.max_tokens else None

    def _prompt(self, tokens: list[int]) -> Prompt:
        return tokens if self.tokenizer else text_of(tokens)


class _Completion:
    """One request over all of its calls; `_sequence` is what a call has to go on behind."""

    def __init__(self, server: Streaming, sequence: Sequence, emit: Emit) -> None:
        self._server, self._sequence, self._emit = server, sequence, emit
        self._finish: Finish | None = None
        self._usage: Usage | None = None

    async def stream(self, answered: Answered) -> None:
        """One call; raises `Fault` when it ends before the output does."""
        stored = len(self._sequence.generated)
        generation = self._server.generation(self._sequence)
        self._finish = "stop" if generation.stopped else self._server.finished(self._sequence)
        if not self._finish:
            await self._read(generation, answered)
        usage = self._usage and Usage(
            max(0, self._usage.prompt_tokens - stored), self._usage.completion_tokens + stored
        )
        await self._emit(replace(generation.rest(), finish=self._finish, usage=usage or None))

    async def _read(self, generation: Generation, answered: Answered) -> None:
        """Emit what the server streams, until it says why it ends or a stop string appears."""
        try:
            async with aclosing(self._deltas(generation)) as deltas:
                async for delta in deltas:
                    answered()
                    await self._take(generation, delta)
                    if generation.stopped:
                        break
        except Fault:
            if not self._finish:
                raise
        if not self._finish:
            raise Fault("stream", "the stream ends before the output does", suspicious=True)

    async def _deltas(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """What the events say, without those that say nothing."""
        sampling = self._sequence.sampling
        left = replace(sampling, max_tokens=sampling.max_tokens - len(self._sequence.generated))
        body = self._server.api.completion(generation.prompt(), left, seed(self._sequence))
        async with aclosing(self._server.upstream.events("/completions", body)) as events:
            async for data in events:
                if data == DONE:
                    return
                if (delta := self._server.api.delta(data)) != _NOTHING:
                    yield delta

    async def _take(self, generation: Generation, delta: Delta) -> None:
        output = generation.take(delta)
        self._finish = "stop" if generation.stopped else delta.finish or self._finish
        self._usage = delta.usage or self._usage
        if output.tokens or output.text:
            self._sequence = behind(self._sequence, output)
            await self._emit(output)
