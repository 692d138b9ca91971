"""The engine's face: sequences in, outputs out; calls are made by a loop in a thread of its own."""

import asyncio
import json
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import structlog
from tokenizers import Tokenizer

from gpu_worker.engine import EngineError, Output, Room, Sequence
from gpu_worker.engines.remote import metrics
from gpu_worker.engines.remote.backoff import Backoff
from gpu_worker.engines.remote.breaker import Breaker
from gpu_worker.engines.remote.caller import Caller
from gpu_worker.engines.remote.gate import Gate
from gpu_worker.engines.remote.items import Items
from gpu_worker.engines.remote.openai import VLLM, OpenAI
from gpu_worker.engines.remote.outbox import Outbox
from gpu_worker.engines.remote.streaming import Emit, Streaming
from gpu_worker.engines.remote.upstream import Timeouts, Upstream
from gpu_worker.limits import reserved
from streams.errors import MillstreamError

Api = Literal["openai", "vllm", "single"]
STEP_SECONDS = 0.005  # the longest that a step waits for an output
log = structlog.get_logger()


class KeyMissing(MillstreamError):
    """The variable that should hold a server's API key does not."""

    def __init__(self, variable: str) -> None:
        super().__init__(f"the environment has no {variable}, which should hold the API key")
        self.variable = variable


class Server(Protocol):
    """How one API is used. Both raise `EngineError`."""

    async def generate(self, sequence: Sequence, emit: Emit) -> None:
        """Emit a request's output to its end."""

    async def embed(self, sequence: Sequence) -> list[bytes]:
        """The vectors of a request's inputs."""


@dataclass(eq=False)
class _Job:
    """A sequence and, on the loop's thread, the task that serves it."""

    sequence: Sequence
    task: asyncio.Task[None] | None = None


