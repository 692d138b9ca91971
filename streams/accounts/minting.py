"""Signed tokens of a cell's accounts and users, made of its signing keys and the table of rights.

Signing keys sign, never the identity keys: those name accounts and their stored streams for ever,
and may lie offline.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streams.accounts import access
from streams.accounts.access import UserClass
from streams.accounts.claims import (
    EVERYTHING,
    AccountState,
    Permissions,
    account_claims,
    activation_claims,
    import_claims,
    user_claims,
)
from streams.accounts.claims_token import Claims, decode, encode
from streams.accounts.credentials_file import UserCredentials, credentials_of
from streams.accounts.nkeys import KeyPair
from streams.accounts.rights import STORES, BrokerAccount, Pins, Right
from streams.errors import BrokerMisconfigured

CLASS_TAG = "class:"
_MAX_TOKEN_BYTES = 3584  # with what else a client says, less than the servers' `max_control_line`


def class_of(tags: Iterable[str]) -> UserClass | None:
    """Return the class that a user's tags name; None if they name none that is known."""
    named = {tag.removeprefix(CLASS_TAG) for tag in tags if tag.startswith(CLASS_TAG)}
    return next((each for each in UserClass if each in named), None)


class TooManyPins(BrokerMisconfigured):
    """A user is pinned to so many models that its token would be too long to connect with."""


@dataclass(frozen=True)
class Mint:
    """Signing keys of a cell: one of the operator, and one of each account, by its name.

    `states` has the accounts by the same names. Accounts of tenants need be in neither.
    """

    operator: KeyPair
    accounts: Mapping[str, KeyPair]
    states: Mapping[str, AccountState]
    shards: int

    def account_token(self, account: BrokerAccount) -> str:
        """Return the claims of one of the cell's own accounts, as its state says, signed."""
        state = self.states[account]
        claims = account_claims(
            state,
            access.exports_of(account, self.shards),
            [self.import_right(right, state) for right in access.imports_of(account, self.shards)],
            access.roles_of(account, self.shards),
            stores=account in STORES,
        )
        return encode(claims, self.operator)

    def tenant_token(self, tenant: str, state: AccountState) -> str:
        """Return the claims of the account of a tenant that publishes to NATS itself, signed."""
        rights = access.rights_of(UserClass.TENANT)
        claims = account_claims(state, (), [self.import_right(r, state, tenant) for r in rights])
        return encode(claims, self.operator)

    def import_right(
        self, right: Right, importer: AccountState, tenant: str | None = None
    ) -> Claims:
        """Return the import of what a right is for, with the owner's signed activation.

        With `tenant`, only the part of that tenant is imported.
        """
        owner, subject, kind = self.states[right.owner], right.imported(tenant), right.kind
        activation = activation_claims(
            importer.public, owner.public, subject, kind, importer.issued_at
        )
        token = encode(activation, self.accounts[right.owner])
        return import_claims(
            owner.public,
            subject,
            kind,
            token,
            right.imported_as(tenant),
            tells_user=right.tells_user,
        )


@dataclass(frozen=True)
class NewUser:
    """A user to be made: its class, name and key, and when its credentials end, if ever."""

    user_class: UserClass
    name: str
    key: KeyPair
    expires_at: int | None = None

    def sign(
        self,
        account: str,
        signer: KeyPair,
        now: float,
        tags: Iterable[str] = (),
        permissions: Permissions | None = None,
    ) -> UserCredentials:
        """Return its credentials; `signer` is a key of its account, or of a role there."""
        claims = user_claims(
            self.name,
            self.key.public,
            account,
            int(now),
            permissions=permissions,
            expires_at=self.expires_at,
            tags=(f"{CLASS_TAG}{self.user_class}", *tags),
        )
        token = encode(claims, signer)
        if len(token) > _MAX_TOKEN_BYTES:
            raise TooManyPins(
                f"the token of the user {self.name!r} would have {len(token)} bytes, more than the "
                f"{_MAX_TOKEN_BYTES} that the servers take: pin it to fewer models, or to none"
            )
        return credentials_of(token, decode(token), self.key)


def sign_process_user(
    user: NewUser, account: str, signer: KeyPair, pins: Pins, now: float
) -> UserCredentials:
    """Return credentials of a process; `signer` is the key of its class's role in the account.

    A system user's is a key of the account itself: it may do all that the account can.
    """
    if user.user_class is UserClass.SYSTEM:
        return user.sign(account, signer, now, permissions=EVERYTHING)
    return user.sign(account, signer, now, pins.tags())


def sign_tenant_user(user: NewUser, account: str, signer: KeyPair, now: float) -> UserCredentials:
    """Return credentials of a user of a tenant's account; `signer` is a key of the account."""
    return user.sign(account, signer, now, permissions=access.tenant_permissions(user.name))
