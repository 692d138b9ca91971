"""Handlers of the operations on managed keys and the deny-list; they return JSON objects."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from admin.operation_table import (
    BootstrapArguments,
    DenialArguments,
    KeyArguments,
    KeyChangeArguments,
    KeyIdArguments,
    KeyLimits,
    PageArguments,
    RotationArguments,
)
from admin.operations import Handler, JsonBody, dump_record, make_page
from registry.credentials.key_format import KeyText
from registry.credentials.key_pepper import Pepper
from registry.credentials.key_records import Denial, ManagedKey
from registry.credentials.keys import Keys, make_key
from registry.store import Registry
from registry.tenant_records import ApiKey, Tenant
from registry.tenants import TenantExists, TenantNotFound, Tenants
from streams.broker.broker_client import Broker
from streams.broker.clock_sync import sample_once
from streams.broker.retry import retry_for
from streams.errors import MillstreamError
from streams.records.key_use import read_last_uses

_CLOCK_SECONDS = 10.0  # in which streams are declared, as a rule
OPERATORS = "operators"  # the tenant of keys that `millstream admin bootstrap` makes
_FORCE = "; a key may name it with --force (in the API `force`), though it is not registered"
_SECRET_FIELDS = {"seal", "pepper"}


class NoKeyPepper(MillstreamError):
    """This admin service was given no pepper, so it can create no key."""

    code = "no_key_pepper"

    def __init__(self) -> None:
        super().__init__(
            "this admin service has no pepper to seal keys with: give it and all gateways the same "
            "--key-pepper-file"
        )


class AdminKeyExists(MillstreamError):
    """A key with the scope `admin` works already, so there is no first one to make."""

    code = "admin_key_exists"

    def __init__(self, id: str) -> None:
        super().__init__(
            f"the key {id!r} has the scope 'admin' already: use it, or make another one with "
            "--force, and revoke the one that is lost"
        )
        self.id = id


class KeyOperations:
    """The operations on keys and denials.

    They raise the errors of `Keys`, `NoKeyPepper`, and `ModelNotFound` for a key to models of which
    one is not registered, unless that is forced.

    A change is answered once it is stored. The text of a key is in the answer that creates it, and
    nowhere else.
    """

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        tenants: Tenants,
        keys: Keys,
        pepper: Pepper | None,
    ) -> None:
        self._broker, self._registry, self._tenants, self._keys = broker, registry, tenants, keys
        self._given_pepper = pepper

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The coroutine function of each operation in the table, by its name."""
        return {
            "keys.list": self._list_keys,
            "keys.create": self._create_key,
            "keys.bootstrap": self._bootstrap,
            "keys.change": self._change_key,
            "keys.rotate": self._rotate_key,
            "keys.revoke": self._revoke_key,
            "denials.list": self._list_denials,
            "denials.add": self._add_denial,
            "denials.remove": self._remove_denial,
        }

    @property
    def _pepper(self) -> Pepper:
        if self._given_pepper is None:
            raise NoKeyPepper
        return self._given_pepper

    async def _now(self) -> float:
        """The cluster's time in epoch seconds; waits for the streams that tell it at the start."""
        await retry_for(_CLOCK_SECONDS, partial(sample_once, self._broker))
        return self._broker.clock.now()

    async def _list_keys(self, page: PageArguments) -> JsonBody:
        keys, last_uses = self._keys.all, await read_last_uses(self._broker)

        def describe(id: str) -> JsonBody:
            return {**_describe(keys[id]), "last_used_at": last_uses.get(id)}

        return make_page(keys, describe, after=page.after, limit=page.limit)

    async def _create_key(self, arguments: KeyArguments) -> JsonBody:
        if self._tenants.get(arguments.tenant) is None:
            raise TenantNotFound(arguments.tenant)
        self._check_models(arguments)
        pepper, now = self._pepper, await self._now()
        fields = arguments.model_dump(exclude={"expires_seconds", "name", "force"})
        expires_at = _expires_at(arguments, now)
        rights = ApiKey(**fields, name=arguments.name or "", expires_at=expires_at)
        text, record = make_key(rights, pepper, now)
        await self._keys.create(record)
        return _show_once(text, record)

    def _check_models(self, limits: KeyLimits) -> None:
        for name in () if limits.force else limits.models:
            if not self._registry.knows(name):
                raise self._registry.not_found(name, _FORCE)

    async def _bootstrap(self, arguments: BootstrapArguments) -> JsonBody:
        """Create a key of the tenant `operators`, which is added if it is missing."""
        pepper, now = self._pepper, await self._now()
        found = self._keys.find_admin(pepper, now)
        if found and not arguments.force:
            raise AdminKeyExists(found.id)
        if self._tenants.get(OPERATORS) is None:
            with suppress(TenantExists):  # another admin service was faster
                await self._tenants.add(Tenant(name=OPERATORS, source="api"))
        text, record = make_key(ApiKey(tenant=OPERATORS, scopes=("admin",)), pepper, now)
        await self._keys.create(record)
        return _show_once(text, record)

    async def _change_key(self, arguments: KeyChangeArguments) -> JsonBody:
        self._check_models(arguments)
        now = await self._now()
        fields = arguments.model_dump(
            exclude_unset=True, exclude={"expires_seconds", "id", "force"}
        )
        if "expires_seconds" in arguments.model_fields_set:
            fields["expires_at"] = _expires_at(arguments, now)
        return _describe(await self._keys.change(arguments.id, fields, now))

    async def _rotate_key(self, arguments: RotationArguments) -> JsonBody:
        now = await self._now()
        text, record = await self._keys.rotate(
            arguments.id, self._pepper, now, arguments.overlap_seconds
        )
        return _show_once(text, record)

    async def _revoke_key(self, arguments: KeyIdArguments) -> JsonBody:
        await self._keys.revoke(arguments.id, await self._now())
        return {"id": arguments.id, "revoked": True}

    async def _list_denials(self, page: PageArguments) -> JsonBody:
        denials = self._keys.denials
        return make_page(
            denials,
            lambda id: {"id": id, **dump_record(denials[id])},
            after=page.after,
            limit=page.limit,
        )

    async def _add_denial(self, arguments: DenialArguments) -> JsonBody:
        denial = Denial(**arguments.model_dump(), created_at=await self._now())
        await self._keys.deny(denial)
        return {"id": denial.id, **dump_record(denial)}

    async def _remove_denial(self, arguments: KeyIdArguments) -> JsonBody:
        await self._keys.remove_denial(arguments.id)
        return {"id": arguments.id, "removed": True}


def _expires_at(limits: KeyLimits, now: float) -> float | None:
    seconds = limits.expires_seconds
    return None if seconds is None else now + seconds


def _describe(record: ManagedKey) -> JsonBody:
    return record.model_dump(mode="json", exclude=_SECRET_FIELDS)


def _show_once(text: KeyText, record: ManagedKey) -> JsonBody:
    return {"key": str(text), **_describe(record)}
