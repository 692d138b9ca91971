"""NATS subjects of Millstream: each is built and parsed here and spelled nowhere else.

Tokens of a subject match `[a-z0-9][a-z0-9_-]{0,62}`. Tenants, routes and ids must match as they are
(`token`); names with other characters, such as model names, are escaped (`escape`). A function
whose docstring says "Filter" returns a pattern with wildcards. Pure.
"""

import re
import zlib
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

ANY = "any"  # the placement of work that every worker of the pool may pull
PREFIX = "infer"
_CACHED_SUBJECTS = 16384  # parsed subjects that are kept: without a cache, one parse per request
_TOKEN = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}\Z")
_PLAIN = re.compile(r"[a-z0-9-]")
_ESCAPED = re.compile(r"_(_|[0-9a-f]{2})")
_LEAD = "e_z"  # marks a name whose first character had to be escaped; `_z` is no escape


class InvalidToken(ValueError):
    """A name that cannot be one token of a subject; `value` is the name as it came."""

    def __init__(self, value: str) -> None:
        super().__init__(
            f"{value!r} is not a subject token: it must match [a-z0-9][a-z0-9_-]{{0,62}}"
        )
        self.value = value


class Priority(StrEnum):
    """Urgency of a request; the members are in order, most urgent first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    def is_above(self, other: "Priority") -> bool:
        """Return whether this priority is more urgent than `other`."""
        return _URGENCY[self] < _URGENCY[other]


_URGENCY = {priority: index for index, priority in enumerate(Priority)}


def token(value: str) -> str:
    """Return `value` if it is one subject token, else raise `InvalidToken`."""
    if not _TOKEN.match(value):
        raise InvalidToken(value)
    return value


def escape(name: str) -> str:
    """Turn any name into one subject token; `unescape` reverses it.

    `[a-z0-9-]` stay, `_` becomes `__`, other UTF-8 bytes become `_xx`. Raises `InvalidToken` for an
    empty name and for one whose escaped form is longer than a token may be.
    """
    out = "".join(c if _PLAIN.match(c) else _escape_character(c) for c in name)
    if out[:1] in ("_", "-") or out.startswith(_LEAD):
        out = _LEAD + out
    if not _TOKEN.match(out):
        raise InvalidToken(name)
    return out


def _escape_character(c: str) -> str:
    return "__" if c == "_" else "".join(f"_{byte:02x}" for byte in c.encode())


def unescape(escaped: str) -> str:
    """Return the name that `escape` was given."""
    raw = escaped.removeprefix(_LEAD)
    decoded = _ESCAPED.sub(lambda m: "_" if m[1] == "_" else chr(int(m[1], 16)), raw)
    return decoded.encode("latin-1").decode()


def shard(request_id: str, shards: int) -> int:
    """Return the shard of a request's token log: stable over processes and releases (CRC-32)."""
    return zlib.crc32(request_id.encode()) % shards


class Lane(NamedTuple):
    """A tenant's queue for one model and priority."""

    tenant: str
    model: str
    priority: Priority


class LogAddress(NamedTuple):
    """The address of one request's token log."""

    tenant: str
    route: str
    request_id: str


class PoolKey(NamedTuple):
    """The workers of one model version, as one priority of work sees them."""

    model: str
    version: str
    priority: Priority


def request(lane: Lane) -> str:
    """Subject on which a lane's requests are queued."""
    return f"{PREFIX}.request.{token(lane.tenant)}.{escape(lane.model)}.{lane.priority}"


def requests_by(tenant: str) -> str:
    """Filter: every queued request of one tenant."""
    return f"{PREFIX}.request.{token(tenant)}.>"


def requests_of(model: str) -> str:
    """Filter: every queued request for one model."""
    return f"{PREFIX}.request.*.{escape(model)}.*"


@lru_cache(maxsize=_CACHED_SUBJECTS)
def parse_lane(subject: str) -> Lane:
    """Parse the subject of a request or of an ingress message into its lane."""
    _, _, tenant, model, priority = subject.split(".")
    return Lane(tenant, unescape(model), Priority(priority))


def work(pool: PoolKey, placement: str = ANY) -> str:
    """Subject of work for a pool, placed on one worker or on `ANY`."""
    return (
        f"{PREFIX}.work.{escape(pool.model)}.{escape(pool.version)}"
        f".{pool.priority}.{token(placement)}"
    )


