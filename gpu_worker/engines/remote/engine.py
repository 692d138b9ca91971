"""The remote engine: sequences in, outputs out; an event loop in its own thread makes the calls."""

import asyncio
import os
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import structlog
from tokenizers import Tokenizer

from gpu_worker.engines.engine import EngineError, FreeCapacity, Output, Sequence
from gpu_worker.engines.remote import metrics
from gpu_worker.engines.remote.backoff import Backoff
from gpu_worker.engines.remote.circuit_breaker import CircuitBreaker
from gpu_worker.engines.remote.concurrency_limiter import ConcurrencyLimiter
from gpu_worker.engines.remote.cross_thread_queue import CrossThreadQueue
from gpu_worker.engines.remote.group_gate import GroupGate
from gpu_worker.engines.remote.http_client import HttpClient, Timeouts
from gpu_worker.engines.remote.openai_client import Emit, OpenAIClient
from gpu_worker.engines.remote.openai_protocol import OpenAIProtocol, VLLMProtocol
from gpu_worker.engines.remote.retrying_caller import RetryingCaller
from gpu_worker.engines.remote.single_item_client import SingleItemClient
from gpu_worker.engines.sequence_limits import count_reserved_tokens
from registry.artifact_verification import json_reader
from registry.destination_policy import THIS_MACHINE_ONLY, DestinationPolicy
from registry.tokenizer.added_tokens import load_tokenizer, read_end_id
from streams.errors import MillstreamError

Api = Literal["openai", "vllm", "single"]
STEP_SECONDS = 0.005  # a step waits at most so long for an output
log = structlog.get_logger()


class ApiKeyMissing(MillstreamError):
    """The environment variable that should hold a server's API key is missing or empty."""

    def __init__(self, variable: str) -> None:
        super().__init__(f"the environment has no {variable}, which should hold the API key")
        self.variable = variable


class RemoteClient(Protocol):
    """Runs requests against one kind of HTTP API, all those of an engine concurrently.

    Both methods retry failed calls and raise `EngineError` when the request cannot be served.
    """

    async def generate(self, sequence: Sequence, emit: Emit) -> None:
        """Await `emit` with each output of a request, and return after the one that finishes it.

        Raises `EngineError` if the server rejects the request or fails too often. Cancelling ends
        the call to the server.
        """

    async def embed(self, sequence: Sequence) -> list[bytes]:
        """Return the vectors of a request's inputs, in order: float32 little-endian rows.

        Raises `EngineError` if the server rejects the request or fails too often.
        """


@dataclass(eq=False)
class _RemoteRequest:
    """A sequence and, on the loop's thread, the task that serves it."""

    sequence: Sequence
    task: asyncio.Task[None] | None = None


