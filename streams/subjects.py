"""Every subject of Millstream, built and parsed here and spelled nowhere else.

Tokens of a subject match `[a-z0-9][a-z0-9_-]{0,62}`. Tenants, routes and ids must match as they are
(`token`); names with other characters, such as model names, are made to match (`escape`). Pure.
"""

import re
import zlib
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

ANY = "any"  # the placement of work that every worker of the pool may pull
PREFIX = "infer"
_CACHED_SUBJECTS = 16384  # subjects whose parts are remembered: each is parsed once per request
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
    """How urgent a request is, most urgent first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    def is_above(self, other: "Priority") -> bool:
        """Whether it is more urgent."""
        return _URGENCY[self] < _URGENCY[other]


_URGENCY = {priority: index for index, priority in enumerate(Priority)}


def token(value: str) -> str:
    """Return `value` if it is one subject token, else raise `InvalidToken`."""
    if not _TOKEN.match(value):
        raise InvalidToken(value)
    return value


def escape(name: str) -> str:
    """Turn any name into one subject token; `unescape` gives the name back.

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
    """The name that `escape` was given."""
    raw = escaped.removeprefix(_LEAD)
    decoded = _ESCAPED.sub(lambda m: "_" if m[1] == "_" else chr(int(m[1], 16)), raw)
    return decoded.encode("latin-1").decode()


def shard(request_id: str, shards: int) -> int:
    """The shard of a request's token log: stable over processes and releases (CRC-32)."""
    return zlib.crc32(request_id.encode()) % shards


class Lane(NamedTuple):
    """One tenant's queue for one model and priority."""

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
    return f"{PREFIX}.request.{token(lane.tenant)}.{escape(lane.model)}.{lane.priority}"


def requests_by(tenant: str) -> str:
    """Filter: every queued request of one tenant."""
    return f"{PREFIX}.request.{token(tenant)}.>"


def requests_of(model: str) -> str:
    """Filter: every queued request for one model."""
    return f"{PREFIX}.request.*.{escape(model)}.*"


@lru_cache(maxsize=_CACHED_SUBJECTS)
def parse_lane(subject: str) -> Lane:
    """The lane of a request's or an ingress message's subject."""
    _, _, tenant, model, priority = subject.split(".")
    return Lane(tenant, unescape(model), Priority(priority))


def work(pool: PoolKey, placement: str = ANY) -> str:
    return (
        f"{PREFIX}.work.{escape(pool.model)}.{escape(pool.version)}"
        f".{pool.priority}.{token(placement)}"
    )


@lru_cache(maxsize=_CACHED_SUBJECTS)
def parse_work(subject: str) -> PoolKey:
    _, _, model, version, priority, _ = subject.split(".")
    return PoolKey(unescape(model), unescape(version), Priority(priority))


def is_work(subject: str) -> bool:
    """Whether a subject below that of work is one of ours: operators may publish on any."""
    try:
        parse_work(subject)
        token(placement(subject))
    except ValueError:
        return False
    return True


def placement(subject: str) -> str:
    """The worker that work was placed on, or `ANY`."""
    return subject.rpartition(".")[2]


def work_placed_on(model: str, version: str, worker: str) -> str:
    """Filter: work of any priority that was placed on one worker."""
    return f"{PREFIX}.work.{escape(model)}.{escape(version)}.*.{token(worker)}"


def log(address: LogAddress, shards: int) -> str:
    tenant, route, request_id = address
    return (
        f"{PREFIX}.token.{shard(request_id, shards)}.{token(tenant)}.{token(route)}"
        f".{token(request_id)}"
    )


def log_on_any_route(tenant: str, request_id: str, shards: int) -> str:
    """Filter: a request's log when the route that it was submitted with is not known."""
    return f"{PREFIX}.token.{shard(request_id, shards)}.{token(tenant)}.*.{token(request_id)}"


def log_of_any_tenant(request_id: str, shards: int) -> str:
    """Filter: a request's log when nothing but its id is known."""
    return f"{PREFIX}.token.{shard(request_id, shards)}.*.*.{token(request_id)}"


def parse_log(subject: str) -> LogAddress:
    """The address in a log's subject or in a reply's."""
    tenant, route, request_id = subject.split(".")[-3:]
    return LogAddress(tenant, route, request_id)


def replies_to(route: str) -> str:
    """Filter: all replies to one route."""
    return f"{PREFIX}.reply.*.{token(route)}.>"


def reply_on_any_route(tenant: str, request_id: str) -> str:
    """Filter: the replies of one request, whichever route they go to."""
    return f"{PREFIX}.reply.{token(tenant)}.*.{token(request_id)}"


def cancel(tenant: str, request_id: str) -> str:
    return f"{PREFIX}.cancel.{token(tenant)}.{token(request_id)}"


def reader(tenant: str, request_id: str) -> str:
    """Asks the gateways whether one of them has a reader of a request."""
    return f"{PREFIX}.reader.{token(tenant)}.{token(request_id)}"


