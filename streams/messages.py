"""Payloads and records of Millstream: frozen dataclasses, msgpack on the wire.

Readers ignore unknown fields. A token log holds records in this order: `accepted` (only for
requests that came over NATS), one `started` per attempt (the claim), `chunk`s or `result`s, and
exactly one terminal: `done` or `error`. Their wire form is a map with a `type`; producers see the
same maps on their reply subject. Pure.
"""

import base64
import struct
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, Self, TypeVar

import msgpack
import orjson

from streams.usage_accounts import PriceEntry, WorkerPrice

RequestKind = Literal["generate", "embed", "classify"]
FinishReason = Literal["stop", "length", "cancelled"]
TokenUsage = Mapping[str, Any]
Record = dict[str, Any]  # one entry of a token log
T = TypeVar("T")


@cache
def _field_names(record: Any) -> frozenset[str]:
    return frozenset(f.name for f in fields(record))


def from_wire(record: type[T], wire: Mapping[str, Any]) -> T:
    """Return an instance of the dataclass `record` with its fields taken from the map `wire`.

    Keys that are no fields of this version are ignored. Raises TypeError if a field without a
    default is missing. Nested maps are not converted.
    """
    names = _field_names(record)  # type: ignore[arg-type]  # a class is hashable
    return record(**{k: v for k, v in wire.items() if k in names})


def pack(value: Any) -> bytes:
    """Return `value` encoded as msgpack; a dataclass, at any depth, becomes a map of its fields."""
    # `asdict` would copy deeply: 1.7 ms of the event loop for a heartbeat with 1,024 requests
    return msgpack.packb(value, default=vars)  # type: ignore[no-any-return]


def unpack(data: bytes) -> Any:
    """Return the maps, lists and scalars encoded in msgpack; raises ValueError for other bytes."""
    try:
        return msgpack.unpackb(data)
    except msgpack.ExtraData:  # it has all that was read, which is for no log
        raise ValueError("further bytes follow the record") from None


Encoding = Literal["msgpack", "json"]  # of what a client is sent
_VECTORS = "vectors"  # the one field of bytes in a record


def pack_record(record: Mapping[str, Any], encoding: Encoding = "msgpack") -> bytes:
    """Return a record of a token log, or an answer, as a client gets it.

    JSON has no bytes, so vectors are in base64 there.
    """
    if encoding == "msgpack":
        return pack(record)
    if vectors := record.get(_VECTORS):
        record = {**record, _VECTORS: [base64.b64encode(each).decode() for each in vectors]}
    return orjson.dumps(record)


def unpack_record(data: bytes) -> dict[str, Any]:
    """Return the record that `pack_record` encoded, in either way.

    Raises ValueError for other bytes.
    """
    if data[:1] != b"{":  # which would be the number 123 in msgpack
        return unpack(data)  # type: ignore[no-any-return]
    record: dict[str, Any] = orjson.loads(data)
    if _VECTORS in record:
        record[_VECTORS] = [base64.b64decode(each) for each in record[_VECTORS]]
    return record


def pack_tokens(tokens: list[int]) -> bytes:
    """Return token ids encoded as little-endian uint32, 4 bytes each.

    That is half of msgpack's size, and a reader that skips them makes no object for each.
    """
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes) -> list[int]:
    """Return the token ids that `pack_tokens` encoded.

    Raises `struct.error` if the length is not a multiple of 4 bytes.
    """
    return list(struct.unpack(f"<{len(data) // 4}I", data))


LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks, as at OpenAI


@dataclass(frozen=True)
class Logprob:
    """A generated token's id, text and natural log probability, with the likeliest alternatives.

    A `text` that is a part of a character is spelt (`streams/logprob_token_text.py`). `top` has id,
    text and log probability of each alternative, the likeliest first.
    """

    token: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Grammar:
    """A constraint that a request sets on its output: any JSON object, a JSON schema, or a regex.

    `source` is the schema or the regular expression; empty for `json_object`.
    """

    kind: Literal["json_object", "json_schema", "regex"]
    source: str = ""


