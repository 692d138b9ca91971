"""Signing keys of a cell replaced in two steps: new ones beside the old ones, then without these.

Servers are told in between, and users get new credentials. Each step can be repeated after a kill
at any point: a new seed lies in `keys/signing/NAME.next.seed` before its public key is listed, and
takes the place of the old seed, which is then needed no more, after that.
"""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from streams.accounts.access import UserClass
from streams.accounts.cell_directory import (
    IDENTITY,
    OPERATOR,
    SIGNING,
    TENANT_USERS,
    CellDirectory,
    CellState,
    InvalidCellDirectory,
    role_file,
)
from streams.accounts.claims import EVERYTHING, AccountState, next_issued_at
from streams.accounts.claims_token import Claims, decode
from streams.accounts.credentials_file import UserCredentials, read_credentials, write_credentials
from streams.accounts.minting import CLASS_TAG, NewUser, class_of
from streams.accounts.nkeys import InvalidKey, KeyKind, KeyPair
from streams.accounts.private_file import write_whole
from streams.accounts.rights import BrokerAccount
from streams.accounts.server_configuration import with_accounts
from streams.errors import BrokerMisconfigured

_SERVER_NAME = re.compile(r'^server_name: "?([^"\s]+)"?', re.MULTILINE)


class RotationRefused(BrokerMisconfigured):
    """A step of a rotation would cut somebody off; the message says whom, and what to do first."""


