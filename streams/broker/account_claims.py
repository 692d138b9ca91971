"""Tells running servers of accounts: made, changed or disabled, without a restart of anything.

Needs a connection of a user of the system account. Every server that lives answers.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from streams.accounts import claims_token
from streams.accounts.claims_token import Claims
from streams.errors import BrokerUnavailable

log = structlog.get_logger()

_UPDATE = "$SYS.REQ.CLAIMS.UPDATE"
_LIST = "$SYS.REQ.CLAIMS.LIST"
_LOOKUP = "$SYS.REQ.ACCOUNT.{}.CLAIMS.LOOKUP"
_PING = "$SYS.REQ.SERVER.PING"
_CONNECTIONS = "$SYS.REQ.SERVER.PING.CONNZ"
_ALL_CONNECTIONS = b'{"auth": true, "limit": 1000000}'
_STATE = "$SYS.REQ.SERVER.PING.VARZ"
PUSH_SECONDS = 2.0
_QUIET_SECONDS = 0.3  # after the last server's answer to a ping: there are no more


@dataclass(frozen=True)
class ClaimsUpdate:
    """Answers of the servers to an account's claims: those that took them, and refusals by name."""

    taken: frozenset[str]
    refused: dict[str, str] = field(default_factory=dict)


class ClaimsOutdated(BrokerUnavailable):
    """The servers know newer claims of an account than those of a directory of keys."""


class ClaimsRefused(BrokerUnavailable):
    """A server does not take an account's claims: it knows newer ones, or another operator."""


async def list_servers(client: Client) -> Mapping[str, str]:
    """Return the servers that answer, of all in the cluster: ids by name.

    A server that was started again has another id. Raises `BrokerUnavailable` if none answers.
    """
    said = [json.loads(answer.data)["server"] for answer in await _ask_all(client, _PING, b"")]
    if not said:
        raise BrokerUnavailable("no NATS server answers a user of the system account")
    return {each["name"]: each["id"] for each in said}


async def list_trusted_keys(client: Client) -> Mapping[str, frozenset[str]]:
    """Return by which keys each server knows its operator's claims: its identity's, and signing.

    A server keeps those of its configuration until it is restarted. It stores claims that others
    have signed, and says that it has taken them, but does not use them.
    """
    found = {}
    for answer in await _ask_all(client, _STATE, b""):
        said = json.loads(answer.data)
        operators = said["data"].get("trusted_operators_claim", [])
        keys = [[each["sub"], *each["nats"].get("signing_keys", [])] for each in operators]
        found[said["server"]["name"]] = frozenset(chain(*keys))
    if not found:
        raise BrokerUnavailable("no NATS server answers a user of the system account")
    return found


async def read_claims(client: Client, account: str, servers: int) -> Claims | None:
    """Return the newest claims of an account that any of so many servers has; None if none does.

    `account` is its public key. Raises `BrokerUnavailable`.
    """
    async with _asked(client, _LOOKUP.format(account), b"") as answers:
        found = await _collect(answers, servers, PUSH_SECONDS)
    claims = [claims_token.decode(answer.data.decode()) for answer in found if answer.data]
    return max(claims, key=lambda each: int(each["iat"]), default=None)


async def read_all_claims(client: Client) -> Sequence[Claims]:
    """Return the newest claims of each account that any server has stored, tenants' among them.

    Raises `BrokerUnavailable`.
    """
    listed = [
        json.loads(each.data).get("data") or [] for each in await _ask_all(client, _LIST, b"")
    ]
    servers = len(await list_servers(client))
    found = [await read_claims(client, each, servers) for each in sorted({*chain(*listed)})]
    return [each for each in found if each]


async def check_newest(client: Client, tokens: Iterable[str]) -> None:
    """Raise `ClaimsOutdated` if a server knows newer claims of an account than those of `tokens`.

    Servers would take older ones all the same, and let in again whoever was cut off meanwhile.
    """
    servers = len(await list_servers(client))
    for ours in map(claims_token.decode, tokens):
        known = await read_claims(client, ours["sub"], servers)
        if known and int(known["iat"]) > int(ours["iat"]):
            raise ClaimsOutdated(
                f"the servers know claims of the account {ours['name']} that are newer than those "
                "of this directory of keys, which is an older copy: use the one that was changed "
                "last; nothing was changed"
            )


async def list_issuers(client: Client) -> Mapping[str, frozenset[str]]:
    """Return the public keys that signed the users now connected, each with these users' names."""
    found: dict[str, set[str]] = {}
    for answer in await _ask_all(client, _CONNECTIONS, _ALL_CONNECTIONS):
        for each in json.loads(answer.data)["data"].get("connections", []):
            name = each.get("name") or f"connection {each['cid']}"
            found.setdefault(each.get("issuer_key", ""), set()).add(name)
    return {issuer: frozenset(names) for issuer, names in found.items()}


async def push_claims(
    client: Client,
    token: str,
    seconds: float = PUSH_SECONDS,
    living: Collection[str] | None = None,
) -> ClaimsUpdate:
    """Tell all servers the claims of an account; returns once every living one has taken them.

    They are told at once; which servers live is asked meanwhile, unless `living` names them. A
    server that is down asks the others when it is back. Raises `ClaimsRefused` if one refuses,
    `BrokerUnavailable` if a server that lives has not answered after `seconds`: then push again.
    """
    async with _asked(client, _UPDATE, token.encode()) as answers:
        if living is None:
            living = await list_servers(client)
        update = _read_answers(await _collect(answers, len(living), seconds))
    if update.refused:
        reasons = "; ".join(f"{server}: {why}" for server, why in sorted(update.refused.items()))
        raise ClaimsRefused(f"the claims of an account are refused by {reasons}")
    if missing := set(living) - update.taken:
        raise BrokerUnavailable(
            f"{', '.join(sorted(missing))} has not taken the claims of an account within "
            f"{seconds:g} s: they are with {', '.join(sorted(update.taken)) or 'no server'}"
        )
    return update


def _read_answers(answers: list[Msg]) -> ClaimsUpdate:
    taken, refused = set(), {}
    for answer in answers:
        said = json.loads(answer.data)
        name = said["server"]["name"]
        if "error" in said:
            refused[name] = str(said["error"].get("description"))
        else:
            taken.add(name)
    return ClaimsUpdate(frozenset(taken), refused)


async def _ask_all(client: Client, subject: str, payload: bytes) -> list[Msg]:
    """Return the answers of all servers, those until there are no more."""
    async with _asked(client, subject, payload) as answers:
        return await _collect(answers, None, PUSH_SECONDS)


@asynccontextmanager
async def _asked(client: Client, subject: str, payload: bytes) -> AsyncIterator[Subscription]:
    """Ask all servers; yield the subscription on which their answers come.

    Raises `BrokerUnavailable` if the question cannot be sent.
    """
    try:
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        try:
            await client.publish(subject, payload, reply=inbox)
            yield answers
        finally:
            await answers.unsubscribe()
    except (nats.errors.Error, OSError) as error:
        raise BrokerUnavailable(f"no answer to {subject}: {error!r}") from error


async def _collect(answers: Subscription, wanted: int | None, seconds: float) -> list[Msg]:
    """Return so many answers, or fewer after `seconds`; with None, those until it is quiet."""
    found: list[Msg] = []
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        while wanted is None or len(found) < wanted:
            left = deadline - asyncio.get_running_loop().time()
            quiet = _QUIET_SECONDS if found and wanted is None else left
            found.append(await answers.next_msg(timeout=max(0.001, min(left, quiet))))
    except (nats.errors.TimeoutError, TimeoutError):
        pass
    return found
