"""Table of access to the broker: each class of users, its account, and its rights.

Two accounts are *stores*: they have JetStream, and no users. JetStream writes its answers to the
reply subject of a question with the server's own rights, so a user inside such an account who may
ask anything can delete its streams. All processes sit in accounts without JetStream and import what
they need; `docs/accounts.md` is printed from here.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from streams import job_subjects, subjects, topology
from streams.accounts.claims import Export, Permissions
from streams.accounts.rights import (
    JETSTREAM_ACKS,
    JETSTREAM_API,
    STORES,
    BrokerAccount,
    Right,
)
from streams.topology import Scale

REGISTRY, TENANTS, PRICES, LEASES = "KV_registry", "KV_tenants", "KV_prices", "KV_leases"
KEYS, ACCOUNTS, IDEMPOTENCY = "KV_keys", "KV_accounts", "KV_idempotency"
BUCKETS = (REGISTRY, TENANTS, KEYS, ACCOUNTS, PRICES, LEASES, IDEMPOTENCY)
CONTROL_STREAMS = frozenset(
    {
        topology.LEDGER,
        topology.AUDIT,
        topology.ROLLUPS,
        topology.CHECKPOINTS,
        topology.FLEET,
        topology.CURVES,
        REGISTRY,
        TENANTS,
        KEYS,
        ACCOUNTS,
        PRICES,
        LEASES,
    }
)
# Of a call of the JetStream API: two words, or three, and then the name of a stream
_CALLED = re.compile(r"[A-Z]+\.(?:(?:MSG|DURABLE|LEADER|PEER)\.)?[A-Z]+\.(?P<stream>[^.]+)")
_TENANT_STATES = f"{BrokerAccount.WORK}.TENANTS.STREAM.INFO."
_ANSWERS_API = "ANSWERS.API."
_SHARD = re.compile(rf"^{subjects.PREFIX}\.token\.\w+\.")


class UserClass(StrEnum):
    """Class of a user, which has its rows in the table."""

    ADMIN = "admin"
    GATEWAY = "gateway"
    DISPATCHER = "dispatcher"
    JOBS = "jobs"
    FLEET = "fleet"
    WORKER = "worker"
    OPERATOR = "operator"
    LEDGER = "ledger"  # exports the ledger and removes what it has exported
    SUPERVISOR = "supervisor"  # starts processes, and tells of those that have died
    TENANT = "tenant"
    SYSTEM = "system"


ACCOUNT_OF = {
    UserClass.ADMIN: BrokerAccount.ADMIN,
    UserClass.GATEWAY: BrokerAccount.SERVICES,
    UserClass.DISPATCHER: BrokerAccount.SERVICES,
    UserClass.JOBS: BrokerAccount.SERVICES,
    UserClass.FLEET: BrokerAccount.SERVICES,
    UserClass.WORKER: BrokerAccount.WORKERS,
    UserClass.OPERATOR: BrokerAccount.OPERATORS,
    UserClass.LEDGER: BrokerAccount.OPERATORS,
    UserClass.SUPERVISOR: BrokerAccount.OPERATORS,
    UserClass.SYSTEM: BrokerAccount.SYSTEM,
}
_ANSWERERS = (
    UserClass.ADMIN,
    UserClass.GATEWAY,
    UserClass.DISPATCHER,
    UserClass.FLEET,
    UserClass.WORKER,
)


def store_of(stream: str) -> BrokerAccount:
    """Return the account that stores a stream."""
    return BrokerAccount.CONTROL if stream in CONTROL_STREAMS else BrokerAccount.WORK


def api_prefix(user_class: UserClass | None, stream: str) -> str:
    """Return what the JetStream API's subjects for a stream begin with, for users of a class.

    The admin service may ask anything of both stores, so they have names of their own there; all
    others ask as if there were one store.
    """
    return f"{store_of(stream)}.API" if user_class is UserClass.ADMIN else "$JS.API"


def api_subject(user_class: UserClass | None, call: str) -> str:
    """Return the subject of a call of the JetStream API, such as `STREAM.INFO.WORK`.

    A call that names no stream, such as `STREAM.NAMES`, is asked of the store of requests.
    `user_class` is None for a connection without accounts.
    """
    found = _CALLED.match(call)
    return f"{api_prefix(user_class, found['stream'] if found else topology.REQUESTS)}.{call}"


def tenant_state_subject(user_class: UserClass | None, stream: str) -> str:
    """Return the subject for asking for the state of a stream of one tenant.

    It has a name of its own, since a pattern for all such streams would fit those of the other
    store, too, and both stores would answer.
    """
    if user_class in (None, UserClass.ADMIN):
        return api_subject(user_class, f"STREAM.INFO.{stream}")
    return f"{_TENANT_STATES}{stream}"


@cache
def _subjects_by_stream(shards: int) -> dict[str, tuple[str, ...]]:
    """The subjects that each stream stores, all shards of the token logs under one."""
    found = {
        config.name or "": tuple(_SHARD.sub(f"{subjects.PREFIX}.token.*.", s) for s in stored)
        for config in topology.stream_configs(Scale(shards=shards), 1)
        if (stored := config.subjects or [])
    }
    return found | {bucket: (f"$KV.{bucket.removeprefix('KV_')}.>",) for bucket in BUCKETS}


def _changes(bucket: str) -> str:
    """The subjects on which the broker tells what a bucket has stored."""
    return f"{subjects.PREFIX}.changed.{bucket.removeprefix('KV_')}.>"


@dataclass(frozen=True)
class _Rights:
    """Makes lines of the table for a cell with so many shards of token logs."""

    shards: int
    own: BrokerAccount

    def publishes(self, owner: BrokerAccount, reason: str, *patterns: str) -> list[Right]:
        return [Right("publish", owner, pattern, reason) for pattern in patterns]

    def hears(self, owner: BrokerAccount, reason: str, *patterns: str) -> list[Right]:
        return [Right("subscribe", owner, pattern, reason) for pattern in patterns]

    def writes(self, stream: str, reason: str, *patterns: str) -> list[Right]:
        """Append to a stream, on all its subjects or on these ones."""
        stored = patterns or _subjects_by_stream(self.shards)[stream]
        return self.publishes(store_of(stream), reason, *stored)

    def asks(self, stream: str, reason: str, *calls: str) -> list[Right]:
        """Ask the JetStream API; `{}` in a call stands for the stream."""
        patterns = (f"{JETSTREAM_API}{call.replace('{}', stream)}" for call in calls)
        return self.publishes(store_of(stream), reason, *patterns)

    def reads(self, *streams: str) -> list[Right]:
        return [right for each in streams for right in self.asks(each, "read", "DIRECT.GET.{}")]

    def sees(self, *streams: str) -> list[Right]:
        """Ask for streams' states, with the subjects in them."""
        return [right for each in streams for right in self.asks(each, "state", "STREAM.INFO.{}")]

    def answers(self, reason: str) -> list[Right]:
        """Store durable answers, and read one by a question that names its subject."""
        store, stored = BrokerAccount.WORK, job_subjects.ALL_ANSWERS
        return self.publishes(store, reason, stored, f"{JETSTREAM_API}DIRECT.GET.*.{stored}")

    def reads_answers(self) -> list[Right]:
        """Read and remove one's own durable answers.

        The calls have names of their own, since the tenant's account would answer, too, that it has
        no JetStream.
        """
        stream, store = f"{topology.ANSWERS}{{tenant}}", BrokerAccount.WORK
        calls = (
            f"DIRECT.GET.{stream}",
            f"DIRECT.GET.{stream}.{subjects.PREFIX}.answer.{{tenant}}.>",
            f"STREAM.PURGE.{stream}",
        )
        return [
            Right(
                "publish",
                store,
                f"{JETSTREAM_API}{call}",
                "durable answers",
                f"{_ANSWERS_API}{call}",
            )
            for call in calls
        ]

    def sees_tenants(self, reason: str) -> list[Right]:
        """Ask for the states of streams of single tenants, whose names no pattern can tell."""
        subject, local = f"{JETSTREAM_API}STREAM.INFO.*", f"{_TENANT_STATES}*"
        return [Right("publish", BrokerAccount.WORK, subject, reason, local)]

    def views(self, *buckets: str) -> list[Right]:
        """Follow a bucket: read it, and hear its changes."""
        changes = map(_changes, buckets)
        asked = self.reads(*buckets) + self.sees(*buckets)
        return asked + self.hears(BrokerAccount.CONTROL, "changes", *changes)

    def pulls(self, stream: str, consumer: str, pattern: str, *more: str) -> list[Right]:
        """Make a consumer whose name and filter are these, pull from it, and acknowledge."""
        named = f"{stream}.{consumer}"
        calls = (
            f"CONSUMER.CREATE.{named}.{pattern}",
            f"CONSUMER.INFO.{named}",
            f"CONSUMER.MSG.NEXT.{named}",
            *(f"CONSUMER.{call}.{named}" for call in more),
        )
        acks = f"{JETSTREAM_ACKS}{named}.>"
        store = store_of(stream)
        return self.asks(stream, "consume", *calls) + self.publishes(store, "acknowledge", acks)

    def keeps(self, reason: str, bucket: str, *patterns: str) -> list[Right]:
        """Write records, on all a bucket's subjects or on these; read them, from its leader too."""
        written = self.writes(bucket, reason, *patterns)
        return [*written, *self.reads(bucket), *self.asks(bucket, reason, "STREAM.MSG.GET.{}")]

    def follows_fleet(self, *changes: str) -> list[Right]:
        """Read the records of the fleet from their leader, and hear some of their changes."""
        read = self.asks(topology.FLEET, "the fleet", "STREAM.MSG.GET.{}")
        return read + self.hears(BrokerAccount.CONTROL, "the fleet", *changes)

    def logs(self) -> list[str]:
        names: list[int | str] = [*range(self.shards), subjects.ITEM_SHARD]
        return [topology.token_stream_name(name) for name in names]

    def sums_usage(self) -> list[Right]:
        """Add the ledger up by tenant, day and model."""
        streams = (topology.LEDGER, topology.ROLLUPS)
        return [
            *self.reads(*streams),
            *self.sees(*streams),
            *self.writes(topology.ROLLUPS, "sums of usage"),
        ]

    def everyone(self) -> list[Right]:
        """Rights of every process: ask for the broker's time, and for streams that it misses."""
        api = Right("publish", BrokerAccount.WORK, f"{JETSTREAM_API}INFO", "is there JetStream")
        return [
            api,
            *self.sees(topology.CLOCK),
            *self.publishes(BrokerAccount.ADMIN, "ask for missing streams", subjects.DECLARE),
            *self.hears(
                BrokerAccount.ADMIN, "which streams there are", f"{subjects.PREFIX}.streams"
            ),
        ]


