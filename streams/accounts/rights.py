"""One line of the table of rights, and what follows from lines: exports, imports, permissions.

A right is publishing on a subject, or subscribing to one, that belongs to some account. Its subject
may name what a user is pinned to: `{id}`, `{model}`, `{pool}` (model and version), `{consumer}` (of
such a pool), `{tenant}`. An account exports the subject for all of them, the account of the user
imports it, and for each user the servers fill in what its tags say.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Literal

from streams import subjects, topology
from streams.accounts.claims import Export, Kind
from streams.subjects import PoolKey, Priority, escape

_ANY_POOL = ("*", "*")
_ANYTHING = {"pool": ("*.*",)}  # a pool is two tokens, model and version
_PIN = re.compile(r"\{(\w+)\}")
JETSTREAM_API, JETSTREAM_ACKS = "$JS.API.", "$JS.ACK."
# Exported once as a whole: what is imported of them is told by each activation.
_WHOLE_EXPORTS = (
    Export(f"{JETSTREAM_API}>", "service", is_many=True),
    Export(f"{JETSTREAM_ACKS}>", "service"),
)


class BrokerAccount(StrEnum):
    """The accounts of a cell, but for those of tenants that publish to NATS themselves."""

    SYSTEM = "SYS"  # the servers' own: claims, health
    CONTROL = "CONTROL"  # a store: what operators decide, who leads, who has used what
    WORK = "WORK"  # a store: requests and everything about them
    ADMIN = "ADMIN"
    SERVICES = "SERVICES"  # gateways, dispatchers, jobs and fleet services
    WORKERS = "WORKERS"
    OPERATORS = "OPERATORS"  # the command line


STORES = (BrokerAccount.CONTROL, BrokerAccount.WORK)


@dataclass(frozen=True)
class Pins:
    """Pins of a user: the process and pools that it is for; None stands for any.

    `id` is the name of a process, `pools` are models and versions, `*` for any version.
    """

    id: str | None = None
    pools: tuple[tuple[str, str], ...] | None = None

    def values(self) -> dict[str, tuple[str, ...]]:
        """By the name in braces, what may stand for it."""
        pools = [(_name(model), _name(version)) for model, version in self.pools or (_ANY_POOL,)]
        return {
            "id": (self.id or "*",),
            "model": _unique(model for model, _ in pools),
            "pool": _unique(".".join(pool) for pool in pools),
            "consumer": _unique(name for pool in self.pools or () for name in self._consumers(pool))
            or ("*",),
        }

    def _consumers(self, pool: tuple[str, str]) -> Iterator[str]:
        """Names of the consumers of a pool; those have the version and the worker in them."""
        if self.id is None or "*" in pool:
            yield "*"
            return
        model, version = pool
        for priority in Priority:
            yield topology.work_consumer(PoolKey(model, version, priority), 1).durable_name or ""
        yield topology.worker_consumer(model, version, self.id, 1).durable_name or ""

    def tags(self) -> list[str]:
        """The tags of a user's claims for its pins, which servers put into a role's subjects."""
        return [f"{name}:{value}" for name, found in self.values().items() for value in found]


def _name(text: str) -> str:
    return "*" if text == "*" else escape(text)


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def fill(subject: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a subject with its pins filled in, in all combinations; wildcards for others."""
    names = dict.fromkeys(_PIN.findall(subject))
    combinations = product(*(values.get(name) or _ANYTHING.get(name, ("*",)) for name in names))
    return [subject.format(**dict(zip(names, each, strict=True))) for each in combinations]


@dataclass(frozen=True)
class Right:
    """A right of a class of users to publish on a subject of `owner`, or subscribe to it.

    `local` is the subject's name for these users where that differs. `reason` is what it is for.
    """

    action: Literal["publish", "subscribe"]
    owner: BrokerAccount
    subject: str
    reason: str
    local: str | None = None

    @property
    def tells_user(self) -> bool:
        """True if the owner is told which user publishes: it records who has changed what."""
        return self.action == "publish" and self.subject == subjects.ALL_ADMIN

    @property
    def kind(self) -> Kind:
        """The kind of export by which the owner offers the subject."""
        return "service" if self.action == "publish" else "stream"

    def permitted(self, pins: Pins) -> list[str]:
        """The subjects that a user with these pins may use."""
        return fill(self._seen, pins.values())

    def template(self) -> str:
        """The subject as a role has it, for servers to fill in from a user's tags."""
        return _PIN.sub(r"{{tag(\1)}}", self._seen)

    def seen_by(self, tenant: str) -> str:
        """The subject as the users of one tenant name it."""
        return fill(self._seen, {"tenant": [tenant]})[0]

    def imported_as(self, tenant: str | None = None) -> str | None:
        """The name that `imported` has in the account of these users; None if it is the same."""
        if self.local is None:
            return None
        (local,) = fill(self.local, {"tenant": [tenant]} if tenant else {})
        return widened(local) if self.action == "publish" else local

    @property
    def _seen(self) -> str:
        return self.local or self.subject

    def imported(self, tenant: str | None = None) -> str:
        """The subject that the account of these users imports, of one tenant or of all.

        A service that is imported always has a wildcard, though one that only this subject matches:
        the servers answer for an import without one in other ways.
        """
        (subject,) = fill(self.subject, {"tenant": [tenant]} if tenant else {})
        return widened(subject) if self.action == "publish" else subject

    def exported(self) -> Export:
        """The export by which the owner offers the subject."""
        subject = self.imported()
        for whole in _WHOLE_EXPORTS:
            if subject.startswith(whole.subject.removesuffix(">")):
                return whole
        return Export(subject, self.kind)


def widened(subject: str) -> str:
    """Return the subject, with a wildcard for its first free token if it has none.

    Of the API of JetStream that is the kind of call: `$JS.API.STREAM.INFO.X` and
    `$JS.API.*.INFO.X` are the same call.
    """
    if "*" in subject or subject.endswith(">"):
        return subject
    tokens = subject.split(".")
    tokens[2 if tokens[1] == "API" else 0] = "*"
    return ".".join(tokens)