GREEDY_BELOW = 1e-5  # temperature, as in vLLM: the division by a smaller one overflows


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters for what a request leaves open; by default those of OpenAI's API."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


NEUTRAL_SAMPLING = SamplingDefaults()


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request.

    `temperature`, `top_p`, `top_k`, `min_p` or `repetition_penalty` None means that the request
    does not say: `resolve` fills them. `seed` None means that the seed is derived from the request
    id, so that a second attempt at the request draws the same tokens.
    """

    max_tokens: int = 16
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: off
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None  # None: off; n: with the n likeliest alternatives
    ignore_eos: bool = False
    min_p: float | None = None  # 0: off; least probability, as a share of the likeliest token's
    repetition_penalty: float | None = None  # 1: off; of tokens in the prompt or the output
    presence_penalty: float = 0.0  # applies to tokens in the output
    frequency_penalty: float = 0.0  # the same, times how often the token has occurred
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    grammar: Grammar | None = None
    skip_special_tokens: bool = True  # leave them out of the text
    min_tokens: int = 0  # no end token and none of `stop_token_ids` comes before so many
    stop_token_ids: list[int] = field(default_factory=list)  # end the output, besides its end token

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """Return the parameters in a map, its `grammar` included; unknown keys are ignored."""
        sampling = from_wire(cls, wire)
        grammar = wire.get("grammar")
        return replace(sampling, grammar=from_wire(Grammar, grammar)) if grammar else sampling

    def resolve(self, defaults: SamplingDefaults = NEUTRAL_SAMPLING) -> "ResolvedSampling":
        """Return the parameters with `defaults` for those that the request does not say."""
        return ResolvedSampling(**{**vars(defaults), **_without_none(self)})


@dataclass(frozen=True)
class ResolvedSampling(Sampling):
    """Sampling parameters that leave nothing open: an engine draws tokens by them."""

    temperature: float = NEUTRAL_SAMPLING.temperature
    top_p: float = NEUTRAL_SAMPLING.top_p
    top_k: int = NEUTRAL_SAMPLING.top_k
    min_p: float = NEUTRAL_SAMPLING.min_p
    repetition_penalty: float = NEUTRAL_SAMPLING.repetition_penalty


def _without_none(record: object) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if value is not None}


@dataclass(frozen=True)
class AdapterRef:
    """The copy of a LoRA adapter's registry record that a request carries.

    The request carries all of it, so that every attempt runs with the same weights even if the
    registry has changed since. `files` are sha256 digests (hex) by relative path; `parameters` is
    the number of the adapter's weights.
    """

    name: str
    digest: str  # sha256 over `files`
    directory: str
    files: dict[str, str]
    parameters: int


@dataclass(frozen=True)
class Request:
    """Payload of a request, while queued and when dispatched: all that an engine needs to serve it.

    The data for routing are in the message's headers. `prompt` holds token ids (`pack_tokens`) and
    is for `generate`; `inputs` is for `embed` and `classify`, the token ids of each input. `splits`
    says where in each input the second text of a pair begins, which some models must know; it is
    empty where there are no pairs.
    """

    kind: RequestKind
    prompt: bytes = b""
    inputs: list[bytes] = field(default_factory=list)
    sampling: Sampling = Sampling()
    dimensions: int | None = None
    splits: list[int] = field(default_factory=list)
    adapter: AdapterRef | None = None

    def pack(self) -> bytes:
        """Return the request encoded as msgpack.

        What its sampling leaves open is left out, since older workers know no None there.
        """
        return pack({**vars(self), "sampling": _without_none(self.sampling)})

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the request that `pack` encoded; unknown fields are ignored.

        Raises ValueError for bytes that are not msgpack, TypeError if a field is missing.
        """
        wire = unpack(data)
        wire["sampling"] = Sampling.from_wire(wire.get("sampling", {}))
        if adapter := wire.get("adapter"):
            wire["adapter"] = from_wire(AdapterRef, adapter)
        return from_wire(cls, wire)