def _gateway(make: _Rights) -> list[Right]:
    return [
        *make.everyone(),
        *make.writes(topology.REQUESTS, "enqueue"),
        *make.writes(topology.RATES, "quotas"),
        *make.writes(topology.USAGE, "quotas"),
        *make.writes(topology.THRESHOLDS, "thresholds of quotas"),
        *make.writes(topology.RESERVATIONS, "reservations on quotas"),
        *make.reads(topology.RESERVATIONS),
        *make.writes(IDEMPOTENCY, "idempotency keys"),
        *make.writes(make.logs()[0], "accept or refuse a submission"),
        *make.writes(topology.LEDGER, "count refusals", "infer.outcome.*.*"),
        *make.writes(topology.FILES, "files"),
        *make.writes(topology.FILE_RECORDS, "files"),
        *make.reads(topology.FILES, topology.FILE_RECORDS),
        *make.asks(topology.FILE_RECORDS, "files", "STREAM.MSG.GET.{}"),
        *make.writes(topology.BATCHES, "batches"),
        *make.reads(topology.BATCHES, topology.RESULTS),
        *make.asks(topology.BATCHES, "batches", "STREAM.MSG.GET.{}"),
        *make.asks(topology.RESULTS, "results just stored", "STREAM.MSG.GET.{}"),
        *make.publishes(make.own, "batches", job_subjects.ALL_BATCH_CHANGES),
        *make.writes(topology.RESPONSES, "responses"),
        *make.reads(topology.RESPONSES),
        *make.asks(topology.RESPONSES, "responses", "STREAM.MSG.GET.{}"),
        *make.publishes(make.own, "responses", job_subjects.ALL_RESPONSE_CHANGES),
        *make.keeps("webhooks", topology.WEBHOOK_ENDPOINTS, job_subjects.ALL_WEBHOOK_ENDPOINTS),
        *make.keeps("webhooks", topology.DELIVERIES),
        *make.publishes(BrokerAccount.WORK, "cancel", "infer.cancel.*.*"),
        *make.reads(topology.REQUESTS, IDEMPOTENCY, *make.logs()),
        *make.sees(*_subjects_by_stream(make.shards)),
        *make.views(REGISTRY, TENANTS, KEYS, PRICES),
        *make.sums_usage(),
        *make.sees_tenants("room for durable answers"),
        *make.answers("refuse or repeat a submission"),
        *make.pulls("*", topology.INGRESS_CONSUMER, "infer.submit.*.*.*"),
        *make.hears(BrokerAccount.WORK, "replies", "infer.reply.*.>"),
        *make.hears(BrokerAccount.CONTROL, "quotas", subjects.ALL_BILLED),
        *make.hears(make.own, "load", subjects.ALL_PRESSURE),
        *make.hears(make.own, "producers' missed replies", subjects.ALL_RECORDS),
        *make.hears(make.own, "producers' batches", job_subjects.ALL_JOBS),
        *make.hears(make.own, "whose request it is", subjects.ALL_READERS, subjects.ALL_FINDS),
        *make.publishes(make.own, "whose request it is", "infer.reader.*.*", "infer.find.*.*"),
        *make.publishes(BrokerAccount.WORKERS, "whose request it is", "infer.find.*.*"),
        *make.publishes(
            BrokerAccount.WORKERS, "missed records", "infer.written.*", "infer.written"
        ),
        *make.publishes(make.own, "ask a leader", "infer.report.*"),
        *make.publishes(make.own, "its own load", "infer.gateway.{id}"),
        *make.follows_fleet(subjects.FLEET_PLAN_CHANGED, subjects.FLEET_MACHINES_CHANGED),
        *make.hears(make.own, "models that wake", subjects.ALL_WAKING),
    ]


