"""The protocol between worker and engine: `Engine`, its sequences and its outputs.

An engine deals in tokens, and uses neither NATS nor asyncio. One thread owns it and calls every
method, so it needs no lock. Pure.
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
    """One sequence cannot be run; the others are unharmed. `code` is the wire code of the error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeviceLost(Exception):
    """The device no longer answers this process, so no engine in the process can be trusted."""


class DoesNotFit(MillstreamError):
    """A model does not fit into the memory that it may use."""


@dataclass(frozen=True)
class Sequence:
    """One request as the engine sees it.

    `generated` are tokens that an earlier attempt has already stored: the engine continues behind
    them and returns neither them nor their text, `text`, again. `inputs` is set for unary work
    (embed, classify): one list of token ids per input. `splits` are the positions in each input at
    which the second text of a pair begins; empty without pairs. `goal` is when the first output is
    wanted; a later one is not an error. Engines with priorities make sequences of the lowest
    `priority` wait, or give way, first. A cached prefix is used for the same `tenant` alone: how
    fast an answer comes would tell one tenant what others have asked.
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
    goal: float | None = None  # by the same clock
    adapter: AdapterRef | None = None
    priority: Priority = Priority.STANDARD
    tenant: str = ""


@dataclass(frozen=True)
class UpstreamUsage:
    """Tokens of a request as counted by another server that ran it for the engine."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Output:
    """The result of one step for one sequence.

    The sequence has left the engine if `finish` or `error` is set. `text` may lag behind `tokens`
    while a character or a possible stop string is incomplete; the finishing output carries all text
    still held back. `vectors` are float32 little-endian rows; `labels` name the columns of a
    classifier's vectors. On a finishing output, `usage` replaces the count of its tokens, and
    `cached` is the number of prompt tokens found in a cache.
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
    """The sequences and KV tokens that an engine could still take now; evictable cache is free."""

    sequences: int
    tokens: int


class Engine(Protocol):
    """One model version, loaded and warm."""

    def add(self, sequence: Sequence) -> None:
        """Take a sequence. One that cannot run comes back from the next `step` as an error."""

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
    """An engine whose capacity also depends on others, such as the server that it forwards to."""

    def concurrency_limit(self) -> int:
        """Return how many sequences may run at once just now. Safe to call from any thread."""


@runtime_checkable
class ReportsCache(Protocol):
    """An engine that caches prompt prefixes or adapters, and can list them."""

    def cached_prefix_hashes(self) -> Collection[int]:
        """Return the hashes of what is cached (`streams/prefix_hashes.py`).

        The least recently used come first.

        Safe to call from any thread.
        """


@runtime_checkable
class ReportsStats(Protocol):
    """An engine that counts its tokens, its KV use and the time of its steps."""

    @property
    def stats(self) -> EngineStats:
        """Current counters, always the same object. Safe from any thread, also after `close`."""


@runtime_checkable
class Preemptive(Protocol):
    """An engine that preempts less urgent sequences for more urgent ones, if `preempts` is True."""

    preempts: bool
