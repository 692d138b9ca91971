"""The command `millstream broker rotate`."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from nats.aio.client import Client

from millstream.broker.rotation_settings import RotationSettings
from streams.accounts.key_rotation import KeyRotation, RotationRefused
from streams.broker.account_claims import (
    check_newest,
    list_issuers,
    list_trusted_keys,
    push_claims,
    read_all_claims,
)
from streams.broker.countdown import Countdown
from streams.broker.reconnecting_client import ReconnectingClient
from streams.connection_files import ConnectionFiles

TENANTS_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_PUSH_SECONDS = 30.0  # for one account: a server may stall for a while


@dataclass(frozen=True)
class RotationReport:
    """Result of a step: the servers that were told, the users that were renewed, the next step."""

    what: str
    is_finished: bool
    told: Sequence[str] = ()
    users: Sequence[str] = ()
    next: Sequence[str] = ()


async def rotate(settings: RotationSettings, stop: asyncio.Event) -> None:
    """Do one step of a rotation; it can be repeated after a kill.

    Raises `RotationRefused` where the step would cut somebody off, `InvalidCellDirectory` for a
    directory or seed that cannot be used, `ClaimsOutdated` for an older copy of it,
    `BrokerUnavailable` if a server that lives has not taken everything.
    """
    cell = KeyRotation.open(settings.directory)
    async with _system_client(settings) as client:
        if client:
            await check_newest(client, cell.account_tokens())
        if settings.what == "accounts":
            report = await _rotate_accounts(cell, client, settings)
        elif settings.what == "users":
            report = await _renew_users(cell, client, settings)
        else:
            report = await _rotate_operator(cell, client, settings)
    _print(report, settings.as_json)


@asynccontextmanager
async def _system_client(settings: RotationSettings) -> AsyncIterator[Client | None]:
    """A connection to the servers that are to be told; None if there is no --nats."""
    if settings.nats is None:
        yield None
        return
    files = ConnectionFiles(creds=_system_creds(settings), ca=settings.nats_ca)
    connection = ReconnectingClient(settings.nats, "millstream-rotate", files)
    await connection.open()
    try:
        yield connection.client
    finally:
        await connection.close()


def _system_creds(settings: RotationSettings) -> Path:
    return settings.nats_creds or KeyRotation(settings.directory).user_file("system")


async def _rotate_accounts(
    cell: KeyRotation, client: Client | None, settings: RotationSettings
) -> RotationReport:
    if not settings.finish:
        cell.begin_accounts()
        told = await _tell(cell, client)
        return RotationReport(
            "accounts", False, told, next=(*_untold(cell, client, _BEFORE_USERS), _TO_USERS)
        )
    creds = [settings.nats_creds] if settings.nats_creds else []
    cell.check_users(creds)
    await _tell(cell, client)  # all know the new keys before the first one drops an old one
    if client and not settings.cut:
        await _wait_for_tenants(cell, client)
        await _check_connections(cell, client)
    cell.finish_accounts(creds)
    told = await _tell(cell, client)
    return RotationReport("accounts", True, told, next=_untold(cell, client, _ELSE_OLD))


async def _renew_users(
    cell: KeyRotation, client: Client | None, settings: RotationSettings
) -> RotationReport:
    if settings.finish:
        raise RotationRefused(
            "users have no keys to drop: --what accounts --finish ends their old credentials"
        )
    told = await _tell(cell, client)  # else no server knows the keys of the new credentials
    users = cell.renew_users()
    untold = _untold(cell, client, _BEFORE_USE)
    return RotationReport("users", True, told, users, (*untold, _TO_FINISH))


async def _rotate_operator(
    cell: KeyRotation, client: Client | None, settings: RotationSettings
) -> RotationReport:
    if not settings.finish:
        cell.begin_operator(settings.operator_seed)
        return RotationReport("operator", False, next=(_restart(cell), _TO_FINISH_OPERATOR))
    if client is None:
        raise RotationRefused(
            "--what operator --finish needs --nats: servers are asked whether they know the new "
            "key, and told accounts that it has signed"
        )
    cell.operator_identity(settings.operator_seed)
    await _check_trust(cell, client, cell.read().operator_signing[-1])
    cell.use_operator_key()
    told = await _tell(cell, client)
    if not settings.cut:
        await _wait_for_tenants(cell, client, by_operator=True)
    cell.finish_operator(settings.operator_seed)
    return RotationReport("operator", True, told, next=(_restart(cell),))


async def _tell(cell: KeyRotation, client: Client | None) -> Sequence[str]:
    """Tell the servers all accounts; returns their names."""
    if client is None:
        return ()
    await _check_trust(cell, client, cell.operator_signer())
    told: set[str] = set()
    for token in cell.account_tokens():
        told |= (await push_claims(client, token, _PUSH_SECONDS)).taken
    return sorted(told)


async def _check_trust(cell: KeyRotation, client: Client, key: str) -> None:
    """Raise `RotationRefused` unless all servers that have a configuration here know a key."""
    trusted = await list_trusted_keys(client)
    silent = set(cell.list_servers()) - trusted.keys()
    foreign = {name for name, keys in trusted.items() if key not in keys}
    if silent and key != cell.operator_signer():
        raise RotationRefused(
            f"{', '.join(sorted(silent))} does not answer, and would not know the operator's new "
            "key: start it with its new configuration, or remove that from nodes/"
        )
    if foreign:
        raise RotationRefused(
            f"{', '.join(sorted(foreign))} does not know the operator's key {key}, and would not "
            f"use what it is told: {_restart(cell)}"
        )


async def _wait_for_tenants(
    cell: KeyRotation, client: Client, *, by_operator: bool = False
) -> None:
    """Wait until admin services have signed all tenants' accounts anew; they look every 2 s.

    Raises `RotationRefused` if some still depend on old keys after `TENANTS_SECONDS`.
    """
    with closing(Countdown(TENANTS_SECONDS)) as limit:
        while True:
            names = cell.name_outdated(await read_all_claims(client), by_operator=by_operator)
            if not names:
                return
            if not limit.seconds_left:
                break
            await asyncio.sleep(_LOOK_SECONDS)
    raise RotationRefused(
        f"{', '.join(names[:20])} ({len(names)} in all) would be cut off: these tenants' accounts "
        "are still signed by keys that are to go. An admin service with the new keys signs them "
        "anew (event accounts_told): give it this directory with --broker-keys, and run this "
        "again; --cut cuts all of them off"
    )


async def _check_connections(cell: KeyRotation, client: Client) -> None:
    """Raise `RotationRefused` while somebody is connected with credentials of an old key."""
    old, issuers = cell.old_keys(), await list_issuers(client)
    names = sorted({name for key, found in issuers.items() if key in old for name in found})
    if names:
        raise RotationRefused(
            f"{', '.join(names[:20])} ({len(names)} in all) still use credentials of the old keys: "
            "processes take up new files within 10 s, tenants must be given new ones; --cut cuts "
            "all of them off"
        )


_BEFORE_USERS = "before users' credentials are made anew"
_BEFORE_USE = "of new signing keys, unless that was done, before processes use the new files"
_ELSE_OLD = "so that the old keys end"
_TO_USERS = "then make users' credentials anew: --what users"
_TO_FINISH = (
    "once all processes use the new files of users/, drop the old keys: --what accounts --finish"
)
_TO_FINISH_OPERATOR = "then sign with the new key: --what operator --finish --nats URL"


def _restart(cell: KeyRotation) -> str:
    files = ", ".join(str(cell.path / "nodes" / f"{name}.conf") for name in cell.list_nodes())
    return (
        f"give each server its new configuration ({files or 'of `millstream up`: at its start'}) "
        "and restart it, one after another; a reload does not change the operator's keys"
    )


def _untold(cell: KeyRotation, client: Client | None, why: str) -> Sequence[str]:
    """Instructions for the case that no server was told, with why or when they must be."""
    if client:
        return ()
    finish = " --finish" if why == _ELSE_OLD else ""
    names = ", ".join(cell.list_nodes()) or "the server of `millstream up`"
    return (
        f"{names} must be told {why}: run `--what accounts{finish}` with --nats URL, or restart "
        "each with its new configuration",
    )


def _print(report: RotationReport, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(report)))
        return
    print(f"{report.what}: {'finished' if report.is_finished else 'old and new keys are good'}")
    for label, names in (("told", report.told), ("made anew", report.users)):
        if names:
            print(f"{label}: {', '.join(names)}")
    for each in report.next:
        print(each)
