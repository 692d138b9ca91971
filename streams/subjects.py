"""NATS subjects of Millstream: each is built and parsed here and spelled nowhere else.

Tokens of a subject match `[a-z0-9][a-z0-9_-]*`. Tenants, routes and ids must match as they are, and
have at most 63 characters (`token`). Names with other characters, such as model names, are escaped
(`escape`), which makes them up to three times as long: at most 1024 characters. A function whose
docstring says "filter" returns a pattern with wildcards. Pure.
"""

import re
import zlib
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

ANY = "any"  # the placement of work that every worker of the pool may pull
PREFIX = "infer"
_OURS, _HEARD = f"{PREFIX}.", f"{PREFIX}.heard."
OTHER = "_other"  # label of a metric for all who have no label of their own: no token, so no name
_CACHED_SUBJECTS = 16384  # parsed subjects that are kept: without a cache, one parse per request
ITEM_PREFIX = "j"  # of the ids of requests that run a line of a batch: others are hexadecimal
ITEM_SHARD = "jobs"
_LEDGER, _WORKER_TIME = f"{PREFIX}.ledger.", f"{PREFIX}.worker_time."
_OUTCOME = f"{PREFIX}.outcome."
_COST_ROLLUP = f"{PREFIX}.rollup._costs."  # `_costs` is no tenant's name
FLEET_PLAN, FLEET_MACHINES = "$KV.fleet.plan", "$KV.fleet.machines"
FLEET_ORDERS = "$KV.fleet.orders"
FLEET_PLAN_CHANGED = f"{PREFIX}.changed.fleet.plan"
ALL_CURVES = "$KV.curves.*.*.*.*"
MEASURED_CURVES, LIVE_CURVES = "$KV.curves.measured.*.*.*", "$KV.curves.live.*.*.*"
FLEET_MACHINES_CHANGED = f"{PREFIX}.changed.fleet.machines"
FLEET_ORDERS_CHANGED = f"{PREFIX}.changed.fleet.orders"
_TOKEN = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}\Z")
# A subject with an escaped model and version must be well below the broker's `max_control_line`
_MAX_ESCAPED = 1024
_PLAIN = re.compile(r"[a-z0-9-]")
_ESCAPED = re.compile(r"_(_|[0-9a-f]{2})")
_LEAD = "e_z"  # marks a name whose first character had to be escaped; `_z` is no escape


class InvalidToken(ValueError):
    """A name cannot be used as one part of a NATS subject; `value` is the name as it came."""

    def __init__(self, value: str, reason: str = "it must match [a-z0-9][a-z0-9_-]{0,62}") -> None:
        super().__init__(f"{value!r} is not a subject token: {reason}")
        self.value = value


class Priority(StrEnum):
    """Urgency of a request; the members are in order, the most urgent first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    def is_above(self, other: "Priority") -> bool:
        """Return whether this priority is more urgent than `other`."""
        return _URGENCY[self] < _URGENCY[other]


_URGENCY = {priority: index for index, priority in enumerate(Priority)}


def token(value: str) -> str:
    """Return `value` unchanged if it is a valid token (one part of a NATS subject).

    Raises `InvalidToken` unless it matches `[a-z0-9][a-z0-9_-]{0,62}`.
    """
    if not _TOKEN.match(value):
        raise InvalidToken(value)
    return value


def escape(name: str) -> str:
    """Return `name` encoded as one token of a NATS subject; `unescape` reverses the encoding.

    `[a-z0-9-]` stay, `_` becomes `__`, other UTF-8 bytes become `_xx`. Raises `InvalidToken` for an
    empty name and for one whose escaped form is longer than 1024 characters.
    """
    out = "".join(c if _PLAIN.match(c) else _escape_character(c) for c in name)
    if out[:1] in ("_", "-") or out.startswith(_LEAD):
        out = _LEAD + out
    if not 1 <= len(out) <= _MAX_ESCAPED:
        raise InvalidToken(name, f"escaped it has {len(out)} characters, not 1 to {_MAX_ESCAPED}")
    return out


def _escape_character(c: str) -> str:
    return "__" if c == "_" else "".join(f"_{byte:02x}" for byte in c.encode())


def unescape(escaped: str) -> str:
    """Return the name that `escape` encoded.

    For a token that `escape` did not return, the result is meaningless or a ValueError is raised.
    """
    raw = escaped.removeprefix(_LEAD)
    decoded = _ESCAPED.sub(lambda m: "_" if m[1] == "_" else chr(int(m[1], 16)), raw)
    return decoded.encode("latin-1").decode()


def is_line(request_id: str) -> bool:
    """Return whether a request runs a line of a batch, as its id says."""
    return request_id.startswith(ITEM_PREFIX)


def shard(request_id: str, shards: int) -> str:
    """Return the name of the stream that holds a request's token log: `0` to `shards` - 1.

    Requests that run a line of a batch have one of their own, `ITEM_SHARD`. The name is the same in
    all processes and releases (CRC-32 of the id).
    """
    if is_line(request_id):
        return ITEM_SHARD
    return str(zlib.crc32(request_id.encode()) % shards)


class Lane(NamedTuple):
    """One tenant's queue for one model and priority."""

    tenant: str
    model: str
    priority: Priority


