"""Every subject of the topology and the table of rights, with names filled in. Pure.

Of most it is known what their wildcards stand for; whatever else is declared or granted is a
target, too.
"""

from dataclasses import dataclass

from admin.operation_table import OPERATIONS
from streams import job_subjects, subjects, topology
from streams.accounts.access import BUCKETS, UserClass, rights_of
from streams.accounts.rights import fill
from streams.job_subjects import JobOperation
from streams.subjects import Lane, LogAddress, PoolKey, Priority
from streams.topology import Scale

MARK = "adversary"  # in each name that an adversary makes up, so that what comes of it is found
DAY = "2026-11-28"
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
    response: str = MARK
    webhook: str = MARK
    gateway: str = MARK

    @property
    def key(self) -> str:
        """A key of any bucket."""
        return f"{self.tenant}.{self.model}"


MADE_UP = Names(MARK, MARK, MARK, MARK, MARK, MARK, f"_INBOX.{MARK}.x", version=MARK)


def subjects_of(names: Names) -> list[str]:
    """Every kind of subject, always in the same order."""
    known = _known(names)
    patterns = dict.fromkeys([*stored_patterns(), *granted_patterns()])
    rest = (each for each in patterns if not any(covers(each, subject) for subject in known))
    return [*known, *(_in_first_place(names.tenant, each) for each in rest)]


def stored_patterns() -> list[str]:
    """Subjects of streams and buckets, with wildcards, but for streams of one tenant."""
    configs = topology.stream_configs(Scale(), 1)
    of_streams = [pattern for config in configs for pattern in config.subjects or []]
    return [*of_streams, *(f"$KV.{bucket.removeprefix('KV_')}.>" for bucket in BUCKETS)]


def granted_patterns() -> list[str]:
    """Subjects that the table of rights grants to some class, but for JetStream's API.

    Those are made for every stream, whoever may make them.
    """
    rights = (right for each in UserClass for right in rights_of(each))
    seen = (pattern for right in rights for pattern in fill(right.local or right.subject, {}))
    return [each for each in seen if ".API." not in each and not each.startswith("$JS.ACK.")]


def _in_first_place(name: str, pattern: str) -> str:
    """The pattern's subject that has a name for its first wildcard."""
    return pattern.replace("*", name, 1).replace("*", MARK).replace(">", MARK)


def _known(names: Names) -> list[str]:
    return [
        *_stored(names),
        *_heard(names),
        *(f"$KV.{bucket.removeprefix('KV_')}.{names.key}" for bucket in BUCKETS),
        *(f"infer.changed.{bucket.removeprefix('KV_')}.{names.key}" for bucket in BUCKETS),
        *(subjects.admin(operation) for operation in OPERATIONS),
        subjects.admin(MARK),
        *(job_subjects.job_question(names.tenant, operation) for operation in JobOperation),
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
        subjects.reservations(names.gateway),
        subjects.usage(tenant, "tenant", "tokens", DAY),
        subjects.rate(tenant, "tenant", "tokens", 1),
        subjects.threshold(tenant, "tenant", "tokens", DAY, 80),
        job_subjects.result(tenant, batch, 0),
        job_subjects.result_part(tenant, batch, 0, f"{MARK}-0"),
        job_subjects.failed_try(tenant, batch, 0, 1),
        job_subjects.batch_record(tenant, batch),
        job_subjects.file_chunk(tenant, names.file, 0),
        job_subjects.file_record(tenant, names.file),
        job_subjects.response_record(tenant, names.response),
        job_subjects.pending_response(tenant, names.response),
        job_subjects.event(tenant, "batch.completed", names.batch),
        job_subjects.webhook_endpoint(tenant, names.webhook),
        job_subjects.EVENT_CURSOR,
        job_subjects.delivery(tenant, names.webhook, MARK),
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
        job_subjects.response_changed(tenant, names.response),
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


def covers(pattern: str, subject: str) -> bool:
    """Return True if a pattern with wildcards covers a subject."""
    wide, narrow = pattern.split("."), subject.split(".")
    for number, each in enumerate(wide):
        if each == ">":
            return len(narrow) > number
        if number >= len(narrow) or each not in ("*", narrow[number]):
            return False
    return len(wide) == len(narrow)