def accepted_record(key: str, request_id: str) -> dict[str, Any]:
    """Return the token log record that tells a NATS producer which request id its message got.

    `key` is the message id under which the producer published.
    """
    return {"type": "accepted", "id": key, "request_id": request_id}


def started_record(
    model: str, version: str, attempt: int, worker: str, first_output_at: int = 0
) -> dict[str, Any]:
    """Return the record with which an attempt claims a token log.

    Only that attempt may append after it. `attempt` counts from 1. `first_output_at` is when an
    earlier attempt made the request's first output, in epoch milliseconds; 0 if none has.
    """
    record = {
        "type": "started",
        "attempt": attempt,
        "model": model,
        "version": version,
        "worker": worker,
    }
    return record | ({"first_output_at": first_output_at} if first_output_at else {})


def openai_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> TokenUsage:
    """Return OpenAI's `usage` object for these token counts.

    `cached_tokens` is how many of the prompt tokens were found in a prefix cache.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def cached_tokens(usage: TokenUsage) -> int:
    """Return how many prompt tokens of a `usage` object were cached; 0 if it does not say."""
    count: int = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return count


def done_record(
    reason: FinishReason, usage: TokenUsage, timing: Mapping[str, float], stop_sequence: str = ""
) -> dict[str, Any]:
    """Return the last token log record of a request that ended normally or was cancelled.

    `timing` is milliseconds by stage; `usage` is OpenAI's usage object. `stop_sequence` is the stop
    string that ended the text; a record of a text that none ended has no such field.
    """
    record = {
        "type": "done",
        "finish_reason": reason,
        "usage": usage,
        "timing": {stage: round(ms, 3) for stage, ms in timing.items()},
    }
    return record | ({"stop_sequence": stop_sequence} if stop_sequence else {})


def error_record(code: str, message: str, usage: TokenUsage) -> dict[str, Any]:
    """Return the last token log record of a request that failed.

    `code` is an error code such as `deadline_exceeded` or `engine_failed`; `usage` is OpenAI's
    usage object of what was used until then.
    """
    return {"type": "error", "code": code, "message": message, "usage": usage}


TERMINAL_TYPES = frozenset({"done", "error"})


@dataclass(frozen=True)
class LedgerRecord:
    """One request's usage, from which it is billed: written once to the stream LEDGER when it ends.

    `outcome` is a finish reason or an error code; times are epoch milliseconds, and `deadline` is
    the one that the client was promised. `attempts` is how many times workers have begun the
    request; `earlier_attempts` has those that did not end it, each with `attempt`, `worker`, when
    it ended (`at`, 0 if nobody knows) and a `reason`: `released`, `failed`, `broke` or `silent`.
    `worker_type` names the kind of machine. `compute_ns` are the nanoseconds of the worker's time
    that were this request's, in the last attempt.
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
    first: int = 0  # when the first attempt that gave an output made it; 0: none, or not known
    cached_tokens: int = 0  # of the prompt, found in a prefix cache
    priority: str = ""  # that the client asked for
    deadline: int = 0
    goal_ms: int | None = None  # the model's goal for the time to first token, at acceptance
    price: str = ""  # packed `PriceEntry`, as in the request's headers
    key: str = ""  # name of the API key; empty for requests over NATS
    user: str = ""  # hash of the end user whom the client named
    earlier_attempts: list[dict[str, Any]] = field(default_factory=list)
    warm: bool | None = None  # its model was loaded when it could start; None: no worker started it
    worker_ms: int = 0  # from the pull to the end, on the worker that ended it
    worker_type: str = ""
    worker_price: str = ""  # packed `WorkerPrice`
    compute_ns: int = 0

    @property
    def price_entry(self) -> PriceEntry:
        """The entry of the price book by which the request is billed; free if it names none."""
        return PriceEntry.unpack(self.price) if self.price else PriceEntry()

    @property
    def billed_tokens(self) -> tuple[int, int, int]:
        """Prompt tokens, generated tokens, and how many of the prompt's were cached, as billed.

        All are 0 for a request that no worker has attempted.
        """
        if not self.attempts:
            return 0, 0, 0
        return self.prompt_tokens, self.completion_tokens, self.cached_tokens

    @property
    def charge(self) -> int:
        """The request's cost to its tenant, as an integer in 10⁻¹² of the price's currency."""
        return self.price_entry.price.spend_for(*self.billed_tokens)

    def pack(self) -> bytes:
        """Return the record encoded as msgpack, without the fields that are at their defaults."""
        defaults = _ledger_defaults()
        return pack({k: v for k, v in vars(self).items() if k not in defaults or v != defaults[k]})

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the record that `pack` encoded; unknown fields are ignored.

        Raises ValueError for bytes that are not msgpack and for a price of another form, TypeError
        if a field is missing.
        """
        record = from_wire(cls, unpack(data))
        if record.price:
            PriceEntry.unpack(record.price)
        WorkerPrice.unpack(record.worker_price)
        return record


@cache
def _ledger_defaults() -> dict[str, Any]:
    """Return the fields of a ledger record that may be left out, with what they then are."""
    optional = (f for f in fields(LedgerRecord) if f.default is not MISSING)
    return {each.name: each.default for each in optional} | {"earlier_attempts": []}


@dataclass(frozen=True)
class RefusalCounts:
    """Counts of one tenant's requests to a model that a gateway refused in some whole seconds.

    `since` and `until` are the first and the last of these seconds, of the epoch; they are the same
    unless the ledger had no room meanwhile. Each of `counts` is an error code, the model's version
    (empty if it is not known), the priority and a number. It is stored in the stream LEDGER, whose
    order says what came before.
    """

    gateway: str
    tenant: str
    model: str
    since: int
    until: int
    counts: list[tuple[str, str, str, int]]

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the counts that `pack` encoded; unknown fields are ignored.

        Raises ValueError for bytes that are not msgpack, TypeError if a field is missing.
        """
        return from_wire(cls, unpack(data))


