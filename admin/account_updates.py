"""Tells the NATS servers of tenants' accounts, and keeps these as tenants, keys and time demand."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

import structlog
from nats.aio.client import Client

from admin.metrics import ACCOUNT_UPDATES, UNTOLD_ACCOUNTS
from registry.credentials.tenant_accounts import TenantAccount, TenantAccounts
from registry.tenants import Tenants
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.claims import AccountState
from streams.accounts.credentials_file import UserCredentials
from streams.broker.account_claims import ClaimsRefused, list_servers, push_claims
from streams.broker.cluster_clock import ClusterClock
from streams.broker.reconnecting_client import ReconnectingClient
from streams.coordination.lease import Lease
from streams.errors import BrokerMisconfigured, BrokerUnavailable, MillstreamError

log = structlog.get_logger()

CHECK_SECONDS = 2.0  # between two looks for servers that have joined, and for what is due
RETELL_SECONDS = 60.0  # all is told again: servers take older claims, too, if they come later
_RETRY_SECONDS = 1.0
_UNWANTED_SECONDS = 5.0  # a tenant's record may be seen later than its account's


class AccountsNotTold(MillstreamError):
    """Not every NATS server that lives has taken an account's claims, which are stored."""

    code = "accounts_not_told"

    def __init__(self, reason: str) -> None:
        super().__init__(
            "it is stored, but not every NATS server has taken it, and the admin service that "
            f"leads tells them again ({reason}); ask again for what an answer would have shown"
        )


class AccountUpdates:
    """Tenants' accounts as one admin service signs them, and tells the servers over a connection.

    `connection` is that of a user of the system account, opened here; `cell` has the keys.
    """

    def __init__(
        self,
        connection: ReconnectingClient,
        cell: CellDirectory,
        accounts: TenantAccounts,
        tenants: Tenants,
        lease: Lease,
        clock: ClusterClock,
    ) -> None:
        self._connection, self._cell, self._accounts = connection, cell, accounts
        self._tenants, self._lease, self._clock = tenants, lease, clock
        self._changed = asyncio.Event()
        self._reason = "it has not been tried yet"  # why there is no connection
        self._servers: Mapping[str, str] = {}
        self._told: dict[str, int] = {}  # by tenant, the claims that all these servers have taken
        self._told_at = 0.0  # when all of them were told, in monotonic seconds
        self._unwanted_since: dict[str, float] = {}  # by tenant, monotonic seconds

    @property
    def basis(self) -> str:
        """The digest of rights and keys by which claims are made now."""
        return self._cell.tenant_basis()

    def sign_user(self, account: TenantAccount, expires_at: int | None) -> UserCredentials:
        """Return credentials of a new user of an account, as old as the account's newest claims."""
        return self._cell.sign_tenant_user(
            account.tenant, account.public, account.issued_at, expires_at
        )

    async def push(self, account: TenantAccount) -> None:
        """Tell the servers of an account; returns once every one that lives has taken it.

        Raises `AccountsNotTold`: what is stored stays, and is told by the service that leads.
        """
        try:
            while True:
                await self._push(account, None)
                # Had this process stood still, servers would now have older claims than before
                newest = self._accounts.by_tenant[account.tenant]
                if newest.issued_at <= account.issued_at:
                    return
                account = newest
        except BrokerUnavailable as error:
            raise AccountsNotTold(str(error)) from error

    async def _push(self, account: TenantAccount, living: Mapping[str, str] | None) -> None:
        try:
            token = self._cell.tenant_token(account.tenant, self._state(account))
            await push_claims(self._client(), token, living=living)
        except MillstreamError:
            ACCOUNT_UPDATES.labels("failed").inc()
            raise
        ACCOUNT_UPDATES.labels("told").inc()

    def _client(self) -> Client:
        if not self._connection.is_connected:
            raise BrokerUnavailable(
                "the admin service has no connection of a user of the servers' system account: "
                f"{self._reason}"
            )
        return self._connection.client

    async def run(self) -> None:
        """Tell servers until cancelled, while this process leads."""
        for records in (self._accounts, self._tenants):
            records.on_change(self._changed.set)
        async with AsyncExitStack() as stack:
            await self._connect()
            stack.push_async_callback(self._connection.close)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._connection.run(), name="accounts-connection")
                tasks.create_task(self._follow(), name="accounts")

    async def _connect(self) -> None:
        while True:
            try:
                return await self._connection.open()
            except (BrokerUnavailable, BrokerMisconfigured) as error:
                if str(error) != self._reason:
                    log.warning("accounts_not_told", reason=str(error))
                self._reason = str(error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(self) -> None:
        logged = ""
        while True:
            self._changed.clear()
            try:
                if self._lease.is_held:
                    await self._tell_all()
                else:
                    self._told.clear()
                logged = ""
            except MillstreamError as error:
                if str(error) != logged:
                    log.warning("accounts_not_told", reason=str(error))
                logged = str(error)
            UNTOLD_ACCOUNTS.set(self._count_untold() if self._lease.is_held else 0)
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _tell_all(self) -> None:
        """Bring every account up to date, and tell the servers of those that they do not know.

        Raises `BrokerUnavailable` at the first one that a server has not taken, and
        `ClaimsRefused` after all others.
        """
        servers, now = await list_servers(self._client()), time.monotonic()
        if joined := servers.items() - self._servers.items():
            self._told.clear()
        if is_retelling := now - self._told_at >= RETELL_SECONDS:
            self._told_at = now
        self._servers, basis, refusal, changed = servers, self.basis, None, 0
        for tenant, account in list(self._accounts.by_tenant.items()):
            current = await self._bring_up_to_date(account, basis)
            is_known = self._told.get(tenant) == current.issued_at
            if is_known and not is_retelling:
                continue
            try:
                await self._push(current, servers)
            except ClaimsRefused as error:
                refusal = error
                continue
            self._told[tenant] = current.issued_at
            changed += not is_known
        if changed:
            names = sorted(name for name, _ in joined)
            log.info("accounts_told", accounts=changed, servers=sorted(servers), joined=names)
        if refusal:
            raise refusal

    def _count_untold(self) -> int:
        known = self._accounts.by_tenant
        return sum(self._told.get(name) != each.issued_at for name, each in known.items())

    async def _bring_up_to_date(self, account: TenantAccount, basis: str) -> TenantAccount:
        now = self._clock.now()
        if self._is_unwanted(account):
            return await self._accounts.change(account.tenant, lambda old: old.disable(now))
        if account.basis != basis or account.is_due(now):
            renew = partial(_renew, now=now, basis=basis)
            return await self._accounts.change(account.tenant, renew)
        return account

    def _is_unwanted(self, account: TenantAccount) -> bool:
        """Return True if the tenant is gone, or publishes no more, and is to be cut off."""
        tenant, now = self._tenants.get(account.tenant), time.monotonic()
        if account.is_disabled or (tenant and tenant.publishes):
            self._unwanted_since.pop(account.tenant, None)
            return False
        return now - self._unwanted_since.setdefault(account.tenant, now) >= _UNWANTED_SECONDS

    def _state(self, account: TenantAccount) -> AccountState:
        return account.state(self._cell.read().tenant_signing)


def _renew(account: TenantAccount, now: float, basis: str) -> TenantAccount:
    return account.renew(now, basis).end(now)
