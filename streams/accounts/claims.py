"""Claims of an operator, its accounts, their users, and what one account may import from another.

Each is a map in the form of NATS's JWT library, version 2 (github.com/nats-io/jwt), to be signed by
`claims_token.encode`. Times are seconds of the epoch. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from streams.accounts.claims_token import Claims

Kind = Literal["service", "stream"]
_LIMITS = {
    "subs": -1,
    "data": -1,
    "payload": -1,
    "imports": -1,
    "exports": -1,
    "wildcards": True,
    "conn": -1,
    "leaf": 0,
}
_JETSTREAM = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
# A response of several messages is forgotten after so long without one; NATS's default of two
# minutes would keep 23 MB of them after 20,000 reads.
_RESPONSE_NANOSECONDS = 5 * 10**9
_ANSWER_NANOSECONDS = 60 * 10**9  # how long a service may take to answer a request
EVERYONE = "*"


@dataclass(frozen=True)
class Export:
    """Subjects of an account that others may import, each with an activation of its own.

    `kind` is `service` for what others publish, `stream` for what they subscribe to. With
    `is_many`, a question may be answered by several messages, as pulls and batched reads are.
    """

    subject: str
    kind: Kind
    is_many: bool = False

    def claims(self) -> Claims:
        """The export as a part of its account's claims."""
        base = {"name": self.subject, "subject": self.subject, "type": self.kind, "token_req": True}
        if not self.is_many:
            return base
        more = {"response_type": "Stream", "response_threshold": _RESPONSE_NANOSECONDS}
        return {**base, **more}


@dataclass(frozen=True)
class Permissions:
    """Subjects that one user may publish and subscribe to, with wildcards; nothing else.

    With `answers` it may reply, within a minute, to whatever asks it. How often is not limited:
    a question that several of its subscriptions get counts as if it had replied to it before.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False

    def claims(self) -> Claims:
        """The permissions as a part of their user's claims."""
        found: Claims = {
            "pub": _allow_or_deny(self.publish),
            "sub": _allow_or_deny(self.subscribe),
        }
        if self.answers:
            found["resp"] = {"max": -1, "ttl": _ANSWER_NANOSECONDS}
        return found


EVERYTHING = Permissions((">",), (">",))


def _allow_or_deny(allowed: Sequence[str]) -> Claims:
    """Allow these subjects; an empty list of NATS would allow everything."""
    return {"allow": sorted(allowed)} if allowed else {"deny": [">"]}


@dataclass(frozen=True)
class AccountState:
    """Parts of an account that may change while its key, and so its stored streams, stay.

    The keys in `signing` may sign users and activations as the account's own key may; a key of
    `roles` signs users that can do what the account's claims say of that role, and nothing else.
    While keys are changed, the old ones and the new ones are listed.

    `issued_at` is when its last claims were made: of two claims, the servers keep the newer one.
    Users whose claims are not newer than their time in `revocations` (by public key, or `EVERYONE`)
    are cut off. A disabled account has no connections; it is never deleted, since a server that was
    down meanwhile would bring it back.
    """

    name: str
    public: str
    signing: tuple[str, ...] = ()
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    issued_at: int = 0
    revocations: Mapping[str, int] = field(default_factory=dict)
    is_disabled: bool = False


def next_issued_at(last: int, now: float) -> int:
    """Return the time to write into new claims of an account whose last ones have `last`.

    It rises by a second at least: where two claims are equally old, either may win.
    """
    return max(int(now), last + 1)


def operator_claims(name: str, public: str, signing: Iterable[str], system: str) -> Claims:
    """Claims of an operator, signed by its identity key; `system` is the system account.

    Accounts may be signed by the identity key or by any of the keys in `signing`.
    """
    body = {
        "type": "operator",
        "version": 2,
        "signing_keys": list(signing),
        "system_account": system,
    }
    return {"sub": public, "name": name, "nats": body}


_NO_ROLES: Mapping[str, Permissions] = {}


def account_claims(
    state: AccountState,
    exports: Iterable[Export] = (),
    imports: Iterable[Claims] = (),
    roles: Mapping[str, Permissions] = _NO_ROLES,
    *,
    stores: bool = False,
) -> Claims:
    """Claims of an account; with `stores` it has JetStream, without limits of its own.

    `roles` says what users may do that are signed by the keys of these roles.
    """
    limits = {**_LIMITS, **(_JETSTREAM if stores else {})}
    if state.is_disabled:
        limits["conn"] = 0
    body = {
        "type": "account",
        "version": 2,
        "limits": limits,
        "signing_keys": [*state.signing, *_scopes(state, roles)],
        "exports": [export.claims() for export in exports],
        "imports": list(imports),
        "revocations": dict(state.revocations),
        "default_permissions": {"pub": {}, "sub": {}},
    }
    return {"sub": state.public, "name": state.name, "iat": state.issued_at, "nats": body}


def _scopes(state: AccountState, roles: Mapping[str, Permissions]) -> Iterator[Claims]:
    """The keys that sign users of a role, each with what such users may do."""
    for role, permissions in roles.items():
        template = {"subs": -1, "data": -1, "payload": -1, **permissions.claims()}
        for key in state.roles.get(role, ()):
            yield {"kind": "user_scope", "key": key, "role": role, "template": template}


def import_claims(
    exporter: str,
    subject: str,
    kind: Kind,
    token: str,
    local: str | None = None,
    *,
    tells_user: bool = False,
) -> Claims:
    """An import as a part of its account's claims.

    `exporter` is the public key of the account that exports, `token` its signed activation, `local`
    the subject's name in the importing account where that differs. With `tells_user` the servers
    tell the exporter, in a header of each message, which user has sent it.
    """
    found: Claims = {
        "name": subject,
        "subject": subject,
        "account": exporter,
        "type": kind,
        "token": token,
    }
    found |= {"share": True} if tells_user else {}
    return {**found, "local_subject": local} if local else found


def activation_claims(
    importer: str, exporter: str, subject: str, kind: Kind, issued_at: int
) -> Claims:
    """Claims by which `exporter` lets `importer` import a subject; both are public keys.

    They never expire: an import whose activation has expired stops without a word. Any of the
    exporter's keys may sign them.
    """
    body = {
        "type": "activation",
        "version": 2,
        "subject": subject,
        "kind": kind,
        "issuer_account": exporter,
    }
    return {"sub": importer, "name": subject, "iat": issued_at, "nats": body}


def user_claims(
    name: str,
    public: str,
    account: str,
    issued_at: int,
    *,
    permissions: Permissions | None = None,
    expires_at: int | None = None,
    tags: Iterable[str] = (),
) -> Claims:
    """Claims of a user of `account` (a public key), signed by one of the account's keys.

    A user whose claims are signed by the key of a role may do what the account says of the role,
    and has no permissions here. Others have these ones; without, they may do all that the account
    can.
    """
    body: Claims = {
        "type": "user",
        "version": 2,
        "issuer_account": account,
        "tags": list(tags),
    }
    if permissions:
        body |= {"subs": -1, "data": -1, "payload": -1, **permissions.claims()}
    expiry = {"exp": expires_at} if expires_at is not None else {}
    return {"sub": public, "name": name, "iat": issued_at, **expiry, "nats": body}


def deletion_claims(operator: str, accounts: Iterable[str], issued_at: int) -> Claims:
    """Claims that ask the servers to forget accounts; only for ones that are disabled already."""
    body = {"type": "generic", "version": 2, "accounts": list(accounts)}
    return {"sub": operator, "name": "delete", "iat": issued_at, "nats": body}