class KeyRotation(CellDirectory):
    """The directory of a cell whose signing keys are replaced. Use `open`."""

    def begin_accounts(self) -> None:
        """List a new signing key of each account and role beside the old one, and sign with it.

        Nothing changes while both are listed already. Tell the servers (`account_tokens`) before
        credentials are made.
        """
        with self._locked():
            cell = self.read()
            if not _lists_both(cell):
                for name, state in cell.accounts.items():
                    cell = cell.with_account(self._with_next_keys(name, state))
                new = self._next_key(TENANT_USERS, KeyKind.ACCOUNT).public
                self._write(cell := replace(cell, tenant_signing=(*cell.tenant_signing[-1:], new)))
            self._use_next_seeds(cell)
        self._write_nodes()

    def _with_next_keys(self, name: str, state: AccountState) -> AccountState:
        signing = (state.signing[-1], self._next_key(name, KeyKind.ACCOUNT).public)
        roles = {
            role: (keys[-1], self._next_key(role_file(role), KeyKind.ACCOUNT).public)
            for role, keys in state.roles.items()
        }
        issued_at = next_issued_at(state.issued_at, time.time())
        return replace(state, signing=signing, roles=roles, issued_at=issued_at)

    def _next_key(self, name: str, kind: KeyKind) -> KeyPair:
        """The key that is to sign next; made if there is none yet."""
        if not (file := self._next_file(name)).exists():
            write_whole(file, KeyPair.generate(kind).seed)
        return self._signing_key(f"{name}.next", kind)

    def _next_file(self, name: str) -> Path:
        return self.path / SIGNING / f"{name}.next.seed"

    def _use_next_seeds(self, cell: CellState) -> None:
        """Sign with the new keys of accounts from now on, if they are listed."""
        self._use_next_seed(TENANT_USERS, KeyKind.ACCOUNT, cell.tenant_signing)
        for state in cell.accounts.values():
            self._use_next_seed(state.name, KeyKind.ACCOUNT, state.signing)
            for role, keys in state.roles.items():
                self._use_next_seed(role_file(role), KeyKind.ACCOUNT, keys)

    def _use_next_seed(self, name: str, kind: KeyKind, listed: Sequence[str]) -> None:
        """One that is not listed was left by a kill: it waits for the next rotation."""
        file = self._next_file(name)
        if file.exists() and self._next_key(name, kind).public in listed:
            file.replace(self.path / SIGNING / f"{name}.seed")

    def renew_users(self) -> Sequence[str]:
        """Make credentials and keys of all users in `users/` anew; returns the users' names.

        Names, classes, pins and expiry stay. Those that have expired are left as they are.
        """
        with self._locked():
            accounts = {state.public: state for state in self.read().accounts.values()}
            users = {file: each for file, each in self._users().items() if _is_good(each)}
            for file, user in users.items():
                write_credentials(file, self._renewed_user(user, accounts.get(user.account)))
        return [user.name for user in users.values()]

    def _users(self) -> dict[Path, UserCredentials]:
        files = sorted((self.path / "users").glob("*.creds"))
        return {file: read_credentials(file, now=0) for file in files}

    def _renewed_user(self, user: UserCredentials, account: AccountState | None) -> UserCredentials:
        tags = decode(user.token)["nats"].get("tags", [])
        user_class = class_of(tags)
        if account is None or user_class is None:
            raise InvalidCellDirectory(
                self.path,
                f"has a user {user.name!r} that was not made here: remove its file from users/",
            )
        made = NewUser(user_class, user.name, KeyPair.generate(KeyKind.USER), user.expires_at)
        signer, now = self._user_signer(user_class, account), time.time()
        pins = [tag for tag in tags if not tag.startswith(CLASS_TAG)]
        permissions = EVERYTHING if user_class is UserClass.SYSTEM else None
        return made.sign(account.public, signer, now, pins, permissions)

    def finish_accounts(self, creds: Iterable[Path] = ()) -> None:
        """Drop the old signing keys of accounts: whoever shows credentials of theirs is cut off.

        Raises `RotationRefused` as `check_users`. Nothing changes where each account lists one key.
        """
        with self._locked():
            cell = self.read()
            self._use_next_seeds(cell)
            self.check_users(creds)
            if _lists_both(cell):
                for state in cell.accounts.values():
                    cell = cell.with_account(_with_last_keys(state))
                self._write(replace(cell, tenant_signing=cell.tenant_signing[-1:]))
        self._write_nodes()

    def check_users(self, creds: Iterable[Path] = ()) -> None:
        """Raise `RotationRefused` if credentials in `users/` or `creds` are of old signing keys."""
        cell = self.read()
        kept = {key for each in cell.accounts.values() for key in _last_keys(each)}
        kept |= {*cell.tenant_signing[-1:]}
        users = {**self._users(), **{file: read_credentials(file, now=0) for file in creds}}
        old = [
            file.name
            for file, user in users.items()
            if _is_good(user) and decode(user.token)["iss"] not in kept
        ]
        if old:
            raise RotationRefused(
                f"{', '.join(old)} would be cut off, being signed by keys that are to go: make "
                "them anew with `broker rotate --what users`, and give them to their processes"
            )

    def old_keys(self) -> frozenset[str]:
        """Return the public keys of accounts and roles that `finish_accounts` drops."""
        cell = self.read()
        accounts = cell.accounts.values()
        listed = [keys for each in accounts for keys in (each.signing, *each.roles.values())]
        return frozenset(key for keys in (*listed, cell.tenant_signing) for key in keys[:-1])

    def name_outdated(self, claims: Iterable[Claims], *, by_operator: bool = False) -> list[str]:
        """Return the names of other accounts than the cell's own that depend on old signing keys.

        Those are tenants', in whose `claims` an import or their users' key is of the old keys of
        accounts; with `by_operator`, those that the operator's old key has signed.
        """
        cell, old = self.read(), self.old_keys()
        own = {state.public for state in cell.accounts.values()}
        ours = {cell.operator, *cell.operator_signing}
        tenants = [each for each in claims if each["sub"] not in own and each["iss"] in ours]
        if by_operator:
            signers = cell.operator_signing[:-1]
            return sorted(each["name"] for each in tenants if each["iss"] in signers)
        return sorted(each["name"] for each in tenants if _keys_of(each, cell) & old)

    def begin_operator(self, seed_file: Path | None = None) -> str:
        """List a new signing key of the operator beside the old one; returns the new one's public.

        The old one signs until `use_operator_key`: servers know the new one when they have been
        restarted with the configurations that are written here. `seed_file` has the seed of the
        operator's identity, by default that of the directory. Raises `InvalidCellDirectory` if
        it is missing or another's.
        """
        identity = self.operator_identity(seed_file)
        with self._locked():
            cell = self.read()
            if len(cell.operator_signing) == 1:
                new = self._next_key(OPERATOR, KeyKind.OPERATOR).public
                cell = replace(cell, operator_signing=(cell.operator_signing[-1], new))
                self._write(cell)
            self._list_operator_keys(identity, cell)
        return cell.operator_signing[-1]

    def use_operator_key(self) -> None:
        """Sign accounts with the operator's new key from now on: the servers know it."""
        with self._locked():
            cell, now = self.read(), time.time()
            for state in cell.accounts.values():
                issued_at = next_issued_at(state.issued_at, now)
                cell = cell.with_account(replace(state, issued_at=issued_at))
            self._write(cell)
            self._use_next_seed(OPERATOR, KeyKind.OPERATOR, cell.operator_signing)

    def finish_operator(self, seed_file: Path | None = None) -> None:
        """Drop the operator's old signing key; servers drop it when they are restarted.

        They must have been told all accounts after `use_operator_key`. Raises as `begin_operator`.
        """
        identity = self.operator_identity(seed_file)
        with self._locked():
            cell = self.read()
            cell = replace(cell, operator_signing=cell.operator_signing[-1:])
            self._write(cell)
            self._list_operator_keys(identity, cell)

    def operator_identity(self, seed_file: Path | None) -> KeyPair:
        """Return the operator's identity key, of `seed_file` or the directory's own.

        Raises `InvalidCellDirectory` if it is missing or another's.
        """
        file = seed_file or self.path / IDENTITY / f"{OPERATOR}.seed"
        try:
            pair = KeyPair.from_seed(file.read_text(), KeyKind.OPERATOR)
        except (OSError, InvalidKey) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise InvalidCellDirectory(
                self.path,
                f"wants the seed of its operator's identity, and {file} cannot be read ({reason}): "
                "bring it from where it is kept, and name it with --operator-seed",
            ) from error
        if pair.public != self.read().operator:
            raise InvalidCellDirectory(
                self.path, f"is that of another operator than {file}: bring the seed of its own"
            )
        return pair

    def _list_operator_keys(self, identity: KeyPair, cell: CellState) -> None:
        system = cell.accounts[BrokerAccount.SYSTEM].public
        self._write_operator(identity, cell.operator_signing, system)
        self._write_nodes()

    def operator_signer(self) -> str:
        """Return the public key that signs accounts now; servers must know it."""
        return self._signing_key(OPERATOR, KeyKind.OPERATOR).public

    def list_nodes(self) -> Sequence[str]:
        """Return what the servers' configurations here are called, without their suffix."""
        return sorted(file.stem for file in (self.path / "nodes").glob("*.conf"))

    def list_servers(self) -> Sequence[str]:
        """Return the names by which the servers of these configurations answer."""
        texts = [(self.path / "nodes" / f"{name}.conf").read_text() for name in self.list_nodes()]
        return sorted(found[1] for text in texts if (found := _SERVER_NAME.search(text)))

    def _write_nodes(self) -> None:
        """Bring the accounts in all servers' configurations up to date."""
        block = self.accounts_block()
        for name in self.list_nodes():
            text = (self.path / "nodes" / f"{name}.conf").read_text()
            self.write_node(name, with_accounts(text, block))


def _lists_both(cell: CellState) -> bool:
    """True during the overlap; all accounts' keys change in one write of the cell's file."""
    return len(cell.accounts[BrokerAccount.SYSTEM].signing) > 1


def _keys_of(account: Claims, cell: CellState) -> set[str]:
    """Keys by which an account's imports are signed, and its users if it lists no newer one."""
    body = account["nats"]
    imports = {decode(each["token"])["iss"] for each in body.get("imports", [])}
    listed = {key for key in body.get("signing_keys", []) if isinstance(key, str)}
    return imports if set(cell.tenant_signing[-1:]) & listed else imports | listed


def _last_keys(state: AccountState) -> Sequence[str]:
    return [state.signing[-1], *(keys[-1] for keys in state.roles.values())]


def _with_last_keys(state: AccountState) -> AccountState:
    roles = {role: keys[-1:] for role, keys in state.roles.items()}
    issued_at = next_issued_at(state.issued_at, time.time())
    return replace(state, signing=state.signing[-1:], roles=roles, issued_at=issued_at)


def _is_good(user: UserCredentials) -> bool:
    return user.expires_at is None or user.expires_at > time.time()