class RemoteEngine:
    """An `Engine` that forwards sequences to another server, with bounded calls at once.

    At most `concurrency` calls run, beside which so many requests as `gathering` may be collected
    for the next group of calls. Every sequence is accepted: one whose call cannot begin yet
    waits, as all do while the server is away, until it is cancelled at its deadline. A thread of
    its own runs the event loop of the calls.
    """

    def __init__(
        self,
        http: HttpClient,
        client: RemoteClient,
        limiter: ConcurrencyLimiter,
        concurrency: int,
        context_length: int,
        gathering: int = 0,
    ) -> None:
        self._http, self._client, self._limiter = http, client, limiter
        self._gathering, self._sequences = gathering, concurrency + gathering
        self._tokens = self._sequences * context_length
        # `_requests` and `_cancelled` belong to the engine's thread, `_serving` to the loop's.
        self._requests: dict[str, _RemoteRequest] = {}
        self._cancelled: list[Output] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="remote-calls", daemon=True)
        self._thread.start()
        self._started.wait()

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
        group_items: int = 1,
        group_seconds: float = 0.0,
        policy: DestinationPolicy = THIS_MACHINE_ONLY,
    ) -> "RemoteEngine":
        """Return an engine for the server at `url`; `directory` holds the model's tokeniser if any.

        Calls go only to hosts and addresses that `policy` allows.

        The server need not run yet: nothing is sent to it. Raises `ApiKeyMissing` if
        `api_key_variable` names an environment variable that is missing or empty.
        """
        timeouts = Timeouts(connect_seconds, first_seconds, chunk_seconds)
        http = HttpClient(url, _read_api_key(api_key_variable), timeouts, concurrency, policy)
        limiter = ConcurrencyLimiter(concurrency, CircuitBreaker(cooldown_seconds=cooldown_seconds))
        caller = RetryingCaller(
            limiter, Backoff(retry_seconds), partial(metrics.observe_call, model)
        )
        client: RemoteClient
        if api == "single":
            gate = GroupGate(group_items, group_seconds, partial(metrics.observe_group, model))
            client = SingleItemClient(http, caller, concurrency, gate)
        else:
            tokenizer = _load_tokenizer(directory)
            protocol = (VLLMProtocol if api == "vllm" else OpenAIProtocol)(model)
            eos_ids = _read_eos_ids(directory, tokenizer) if protocol.has_token_ids else frozenset()
            client = OpenAIClient(protocol, http, caller, tokenizer, eos_ids)
        return cls(http, client, limiter, concurrency, context_length, group_items - 1)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence and return at once; its call begins when the limits allow one more."""
        assert sequence.request_id not in self._requests, f"{sequence.request_id} was added before"
        request = self._requests[sequence.request_id] = _RemoteRequest(sequence)
        self._loop.call_soon_threadsafe(self._start_task, request)

    def cancel(self, request_id: str) -> None:
        """Drop a sequence and cancel its call. Idempotent; unknown requests are ignored.

        The next `step` returns its `cancelled` output; outputs that still arrive are dropped.
        """
        if request := self._requests.pop(request_id, None):
            self._cancelled.append(Output(request_id, finish="cancelled"))
            self._loop.call_soon_threadsafe(_cancel_task, request)

    def step(self) -> list[Output]:
        """Return all outputs that have arrived; wait up to 5 ms for the first one.

        The list may be empty. If the thread that makes the calls has ended with an error, raises
        that error.
        """
        if self._failure:
            raise self._failure
        outputs, self._cancelled = self._cancelled, []
        for request, output in self._outputs.get_all(0 if outputs else STEP_SECONDS):
            if self._requests.get(output.request_id) is request:
                outputs.append(output)
                if output.finish or output.error:
                    del self._requests[output.request_id]
        return outputs

    def free_capacity(self) -> FreeCapacity:
        """Return how many more sequences and tokens the engine would accept at once.

        It has room for `concurrency` sequences of the model's whole context length, and for those
        that it gathers.
        """
        reserved = sum(
            count_reserved_tokens(request.sequence) for request in self._requests.values()
        )
        sequences = self._sequences - len(self._requests)
        return FreeCapacity(max(0, sequences), max(0, self._tokens - reserved))

    def concurrency_limit(self) -> int:
        """Return how many sequences the server can run at once now, those that run included.

        0 while the circuit breaker is open or the server has asked for a pause. Safe to call from
        any thread.
        """
        capacity = self._limiter.capacity(time.monotonic())
        return capacity and capacity + self._gathering

    @property
    def idle(self) -> bool:
        """True when there is no sequence and no output to return."""
        return not self._requests and not self._cancelled

    def close(self) -> None:
        """Cancel every call, end the thread of the calls, and wait for its end."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._requests.clear()

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._run_until_stopped())
        except BaseException as error:  # whatever it is, the next step raises it
            self._failure = error
            self._started.set()

    async def _run_until_stopped(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._outputs: CrossThreadQueue[tuple[_RemoteRequest, Output]] = CrossThreadQueue()
        async with self._http, asyncio.TaskGroup() as self._tasks:
            self._started.set()
            await self._stop.wait()
            for task in self._serving:
                task.cancel()

    def _start_task(self, request: _RemoteRequest) -> None:
        request.task = self._tasks.create_task(
            self._serve_sequence(request), name=request.sequence.request_id
        )
        self._serving.add(request.task)
        request.task.add_done_callback(self._serving.discard)

    async def _serve_sequence(self, request: _RemoteRequest) -> None:
        """Serve one sequence; any error becomes its output and leaves the others alone."""
        sequence = request.sequence

        async def emit(output: Output) -> None:
            await self._outputs.put((request, output))

        try:
            if sequence.inputs:
                vectors = await self._client.embed(sequence)
                await emit(Output(sequence.request_id, vectors=vectors, finish="stop"))
            else:
                await self._client.generate(sequence, emit)
        except EngineError as error:
            await emit(Output(sequence.request_id, error=error))
        except Exception as error:  # a bug of ours must not end the others' calls
            log.exception("remote_call_failed", request_id=sequence.request_id)
            failure = EngineError("engine_failed", f"{type(error).__name__}: {error}")
            await emit(Output(sequence.request_id, error=failure))


def _cancel_task(request: _RemoteRequest) -> None:
    assert request.task, "a task is started before it is cancelled"
    request.task.cancel()


def _read_api_key(variable: str) -> str:
    """Return the API key in an environment variable, whose name alone the registry holds."""
    if variable and not os.environ.get(variable):
        raise ApiKeyMissing(variable)
    return os.environ[variable] if variable else ""


def _load_tokenizer(directory: Path | None) -> Tokenizer | None:
    return load_tokenizer(directory, sys.maxsize) if directory else None


def _read_eos_ids(directory: Path | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the end-of-sequence ids of generation_config.json and of the tokeniser's settings."""
    if directory is None or tokenizer is None:
        return frozenset()
    read = json_reader(directory)
    found = (read("generation_config.json") or {}).get("eos_token_id")
    own = read_end_id(tokenizer, read)
    return frozenset([*(found if isinstance(found, list) else [found]), own]) - {None}