def _dispatcher(make: _Rights) -> list[Right]:
    advisories = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{topology.WORK}.*"
    return [
        *make.everyone(),
        *make.writes(topology.WORK, "dispatch"),
        *make.writes(make.logs()[0], "end a request"),
        *make.writes(topology.LEDGER, "end a request", "infer.ledger.*.*"),
        *make.writes(topology.USAGE, "end a request"),
        *make.writes(topology.DEAD, "dead letters"),
        *make.writes(topology.RESULTS, "results of batches"),
        *make.reads(topology.RESULTS),
        *make.writes(topology.CHECKPOINTS, "hand over to the next leader"),
        *make.writes(LEASES, "lead"),
        *make.reads(topology.REQUESTS, topology.WORK, topology.ATTEMPTS, *make.logs()),
        *make.reads(topology.LEDGER, topology.CHECKPOINTS, LEASES),
        *make.sees(topology.REQUESTS, topology.WORK, topology.USAGE, topology.DEAD),
        *make.sees(topology.ATTEMPTS, *make.logs()),
        *make.sees_tenants("what producers have submitted"),
        *make.answers("end a request"),
        *make.sees(topology.LEDGER, topology.CHECKPOINTS, LEASES),
        *make.asks(topology.REQUESTS, "read", "STREAM.MSG.GET.{}", "CONSUMER.NAMES.{}"),
        *make.asks(topology.WORK, "read", "STREAM.MSG.GET.{}"),
        *make.asks(topology.WORK, "dead letters", "STREAM.MSG.DELETE.{}"),
        *make.pulls(topology.REQUESTS, "*", "infer.request.*.*.*", "DELETE", "RESET"),
        *make.pulls(topology.WORK, "*", "infer.work.*.*.*.*", "DELETE", "PAUSE"),
        *make.views(REGISTRY, TENANTS),
        *make.hears(BrokerAccount.WORKERS, "heartbeats", "infer.fleet.*.*"),
        *make.hears(BrokerAccount.WORK, "signals", "infer.heard.cancel.*.*", "infer.heard.gone"),
        *make.hears(BrokerAccount.WORK, "work that nobody finished", advisories),
        *make.hears(BrokerAccount.CONTROL, "ended requests", subjects.ALL_BILLED),
        *make.hears(make.own, "questions", subjects.ALL_FINDS, "infer.report.*"),
        *make.publishes(make.own, "load", "infer.pressure.*"),
        *make.publishes(make.own, "whose request it is", "infer.find.*.*"),
        *make.publishes(BrokerAccount.WORKERS, "whose request it is", "infer.find.*.*"),
        *make.publishes(BrokerAccount.WORKERS, "is a worker alive", "infer.alive.*"),
        *make.publishes(BrokerAccount.WORKERS, "ask for heartbeats", "infer.muster.*"),
    ]