class LogAddress(NamedTuple):
    """Tenant, route and request id, which together locate one request's token log.

    The route says where the request's replies go: to a gateway, by its id, or to a name that a
    producer chose.
    """

    tenant: str
    route: str
    request_id: str


class PoolKey(NamedTuple):
    """The workers of one model version, for work of one priority."""

    model: str
    version: str
    priority: Priority


def request(lane: Lane) -> str:
    """Return the subject on which a lane's requests are queued.

    Raises `InvalidToken` for a tenant or model whose name cannot be part of a subject.
    """
    return f"{PREFIX}.request.{token(lane.tenant)}.{escape(lane.model)}.{lane.priority}"


def requests_by(tenant: str) -> str:
    """Return the filter (a subject with wildcards) for all queued requests of one tenant.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.request.{token(tenant)}.>"


def requests_of(model: str) -> str:
    """Return the filter (a subject with wildcards) for all tenants' queued requests for one model.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.request.*.{escape(model)}.*"


@lru_cache(maxsize=_CACHED_SUBJECTS)
def parse_lane(subject: str) -> Lane:
    """Return the lane named by the subject of a queued request or of a producer's submission.

    Raises ValueError for a subject of another form.
    """
    _, _, tenant, model, priority = subject.split(".")
    return Lane(tenant, unescape(model), Priority(priority))


def work(pool: PoolKey, placement: str = ANY) -> str:
    """Return the subject on which dispatched requests (work) for a pool of workers are published.

    `placement` is the one worker that shall get the work; `ANY` lets every worker of the pool pull
    it. Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return (
        f"{PREFIX}.work.{escape(pool.model)}.{escape(pool.version)}"
        f".{pool.priority}.{token(placement)}"
    )


@lru_cache(maxsize=_CACHED_SUBJECTS)
def parse_work(subject: str) -> PoolKey:
    """Return the pool (model, version and priority) named by the subject of dispatched work.

    Raises ValueError for a subject of another form. The placement is not checked.
    """
    _, _, model, version, priority, _ = subject.split(".")
    return PoolKey(unescape(model), unescape(version), Priority(priority))


def is_work(subject: str) -> bool:
    """Return whether `work` can have built this subject; raises nothing.

    Operators may have published on any other subject of the stream WORK.
    """
    try:
        parse_work(subject)
        token(placement(subject))
    except ValueError:
        return False
    return True


def placement(subject: str) -> str:
    """Return the last part of a work subject: the worker that the work was placed on, or `ANY`.

    The subject is not checked.
    """
    return subject.rpartition(".")[2]


def work_placed_on(model: str, version: str, worker: str) -> str:
    """Return the filter (a subject with wildcards) for work of any priority placed on one worker.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.work.{escape(model)}.{escape(version)}.*.{token(worker)}"


def log(address: LogAddress, shards: int) -> str:
    """Return the subject on which the records of a request's token log are stored.

    `shards` is the number of streams over which all logs are spread. Raises `InvalidToken` for a
    name that cannot be part of a subject.
    """
    tenant, route, request_id = address
    return (
        f"{PREFIX}.token.{shard(request_id, shards)}.{token(tenant)}.{token(route)}"
        f".{token(request_id)}"
    )


def log_on_any_route(tenant: str, request_id: str, shards: int) -> str:
    """Return the filter for a request's token log, for a reader that does not know its route.

    The route says where replies go. Raises `InvalidToken` for a name that cannot be part of a
    subject.
    """
    return f"{PREFIX}.token.{shard(request_id, shards)}.{token(tenant)}.*.{token(request_id)}"


def log_of_any_tenant(request_id: str, shards: int) -> str:
    """Return the filter for a request's token log, for a reader that knows only the request id.

    Raises `InvalidToken` for an id that cannot be part of a subject.
    """
    return f"{PREFIX}.token.{shard(request_id, shards)}.*.*.{token(request_id)}"


