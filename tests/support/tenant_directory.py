"""A cell's directory with accounts of tenants, which an admin service would keep in a bucket."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from registry.credentials.tenant_accounts import TenantAccount
from streams.accounts.credentials_file import UserCredentials
from streams.accounts.key_rotation import KeyRotation
from streams.accounts.nkeys import KeyKind, KeyPair


class TenantDirectory(KeyRotation):
    """Makes tokens of tenants' accounts, for a test to tell the servers."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tenants: dict[str, TenantAccount] = {}

    def add_tenant(self, tenant: str) -> str:
        """The account of a tenant, made or enabled."""
        if tenant not in self.tenants:
            public = KeyPair.generate(KeyKind.ACCOUNT).public
            self.tenants[tenant] = TenantAccount(tenant=tenant, public=public)
        return self._change(tenant, lambda old: old.enable(time.time(), self.tenant_basis()))

    def disable_tenant(self, tenant: str) -> str:
        """The account without good credentials and connections."""
        return self._change(tenant, lambda old: old.disable(time.time()))

    def _change(self, tenant: str, change: Callable[[TenantAccount], TenantAccount]) -> str:
        account = self.tenants[tenant] = change(self.tenants[tenant])
        return self.tenant_token(tenant, account.state(self.read().tenant_signing))

    def tenant_credentials(self, tenant: str, expires_at: int | None = None) -> UserCredentials:
        """A new user of the account; the same one's token is never as old as a revocation."""
        account = self.tenants[tenant]
        issued_at = max(account.issued_at, account.revoked_until + 1)
        return self.sign_tenant_user(tenant, account.public, issued_at, expires_at)

    def account_tokens(self) -> Sequence[str]:
        """Those of all accounts, tenants' too."""
        basis = self.tenant_basis()
        return [
            *super().account_tokens(),
            *(self._change(t, lambda old: old.renew(time.time(), basis)) for t in self.tenants),
        ]
