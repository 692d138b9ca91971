"""Messages as they travel: frozen records, msgpack on the wire, unknown fields ignored by readers.

A token log holds records in this order: `accepted` (only for requests that came over NATS), one
`started` per attempt (the claim), `chunk`s or `result`s, and exactly one terminal: `done` or
`error`. Their wire form is a map with a `type`; producers see the same maps on their reply subject.
Pure.
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
    """A record becomes a map of its fields, wherever in `value` it is."""
    # `asdict` would copy all that is in them: 1.7 ms of the event loop for a beat of 1,024 requests
    return msgpack.packb(value, default=vars)  # type: ignore[no-any-return]


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data)


def pack_tokens(tokens: list[int]) -> bytes:
    """Token ids as little-endian uint32: half of msgpack's size and no per-item objects to skip."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


@dataclass(frozen=True)
class Logprob:
    """One sampled token's log probability (natural), and the likeliest alternatives in order."""

    token: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Grammar:
    """What the output must be; `source` is the JSON schema or the regular expression."""

    kind: Literal["json_object", "json_schema", "regex"]
    source: str = ""


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. `seed` None means: derived from the request id, so attempts agree."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None  # None: off; n: with the n likeliest alternatives
    ignore_eos: bool = False
    min_p: float = 0.0  # 0: off; else at least so likely, as a share of the likeliest
    repetition_penalty: float = 1.0  # 1: off; of tokens in the prompt or the output
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0  # the same, times how often
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    grammar: Grammar | None = None
    skip_special_tokens: bool = True  # leave them out of the text

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        sampling = from_wire(cls, wire)
        grammar = wire.get("grammar")
        return replace(sampling, grammar=from_wire(Grammar, grammar)) if grammar else sampling


@dataclass(frozen=True)
class AdapterRef:
    """A LoRA adapter of the request's model: its files by path and sha256, and how large it is.

    The request carries all of it, so that every attempt runs with the same weights, whatever the
    registry says by then.
    """

    name: str
    digest: str  # sha256 over `files`
    directory: str
    files: dict[str, str]
    parameters: int


@dataclass(frozen=True)
class Request:
    """The payload of a request and of its work: all that the engine needs, nothing for the router.

    `prompt` holds token ids (`pack_tokens`); `inputs` is for `embed` and `classify`:
    token ids per input. `splits` tells where in each of them the second text of a pair begins,
    which some models must know; it is empty where there are no pairs.
    """

    kind: RequestKind
    prompt: bytes = b""
    inputs: list[bytes] = field(default_factory=list)
    sampling: Sampling = Sampling()
    dimensions: int | None = None
    splits: list[int] = field(default_factory=list)
    adapter: AdapterRef | None = None

    def pack(self) -> bytes:
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        wire = unpack(data)
        wire["sampling"] = Sampling.from_wire(wire.get("sampling", {}))
        if adapter := wire.get("adapter"):
            wire["adapter"] = from_wire(AdapterRef, adapter)
        return from_wire(cls, wire)


def accepted_record(key: str, request_id: str) -> dict[str, Any]:
    """Tells a producer which request its message id has become."""
    return {"type": "accepted", "id": key, "request_id": request_id}


def started_record(model: str, version: str, attempt: int, worker: str) -> dict[str, Any]:
    """The claim: from here on only `attempt` may append."""
    return {
        "type": "started",
        "attempt": attempt,
        "model": model,
        "version": version,
        "worker": worker,
    }


def openai_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> TokenUsage:
    """As OpenAI has it; `cached_tokens` are those of the prompt that were found in a cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def cached_tokens(used: TokenUsage) -> int:
    """Those in a usage, which is 0 where it says nothing of them."""
    found: int = used.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return found


def done_record(
    reason: FinishReason, used: TokenUsage, timing: Mapping[str, float]
) -> dict[str, Any]:
    """The terminal of a request that ended as its client asked; `timing` is ms per stage."""
    return {
        "type": "done",
        "finish_reason": reason,
        "usage": used,
        "timing": {stage: round(ms, 3) for stage, ms in timing.items()},
    }


def error_record(code: str, message: str, used: TokenUsage) -> dict[str, Any]:
    """The terminal of a request that ended otherwise (`deadline_exceeded`, `engine_failed`, …)."""
    return {"type": "error", "code": code, "message": message, "usage": used}


TERMINAL_TYPES = frozenset({"done", "error"})


@dataclass(frozen=True)
class LedgerRecord:
    """One request's usage, written once. `outcome` is a finish reason or an error code."""

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
    account: str = ""  # where it is counted, as in the request's headers
    first: int = 0  # when its first output was made; 0: there was none
    cached_tokens: int = 0  # of the prompt, found in a prefix cache