def parse_log(subject: str) -> LogAddress:
    """Return the address of the token log that the subject of a log or of a reply belongs to.

    Only the last three parts of the subject are read; raises ValueError if there are fewer.
    """
    tenant, route, request_id = subject.split(".")[-3:]
    return LogAddress(tenant, route, request_id)


def replies_to(route: str) -> str:
    """Return the filter (a subject with wildcards) for all replies to one route.

    A route is a gateway's id or a name that a producer chose. Raises `InvalidToken` for a name that
    cannot be part of a subject.
    """
    return f"{PREFIX}.reply.*.{token(route)}.>"


def reply_on_any_route(tenant: str, request_id: str) -> str:
    """Return the filter for the replies to one request, whichever gateway or producer they go to.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.reply.{token(tenant)}.*.{token(request_id)}"


def heard(signal: str) -> str:
    """Return the subject (or filter) on which listeners hear a signal that was stored.

    `signal` is the subject (or filter) on which it is sent: of a cancel, a drain order, or `GONE`.
    The broker copies each signal there once the stream SIGNALS holds it.
    """
    return f"{_HEARD}{signal.removeprefix(_OURS)}"


def cancel(tenant: str, request_id: str) -> str:
    """Return the subject of the signal that asks the services to cancel a request.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.cancel.{token(tenant)}.{token(request_id)}"


def reader(tenant: str, request_id: str) -> str:
    """Return the subject for asking all gateways whether one of them has a reader of a request.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.reader.{token(tenant)}.{token(request_id)}"


def find(tenant: str, request_id: str) -> str:
    """Return the subject for asking dispatchers, gateways and workers who knows a request.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.find.{token(tenant)}.{token(request_id)}"


def parse_records(subject: str) -> LogAddress:
    """Return the token log that a producer asks for, of a subject that `ALL_RECORDS` matches.

    Raises `InvalidToken` for a name that cannot be part of a log's subject.
    """
    tenant, route, request_id = map(token, subject.split(".")[-3:])
    return LogAddress(tenant, route, request_id)


def parse_request_id(subject: str) -> tuple[str, str]:
    """Return tenant and request id, the last two parts of a `cancel`, `reader` or `find` subject.

    The subject on which a cancel is heard has them, too.

    Raises ValueError for a subject with fewer than two parts.
    """
    tenant, request_id = subject.split(".")[-2:]
    return tenant, request_id


def drain(worker: str) -> str:
    """Return the subject of the signal that orders a worker to drain.

    That is to finish its work or hand it over, and to end. Raises `InvalidToken` for a name that
    cannot be part of a subject.
    """
    return f"{PREFIX}.drain.{token(worker)}"