def _jobs(make: _Rights) -> list[Right]:
    files, counters = (topology.FILES, topology.FILE_RECORDS), (topology.RATES, topology.USAGE)
    records = (topology.BATCHES, topology.RESULTS, topology.RESPONSES, topology.WEBHOOKS)
    webhooks = (topology.WEBHOOK_ENDPOINTS, topology.DELIVERIES)
    return [
        *make.everyone(),
        *make.writes(LEASES, "lead"),
        *make.reads(LEASES, *files, *records),
        *make.sees(LEASES, *files, *records),
        *make.sees(topology.LEDGER, topology.REQUESTS, topology.WORK),
        *make.writes(topology.FILES, "files of results"),
        *make.writes(topology.BATCHES, "batches"),
        *make.asks(topology.BATCHES, "batches", "STREAM.MSG.GET.{}"),
        *make.hears(make.own, "batches", job_subjects.ALL_BATCH_CHANGES),
        *make.writes(topology.RESPONSES, "background responses"),
        *make.asks(topology.RESPONSES, "responses", "STREAM.MSG.GET.{}", "STREAM.PURGE.{}"),
        *make.hears(make.own, "responses", job_subjects.ALL_RESPONSE_CHANGES),
        *make.asks(topology.RESULTS, "deleted responses", "STREAM.PURGE.{}"),
        *make.asks(topology.RESULTS, "results just stored", "STREAM.MSG.GET.{}"),
        *make.writes(topology.RESULTS, "lines that were refused"),
        *make.writes(topology.WEBHOOKS, "events"),
        *make.reads(topology.THRESHOLDS),
        *make.sees(topology.THRESHOLDS, *webhooks),
        *(right for each in webhooks for right in make.keeps("webhooks", each)),
        *(r for each in webhooks for r in make.asks(each, "webhooks", "STREAM.MSG.DELETE.{}")),
        *make.hears(BrokerAccount.WORK, "results", "infer.resulted.>"),
        *make.asks(make.logs()[-1], "logs behind results", "STREAM.PURGE.{}"),
        *make.views(REGISTRY, TENANTS, KEYS, PRICES),
        *make.writes(topology.REQUESTS, "enqueue"),
        *(right for each in counters for right in make.writes(each, "quotas")),
        *make.writes(topology.RESERVATIONS, "reservations on quotas"),
        *make.hears(BrokerAccount.CONTROL, "quotas", subjects.ALL_BILLED),
        *make.publishes(BrokerAccount.WORK, "cancel", "infer.cancel.*.*"),
        *make.writes(topology.FILE_RECORDS, "files"),
        *make.asks(topology.FILES, "deleted files", "STREAM.PURGE.{}"),
        *make.asks(
            topology.FILE_RECORDS, "deleted files", "STREAM.MSG.GET.{}", "STREAM.MSG.DELETE.{}"
        ),
    ]