@dataclass(frozen=True)
class Heartbeat:
    """A worker's report on one model, sent every second and when its free capacity changes.

    `pulled` is, by priority, the highest stream sequence in WORK that this worker has pulled from
    the consumer shared by all workers of the pool: work up to there no longer waits to be pulled.
    `pulled_own` is the same for work that was placed on this worker.

    `holds` are the prefix hashes (`streams/prefix_hashes.py`) that the worker's cache has gained
    since the last heartbeat, and `dropped` those that it has lost. With `holds_only`, `holds` is
    all that the cache has.

    `room` is the worker's free capacity by priority, as sequences (negative: so many wait for a
    place) and tokens; only engines that preempt less urgent work for more urgent work report it.
    `progress` has pairs of a stream sequence in WORK and the tokens generated for that request so
    far; each heartbeat has some of the worker's requests. `taken` are the reply subjects of the
    deliveries that the worker has accepted lately, or of all of them for a new leader. If the
    worker dies, the dispatcher's leader naks these deliveries.

    `drained` is only in the last heartbeat of a worker that drains and is about to end: how many of
    the requests that it held when its drain began it has `finished`, and how many it has
    `handed_over`, over all of its models. Mostly it holds nothing then; what it still holds is
    taken from it as from a dead worker.

    `type` names the kind of machine that the worker runs on, empty if it has no name. `not_loaded`
    says, by `MODEL@VERSION`, why the worker serves nothing of what it has to serve. `reclaiming`
    says that it drains because its provider takes the machine back. `load` has what the last load
    of the model has measured: `load_seconds`, `warm_up_seconds` in them, `weight_bytes`,
    `kv_bytes_per_token`; those are left out that nobody knows.
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
    drained: dict[str, int] = field(default_factory=dict)
    type: str = ""
    not_loaded: dict[str, str] = field(default_factory=dict)
    reclaiming: bool = False
    load: dict[str, float] = field(default_factory=dict)

    def free_capacity(self, priority: str) -> tuple[int, int]:
        """Return how many sequences and KV tokens are free for requests of `priority`, as a pair.

        The sequences are negative if more wait than are free. If `room` has no entry for the
        priority, the pair is all free sequences less the waiting ones, and all free tokens.
        """
        sequences, tokens = self.room.get(
            priority, (self.free_sequences - self.waiting, self.free_tokens)
        )
        return sequences, tokens

    def pack(self) -> bytes:
        """Return the heartbeat encoded as msgpack."""
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the heartbeat that `pack` encoded; unknown fields are ignored.

        Raises ValueError for bytes that are not msgpack, TypeError if a field is missing.
        """
        return from_wire(cls, unpack(data))