def draining(worker: str) -> str:
    """Return the subject on which a worker says that it drains, and then that it is empty.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.draining.{token(worker)}"


def alive(worker: str) -> str:
    """Return the subject for asking a worker whether it is alive.

    If the worker is not connected, the broker answers that there are no responders. Raises
    `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.alive.{token(worker)}"


def written(worker: str) -> str:
    """Return the subject for asking a worker for records of a token log that the worker writes.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.written.{token(worker)}"


def measured_curve(model: str, version: str, type_name: str) -> str:
    """Return the subject of the curve that was measured of a model version on a machine type.

    Raises `InvalidToken`, as `fleet` does.
    """
    return f"$KV.curves.measured.{escape(model)}.{escape(version)}.{token(type_name)}"


def live_curve(model: str, version: str, type_name: str) -> str:
    """Return the subject of what workers at their work tell of a curve; raises `InvalidToken`."""
    return f"$KV.curves.live.{escape(model)}.{escape(version)}.{token(type_name)}"


def fleet(model: str, worker: str) -> str:
    """Return the subject on which a worker publishes its heartbeats about a model.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.fleet.{escape(model)}.{token(worker)}"


def gateway(name: str) -> str:
    """Return the subject on which a gateway publishes its beats.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.gateway.{token(name)}"


def muster(model: str) -> str:
    """Return the subject on which all workers of a model are asked to send a heartbeat now.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.muster.{escape(model)}"


def pressure(model: str) -> str:
    """Return the subject on which a model's dispatcher publishes the model's load (`Pressure`).

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.pressure.{escape(model)}"


def waking(model: str) -> str:
    """Return the subject on which the fleet tells how far the wake of a model is (`Waking`).

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.waking.{escape(model)}"


def ledger(tenant: str, model: str) -> str:
    """Return the subject on which the usage records of one tenant and model are stored.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.ledger.{token(tenant)}.{escape(model)}"


def billed(tenant: str, model: str) -> str:
    """Return the subject on which a tenant's and model's usage records are heard once stored.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.billed.{token(tenant)}.{escape(model)}"


def billed_of(model: str) -> str:
    """Return the filter for usage records of one model as they are heard once they are stored.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.billed.*.{escape(model)}"


def ledgers_of(tenant: str) -> str:
    """Return the filter (a subject with wildcards) for all usage records of one tenant.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_LEDGER}{token(tenant)}.*"


def is_ledger(subject: str) -> bool:
    """Return whether usage records are stored on this subject."""
    return subject.startswith(_LEDGER)


def outcome(tenant: str, model: str | None) -> str:
    """Return the subject for counts of a tenant's requests to a model that gateways have refused.

    `model` None stands for all models that are not registered. Raises `InvalidToken` for a name
    that cannot be part of a subject.
    """
    return f"{_OUTCOME}{token(tenant)}.{OTHER if model is None else escape(model)}"


def is_outcome(subject: str) -> bool:
    """Return whether counts of refused requests are stored on this subject."""
    return subject.startswith(_OUTCOME)


def worker_time(model: str, worker: str) -> str:
    """Return the subject on which the records of a worker's time of one model are stored.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_WORKER_TIME}{escape(model)}.{token(worker)}"


def is_worker_time(subject: str) -> bool:
    """Return whether records of workers' time are stored on this subject."""
    return subject.startswith(_WORKER_TIME)


def cost_rollup(day: str, model: str) -> str:
    """Return the subject on which the sums of costs of a day of UTC and a model are stored.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_COST_ROLLUP}{token(day)}.{escape(model)}"


def cost_rollups_of(day: str) -> str:
    """Return the filter (a subject with wildcards) for the sums of costs of a day, of all models.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_COST_ROLLUP}{token(day)}.*"


def is_cost_rollup(subject: str) -> bool:
    """Return whether sums of costs are stored on this subject."""
    return subject.startswith(_COST_ROLLUP)


def rollup(tenant: str, day: str, model: str) -> str:
    """Return the subject on which the sums of a tenant, a day of UTC and a model are stored.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.rollup.{token(tenant)}.{token(day)}.{escape(model)}"


def rollups_of(tenant: str, day: str) -> str:
    """Return the filter (a subject with wildcards) for the sums of a tenant and day, of all models.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.rollup.{token(tenant)}.{token(day)}.*"


def parse_rollup(subject: str) -> tuple[str, str, str]:
    """Return tenant, day and model of a subject that `rollup` returned."""
    _, _, tenant, day, model = subject.split(".")
    return tenant, day, unescape(model)


def usage(tenant: str, scope: str, meter: str, period: str) -> str:
    """Return the subject of the counter of what a tenant, or one of its keys, uses in a period.

    `scope` says which of them, `meter` what is counted, and `period` is a day of UTC as
    `2026-11-21`, or a month as `2026-11`. Raises `InvalidToken` for a name that cannot be part of a
    subject.
    """
    return f"{PREFIX}.usage.{token(tenant)}.{token(scope)}.{meter}.{token(period)}"


def usage_on(period: str) -> str:
    """Return the filter (a subject with wildcards) for all usage counters of a day or month.

    `period` is one of UTC as `2026-11-21` or `2026-11`.
    """
    return f"{PREFIX}.usage.*.*.*.{token(period)}"


def reservations(holder: str) -> str:
    """Return the subject of what one process has reserved for requests not known to be queued.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.reservation.{token(holder)}"


def threshold(tenant: str, scope: str, quota: str, period: str, percent: int) -> str:
    """Return the subject on which it is stored, once, that a part of a quota is used.

    `scope` and `period` are those of the usage counter, and `quota` is such as `tokens_per_day`.
    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    words = (tenant, scope, quota, period, str(percent))
    return ".".join([PREFIX, "threshold", *map(token, words)])


def thresholds_of(tenant: str | None) -> str:
    """Return the filter (a subject with wildcards) for all thresholds of a tenant; None: of all.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.threshold.{'*' if tenant is None else token(tenant)}.*.*.*.*"


def usage_of(meter: str) -> str:
    """Return the filter (a subject with wildcards) for all usage counters of one meter."""
    return f"{PREFIX}.usage.*.*.{meter}.*"


def rate(tenant: str, scope: str, meter: str, slot: int) -> str:
    """Return the subject of the counter of what a tenant, or one of its keys, uses in a short time.

    `slot` is the number, since the epoch, of a minute or of a quota slot of six seconds. Raises
    `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.rate.{token(tenant)}.{token(scope)}.{meter}.{slot}"


