"""Promises about each class of adversary: all that it may read and write. Pure.

Of tenants and workers it is written here, beside the table of rights and not from it, so that a
right too many is found. Of processes that serve everybody it is the table: what they reach by their
job is told, and what they reach beyond it is a hole.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from streams import topology
from streams.accounts import access
from streams.accounts.access import UserClass
from streams.accounts.rights import BrokerAccount, Pins, fill
from tests.adversary.canaries import (
    BATCHES,
    KEYS,
    OF_BATCHES,
    OF_RESPONSES,
    REQUESTS,
    TENANTS,
    WEBHOOKS,
    prompts_of,
)
from tests.adversary.cell import MALLORY, MODEL, SECOND, STOLEN, pinned
from tests.adversary.target_subjects import MARK, covers

_API = "$JS.API"
_EMPTIES = ".STREAM.PURGE."  # of what the victims need: who has that right may, by its job
ONE_RIGHT = f"{_API}.DIRECT.GET.{topology.DEAD}"  # of a user in a store, which nobody has


class Adversary(StrEnum):
    """Classes of adversaries, by what they hold."""

    NOBODY = "no credentials"
    TENANT_KEY = "a tenant's API key"
    TENANT_USER = "a tenant's NATS user"
    WORKER = "a stolen worker"
    GATEWAY = "a stolen gateway"
    DISPATCHER = "a stolen dispatcher"
    JOBS = "a stolen jobs service"
    FLEET = "a stolen fleet service"
    OPERATOR = "a stolen operator"
    PAGE = "a web page"
    STORE_USER = "control: a user in a store"


@dataclass(frozen=True)
class Promise:
    """Kinds of secrets that a class may read, and subjects on which it may publish.

    `causes` are subjects on which the broker and the services then say something about that.
    """

    reads: frozenset[str] = frozenset()
    writes: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    account: BrokerAccount | None = None
    pins: Pins = field(default_factory=Pins)
    user_class: UserClass | None = None
    asks: tuple[str, ...] = ()  # of a user whom the table does not know

    def allows(self, subject: str) -> bool:
        """Whether the class may publish on a subject."""
        return any(covers(pattern, subject) for pattern in self.writes)

    def covers(self, subject: str) -> bool:
        """Whether the class may publish on a subject, or cause others to."""
        return self.allows(subject) or any(covers(pattern, subject) for pattern in self.causes)

    def own_subjects(self) -> list[str]:
        """A subject for each right to publish that the table has, with names of its own."""
        if self.user_class is None:
            return list(self.asks)
        values = {**self.pins.values(), "tenant": (MALLORY,)}
        rights = [r for r in access.rights_of(self.user_class) if r.action == "publish"]
        found = dict.fromkeys(s for r in rights for s in fill(r.local or r.subject, values))
        return [_sample(each) for each in found if _EMPTIES not in each]


def _sample(pattern: str) -> str:
    stored = pattern.replace("infer.token.*", "infer.token.0")
    return stored.replace("*", MARK).replace(">", MARK)


def _own_consumers(pins: Pins) -> Iterable[str]:
    for consumer in pins.values()["consumer"]:
        for call in ("CREATE", "INFO", "MSG.NEXT"):
            yield f"{_API}.CONSUMER.{call}.{topology.WORK}.{consumer}"
            yield f"{_API}.CONSUMER.{call}.{topology.WORK}.{consumer}.infer.work.{SECOND}.1.>"
        yield f"$JS.ACK.{topology.WORK}.{consumer}.>"


_TENANT = Promise(
    writes=(
        f"infer.submit.{MALLORY}.*.*",
        f"infer.cancel.{MALLORY}.*",
        f"infer.records.{MALLORY}.*.*",
        f"infer.jobs.{MALLORY}.*",
        f"ANSWERS.API.DIRECT.GET.ANSWERS_{MALLORY}",
        f"ANSWERS.API.DIRECT.GET.ANSWERS_{MALLORY}.infer.answer.{MALLORY}.>",
        f"ANSWERS.API.STREAM.PURGE.ANSWERS_{MALLORY}",
    ),
    causes=(
        f"infer.heard.cancel.{MALLORY}.*",
        f"infer.token.*.{MALLORY}.*.*",
        f"infer.reply.{MALLORY}.>",
        f"infer.outcome.{MALLORY}.*",
    ),
    user_class=UserClass.TENANT,
)
_WORKER_PINS = pinned(STOLEN, SECOND)
_WORKER_READS = ("TOKENS_0", "TOKENS_jobs", "ATTEMPTS", topology.RESULTS, "KV_registry")
_WORKER = Promise(
    # Token logs, notes, cancels and results name no model: what they say of other models is told
    reads=frozenset({prompts_of(SECOND), REQUESTS, TENANTS, BATCHES}),
    writes=(
        "infer.token.*.*.*.*",
        "infer.attempt.*.*",
        f"infer.ledger.*.{SECOND}",
        f"infer.worker_time.{SECOND}.{STOLEN}",
        "infer.result.>",
        "infer.usage.*.*.*.*",
        f"infer.dead.*.{SECOND}",
        "infer.answer.*.>",
        f"infer.fleet.{SECOND}.{STOLEN}",
        f"infer.muster.{SECOND}",
        f"infer.draining.{STOLEN}",
        "infer.declare",
        f"{_API}.INFO",
        *(f"{_API}.STREAM.INFO.{stream}" for stream in (topology.WORK, "KV_registry")),
        *(f"{_API}.DIRECT.GET.{each}" for each in _WORKER_READS),
        *_own_consumers(_WORKER_PINS),
    ),
    causes=(
        "infer.reply.*.>",
        f"infer.billed.*.{SECOND}",
        "infer.resulted.>",
        f"infer.rollup.*.*.{SECOND}",
    ),
    account=BrokerAccount.WORKERS,
    pins=_WORKER_PINS,
    user_class=UserClass.WORKER,
)


def _by_table(user_class: UserClass, pins: Pins, *reads: str) -> Promise:
    rights = [r for r in access.rights_of(user_class) if r.action == "publish"]
    writes = tuple(dict.fromkeys(s for r in rights for s in r.permitted(pins)))
    return Promise(
        frozenset(reads), writes, _COPIES, access.ACCOUNT_OF[user_class], pins, user_class
    )


_COPIES = (
    "infer.reply.*.>",
    "infer.heard.>",
    "infer.billed.>",
    "infer.changed.idempotency.>",
    "infer.changed.fleet.>",
    "infer.resulted.>",
)
_STORED_PROMPTS = (prompts_of(OF_BATCHES), prompts_of(OF_RESPONSES))
_PROMPTS = (prompts_of(MODEL), prompts_of(SECOND), *_STORED_PROMPTS)
PROMISES = {
    Adversary.NOBODY: Promise(),
    Adversary.TENANT_KEY: Promise(),
    Adversary.TENANT_USER: _TENANT,
    Adversary.WORKER: _WORKER,
    Adversary.GATEWAY: _by_table(
        UserClass.GATEWAY,
        Pins("stolen-gateway"),
        *_PROMPTS,
        REQUESTS,
        TENANTS,
        KEYS,
        BATCHES,
        WEBHOOKS,
    ),
    Adversary.DISPATCHER: _by_table(
        UserClass.DISPATCHER, Pins("stolen-dispatcher"), *_PROMPTS, REQUESTS, TENANTS, KEYS, BATCHES
    ),
    # Prompts of batches and of stored responses: it reads neither requests nor work
    Adversary.JOBS: _by_table(
        UserClass.JOBS,
        Pins("stolen-jobs"),
        *_STORED_PROMPTS,
        REQUESTS,
        TENANTS,
        KEYS,
        BATCHES,
        WEBHOOKS,
    ),
    # What has ended, from the ledger: ids, and no prompt
    Adversary.FLEET: _by_table(UserClass.FLEET, Pins("stolen-fleet"), REQUESTS, TENANTS),
    # Prompts only of dead letters; no victim's request is one
    Adversary.OPERATOR: _by_table(
        UserClass.OPERATOR, Pins("stolen-operator"), REQUESTS, TENANTS, KEYS
    ),
    Adversary.PAGE: Promise(),
    Adversary.STORE_USER: Promise(asks=(ONE_RIGHT,)),
}
