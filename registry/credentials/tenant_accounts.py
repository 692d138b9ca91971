"""Accounts at the broker of tenants that publish to it, in the KV bucket `accounts`.

A record has what an account's claims say and when they were made, and no secret: an account needs
no seed of its own. The admin service alone reads and writes the bucket; every change is a
compare-and-set.
"""

from collections.abc import Callable, Mapping
from typing import Self

from registry.kv_records import KvRecords
from registry.models import Record
from streams.accounts.cell_directory import tenant_account
from streams.accounts.claims import EVERYONE, AccountState, next_issued_at
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.errors import MillstreamError
from streams.subjects import token

BUCKET = "accounts"


class AccountNotFound(MillstreamError):
    """The tenant has no account at the broker."""

    code = "account_not_found"

    def __init__(self, tenant: str) -> None:
        super().__init__(
            f"the tenant {tenant!r} has no account at the broker: `millstream tenants change "
            f"{tenant} --producer DIR` makes one"
        )
        self.tenant = tenant


class Ending(Record):
    """Credentials to be withdrawn at a time: all that were issued at `issued_until` or before."""

    at: float
    issued_until: int


class TenantAccount(Record):
    """Record of a tenant's account: its public key, and what of its claims changes.

    Times are in epoch seconds. `issued_at` is that of the newest claims, and of the credentials
    that were made with them: it rises by a second at least with every change, so that it orders
    both. Credentials of `revoked_until` or before are cut off; those of an ending will be. `basis`
    is a digest of keys and rights by which the newest claims were made.
    """

    tenant: str
    public: str
    issued_at: int = 0
    revoked_until: int = 0
    is_disabled: bool = False
    endings: tuple[Ending, ...] = ()
    basis: str = ""

    def state(self, signing: tuple[str, ...]) -> AccountState:
        """Return what the account's claims say; `signing` are the keys that sign its users."""
        revocations = {EVERYONE: self.revoked_until} if self.revoked_until else {}
        name = tenant_account(self.tenant)
        return AccountState(
            name, self.public, signing, {}, self.issued_at, revocations, self.is_disabled
        )

    def renew(self, now: float, basis: str) -> Self:
        """Return the account with newer claims, made by the keys and rights of `basis`."""
        issued_at = next_issued_at(self.issued_at, now)
        return self.model_copy(update={"issued_at": issued_at, "basis": basis})

    def enable(self, now: float, basis: str, overlap_seconds: float | None = None) -> Self:
        """Return the account as one that lets users in whose credentials are of its newest claims.

        Older credentials stay as they are; with `overlap_seconds` they end after so long.
        """
        made = self.renew(now, basis)
        if overlap_seconds is None:
            return made.model_copy(update={"is_disabled": False})
        ending = Ending(at=now + overlap_seconds, issued_until=made.issued_at - 1)
        endings = (*self.endings, ending)
        return made.model_copy(update={"is_disabled": False, "endings": endings}).end(now)

    def disable(self, now: float) -> Self:
        """Return the account as one that has no connections, and no good credentials."""
        if self.is_disabled:
            return self
        made = self.renew(now, self.basis)
        cut = {"is_disabled": True, "revoked_until": made.issued_at, "endings": ()}
        return made.model_copy(update=cut)

    def is_due(self, now: float) -> bool:
        """Return True if credentials are to be withdrawn that `end` withdraws."""
        return any(each.at <= now for each in self.endings)

    def end(self, now: float) -> Self:
        """Return the account without the endings that are due: their credentials are cut off."""
        due = [each.issued_until for each in self.endings if each.at <= now]
        left = tuple(each for each in self.endings if each.at > now)
        return self.model_copy(
            update={"endings": left, "revoked_until": max(self.revoked_until, *due, 0)}
        )


class TenantAccounts(KvRecords[TenantAccount]):
    """All tenants' accounts, kept current and looked up without waiting.

    Methods that write also raise `BrokerUnavailable` if the broker does not answer, or
    `StoreRefused`.
    """

    bucket = BUCKET

    @property
    def by_tenant(self) -> Mapping[str, TenantAccount]:
        """The accounts by their tenants' names."""
        return self._view.values

    async def issue(
        self, tenant: str, now: float, basis: str, overlap_seconds: float | None = None
    ) -> TenantAccount:
        """Enable a tenant's account, which is made if there is none, as `TenantAccount.enable`.

        New credentials are to have the time `issued_at` of the result.
        """
        public = KeyPair.generate(KeyKind.ACCOUNT).public  # its seed signs nothing, and is not kept

        def change(old: TenantAccount | None) -> TenantAccount:
            account = old or TenantAccount(tenant=tenant, public=public)
            return account.enable(now, basis, overlap_seconds)

        return await self._change(tenant, change)

    async def change(
        self, tenant: str, change: Callable[[TenantAccount], TenantAccount]
    ) -> TenantAccount:
        """Replace an account by what `change` makes of it; raises `AccountNotFound`."""

        def change_known(old: TenantAccount | None) -> TenantAccount:
            if old is None:
                raise AccountNotFound(tenant)
            return change(old)

        return await self._change(tenant, change_known)

    async def _change(
        self, tenant: str, change: Callable[[TenantAccount | None], TenantAccount]
    ) -> TenantAccount:
        made: list[TenantAccount] = []

        def encode(old: TenantAccount | None) -> bytes:
            made.append(change(old))
            return made[-1].model_dump_json().encode()

        await self._view.write(token(tenant), encode)
        return made[-1]

    @staticmethod
    def _decode(key: str, value: bytes) -> TenantAccount:
        return TenantAccount.model_validate_json(value)