@dataclass(frozen=True)
class ServiceTime:
    """Linear estimate of a request's seconds from dispatch on, by its prompt and output tokens.

    The coefficients are measured on requests that have ended.
    """

    first: float = 0.0  # seconds to the first output, without those for each prompt token
    per_prompt_token: float = 0.0
    per_output_token: float = 0.0
    output_share: float = 1.0  # mean share of its allowed output tokens that a request generates
    first_spread: float = 0.0  # one standard deviation of the seconds to the first output

    def first_seconds(self, prompt_tokens: int) -> float:
        """Return the expected seconds from dispatch to the first output for such a prompt."""
        return self.first + self.per_prompt_token * prompt_tokens

    def seconds(self, prompt_tokens: int, max_output: int) -> float:
        """Return the expected seconds from dispatch to the end of a request.

        `max_output` is the most tokens that the request may generate; it is expected to generate
        the share `output_share` of them.
        """
        output = self.output_share * max_output
        return self.first_seconds(prompt_tokens) + self.per_output_token * output


@dataclass(frozen=True)
class Pressure:
    """A model's load, published to the gateways by its dispatcher several times a second.

    `wait_seconds` is, by priority, the estimated wait of a request whose tenant has nothing queued;
    None while nothing is known. `tenants` has the estimated waits in seconds, by priority, of those
    tenants with queued requests that wait longest. `seconds_per_token` is how much each reserved
    token ahead of a request adds to its wait, beyond the first `room_tokens`, which are admitted at
    once. `arrived` counts by priority what was queued since this leader began: requests, their
    prompt tokens, and the most tokens that they may generate. `queued_tokens` are, by priority,
    prompt tokens and the most output of what is queued. `earliest_deadline` is that of what
    is queued, in epoch milliseconds; 0 if nothing is.
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
    arrived: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    earliest_deadline: int = 0
    queued_tokens: dict[str, int] = field(default_factory=dict)

    def estimated_wait(self, tenant: str, priority: str) -> float | None:
        """Return the estimated seconds that a tenant's next request would wait; None if unknown."""
        return self.tenants.get(tenant, {}).get(priority, self.wait_seconds.get(priority))

    def pack(self) -> bytes:
        """Return the report encoded as msgpack."""
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the report that `pack` encoded; unknown fields are ignored.

        Raises ValueError for bytes that are not msgpack, TypeError if a field is missing.
        """
        wire = unpack(data)
        if compute := wire.get("compute"):
            wire["compute"] = from_wire(ServiceTime, compute)
        return from_wire(cls, wire)


@dataclass(frozen=True)
class StreamReport:
    """Report on all streams by the service that declares them, each time it has looked.

    `created` has the time in epoch seconds when each stream was made, by name. `unusable` has those
    that the broker refuses to make as they are declared, with its reason. `lane_limit` is how many
    requests a lane (one tenant's queue for a model and priority) can hold.
    """

    created: dict[str, float]
    unusable: dict[str, str]
    lane_limit: int

    def pack(self) -> bytes:
        """Return the report encoded as msgpack."""
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the report that `pack` encoded; unknown fields are ignored.

        Raises ValueError for bytes that are not msgpack, TypeError if a field is missing.
        """
        return from_wire(cls, unpack(data))