@dataclass(frozen=True)
class Heartbeat:
    """A worker's heartbeat: its credit and how it fares. Sent every second and when credit changes.

    `pulled` is, per priority, the highest sequence in WORK that this worker has pulled: what was
    dispatched up to there is no longer waiting to be pulled.

    `pulled_own` is the same for what was placed on this worker.

    `holds` are the marks (`streams/prefix_hashes.py`) of what it has come to hold since its last beat, and
    `dropped` of what it holds no more; with `holds_only` it holds `holds` and nothing else.

    `room` is what the worker could take of each priority, if its engine takes the place of less
    urgent work for more urgent: sequences (negative ones wait for a place) and tokens. `progress`
    has pairs of a sequence in WORK and the tokens generated for it so far: of what the worker
    holds, some at a time. `taken` are the reply subjects of deliveries that it has taken lately, or
    of all for a new leader, who gives them back when the worker dies.
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
    resident: bool = True  # its model is loaded; else it would be for the first request
    room: dict[str, tuple[int, int]] = field(default_factory=dict)
    progress: list[tuple[int, int]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    pulled_own: int = 0
    holds: bytes = b""
    dropped: bytes = b""
    holds_only: bool = False

    def free_capacity(self, priority: str) -> tuple[int, int]:
        """Sequences and tokens: what is free, where they are not told by priority."""
        sequences, tokens = self.room.get(
            priority, (self.free_sequences - self.waiting, self.free_tokens)
        )
        return sequences, tokens

    def pack(self) -> bytes:
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return from_wire(cls, unpack(data))


@dataclass(frozen=True)
class ServiceTime:
    """What a request takes once it has been dispatched, in seconds, as measured."""

    first: float = 0.0  # to its first output, and for each token of its prompt:
    per_prompt_token: float = 0.0
    per_output_token: float = 0.0
    output_share: float = 1.0  # of the tokens that it may generate
    first_spread: float = 0.0  # of the seconds to the first output: one standard deviation

    def first_seconds(self, prompt_tokens: int) -> float:
        """From dispatch to the first output."""
        return self.first + self.per_prompt_token * prompt_tokens

    def seconds(self, prompt_tokens: int, most_output: int) -> float:
        """From dispatch to the end."""
        output = self.output_share * most_output
        return self.first_seconds(prompt_tokens) + self.per_output_token * output


@dataclass(frozen=True)
class Pressure:
    """What a model's dispatcher tells the gateways several times a second.

    `wait_seconds` is the estimated wait of a request per priority if its tenant has nothing queued;
    None while nothing is known. `tenants` has it for those with a backlog: not all, but those that
    wait longest. `seconds_per_token` is how much longer each reserved token ahead makes it, beyond
    the `room_tokens` that come in at once.
    """

    model: str
    workers: int
    queued: dict[str, int]
    wait_seconds: dict[str, float | None]
    tenants: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds_per_token: float | None = None
    compute: ServiceTime | None = None  # None while nothing is known
    unmanned_seconds: float = 0.0  # since there was a worker
    uncertainty: float = 0.0  # of the waits, as a share of them: one standard deviation
    room_tokens: dict[str, float] = field(default_factory=dict)  # by priority

    def estimated_wait(self, tenant: str, priority: str) -> float | None:
        """The estimated wait of a tenant's next request; None while nothing is known."""
        return self.tenants.get(tenant, {}).get(priority, self.wait_seconds.get(priority))

    def pack(self) -> bytes:
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        wire = unpack(data)
        if compute := wire.get("compute"):
            wire["compute"] = from_wire(ServiceTime, compute)
        return from_wire(cls, wire)
