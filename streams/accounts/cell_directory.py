"""The directory of a cell's keys and credentials, made once and never overwritten.

    cell.json          accounts, their claims' times and revocations, nodes, shards
    keys/identity/     seeds that name the operator and the accounts: take them away and keep them
    keys/signing/      seeds that sign: needed to add users, and for tenants by the admin service
    users/NAME.creds   credentials of processes
    keys/routes        the password by which the servers of a cluster know each other
    nodes/NAME.conf    configuration of each server, with that password

All of it is readable by its owner alone.
"""

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from streams.accounts import minting
from streams.accounts.access import ACCOUNT_OF, ROLES, UserClass, rights_of
from streams.accounts.claims import AccountState, next_issued_at, operator_claims
from streams.accounts.claims_token import decode, encode
from streams.accounts.credentials_file import UserCredentials, read_credentials, write_credentials
from streams.accounts.minting import CLASS_TAG, Mint, NewUser
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.accounts.private_file import write_new, write_whole
from streams.accounts.rights import BrokerAccount, Pins
from streams.accounts.server_configuration import AccountsBlock
from streams.errors import BrokerMisconfigured
from streams.subjects import token

_ROUTES = Path("keys/routes")
_CELL, _LOCK, OPERATOR, TENANT_USERS = "cell.json", "cell.lock", "operator", "tenant-users"
IDENTITY, SIGNING = Path("keys/identity"), Path("keys/signing")
OPERATOR_TOKEN = f"{OPERATOR}.jwt"
TENANT_PREFIX = "T_"  # of the names of tenants' accounts, which are in lower case after it


