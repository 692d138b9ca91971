"""Every subject that there is, and every call of the JetStream API, with names filled in. Pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from admin.operation_table import OPERATIONS
from streams import job_subjects, subjects, topology
from streams.accounts.access import BUCKETS
from streams.subjects import Lane, LogAddress, PoolKey, Priority

MARK = "adversary"  # in each name that an adversary makes up, so that what comes of it is found
DAY = "2026-11-28"
API_PREFIXES = ("$JS.API", "CONTROL.API", "WORK.API", "ANSWERS.API")
SERVERS_OWN = (
    "$SYS.REQ.CLAIMS.UPDATE",
    "$SYS.REQ.CLAIMS.DELETE",
    "$SYS.REQ.CLAIMS.LIST",
    "$SYS.REQ.CLAIMS.PACK",
    "$SYS.REQ.SERVER.PING",
    "$SYS.REQ.SERVER.PING.CONNZ",
    "$SYS.REQ.SERVER.PING.JSZ",
    "$SYS.REQ.ACCOUNT.PING.CONNZ",
    "$SYS.REQ.ACCOUNT.PING.STATZ",
    "$SYS.REQ.USER.INFO",
    f"$SYS.ACCOUNT.{MARK}.CONNECT",
    f"$NRG.V.{MARK}",
    f"$SRV.PING.{MARK}",
    f"_R_.{MARK}.x",
    f"_GR_.{MARK}.x.y",
)
WILDCARDS = (
    ">",
    "*",
    "*.>",
    "infer.>",
    "infer.*.*.*.>",
    "$JS.>",
    "$JS.API.>",
    "$JS.ACK.>",
    "$JS.EVENT.>",
    "$KV.>",
    "$SYS.>",
    "CONTROL.API.>",
    "WORK.API.>",
    "_INBOX.>",
    "_INBOX.*.*",
    "_R_.>",
    "_GR_.>",
)


@dataclass(frozen=True)
class Names:
    """Names that fill in subjects: a victim's, or an adversary's own."""

    tenant: str
    model: str
    request: str
    route: str
    worker: str
    consumer: str
    inbox: str
    version: str = "1"
    batch: str = MARK
    file: str = MARK

    @property
    def key(self) -> str:
        """A key of any bucket."""
        return f"{self.tenant}.{self.model}"


MADE_UP = Names(MARK, MARK, MARK, MARK, MARK, MARK, f"_INBOX.{MARK}.x", version=MARK)


def subjects_of(names: Names) -> list[str]:
    """Every kind of subject, always in the same order."""
    return [
        *_stored(names),
        *_heard(names),
        *(f"$KV.{bucket.removeprefix('KV_')}.{names.key}" for bucket in BUCKETS),
        *(f"infer.changed.{bucket.removeprefix('KV_')}.{names.key}" for bucket in BUCKETS),
        *(subjects.admin(operation) for operation in OPERATIONS),
        subjects.admin(MARK),
        *(f"$JS.ACK.{each}.{names.consumer}.1.1.1.1.0" for each in ("WORK", "REQUESTS", "LEDGER")),
        f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.WORK.{names.consumer}",
        f"$JS.EVENT.ADVISORY.STREAM.DELETED.{MARK}",
        *SERVERS_OWN,
    ]


def _stored(names: Names) -> list[str]:
    tenant, model, request = names.tenant, names.model, names.request
    batch = names.batch
    return [
        subjects.request(Lane(tenant, model, Priority.BATCH)),
        subjects.work(PoolKey(model, names.version, Priority.BATCH)),
        subjects.work_placed_on(model, names.version, names.worker).replace("*", "batch"),
        subjects.log(LogAddress(tenant, names.route, request), 1),
        subjects.log(LogAddress(tenant, names.route, f"{subjects.ITEM_PREFIX}{request}"), 1),
        subjects.ledger(tenant, model),
        subjects.outcome(tenant, model),
        subjects.worker_time(model, names.worker),
        subjects.rollup(tenant, DAY, model),
        subjects.cost_rollup(DAY, model),
        subjects.ROLLUP_CURSOR,
        subjects.usage(tenant, "tenant", "tokens", DAY),
        subjects.rate(tenant, "tenant", "tokens", 1),
        subjects.threshold(tenant, "tenant", "tokens", DAY, 80),
        job_subjects.result(tenant, batch, 0),
        job_subjects.result_part(tenant, batch, 0, f"{MARK}-0"),
        job_subjects.failed_try(tenant, batch, 0, 1),
        job_subjects.batch_record(tenant, batch),
        job_subjects.file_chunk(tenant, names.file, 0),
        job_subjects.file_record(tenant, names.file),
        subjects.attempts(tenant, request),
        subjects.dead(tenant, model),
        subjects.replay(request),
        subjects.checkpoint(model),
        subjects.cancel(tenant, request),
        subjects.drain(names.worker),
        subjects.GONE,
        subjects.submissions(tenant).replace("*.*", f"{model}.batch"),
        subjects.closed_submissions(tenant),
        job_subjects.answer(tenant, request),
    ]


def _heard(names: Names) -> list[str]:
    tenant, model, request = names.tenant, names.model, names.request
    return [
        f"infer.reply.{tenant}.{names.route}.{request}",
        subjects.heard(subjects.cancel(tenant, request)),
        subjects.heard(subjects.drain(names.worker)),
        subjects.heard(subjects.GONE),
        f"infer.billed.{tenant}.{model}",
        f"infer.records.{tenant}.{names.route}.{request}",
        job_subjects.resulted(tenant, names.batch).replace(">", "0").replace("*", "0"),
        job_subjects.batch_changed(tenant, names.batch),
        f"infer.jobs.{tenant}.status",
        subjects.fleet(model, names.worker),
        subjects.muster(model),
        subjects.pressure(model),
        subjects.report(model),
        subjects.find(tenant, request),
        subjects.reader(tenant, request),
        subjects.alive(names.worker),
        subjects.written(names.worker),
        subjects.WRITTEN_BY_ANY,
        subjects.draining(names.worker),
        subjects.DECLARE,
        subjects.STREAMS,
        names.inbox,
    ]


@dataclass(frozen=True)
class Call:
    """One question: its subject, its body as JSON, headers, and a subject to answer on."""

    subject: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    reply: str = ""

    @property
    def payload(self) -> bytes:
        """The body as it is sent."""
        if isinstance(self.body, bytes):
            return self.body
        return b"" if self.body is None else json.dumps(self.body).encode()


def stream_names(*tenants: str) -> list[str]:
    """Every stream and bucket, with the streams of some tenants."""
    makers = (topology.ingress_stream_name, topology.answers_stream_name)
    own = [make(tenant) for tenant in tenants for make in makers]
    return list(dict.fromkeys([*topology.stream_names(1), *BUCKETS, *own]))


def api_calls(stream: str, names: Names, prefix: str) -> Iterator[Call]:
    """Every call of the API about a stream that changes, reads or lists something."""
    consumer, key = names.consumer, f"{stream}.{names.consumer}"
    config = {"name": stream, "subjects": [f"{MARK}.>"]}
    durable = {"durable_name": consumer, "name": consumer, "ack_policy": "explicit"}
    made = {"stream_name": stream, "config": durable}
    bodies: dict[str, Any] = {
        "INFO": None,
        "ACCOUNT.INFO": None,
        "STREAM.NAMES": None,
        "STREAM.LIST": None,
        f"STREAM.CREATE.{stream}": config,
        f"STREAM.UPDATE.{stream}": config,
        f"STREAM.DELETE.{stream}": None,
        f"STREAM.PURGE.{stream}": {},
        f"STREAM.INFO.{stream}": {"subjects_filter": ">"},
        f"STREAM.MSG.GET.{stream}": {"seq": 1},
        f"STREAM.MSG.DELETE.{stream}": {"seq": 1},
        f"STREAM.SNAPSHOT.{stream}": {"deliver_subject": f"{MARK}.snapshot"},
        f"STREAM.RESTORE.{stream}": {"config": config, "state": {}},
        f"STREAM.LEADER.STEPDOWN.{stream}": None,
        f"STREAM.PEER.REMOVE.{stream}": {"peer": "n0"},
        f"CONSUMER.CREATE.{stream}": made,
        f"CONSUMER.CREATE.{key}": made,
        f"CONSUMER.CREATE.{key}.infer.{names.tenant}": made,
        f"CONSUMER.DURABLE.CREATE.{key}": made,
        f"CONSUMER.DELETE.{key}": None,
        f"CONSUMER.INFO.{key}": None,
        f"CONSUMER.LIST.{stream}": None,
        f"CONSUMER.NAMES.{stream}": None,
        f"CONSUMER.MSG.NEXT.{key}": {"batch": 10, "expires": 200_000_000},
        f"CONSUMER.PAUSE.{key}": {"pause_until": "2030-01-01T00:00:00Z"},
        f"CONSUMER.RESET.{key}": {"seq": 1},
        f"CONSUMER.UNPIN.{key}": {"group": MARK},
        f"CONSUMER.LEADER.STEPDOWN.{key}": None,
        f"DIRECT.GET.{stream}": {"seq": 1, "batch": 1000},
        f"DIRECT.GET.{stream}.infer.>": None,
        "META.LEADER.STEPDOWN": None,
        "SERVER.REMOVE": {"peer": "n0"},
        f"ACCOUNT.STREAM.MOVE.{names.tenant}.{stream}": {"server": "n0"},
        f"ACCOUNT.PURGE.{names.tenant}": None,
    }
    return (Call(f"{prefix}.{call}", body) for call, body in bodies.items())


def copying_calls(stream: str, prefix: str) -> Iterator[Call]:
    """Streams that would copy another one, and changes by which one would send copies away."""
    copy = f"{MARK}_{stream}"
    external = {"api": "$JS.API", "deliver": f"{MARK}.deliver"}
    for source in ({"name": stream}, {"name": stream, "external": external}):
        yield Call(f"{prefix}.STREAM.CREATE.{copy}", {"name": copy, "sources": [source]})
        yield Call(f"{prefix}.STREAM.CREATE.{copy}", {"name": copy, "mirror": source})
    republish = {"src": ">", "dest": f"{MARK}.>"}
    yield Call(f"{prefix}.STREAM.UPDATE.{stream}", {"name": stream, "republish": republish})
    sources = [{"name": "REQUESTS"}]
    yield Call(f"{prefix}.STREAM.UPDATE.{stream}", {"name": stream, "sources": sources})


def delivering_calls(
    stream: str, prefix: str, consumer: str, filter_subject: str, targets: Sequence[str]
) -> Iterator[Call]:
    """Consumers that would send what is stored to a subject of their maker's choice."""
    for target in targets:
        config = {"name": consumer, "deliver_subject": target, "filter_subject": filter_subject}
        lasting = {**config, "durable_name": consumer, "ack_policy": "explicit"}
        wide = {**lasting, "filter_subjects": ["infer.work.>", "infer.request.>"]}
        key = f"{prefix}.CONSUMER.CREATE.{stream}"
        yield Call(key, {"stream_name": stream, "config": {"deliver_subject": target}})
        for each in (config, lasting, wide):
            yield Call(f"{key}.{consumer}", {"stream_name": stream, "config": each})
            body = {"stream_name": stream, "config": each}
            yield Call(f"{key}.{consumer}.{filter_subject}", body)
        durable = f"{prefix}.CONSUMER.DURABLE.CREATE.{stream}.{consumer}"
        yield Call(durable, {"stream_name": stream, "config": lasting})