@lru_cache(maxsize=_CACHED_SUBJECTS)
def parse_work(subject: str) -> PoolKey:
    """Parse the subject of work into its pool; raises ValueError for one of another form."""
    _, _, model, version, priority, _ = subject.split(".")
    return PoolKey(unescape(model), unescape(version), Priority(priority))


def is_work(subject: str) -> bool:
    """Return whether `work` can have built this subject; operators may publish on any other."""
    try:
        parse_work(subject)
        token(placement(subject))
    except ValueError:
        return False
    return True


def placement(subject: str) -> str:
    """Return the worker that work on this subject was placed on, or `ANY`."""
    return subject.rpartition(".")[2]


def work_placed_on(model: str, version: str, worker: str) -> str:
    """Filter: work of any priority that was placed on one worker."""
    return f"{PREFIX}.work.{escape(model)}.{escape(version)}.*.{token(worker)}"


def log(address: LogAddress, shards: int) -> str:
    """Subject of a request's token log."""
    tenant, route, request_id = address
    return (
        f"{PREFIX}.token.{shard(request_id, shards)}.{token(tenant)}.{token(route)}"
        f".{token(request_id)}"
    )


def log_on_any_route(tenant: str, request_id: str, shards: int) -> str:
    """Filter: a request's token log, for a reader that does not know its route."""
    return f"{PREFIX}.token.{shard(request_id, shards)}.{token(tenant)}.*.{token(request_id)}"


def log_of_any_tenant(request_id: str, shards: int) -> str:
    """Filter: a request's token log, for a reader that knows only its id."""
    return f"{PREFIX}.token.{shard(request_id, shards)}.*.*.{token(request_id)}"


def parse_log(subject: str) -> LogAddress:
    """Parse the subject of a token log or of a reply into the log's address."""
    tenant, route, request_id = subject.split(".")[-3:]
    return LogAddress(tenant, route, request_id)


def replies_to(route: str) -> str:
    """Filter: all replies to one route."""
    return f"{PREFIX}.reply.*.{token(route)}.>"


def reply_on_any_route(tenant: str, request_id: str) -> str:
    """Filter: the replies of one request, whichever route they go to."""
    return f"{PREFIX}.reply.{token(tenant)}.*.{token(request_id)}"


def cancel(tenant: str, request_id: str) -> str:
    """Subject that cancels a request."""
    return f"{PREFIX}.cancel.{token(tenant)}.{token(request_id)}"


def reader(tenant: str, request_id: str) -> str:
    """Subject that asks the gateways whether one of them has a reader of a request."""
    return f"{PREFIX}.reader.{token(tenant)}.{token(request_id)}"


def find(tenant: str, request_id: str) -> str:
    """Subject that asks dispatchers, gateways and workers whether one of them knows a request."""
    return f"{PREFIX}.find.{token(tenant)}.{token(request_id)}"


def parse_request_id(subject: str) -> tuple[str, str]:
    """Parse a `cancel`, `reader` or `find` subject into tenant and request id."""
    tenant, request_id = subject.split(".")[-2:]
    return tenant, request_id


def drain(worker: str) -> str:
    """Subject that tells a worker to drain and leave."""
    return f"{PREFIX}.drain.{token(worker)}"


def alive(worker: str) -> str:
    """Subject that asks a worker whether it is alive.

    If it is not, the broker answers that there are no responders.
    """
    return f"{PREFIX}.alive.{token(worker)}"


def written(worker: str) -> str:
    """Subject that asks a worker for records of a token log that it writes."""
    return f"{PREFIX}.written.{token(worker)}"


def fleet(model: str, worker: str) -> str:
    """Subject of a worker's heartbeats."""
    return f"{PREFIX}.fleet.{escape(model)}.{token(worker)}"


def muster(model: str) -> str:
    """Subject that asks the workers of a model for a heartbeat now."""
    return f"{PREFIX}.muster.{escape(model)}"


def pressure(model: str) -> str:
    """Subject on which a model's dispatcher publishes its `Pressure`."""
    return f"{PREFIX}.pressure.{escape(model)}"


def ledger(tenant: str, model: str) -> str:
    """Subject of the ledger records of one tenant and model."""
    return f"{PREFIX}.ledger.{token(tenant)}.{escape(model)}"


