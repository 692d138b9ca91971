"""The protocol between worker and engine: `Engine`, its sequences and its outputs.

An engine deals in tokens, and uses neither NATS nor asyncio. One thread owns it and calls every
method, so it needs no lock. Pure.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from gpu_worker.engines.engine_stats import EngineStats
from streams.errors import MillstreamError
from streams.messages import AdapterRef, Logprob, Sampling
from streams.subjects import Priority

FinishReason = Literal["stop", "length", "cancelled"]


class EngineError(Exception):
    """One sequence cannot be run; others are unharmed. `code` is the error code for the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeviceLost(Exception):
    """The device no longer answers this process, so no engine in the process can be trusted."""


class DoesNotFit(MillstreamError):
    """A model needs more memory than it may take."""


@dataclass(frozen=True)
class Sequence:
    """One request as an engine sees it: a prompt to continue, or inputs to embed or classify.

    `generated` are tokens that an earlier attempt has already stored: the engine continues after
    them and returns neither them nor their `text` again. `inputs` is set instead of `prompt` for
    embed and classify: one list of token ids per input. `splits` are the positions in each input at
    which the second text of a pair begins; empty without pairs. `dimensions` is the wanted length
    of vectors (None: the model's).

    `deadline` and `goal` (when the first output is wanted; a later one is not an error) are
    monotonic seconds. Engines with priorities make sequences of the lowest `priority` wait, or give
    way, first. A cached prefix is used for the same `tenant` alone: how fast an answer comes would
    tell one tenant what others have asked.
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
    """Tokens of one request as counted by another server, which ran it for a remote engine."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Output:
    """The result of one step for one sequence: new tokens and their text, vectors, or its end.

    The sequence has left the engine if `finish` or `error` is set. `text` may lag behind `tokens`
    while a character or a possible stop string is incomplete; the finishing output carries all text
    still held back. `vectors` are float32 little-endian rows; `labels` name the columns of a
    classifier's vectors. On a finishing output, `usage` replaces the count of its tokens,
    `cached` is the number of prompt tokens found in a cache, and `matched_stop` is the stop string
    that ended the text; empty if none did.
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
    matched_stop: str = ""


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a model will take on a device, as far as is known before it is loaded.

    `kv_bytes_per_token` is of a sequence's first token, `kv_bytes_per_1000_tokens` of one sequence
    of that length, less what lies outside of sliding windows. `kv_tokens` is how many tokens fit
    beside weights, adapters and a step, of all sequences together; 0 if the model does not fit, and
    None for an engine without a KV cache, or where config.json does not tell the KV's size.
    """

    device: str
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int | None = None
    kv_bytes_per_1000_tokens: int | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True)
class FreeCapacity:
    """The sequences and KV tokens that an engine could still take now.

    Memory of cached prompts that can be evicted counts as free.
    """

    sequences: int
    tokens: int


class Engine(Protocol):
    """One loaded and warm model version; the interface that every engine implements.

    One thread owns an engine and calls all of its methods: `add` and `cancel` between steps, `step`
    while it is not `idle`.
    """

    def add(self, sequence: Sequence) -> None:
        """Take a sequence to run; returns at once and never raises for a sequence that cannot run.

        Such a one comes back from the next `step` as an output with an error.
        """

    def cancel(self, request_id: str) -> None:
        """Drop a sequence; the next `step` returns its `cancelled` output. Idempotent.

        A sequence that has finished or is unknown is ignored.
        """

    def step(self) -> list[Output]:
        """Run one forward pass over the running batch, and return the outputs that it made.

        When nothing is due, returns an empty list within a few milliseconds. The fault of one
        sequence is returned as that sequence's error. An exception means that the engine itself has
        failed.
        """

    def free_capacity(self) -> FreeCapacity:
        """Return how many more sequences and KV tokens the engine could take now."""

    @property
    def idle(self) -> bool:
        """True while `step` would have nothing to compute or return until the next `add`."""

    def close(self) -> None:
        """Drop all sequences without an output, and free the memory of the model."""


@runtime_checkable
class Throttled(Protocol):
    """An engine whose capacity also depends on others, such as the server that it forwards to."""

    def concurrency_limit(self) -> int:
        """Return how many sequences may run at once now, those that run included.

        Safe to call from any thread.
        """


@runtime_checkable
class ReportsCache(Protocol):
    """An engine that caches prompt prefixes or adapters, and can list them."""

    def cached_prefix_hashes(self) -> Collection[int]:
        """Return the hashes of cached prompt prefixes or adapters, least recently used first.

        They are made as in `streams/prefix_hashes.py`. Safe to call from any thread.
        """


@runtime_checkable
class ReportsStats(Protocol):
    """An engine that counts its tokens, its KV use and the time of its steps."""

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine: always the same object, which the engine keeps current.

        Safe to read from any thread, also after `close`.
        """


@runtime_checkable
class CountsStepTokens(Protocol):
    """An engine that counts the tokens of its last step: of prompts, and generated ones.

    Without it, the tokens of its outputs are counted.
    """

    step_tokens: Mapping[str, int]  # by request id


@runtime_checkable
class Preemptive(Protocol):
    """An engine that, if `preempts` is True, interrupts less urgent sequences for more urgent ones.

    An interrupted sequence waits and goes on later.
    """

    preempts: bool