class RemoteEngine:
    """An `Engine` that forwards to a server, with at most `concurrency` calls at once.

    It takes whatever it is given: what cannot begin yet waits, as everything does while the server
    is away, until it is cancelled at its deadline.
    """

    def __init__(
        self, upstream: Upstream, server: Server, gate: Gate, concurrency: int, context_length: int
    ) -> None:
        self._upstream, self._server, self._gate = upstream, server, gate
        self._concurrency, self._tokens = concurrency, concurrency * context_length
        self._jobs: dict[str, _Job] = {}  # of the engine's thread, as `_cancelled` is
        self._cancelled: list[Output] = []
        self._serving: set[asyncio.Task[None]] = set()  # of the loop's
        self._failure: BaseException | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="remote-calls", daemon=True)
        self._thread.start()
        self._begun.wait()

    @classmethod
    def load(
        cls,
        directory: Path | None,
        *,
        url: str,
        model: str,
        context_length: int,
        api: Api = "openai",
        concurrency: int = 16,
        api_key_variable: str = "",
        connect_seconds: float = 5.0,
        first_seconds: float = 60.0,
        chunk_seconds: float = 30.0,
        retry_seconds: float = 0.25,
        cooldown_seconds: float = 1.0,
    ) -> "RemoteEngine":
        """An engine for the server at `url`; `directory` holds the model's tokeniser, if any.

        The server need not be there yet. Raises `KeyMissing`.
        """
        timeouts = Timeouts(connect_seconds, first_seconds, chunk_seconds)
        upstream = Upstream(url, _key(api_key_variable), timeouts, concurrency)
        gate = Gate(concurrency, Breaker(cooldown_seconds=cooldown_seconds))
        caller = Caller(gate, Backoff(retry_seconds), partial(metrics.observe, model))
        server: Server
        if api == "single":
            server = Items(upstream, caller, concurrency)
        else:
            tokenizer = _tokenizer(directory)
            words = (VLLM if api == "vllm" else OpenAI)(model)
            ends = _ends(directory, tokenizer) if words.knows_tokens else frozenset()
            server = Streaming(words, upstream, caller, tokenizer, ends)
        return cls(upstream, server, gate, concurrency, context_length)

    def add(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self._jobs, f"{sequence.request_id} is here already"
        job = self._jobs[sequence.request_id] = _Job(sequence)
        self._loop.call_soon_threadsafe(self._begin, job)

    def cancel(self, request_id: str) -> None:
        """What its call still sends is not for anybody from here on."""
        if job := self._jobs.pop(request_id, None):
            self._cancelled.append(Output(request_id, finish="cancelled"))
            self._loop.call_soon_threadsafe(_cancel, job)

    def step(self) -> list[Output]:
        """Everything that the calls have brought; waits a little for the first of it."""
        if self._failure:
            raise self._failure
        outputs, self._cancelled = self._cancelled, []
        for job, output in self._outbox.take(0 if outputs else STEP_SECONDS):
            if self._jobs.get(output.request_id) is job:
                outputs.append(output)
                if output.finish or output.error:
                    del self._jobs[output.request_id]
        return outputs

    def room(self) -> Room:
        held = sum(reserved(job.sequence) for job in self._jobs.values())
        sequences = self._concurrency - len(self._jobs)
        return Room(max(0, sequences), max(0, self._tokens - held))

    def capacity(self) -> int:
        """None while the breaker is open or the server has asked for a pause. From any thread."""
        return self._gate.capacity(time.monotonic())

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._cancelled

    def close(self) -> None:
        """Hang up every call and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._jobs.clear()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # whatever it is, the next step tells the driver
            self._failure = error
            self._begun.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._outbox: Outbox[tuple[_Job, Output]] = Outbox()
        async with self._upstream, asyncio.TaskGroup() as self._tasks:
            self._begun.set()
            await self._stop.wait()
            for task in self._serving:
                task.cancel()

    def _begin(self, job: _Job) -> None:
        job.task = self._tasks.create_task(self._work(job), name=job.sequence.request_id)
        self._serving.add(job.task)
        job.task.add_done_callback(self._serving.discard)

    async def _work(self, job: _Job) -> None:
        """Serve one sequence; whatever goes wrong is its own."""
        sequence = job.sequence

        async def emit(output: Output) -> None:
            await self._outbox.put((job, output))

        try:
            if sequence.inputs:
                vectors = await self._server.embed(sequence)
                await emit(Output(sequence.request_id, vectors=vectors, finish="stop"))
            else:
                await self._server.generate(sequence, emit)
        except EngineError as error:
            await emit(Output(sequence.request_id, error=error))
        except Exception as error:  # a fault of ours must not end the others' calls
            log.exception("remote_call_failed", request_id=sequence.request_id)
            failed = EngineError("engine_failed", f"{type(error).__name__}: {error}")
            await emit(Output(sequence.request_id, error=failed))


def _cancel(job: _Job) -> None:
    assert job.task, "`add` was noted before `cancel`"
    job.task.cancel()


def _key(variable: str) -> str:
    """The API key that a variable of this process holds; the registry knows its name alone."""
    if variable and not os.environ.get(variable):
        raise KeyMissing(variable)
    return os.environ[variable] if variable else ""


def _tokenizer(directory: Path | None) -> Tokenizer | None:
    return Tokenizer.from_file(str(directory / "tokenizer.json")) if directory else None


def _ends(directory: Path | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end a text, by generation_config.json or else by the tokeniser's settings."""
    if directory is None or tokenizer is None:
        return frozenset()
    found = _read(directory / "generation_config.json").get("eos_token_id")
    if found is None:
        name = _read(directory / "tokenizer_config.json").get("eos_token")
        content = name.get("content") if isinstance(name, dict) else name
        found = tokenizer.token_to_id(content) if content else None
    return frozenset(found if isinstance(found, list) else [found]) - {None}


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text()) if path.exists() else {}
    return content if isinstance(content, dict) else {}