def _fleet(make: _Rights) -> list[Right]:
    return [
        *make.everyone(),
        *make.writes(LEASES, "lead"),
        *make.reads(LEASES, topology.LEDGER),
        *make.sees(LEASES, topology.LEDGER),
        *make.views(REGISTRY),
        *make.hears(BrokerAccount.WORKERS, "heartbeats", subjects.ALL_HEARTBEATS),
        *make.hears(make.own, "load", subjects.ALL_PRESSURE, subjects.ALL_GATEWAYS),
        *make.hears(make.own, "questions", subjects.SIGNALS_REPORT),
        *make.keeps("curves of live workers", topology.CURVES, subjects.LIVE_CURVES),
        *make.sees(topology.CURVES),
        *make.writes(topology.FLEET, "wanted machines", subjects.FLEET_PLAN),
        *make.follows_fleet(subjects.FLEET_MACHINES_CHANGED, subjects.FLEET_ORDERS_CHANGED),
        *make.publishes(make.own, "models that wake", subjects.ALL_WAKING),
    ]


def _worker(make: _Rights) -> list[Right]:
    return [
        *make.everyone(),
        *make.writes(make.logs()[0], "token logs"),
        *make.writes(topology.ATTEMPTS, "notes"),
        *make.writes(topology.LEDGER, "end a request", "infer.ledger.*.{model}"),
        *make.writes(topology.LEDGER, "its own time", "infer.worker_time.{model}.{id}"),
        *make.writes(topology.USAGE, "end a request"),
        *make.writes(topology.DEAD, "dead letters", "infer.dead.*.{model}"),
        *make.writes(topology.RESULTS, "results of batches"),
        *make.reads(topology.RESULTS),
        *make.answers("end a request"),
        *make.reads(topology.ATTEMPTS, *make.logs()),
        *make.pulls(topology.WORK, "{consumer}", "infer.work.{pool}.*.*"),
        *make.views(REGISTRY),
        *make.hears(
            BrokerAccount.WORK, "signals", "infer.heard.cancel.*.*", "infer.heard.drain.{id}"
        ),
        *make.hears(make.own, "questions", "infer.alive.{id}", subjects.ALL_FINDS),
        *make.hears(make.own, "missed records", "infer.written.{id}", "infer.written"),
        *make.hears(make.own, "heartbeats", "infer.muster.{model}", "infer.fleet.{model}.*"),
        *make.publishes(make.own, "heartbeats", "infer.fleet.{model}.{id}", "infer.muster.{model}"),
        *make.publishes(make.own, "how a drain goes", "infer.draining.{id}"),
    ]


