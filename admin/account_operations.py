"""Handlers of the operations on tenants' accounts at the broker; they return JSON objects."""

from collections.abc import Mapping
from functools import partial

from admin.account_updates import AccountUpdates
from admin.operation_table import CredentialsArguments, PageArguments, TenantNameArguments
from admin.operations import Handler, JsonBody, make_page
from registry.credentials.tenant_accounts import TenantAccount, TenantAccounts
from registry.tenants import TenantNotFound, Tenants
from streams.broker.broker_client import Broker
from streams.broker.clock_sync import sample_once
from streams.broker.retry import retry_for
from streams.errors import MillstreamError

_CLOCK_SECONDS = 10.0  # in which streams are declared, as a rule


class NoBrokerKeys(MillstreamError):
    """No account can be signed: this admin service was given no directory of keys."""

    code = "no_broker_keys"

    def __init__(self) -> None:
        super().__init__(
            "this admin service has no keys to sign accounts with: give it --broker-keys, the "
            "directory that `millstream broker init` made for its NATS servers"
        )


class TenantNotPublishing(MillstreamError):
    """The tenant may not submit over NATS, so credentials for it would open nothing."""

    code = "tenant_not_publishing"

    def __init__(self, tenant: str) -> None:
        super().__init__(
            f"the tenant {tenant!r} does not publish to NATS: set `publishes` in its table of the "
            f"configuration, or `millstream tenants change {tenant} --publishes`"
        )
        self.tenant = tenant


class AccountOperations:
    """The operations on accounts; they raise `NoBrokerKeys` and the errors of `TenantAccounts`.

    A change is answered once it is stored and every server that lives has taken it; else
    `AccountsNotTold` is raised, and the service that leads tells the servers. Credentials are in
    the answer that issues them, and nowhere else.
    """

    def __init__(
        self,
        broker: Broker,
        tenants: Tenants,
        accounts: TenantAccounts,
        updates: AccountUpdates | None,
    ) -> None:
        self._broker, self._tenants, self._accounts = broker, tenants, accounts
        self._given_updates = updates

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The coroutine function of each operation in the table, by its name."""
        return {
            "accounts.list": self._list,
            "credentials.issue": self._issue,
            "credentials.withdraw": self._withdraw,
        }

    @property
    def _updates(self) -> AccountUpdates:
        if self._given_updates is None:
            raise NoBrokerKeys
        return self._given_updates

    async def _now(self) -> float:
        """The cluster's time in epoch seconds, whatever this machine's clock says."""
        await retry_for(_CLOCK_SECONDS, partial(sample_once, self._broker))
        return self._broker.clock.now()

    async def _list(self, page: PageArguments) -> JsonBody:
        accounts = self._accounts.by_tenant
        return make_page(
            accounts, lambda name: _describe(accounts[name]), after=page.after, limit=page.limit
        )

    async def _issue(self, arguments: CredentialsArguments) -> JsonBody:
        updates, tenant = self._updates, self._tenants.get(arguments.name)
        if tenant is None:
            raise TenantNotFound(arguments.name)
        if not tenant.publishes:
            raise TenantNotPublishing(tenant.name)
        now, seconds = await self._now(), arguments.expires_seconds
        account = await self._accounts.issue(
            tenant.name, now, updates.basis, arguments.overlap_seconds
        )
        await updates.push(account)
        expires_at = None if seconds is None else int(now + seconds)
        made = updates.sign_user(account, expires_at)
        shown = {"user": made.user, "expires_at": expires_at, "credentials": made.text()}
        return {**_describe(account), **shown}

    async def _withdraw(self, arguments: TenantNameArguments) -> JsonBody:
        account = await self._disable(arguments.name)
        return _describe(account)

    async def withdraw_if_any(self, tenant: str) -> None:
        """Cut off a tenant's users, if it has an account; raises `AccountsNotTold`."""
        if tenant in self._accounts.by_tenant:
            await self._disable(tenant)

    async def _disable(self, tenant: str) -> TenantAccount:
        now = self._broker.clock.now()  # times of an account rise, whatever it says
        account = await self._accounts.change(tenant, lambda old: old.disable(now))
        if self._given_updates:  # else another admin service has the keys, and tells the servers
            await self._given_updates.push(account)
        return account


def _describe(account: TenantAccount) -> JsonBody:
    """Return what operators see of an account; its public key is `account`."""
    return {
        "name": account.tenant,
        "account": account.public,
        "issued_at": account.issued_at,
        "disabled": account.is_disabled,
        "endings": [each.at for each in account.endings],
    }