def find(tenant: str, request_id: str) -> str:
    """Asks dispatchers, gateways and workers whether one of them knows a request."""
    return f"{PREFIX}.find.{token(tenant)}.{token(request_id)}"


def parse_request_id(subject: str) -> tuple[str, str]:
    """Tenant and request id of a `cancel`, `reader` or `find` subject."""
    tenant, request_id = subject.split(".")[-2:]
    return tenant, request_id


def drain(worker: str) -> str:
    """Tells a worker to leave."""
    return f"{PREFIX}.drain.{token(worker)}"


def alive(worker: str) -> str:
    """Asks a worker whether it is there; the broker answers for one that is not."""
    return f"{PREFIX}.alive.{token(worker)}"


def written(worker: str) -> str:
    """Asks a worker for what it has stored of a log that it writes."""
    return f"{PREFIX}.written.{token(worker)}"


def fleet(model: str, worker: str) -> str:
    return f"{PREFIX}.fleet.{escape(model)}.{token(worker)}"


def muster(model: str) -> str:
    """Asks the workers of a model for a heartbeat now."""
    return f"{PREFIX}.muster.{escape(model)}"


def pressure(model: str) -> str:
    return f"{PREFIX}.pressure.{escape(model)}"


def ledger(tenant: str, model: str) -> str:
    return f"{PREFIX}.ledger.{token(tenant)}.{escape(model)}"


def usage(tenant: str, scope: str, meter: str, day: str) -> str:
    """The counter of what a tenant, or one of its keys, has used on a day."""
    return f"{PREFIX}.usage.{token(tenant)}.{token(scope)}.{meter}.{token(day)}"


def usage_on(day: str) -> str:
    """Filter: what all tenants have used on a day."""
    return f"{PREFIX}.usage.*.*.*.{token(day)}"


def rate(tenant: str, scope: str, meter: str, slot: int) -> str:
    """The counter of a minute, or of a lease, by its number since the epoch."""
    return f"{PREFIX}.rate.{token(tenant)}.{token(scope)}.{meter}.{slot}"


def attempts(tenant: str, request_id: str) -> str:
    """Where workers note how their attempts at a request went."""
    return f"{PREFIX}.attempt.{token(tenant)}.{token(request_id)}"


def dead(tenant: str, model: str) -> str:
    return f"{PREFIX}.dead.{token(tenant)}.{escape(model)}"


def replay(name: str) -> str:
    """What has become of a dead letter."""
    return f"{PREFIX}.replay.{token(name)}"


def dead_of(tenant: str | None, model: str | None) -> str:
    """Filter: the dead letters of one tenant and model, or of all."""
    return f"{PREFIX}.dead.{token(tenant) if tenant else '*'}.{escape(model) if model else '*'}"


def parse_dead(subject: str) -> tuple[str, str]:
    """Tenant and model of a dead letter."""
    _, _, tenant, model = subject.split(".")
    return tenant, unescape(model)


def submissions(tenant: str) -> str:
    """Filter: what one tenant's producers publish."""
    return f"{PREFIX}.submit.{token(tenant)}.*.*"


def fleet_of(model: str) -> str:
    """Filter: the heartbeats of one model's workers."""
    return f"{PREFIX}.fleet.{escape(model)}.*"


def ledger_of(model: str) -> str:
    """Filter: the usage of one model by all tenants."""
    return f"{PREFIX}.ledger.*.{escape(model)}"


def work_of(model: str) -> str:
    """Filter: all work for one model."""
    return f"{PREFIX}.work.{escape(model)}.>"


def report(model: str) -> str:
    """Asks the leader of a model for its lanes and workers, or how a request or a tenant stands."""
    return f"{PREFIX}.report.{escape(model)}"


def checkpoint(model: str) -> str:
    """Where the leader of a model keeps what its successor needs to know of the tenants."""
    return f"{PREFIX}.checkpoint.{escape(model)}"


def parse_ack_subject(reply: str) -> tuple[int, int]:
    """How often a message was delivered by now, and its sequence, of its reply subject (ADR-15)."""
    fields = reply.split(".")
    if len(fields) > 9:  # $JS.ACK.<domain>.<account>.<stream>.<consumer>.…, maybe a token more
        fields = fields[:2] + fields[4:]
    return int(fields[4]), int(fields[5])


ALL_REPLAYS = f"{PREFIX}.replay.*"
ALL_REQUESTS = f"{PREFIX}.request.>"
ALL_WORK = f"{PREFIX}.work.>"
ALL_LEDGERS = f"{PREFIX}.ledger.>"
ALL_CANCELS = f"{PREFIX}.cancel.>"
GONE = f"{PREFIX}.gone"  # tells the leaders of a worker that has died; its name is the payload
ALL_FINDS = f"{PREFIX}.find.>"
WRITTEN_BY_ANY = f"{PREFIX}.written"  # asks all workers; who writes the log answers
ALL_READERS = f"{PREFIX}.reader.>"
ALL_PRESSURE = f"{PREFIX}.pressure.>"
ALL_RATES = f"{PREFIX}.rate.>"
