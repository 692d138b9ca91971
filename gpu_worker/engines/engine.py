"""What the worker asks of an engine, and the words they share.

An engine knows tokens; it knows no NATS and no asyncio. One thread owns it and calls every method,
so it needs no lock. Pure.
"""

from collections.abc import Sequence as Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from gpu_worker.engines.engine_stats import EngineStats
from streams.errors import MillstreamError
from streams.messages import AdapterRef, Logprob, Sampling
from streams.subjects import Priority

FinishReason = Literal["stop", "length", "cancelled"]


class EngineError(Exception):
    """One sequence cannot be run, the others are unharmed. `code` is the failure's wire code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeviceLost(Exception):
    """The device answers this process no more; no engine in it can be trusted."""


class DoesNotFit(MillstreamError):
    """A model does not fit the memory that it may take."""


@dataclass(frozen=True)
class Sequence:
    """One request as the engine sees it.

    `generated` are tokens that an earlier attempt has already stored: the engine continues behind
    them and neither returns them nor their text again. `text` is what was stored with them.
    `inputs` is set for unary work (embed, classify): one list of token ids per input. `splits`
    tells where in each of them the second text of a pair begins; it is empty where there are no
    pairs. `goal` is when the first output is wanted by; late is not wrong. Who has to wait, or to
    give way, is of the lowest `priority` first, in engines that know it. What is cached of a prompt
    is found by the same `tenant` alone: who is faster served could tell what others have asked.
    """

    request_id: str
    prompt: list[int] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)
    generated: list[int] = field(default_factory=list)
    text: str = ""
    inputs: list[list[int]] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)
    dimensions: int | None = None
    deadline: float | None = None  # by the monotonic clock of its machine
    goal: float | None = None  # so is this
    adapter: AdapterRef | None = None
    priority: Priority = Priority.STANDARD
    tenant: str = ""


@dataclass(frozen=True)
class UpstreamUsage:
    """What a request took by the account of who ran it, where that is not the engine itself."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Output:
    """What one step produced for one sequence; with `finish` or `error` it has left the engine.

    `text` may lag behind `tokens` while a character or a possible stop string is incomplete; the
    finishing output carries whatever was still held back. `vectors` are float32 little-endian rows;
    `labels` name the columns of what a classifier says. `usage`, on a finishing output, counts
    better than its tokens do; `cached`, there, are tokens of the prompt that were found in a cache.
    """

    request_id: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] | None = None
    vectors: list[bytes] | None = None
    labels: list[str] | None = None
    finish: FinishReason | None = None
    error: EngineError | None = None
    usage: UpstreamUsage | None = None
    cached: int = 0


@dataclass(frozen=True)
class FreeCapacity:
    """What an engine could still take now: sequences, and KV tokens (evictable cache is free)."""

    sequences: int
    tokens: int


class Engine(Protocol):
    """One model version, loaded and warm."""

    def add(self, sequence: Sequence) -> None:
        """Take a sequence. What it cannot run comes back from the next `step` as an error."""

    def cancel(self, request_id: str) -> None:
        """Drop a sequence; its `cancelled` output comes from the next `step`. Idempotent."""

    def step(self) -> list[Output]:
        """Run one forward pass over the running batch.

        Returns soon (within a few milliseconds) when nothing is due, never raises for the fault of
        one sequence.
        """

    def free_capacity(self) -> FreeCapacity: ...

    @property
    def idle(self) -> bool:
        """True when `step` would have nothing to do until the next `add`."""

    def close(self) -> None: ...


@runtime_checkable
class Throttled(Protocol):
    """An engine whose room also depends on others, such as on the server that it forwards to."""

    def concurrency_limit(self) -> int:
        """How many sequences it would run at once just now. Safe to call from any thread."""


@runtime_checkable
class ReportsCache(Protocol):
    """An engine that keeps what it has computed of prompts, or the adapters that it has loaded."""

    def cached_prefix_hashes(self) -> Collection[int]:
        """Their marks (`streams/prefix_hashes.py`), least recently used first.

        Safe to call from any thread.
        """


@runtime_checkable
class ReportsStats(Protocol):
    """An engine that counts what it does."""

    @property
    def stats(self) -> EngineStats:
        """As of now; the same object each time. Safe from any thread, also after `close`."""


@runtime_checkable
class Preemptive(Protocol):
    """An engine in which less urgent sequences give their places and KV to more urgent ones."""

    preempts: bool