def _operator(make: _Rights) -> list[Right]:
    signals = ("infer.cancel.*.*", "infer.drain.*")
    letters = (topology.DEAD, topology.REPLAYS)
    return [
        *make.everyone(),
        *make.publishes(BrokerAccount.ADMIN, "ask the admin service", "infer.admin.>"),
        *make.publishes(
            BrokerAccount.SERVICES, "ask a leader", "infer.report.*", subjects.SIGNALS_REPORT
        ),
        *make.publishes(BrokerAccount.WORK, "signals", *signals),
        *make.hears(BrokerAccount.WORKERS, "how a drain goes", "infer.draining.*"),
        *make.reads(topology.USAGE, topology.RATES, *letters, *make.logs()),
        *make.sees(topology.USAGE, topology.RATES, *letters),
        *make.sums_usage(),
        *(right for s in letters for right in make.asks(s, "dead letters", "STREAM.MSG.GET.{}")),
        *(right for s in letters for right in make.asks(s, "dead letters", "STREAM.MSG.DELETE.{}")),
        *make.reads(topology.THRESHOLDS),
        *make.writes(topology.REPLAYS, "replay"),
        *make.writes(topology.REQUESTS, "replay"),
        *make.views(REGISTRY, TENANTS),
    ]


def _ledger(make: _Rights) -> list[Right]:
    return [
        *make.everyone(),
        *make.sums_usage(),
        *make.asks(topology.LEDGER, "remove what is exported", "STREAM.PURGE.{}"),
    ]


def _supervisor(make: _Rights) -> list[Right]:
    return [
        *make.everyone(),
        *make.publishes(BrokerAccount.WORK, "tell of a dead worker", subjects.GONE),
        *make.keeps("its machines", topology.FLEET, subjects.FLEET_MACHINES),
        *make.sees(topology.FLEET),
        *make.hears(BrokerAccount.CONTROL, "wanted machines", subjects.FLEET_PLAN_CHANGED),
        *make.views(REGISTRY),
    ]


def _admin(make: _Rights) -> list[Right]:
    whole = f"{JETSTREAM_API}>"
    decided = (REGISTRY, TENANTS, KEYS, ACCOUNTS, PRICES)
    deleted = "$JS.EVENT.ADVISORY.STREAM.DELETED.*"
    return [
        Right("publish", BrokerAccount.WORK, f"{JETSTREAM_API}INFO", "is there JetStream"),
        *(Right("publish", s, whole, "declare", local=f"{s}.API.>") for s in STORES),
        *(right for s in STORES for right in make.hears(s, "deleted streams", deleted)),
        *make.publishes(make.own, "missing streams", subjects.DECLARE),
        *make.hears(make.own, "missing streams", subjects.DECLARE),
        *make.publishes(make.own, "which streams there are", f"{subjects.PREFIX}.streams"),
        *make.hears(make.own, "which streams there are", f"{subjects.PREFIX}.streams"),
        *make.hears(make.own, "operators' questions", "infer.admin.>"),
        *make.publishes(make.own, "another admin service", "infer.admin.>"),
        *make.writes(REGISTRY, "models and aliases"),
        *make.writes(TENANTS, "tenants"),
        *make.writes(KEYS, "keys"),
        *make.writes(ACCOUNTS, "tenants' accounts"),
        *make.writes(PRICES, "prices"),
        *make.writes(topology.FLEET, "operators' orders", subjects.FLEET_ORDERS),
        *make.writes(topology.CURVES, "curves", subjects.MEASURED_CURVES),
        *make.writes(LEASES, "lead"),
        *make.writes(topology.AUDIT, "what was changed"),
        *(r for b in decided for r in make.hears(BrokerAccount.CONTROL, "changes", _changes(b))),
        *make.publishes(BrokerAccount.SERVICES, "ask a leader", "infer.report.*"),
        *make.publishes(BrokerAccount.WORK, "signals", "infer.cancel.*.*", "infer.drain.*"),
    ]