def spoofing_headers(request: str, target: str) -> list[dict[str, str]]:
    """Headers by which a message would be more than it is."""
    return [
        {"Nats-Rollup": "all"},
        {"Nats-Rollup": "sub"},
        {"Nats-Msg-Id": request},
        {"Nats-Expected-Stream": "REQUESTS"},
        {"Nats-Expected-Last-Sequence": "0"},
        {"Nats-Expected-Last-Subject-Sequence": "0"},
        {
            "Nats-Expected-Last-Subject-Sequence": "0",
            "Nats-Expected-Last-Subject-Sequence-Subject": ">",
        },
        {"KV-Operation": "PURGE"},
        {"KV-Operation": "DEL", "Nats-Rollup": "sub"},
        {"Nats-Marker-Reason": "MaxAge"},
        {"Nats-TTL": "1s"},
        {"Nats-Incr": "+1000000"},
        {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": target},
        {"Nats-Batch-Id": MARK, "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
        {"Nats-Trace-Dest": target},
        {"Nats-Trace-Dest": target, "Nats-Trace-Only": "true"},
        {"Nats-Stream": "SIGNALS", "Nats-Subject": "infer.gone", "Nats-Sequence": "1"},
        {"Nats-Request-Info": '{"acc":"CONTROL"}', "Status": "100"},
        {"Nats-Stream-Source": f"REQUESTS 1 > > {target}"},
    ]


def covers(pattern: str, subject: str) -> bool:
    """Whether a subject is one of a pattern with wildcards."""
    wide, narrow = pattern.split("."), subject.split(".")
    for number, each in enumerate(wide):
        if each == ">":
            return len(narrow) > number
        if number >= len(narrow) or each not in ("*", narrow[number]):
            return False
    return len(wide) == len(narrow)