def attempts(tenant: str, request_id: str) -> str:
    """Return the subject on which workers store notes on their attempts at a request.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.attempt.{token(tenant)}.{token(request_id)}"


def dead(tenant: str, model: str) -> str:
    """Return the subject on which the dead letters (failed work) of a tenant and model are stored.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.dead.{token(tenant)}.{escape(model)}"


def replay(name: str) -> str:
    """Return the subject on which the replay of the dead letter called `name` is recorded.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.replay.{token(name)}"


def dead_of(tenant: str | None, model: str | None) -> str:
    """Return the filter for the dead letters of one tenant and one model; None stands for all.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.dead.{token(tenant) if tenant else '*'}.{escape(model) if model else '*'}"


def parse_dead(subject: str) -> tuple[str, str]:
    """Return tenant and model from the subject of a dead letter.

    Raises ValueError for a subject that does not have four parts.
    """
    _, _, tenant, model = subject.split(".")
    return tenant, unescape(model)


def submissions(tenant: str) -> str:
    """Return the filter (a subject with wildcards) for requests that a tenant submits over NATS.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.submit.{token(tenant)}.*.*"


def closed_submissions(tenant: str) -> str:
    """Subject of an ingress stream that is closed; nobody publishes on it."""
    return f"{PREFIX}.closed.{token(tenant)}"


def fleet_of(model: str) -> str:
    """Return the filter (a subject with wildcards) for the heartbeats of one model's workers.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.fleet.{escape(model)}.*"


def ledger_of(model: str) -> str:
    """Return the filter (a subject with wildcards) for all tenants' usage records of one model.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.ledger.*.{escape(model)}"


def work_of(model: str) -> str:
    """Return the filter (a subject with wildcards) for all dispatched work of one model.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.work.{escape(model)}.>"


def report(model: str) -> str:
    """Return the subject for asking the dispatcher that leads a model what it knows.

    The question is about the model's queues and workers, or about one request or tenant. Raises
    `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.report.{escape(model)}"


def checkpoint(model: str) -> str:
    """Return the subject on which a model's dispatcher stores its tenants' state for its successor.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.checkpoint.{escape(model)}"


def audit(kind: str) -> str:
    """Return the subject on which changes of one kind of record are stored, such as `tenant`.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.audit.{token(kind)}"


def admin(operation: str) -> str:
    """Return the subject for asking the admin service for an operation, such as `models.list`.

    Raises `InvalidToken` unless each of its words can be a token.
    """
    return ".".join([PREFIX, "admin", *map(token, operation.split("."))])


def parse_admin(subject: str) -> str:
    """Return the operation that `admin` put into a subject."""
    return subject.removeprefix(f"{PREFIX}.admin.")


ALL_REPLAYS = f"{PREFIX}.replay.*"
ALL_REQUESTS = f"{PREFIX}.request.>"
ALL_WORK = f"{PREFIX}.work.>"
ALL_LEDGERS = f"{PREFIX}.ledger.>"
ALL_CANCELS = f"{PREFIX}.cancel.*.*"
ALL_DRAINS = f"{PREFIX}.drain.*"
ALL_OUTCOMES = f"{PREFIX}.outcome.>"
ROLLUP_CURSOR = f"{PREFIX}.rollup.cursor"
ALL_BILLED = f"{PREFIX}.billed.>"  # ledger records, once they are stored
DECLARE = f"{PREFIX}.declare"  # asks whoever declares streams to make missing ones anew
STREAMS = f"{PREFIX}.streams"  # what whoever declares streams says of them
ALL_ADMIN = f"{PREFIX}.admin.>"
ALL_AUDIT = f"{PREFIX}.audit.*"
GONE = f"{PREFIX}.gone"  # the signal that a worker has died; the payload is its name
SIGNALS = (ALL_CANCELS, ALL_DRAINS, GONE)
ALL_FINDS = f"{PREFIX}.find.>"
WRITTEN_BY_ANY = f"{PREFIX}.written"  # asks all workers; the one that writes the log answers
ALL_RECORDS = f"{PREFIX}.records.*.*.*"  # asks a gateway for stored records of a log
ALL_READERS = f"{PREFIX}.reader.>"
ALL_SUBMISSIONS = f"{PREFIX}.submit.>"
ALL_PRESSURE = f"{PREFIX}.pressure.>"
ALL_HEARTBEATS = f"{PREFIX}.fleet.*.*"
ALL_WAKING = f"{PREFIX}.waking.*"
ALL_GATEWAYS = f"{PREFIX}.gateway.*"
SIGNALS_REPORT = f"{PREFIX}.signals"  # asks the fleet service's leader for the signals
ALL_RESERVATIONS = f"{PREFIX}.reservation.*"
ALL_RATES = f"{PREFIX}.rate.>"