def _tenant(make: _Rights) -> list[Right]:
    return [
        *make.publishes(BrokerAccount.WORK, "submit", "infer.submit.{tenant}.*.*"),
        *make.publishes(BrokerAccount.WORK, "cancel", "infer.cancel.{tenant}.*"),
        *make.publishes(BrokerAccount.SERVICES, "missed replies", "infer.records.{tenant}.*.*"),
        *make.publishes(BrokerAccount.SERVICES, "batches", "infer.jobs.{tenant}.*"),
        *make.hears(BrokerAccount.WORK, "replies", "infer.reply.{tenant}.>"),
        *make.reads_answers(),
    ]


_TABLE = {
    UserClass.ADMIN: _admin,
    UserClass.GATEWAY: _gateway,
    UserClass.DISPATCHER: _dispatcher,
    UserClass.JOBS: _jobs,
    UserClass.FLEET: _fleet,
    UserClass.WORKER: _worker,
    UserClass.OPERATOR: _operator,
    UserClass.LEDGER: _ledger,
    UserClass.SUPERVISOR: _supervisor,
    UserClass.TENANT: _tenant,
}


ROLES = tuple(each for each in ACCOUNT_OF if each in _TABLE)


@cache
def rights_of(user_class: UserClass, shards: int = 1) -> tuple[Right, ...]:
    """Return the rights of a class, none of them twice, in a cell with so many token log shards.

    A system user has none here: it may do all that the servers let their own account do.
    """
    if user_class not in _TABLE:
        return ()
    own = ACCOUNT_OF.get(user_class, BrokerAccount.WORK)
    return tuple(dict.fromkeys(_TABLE[user_class](_Rights(shards, own))))


def roles_of(account: BrokerAccount, shards: int = 1) -> dict[str, Permissions]:
    """Return what the users of each of an account's classes may do, to be filled in by servers.

    A user called X has its inboxes under `_INBOX.X.`: nobody else in the account hears them.
    """
    inbox = "_INBOX.{{name()}}.>"
    return {
        each: _permissions(each, [(r.action, r.template()) for r in rights_of(each, shards)], inbox)
        for each in ROLES
        if ACCOUNT_OF[each] is account
    }


def tenant_permissions(tenant: str) -> Permissions:
    """Return what the users of a tenant's account may do.

    Their inboxes are their clients' usual ones, since nobody else is in the account.
    """
    rights = rights_of(UserClass.TENANT)
    found = [(r.action, r.seen_by(tenant)) for r in rights]
    return _permissions(UserClass.TENANT, found, "_INBOX.>")


def _permissions(
    user_class: UserClass, rights: Iterable[tuple[str, str]], inbox: str
) -> Permissions:
    found = list(dict.fromkeys(rights))
    return Permissions(
        tuple(subject for action, subject in found if action == "publish"),
        (*(subject for action, subject in found if action == "subscribe"), inbox),
        answers=user_class in _ANSWERERS,
    )


def imports_of(account: BrokerAccount, shards: int = 1) -> list[Right]:
    """Return what an account imports: what its classes of users need of other accounts."""
    classes = [each for each, own in ACCOUNT_OF.items() if own is account]
    found: dict[tuple[str, BrokerAccount, str, str | None], Right] = {}
    for right in (r for each in classes for r in rights_of(each, shards)):
        if right.owner is not account:
            key = (right.kind, right.owner, right.imported(), right.local)
            found.setdefault(key, right)
    return list(found.values())


def exports_of(account: BrokerAccount, shards: int = 1) -> list[Export]:
    """Return what an account exports: what users of other accounts, tenants' too, need of it."""
    others: Sequence[UserClass] = [c for c in _TABLE if ACCOUNT_OF.get(c) is not account]
    rights: Iterable[Right] = (r for each in others for r in rights_of(each, shards))
    return list(dict.fromkeys(r.exported() for r in rights if r.owner is account))