def usage(tenant: str, scope: str, meter: str, day: str) -> str:
    """Subject of the counter of what a tenant, or one of its keys, has used on a day."""
    return f"{PREFIX}.usage.{token(tenant)}.{token(scope)}.{meter}.{token(day)}"


def usage_on(day: str) -> str:
    """Filter: the usage counters of all tenants for a day."""
    return f"{PREFIX}.usage.*.*.*.{token(day)}"


def rate(tenant: str, scope: str, meter: str, slot: int) -> str:
    """Subject of the counter of a minute or of a quota slot, by its number since the epoch."""
    return f"{PREFIX}.rate.{token(tenant)}.{token(scope)}.{meter}.{slot}"


def attempts(tenant: str, request_id: str) -> str:
    """Subject on which workers store notes of how their attempts at a request went."""
    return f"{PREFIX}.attempt.{token(tenant)}.{token(request_id)}"


def dead(tenant: str, model: str) -> str:
    """Subject of the dead letters of one tenant and model."""
    return f"{PREFIX}.dead.{token(tenant)}.{escape(model)}"


def replay(name: str) -> str:
    """Subject of the record of how a dead letter, by its name, was replayed."""
    return f"{PREFIX}.replay.{token(name)}"


def dead_of(tenant: str | None, model: str | None) -> str:
    """Filter: the dead letters of one tenant and model; None: of all."""
    return f"{PREFIX}.dead.{token(tenant) if tenant else '*'}.{escape(model) if model else '*'}"


def parse_dead(subject: str) -> tuple[str, str]:
    """Parse the subject of a dead letter into tenant and model."""
    _, _, tenant, model = subject.split(".")
    return tenant, unescape(model)


def submissions(tenant: str) -> str:
    """Filter: the submissions of one tenant's producers."""
    return f"{PREFIX}.submit.{token(tenant)}.*.*"


def closed_submissions(tenant: str) -> str:
    """Subject of an ingress stream that is closed; nobody publishes on it."""
    return f"{PREFIX}.closed.{token(tenant)}"


def fleet_of(model: str) -> str:
    """Filter: the heartbeats of one model's workers."""
    return f"{PREFIX}.fleet.{escape(model)}.*"


def ledger_of(model: str) -> str:
    """Filter: the ledger records of one model for all tenants."""
    return f"{PREFIX}.ledger.*.{escape(model)}"


def work_of(model: str) -> str:
    """Filter: all work for one model."""
    return f"{PREFIX}.work.{escape(model)}.>"


def report(model: str) -> str:
    """Subject that asks a model's leader for its lanes and workers, or for a request or tenant."""
    return f"{PREFIX}.report.{escape(model)}"


def checkpoint(model: str) -> str:
    """Subject on which a model's leader stores what its successor must know of the tenants."""
    return f"{PREFIX}.checkpoint.{escape(model)}"


def parse_ack_subject(reply: str) -> tuple[int, int]:
    """Parse a delivery's reply subject (ADR-15).

    Returns how often the message has been delivered so far, and its sequence in the stream.
    """
    fields = reply.split(".")
    if len(fields) > 9:  # $JS.ACK.<domain>.<account>.<stream>.<consumer>.…, maybe a token more
        fields = fields[:2] + fields[4:]
    return int(fields[4]), int(fields[5])


ALL_REPLAYS = f"{PREFIX}.replay.*"
ALL_REQUESTS = f"{PREFIX}.request.>"
ALL_WORK = f"{PREFIX}.work.>"
ALL_LEDGERS = f"{PREFIX}.ledger.>"
ALL_CANCELS = f"{PREFIX}.cancel.>"
DECLARE = f"{PREFIX}.declare"  # asks whoever declares streams to make missing ones anew
GONE = f"{PREFIX}.gone"  # tells leaders that a worker has died; the payload is its name
ALL_FINDS = f"{PREFIX}.find.>"
WRITTEN_BY_ANY = f"{PREFIX}.written"  # asks all workers; the one that writes the log answers
ALL_READERS = f"{PREFIX}.reader.>"
ALL_SUBMISSIONS = f"{PREFIX}.submit.>"
ALL_PRESSURE = f"{PREFIX}.pressure.>"
ALL_RATES = f"{PREFIX}.rate.>"
