"""Payloads and records of Millstream: frozen dataclasses, msgpack on the wire.

Readers ignore unknown fields. A token log holds records in this order: `accepted` (only for
requests that came over NATS), one `started` per attempt (the claim), `chunk`s or `result`s, and
exactly one terminal: `done` or `error`. Their wire form is a map with a `type`; producers see the
same maps on their reply subject. Pure.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, Self, TypeVar

import msgpack

RequestKind = Literal["generate", "embed", "classify"]
FinishReason = Literal["stop", "length", "cancelled"]
TokenUsage = Mapping[str, Any]
Record = dict[str, Any]  # one entry of a token log
T = TypeVar("T")


@cache
def _field_names(record: Any) -> frozenset[str]:
    return frozenset(f.name for f in fields(record))


def from_wire(record: type[T], wire: Mapping[str, Any]) -> T:
    """Build `record` from a map, dropping the fields that this version does not know."""
    names = _field_names(record)  # type: ignore[arg-type]  # a class is hashable
    return record(**{k: v for k, v in wire.items() if k in names})


def pack(value: Any) -> bytes:
    """Encode `value` as msgpack; a dataclass, at any depth, becomes a map of its fields."""
    # `asdict` would copy deeply: 1.7 ms of the event loop for a heartbeat with 1,024 requests
    return msgpack.packb(value, default=vars)  # type: ignore[no-any-return]


def unpack(data: bytes) -> Any:
    """Decode msgpack into plain maps, lists and scalars."""
    return msgpack.unpackb(data)


def pack_tokens(tokens: list[int]) -> bytes:
    """Encode token ids as little-endian uint32.

    Half of msgpack's size, and a reader that skips them makes no object for each.
    """
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes) -> list[int]:
    """Decode what `pack_tokens` returned."""
    return list(struct.unpack(f"<{len(data) // 4}I", data))


LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks, as at OpenAI


@dataclass(frozen=True)
class Logprob:
    """A sampled token with its natural log probability and the likeliest alternatives.

    A `text` that is a part of a character is spelt (`streams/partial_characters.py`). `top` has id,
    text and log probability of each alternative, the likeliest first.
    """

    token: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Grammar:
    """A constraint on the output; `source` is the JSON schema or the regular expression."""

    kind: Literal["json_object", "json_schema", "regex"]
    source: str = ""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `seed` None: derived from the request id, so that attempts agree."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None  # None: off; n: with the n likeliest alternatives
    ignore_eos: bool = False
    min_p: float = 0.0  # 0: off; else the least probability, as a share of the likeliest token's
    repetition_penalty: float = 1.0  # 1: off; applies to tokens in the prompt or the output
    presence_penalty: float = 0.0  # applies to tokens in the output
    frequency_penalty: float = 0.0  # the same, times how often the token has occurred
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    grammar: Grammar | None = None
    skip_special_tokens: bool = True  # leave them out of the text

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """Build it from a map, its grammar included; unknown fields are dropped."""
        sampling = from_wire(cls, wire)
        grammar = wire.get("grammar")
        return replace(sampling, grammar=from_wire(Grammar, grammar)) if grammar else sampling


@dataclass(frozen=True)
class AdapterRef:
    """The copy of a LoRA adapter's record that a request carries: files by path and sha256.

    The request carries all of it, so that every attempt runs with the same weights, whatever the
    registry says by then. `parameters` is the number of its weights.
    """

    name: str
    digest: str  # sha256 over `files`
    directory: str
    files: dict[str, str]
    parameters: int


@dataclass(frozen=True)
class Request:
    """Payload of a request and of its work: all that the engine needs, nothing for routing.

    `prompt` holds token ids (`pack_tokens`); `inputs` is for `embed` and `classify`: token ids of
    each input. `splits` says where in each input the second text of a pair begins, which some
    models must know; it is empty where there are no pairs.
    """

    kind: RequestKind
    prompt: bytes = b""
    inputs: list[bytes] = field(default_factory=list)
    sampling: Sampling = Sampling()
    dimensions: int | None = None
    splits: list[int] = field(default_factory=list)
    adapter: AdapterRef | None = None

    def pack(self) -> bytes:
        """Encode as msgpack."""
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Decode from msgpack; unknown fields are dropped."""
        wire = unpack(data)
        wire["sampling"] = Sampling.from_wire(wire.get("sampling", {}))
        if adapter := wire.get("adapter"):
            wire["adapter"] = from_wire(AdapterRef, adapter)
        return from_wire(cls, wire)


def accepted_record(key: str, request_id: str) -> dict[str, Any]:
    """Build the record that tells a NATS producer the request id for its message id `key`."""
    return {"type": "accepted", "id": key, "request_id": request_id}


def started_record(model: str, version: str, attempt: int, worker: str) -> dict[str, Any]:
    """Build the claim of a token log: behind it, only this attempt may append."""
    return {
        "type": "started",
        "attempt": attempt,
        "model": model,
        "version": version,
        "worker": worker,
    }