class InvalidCellDirectory(BrokerMisconfigured):
    """A directory of keys cannot be used; the message names it, the reason and the remedy."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the directory of keys {path} {reason}")


@dataclass(frozen=True)
class CellState:
    """Record of a cell beside its keys: its accounts by name, and how large it is.

    The keys in `tenant_signing` sign the users of all tenants' accounts, which are told of in the
    bucket `accounts`.
    """

    operator: str
    operator_signing: tuple[str, ...]
    shards: int
    accounts: Mapping[str, AccountState] = field(default_factory=dict)
    tenant_signing: tuple[str, ...] = ()

    def with_account(self, state: AccountState) -> "CellState":
        """Return this state with an account added or replaced."""
        return replace(self, accounts={**self.accounts, state.name: state})


class CellDirectory:
    """A cell's keys, from which its accounts and users are made. Safe for several processes.

    Use `create` for one that may not exist yet, else `open`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, shards: int) -> Self:
        """Make all keys that are missing and new claims of all accounts; returns the directory.

        Idempotent: keys that are there stay, and classes of users that are new get theirs. Raises
        `InvalidCellDirectory` for keys without the file that says whose they are, and where it
        cannot be written.
        """
        cell = cls(path)
        try:
            cell._make_folders()
            with cell._locked():
                if not (path / _CELL).exists():
                    cell._make_keys(shards)
                if not (path / _ROUTES).exists():
                    write_new(path / _ROUTES, secrets.token_urlsafe(24))
                state = cell._with_all_roles(_renewed(cell.read(), time.time()))
                state = cell._with_tenant_key(state)
                cell._write(replace(state, shards=shards))
        except OSError as error:
            raise InvalidCellDirectory(
                path, f"cannot be written ({error.strerror}): choose another"
            ) from error
        return cell

    def _make_folders(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (IDENTITY.parent, IDENTITY, SIGNING, Path("users"), Path("nodes")):
            (self.path / folder).mkdir(mode=0o700, exist_ok=True)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return a directory that `create` has made; raises `InvalidCellDirectory`."""
        cell = cls(path)
        cell.read()
        return cell

    def _make_keys(self, shards: int) -> None:
        """Make all keys; one file, written last, says that they are complete."""
        if any(each for each in (self.path / IDENTITY).iterdir()):
            raise InvalidCellDirectory(
                self.path,
                f"has keys but no {_CELL}: bring that file back, or make another directory",
            )
        operator, signing = self._make_pair(OPERATOR, KeyKind.OPERATOR)
        state = CellState(operator.public, (signing.public,), shards)
        for account in BrokerAccount:
            state = state.with_account(self._make_account(account))
        system = state.accounts[BrokerAccount.SYSTEM].public
        self._write_operator(operator, [signing.public], system)
        self._write(state)

    def _with_tenant_key(self, state: CellState) -> CellState:
        """The state with a key that signs tenants' users, made if there is none."""
        if state.tenant_signing:
            return state
        file = self.path / SIGNING / f"{TENANT_USERS}.seed"
        if not file.exists():
            write_whole(file, KeyPair.generate(KeyKind.ACCOUNT).seed)
        key = self._signing_key(TENANT_USERS, KeyKind.ACCOUNT)
        return replace(state, tenant_signing=(key.public,))

    def _write_operator(self, identity: KeyPair, signing: Sequence[str], system: str) -> None:
        """Write the operator's claims, with the public keys that sign for it."""
        claims = operator_claims("millstream", identity.public, signing, system)
        token = encode({**claims, "iat": int(time.time())}, identity)
        write_whole(self.path / OPERATOR_TOKEN, token)

    def _make_account(self, name: str) -> AccountState:
        identity, signing = self._make_pair(name, KeyKind.ACCOUNT)
        return AccountState(name, identity.public, (signing.public,))

    def _with_all_roles(self, state: CellState) -> CellState:
        """Return the state with a key for each class of users, made where there is none."""
        for role in ROLES:
            account = state.accounts[ACCOUNT_OF[role]]
            if role not in account.roles:
                keys = {**account.roles, role: (self._role_key(role).public,)}
                state = state.with_account(replace(account, roles=keys))
        return state

    def _role_key(self, role: str) -> KeyPair:
        """Return the key of a role, which may be there from a try that was killed."""
        name = role_file(role)
        if (self.path / SIGNING / f"{name}.seed").exists():
            return self._signing_key(name, KeyKind.ACCOUNT)
        return self._make_key(SIGNING, name, KeyKind.ACCOUNT)

    def _make_pair(self, name: str, kind: KeyKind) -> tuple[KeyPair, KeyPair]:
        return self._make_key(IDENTITY, name, kind), self._make_key(SIGNING, name, kind)

    def _make_key(self, folder: Path, name: str, kind: KeyKind) -> KeyPair:
        pair = KeyPair.generate(kind)
        write_new(self.path / folder / f"{name}.seed", pair.seed)
        return pair

    def read(self) -> CellState:
        """Return what the directory says of its accounts; raises `InvalidCellDirectory`."""
        file = self.path / _CELL
        try:
            found: dict[str, Any] = json.loads(file.read_text())
            accounts = {name: _account_state(each) for name, each in found.pop("accounts").items()}
            for keys in ("operator_signing", "tenant_signing"):
                found[keys] = tuple(found.get(keys, ()))
            return CellState(**found, accounts=accounts)
        except OSError as error:
            raise InvalidCellDirectory(
                self.path, f"cannot be read ({error.strerror}): make it with `broker init`"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidCellDirectory(
                self.path, f"has a malformed {_CELL}: bring back its last copy"
            ) from error

    def _write(self, state: CellState) -> None:
        write_whole(self.path / _CELL, json.dumps(asdict(state), indent=1))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from changing the directory meanwhile."""
        with os.fdopen(os.open(self.path / _LOCK, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _signing_key(self, name: str, kind: KeyKind) -> KeyPair:
        file = self.path / SIGNING / f"{name}.seed"
        try:
            return KeyPair.from_seed(file.read_text(), kind)
        except OSError as error:
            raise InvalidCellDirectory(
                self.path, f"lacks {SIGNING / file.name} ({error.strerror}): bring it back"
            ) from error

    def mint(self) -> Mint:
        """Return what signs this cell's accounts and users; raises `InvalidCellDirectory`."""
        state = self.read()
        keys = {str(each): self._signing_key(each, KeyKind.ACCOUNT) for each in BrokerAccount}
        operator = self._signing_key(OPERATOR, KeyKind.OPERATOR)
        return Mint(operator, keys, state.accounts, state.shards)

    def accounts_block(self) -> AccountsBlock:
        """Return what every server's configuration says of accounts."""
        mint = self.mint()
        tokens = {mint.states[each].public: mint.account_token(each) for each in BrokerAccount}
        operator = (self.path / OPERATOR_TOKEN).read_text()
        system = mint.states[BrokerAccount.SYSTEM].public
        return AccountsBlock(operator, system, tokens, self.routes_password())

    def routes_password(self) -> str:
        """Return the password by which the servers know each other; raises as `read`."""
        try:
            return (self.path / _ROUTES).read_text()
        except OSError as error:
            raise InvalidCellDirectory(
                self.path, f"lacks {_ROUTES} ({error.strerror}): `broker init` makes it anew"
            ) from error

    def write_node(self, name: str, text: str) -> Path:
        """Write a server's configuration and return the file; it holds no signing key."""
        file = self.path / "nodes" / f"{name}.conf"
        write_whole(file, text)
        return file

    def user_file(self, name: str) -> Path:
        """Return where the credentials of a user of this name are, or would be."""
        return self.path / "users" / f"{token(name)}.creds"

    def add_user(
        self,
        name: str,
        user_class: UserClass,
        pins: Pins | None = None,
        seconds: float | None = None,
    ) -> Path:
        """Write the credentials of a process and return the file.

        By default the user is pinned to the process `name`; the credentials end after `seconds`, if
        ever. One that is there keeps its key, unless that was revoked, and gets new claims; raises
        `InvalidCellDirectory` if it is of another class.
        """
        file = self.user_file(name)
        with self._locked():
            expires_at = None if seconds is None else int(time.time() + seconds)
            account = self.read().accounts[ACCOUNT_OF[user_class]]
            key = self._user_key(file, user_class)
            if key.public in account.revocations:  # a copy of a file that was removed
                key = KeyPair.generate(KeyKind.USER)
            user = NewUser(user_class, name, key, expires_at)
            signer = self._user_signer(user_class, account)
            made = minting.sign_process_user(
                user, account.public, signer, pins or Pins(id=name), time.time()
            )
            write_credentials(file, made)
        return file

    def _user_signer(self, user_class: UserClass, account: AccountState) -> KeyPair:
        """The key that signs users of a class: that of its role, if it has one there."""
        name = role_file(user_class) if user_class in account.roles else account.name
        return self._signing_key(name, KeyKind.ACCOUNT)

    def _user_key(self, file: Path, user_class: UserClass) -> KeyPair:
        if not file.exists():
            return KeyPair.generate(KeyKind.USER)
        known = read_credentials(file, now=0)
        tags = decode(known.token)["nats"].get("tags", [])
        if f"{CLASS_TAG}{user_class}" not in tags:
            found = ", ".join(t.removeprefix(CLASS_TAG) for t in tags if t.startswith(CLASS_TAG))
            raise InvalidCellDirectory(
                self.path, f"has a user {file.stem!r} of the class {found}: choose another name"
            )
        return known.key

    def sign_owner(self, account: BrokerAccount, name: str, seconds: float) -> UserCredentials:
        """Return credentials of a new user that may do all that an account can, for so long.

        Nothing is kept of it: whoever holds the keys needs no standing right to the stores.
        """
        now = time.time()
        key = KeyPair.generate(KeyKind.USER)
        user = NewUser(UserClass.SYSTEM, name, key, int(now + seconds))
        signer = self._signing_key(account, KeyKind.ACCOUNT)
        public = self.read().accounts[account].public
        return minting.sign_process_user(user, public, signer, Pins(), now)

    def tenant_token(self, tenant: str, state: AccountState) -> str:
        """Return the signed claims of the account of a tenant that publishes to NATS itself.

        They are for the servers (`streams/broker/account_claims.py`).
        """
        return self.mint().tenant_token(tenant, state)

    def sign_tenant_user(
        self, tenant: str, account: str, issued_at: int, expires_at: int | None = None
    ) -> UserCredentials:
        """Return credentials of a new user of a tenant's account, whose public key is given."""
        signer = self._signing_key(TENANT_USERS, KeyKind.ACCOUNT)
        user = NewUser(UserClass.TENANT, tenant, KeyPair.generate(KeyKind.USER), expires_at)
        return minting.sign_tenant_user(user, account, signer, issued_at)

    def tenant_basis(self) -> str:
        """Return a digest of all by which tenants' claims are made: rights, and keys that sign."""
        mint, signing = self.mint(), self.read().tenant_signing
        owners = sorted({right.owner for right in rights_of(UserClass.TENANT)})
        keys = [(mint.states[each].public, mint.accounts[each].public) for each in owners]
        parts = (mint.operator.public, signing, keys, rights_of(UserClass.TENANT))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def account_tokens(self) -> Sequence[str]:
        """Return the tokens of the cell's own accounts, to tell servers of after a rotation."""
        mint = self.mint()
        return [mint.account_token(each) for each in BrokerAccount]


def role_file(role: str) -> str:
    """Return what the file of the signing key of a role is called, without its suffix."""
    return f"{role}-users"


def _account_state(found: dict[str, Any]) -> AccountState:
    roles = {role: tuple(keys) for role, keys in found["roles"].items()}
    return AccountState(**{**found, "signing": tuple(found["signing"]), "roles": roles})


def tenant_account(tenant: str) -> str:
    """Return the name of the account of a tenant that publishes to NATS itself."""
    return f"{TENANT_PREFIX}{token(tenant)}"


def _renewed(state: CellState, now: float) -> CellState:
    """Return the state with a new time for the claims of all of the cell's own accounts."""
    for account in BrokerAccount:
        known = state.accounts[account]
        issued_at = next_issued_at(known.issued_at, now)
        state = state.with_account(replace(known, issued_at=issued_at))
    return state
