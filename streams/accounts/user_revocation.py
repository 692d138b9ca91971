"""Single users of a cell cut off, in the claims of their accounts. The servers are to be told."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from streams.accounts.cell_directory import CellState, InvalidCellDirectory
from streams.accounts.claims import AccountState, next_issued_at
from streams.accounts.credentials_file import UserCredentials, read_credentials, write_credentials
from streams.accounts.key_rotation import KeyRotation
from streams.accounts.rights import BrokerAccount

_FOR_EVER = 2**53  # seconds of the epoch: no later claims bring the user's key back


@dataclass(frozen=True)
class RevokedUser:
    """A user that its account's claims name as cut off; `user` is its public key.

    `token` has these claims, signed, for the servers. `file` is where its credentials are.
    """

    name: str
    user: str
    account: str
    token: str
    file: Path


class UserRevocation(KeyRotation):
    """The directory of a cell of which single users are cut off. Use `open`."""

    def revoke(self, name: str, *, renew: bool = False) -> RevokedUser:
        """Write into claims and servers' configurations that a user is cut off for ever.

        Its file stays until the servers have been told, so that this can be repeated; with `renew`
        it gets the credentials of a new key, with the class, pins and expiry of the old one. Raises
        `InvalidCellDirectory` if no such user was made here.
        """
        file = self.user_file(name)
        with self._locked():
            cell, user = self.read(), self._read_user(file)
            account = self._account_of(cell, user)
            revocations = {**account.revocations, user.user: _FOR_EVER}
            issued_at = next_issued_at(account.issued_at, time.time())
            account = replace(account, issued_at=issued_at, revocations=revocations)
            self._write(cell.with_account(account))
            if renew:
                write_credentials(file, self._renewed_user(user, account))
        self._write_nodes()
        token = self.mint().account_token(BrokerAccount(account.name))
        return RevokedUser(name, user.user, account.name, token, file)

    def _read_user(self, file: Path) -> UserCredentials:
        if file.exists():
            return read_credentials(file, now=0)
        known = ", ".join(sorted(each.stem for each in file.parent.glob("*.creds")))
        raise InvalidCellDirectory(
            self.path,
            f"has no user {file.stem!r}: there is {known or 'none'}; one whose file is lost is cut "
            "off with all others by `broker rotate`, and a tenant by `tenants change --withdraw`",
        )

    def _account_of(self, cell: CellState, user: UserCredentials) -> AccountState:
        for account in cell.accounts.values():
            if account.public == user.account:
                return account
        raise InvalidCellDirectory(
            self.path,
            f"has a user {user.name!r} that was not made here: remove its file from users/",
        )