def openai_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> TokenUsage:
    """Build OpenAI's `usage` object.

    `cached_tokens` counts the prompt tokens that were found in a prefix cache.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def cached_tokens(usage: TokenUsage) -> int:
    """Return the cached prompt tokens of a usage object; 0 where it does not mention them."""
    count: int = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return count


def done_record(
    reason: FinishReason, usage: TokenUsage, timing: Mapping[str, float]
) -> dict[str, Any]:
    """Build the terminal of a request that ended normally or was cancelled by its client.

    `timing` is milliseconds by stage.
    """
    return {
        "type": "done",
        "finish_reason": reason,
        "usage": usage,
        "timing": {stage: round(ms, 3) for stage, ms in timing.items()},
    }


def error_record(code: str, message: str, usage: TokenUsage) -> dict[str, Any]:
    """Build the terminal of a request that failed (`deadline_exceeded`, `engine_failed`, …)."""
    return {"type": "error", "code": code, "message": message, "usage": usage}


TERMINAL_TYPES = frozenset({"done", "error"})


@dataclass(frozen=True)
class LedgerRecord:
    """A request's usage as the stream LEDGER holds it, written once.

    `outcome` is a finish reason or an error code; times are epoch milliseconds.
    """

    request_id: str
    tenant: str
    model: str
    version: str
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    attempts: int
    worker: str
    accepted: int
    finished: int
    adapter: str = ""
    account: str = ""  # packed `Account` on which it is counted, as in the request's headers
    first: int = 0  # when its first output was made; 0: there was none
    cached_tokens: int = 0  # of the prompt, found in a prefix cache


@dataclass(frozen=True)
class Heartbeat:
    """A worker's free capacity and progress, sent every second and when its credit changes.

    `pulled` is, by priority, the highest stream sequence in WORK that this worker has pulled from
    the pool's shared consumer: work up to there no longer waits to be pulled. `pulled_own` is the
    same for work that was placed on this worker.

    `holds` are the prefix hashes (`streams/prefix_hashes.py`) that its cache has gained since the
    last heartbeat, and `dropped` those that it has lost; with `holds_only`, `holds` is all that the
    cache has.

    `room` is the worker's free capacity by priority, where its engine preempts less urgent work for
    more urgent: sequences (negative: so many wait for a place) and tokens. `progress` has pairs of
    a stream sequence in WORK and the tokens generated for it so far; each heartbeat has some of the
    worker's requests. `taken` are the reply subjects of deliveries that it has accepted lately, or
    of all of them for a new leader; the leader naks them when the worker dies.
    """

    worker: str
    model: str
    version: str
    free_sequences: int
    free_tokens: int
    running: int
    waiting: int
    max_sequences: int
    kv_tokens: int
    generated_tokens: int  # since the worker started
    tokens_per_second: float
    pulled: dict[str, int] = field(default_factory=dict)
    draining: bool = False
    resident: bool = True  # the model is loaded; False: the first request would load it
    room: dict[str, tuple[int, int]] = field(default_factory=dict)
    progress: list[tuple[int, int]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    pulled_own: int = 0
    holds: bytes = b""
    dropped: bytes = b""
    holds_only: bool = False

    def free_capacity(self, priority: str) -> tuple[int, int]:
        """Return the sequences and KV tokens that are free for a priority.

        Without a `room` for that priority: all free sequences less the waiting ones, and all free
        tokens.
        """
        sequences, tokens = self.room.get(
            priority, (self.free_sequences - self.waiting, self.free_tokens)
        )
        return sequences, tokens

    def pack(self) -> bytes:
        """Encode as msgpack."""
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Decode from msgpack; unknown fields are dropped."""
        return from_wire(cls, unpack(data))


@dataclass(frozen=True)
class ServiceTime:
    """Measured seconds that a request takes after dispatch, by prompt and output tokens."""

    first: float = 0.0  # seconds to the first output, without those for each prompt token
    per_prompt_token: float = 0.0
    per_output_token: float = 0.0
    output_share: float = 1.0  # mean share of its allowed output tokens that a request generates
    first_spread: float = 0.0  # one standard deviation of the seconds to the first output

    def first_seconds(self, prompt_tokens: int) -> float:
        """Return the expected seconds from dispatch to the first output."""
        return self.first + self.per_prompt_token * prompt_tokens

    def seconds(self, prompt_tokens: int, max_output: int) -> float:
        """Return the expected seconds from dispatch to the end.

        `max_output` is the most tokens that the request may generate.
        """
        output = self.output_share * max_output
        return self.first_seconds(prompt_tokens) + self.per_output_token * output


@dataclass(frozen=True)
class Pressure:
    """A model's load, published to the gateways by its dispatcher several times a second.

    `wait_seconds` is, by priority, the estimated wait of a request whose tenant has nothing queued;
    None while nothing is known. `tenants` has the estimated waits of tenants with a backlog: not of
    all, but of those that wait longest. `seconds_per_token` is how much each reserved token ahead
    of a request adds to its wait, beyond the first `room_tokens`, which are admitted at once.
    """

    model: str
    workers: int
    queued: dict[str, int]
    wait_seconds: dict[str, float | None]
    tenants: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds_per_token: float | None = None
    compute: ServiceTime | None = None  # None while nothing is known
    unmanned_seconds: float = 0.0  # since the last worker was there
    uncertainty: float = 0.0  # one standard deviation of the waits, as a share of them
    room_tokens: dict[str, float] = field(default_factory=dict)  # by priority

    def estimated_wait(self, tenant: str, priority: str) -> float | None:
        """Return the estimated wait of a tenant's next request in seconds; None if unknown."""
        return self.tenants.get(tenant, {}).get(priority, self.wait_seconds.get(priority))

    def pack(self) -> bytes:
        """Encode as msgpack."""
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Decode from msgpack; unknown fields are dropped."""
        wire = unpack(data)
        if compute := wire.get("compute"):
            wire["compute"] = from_wire(ServiceTime, compute)
        return from_wire(cls, wire)
