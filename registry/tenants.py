"""Tenants and their keys in the KV bucket `tenants`, as a live view; keys are kept as hashes."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from pydantic import SecretStr

from registry.kv_view import OPEN_SECONDS, KvView
from registry.tenant_records import ApiKey, Source, Tenant
from streams.broker.connection import Broker
from streams.errors import MillstreamError
from streams.settings import KeySettings, TenantSettings
from streams.subjects import token

BUCKET = "tenants"
_TENANT, _KEY = "tenant.", "key."
_SHORT_DIGEST = 8  # of a key that has no name
DEFAULT = "default"  # whose key `--api-key` is


class KeyTaken(MillstreamError):
    """Two tenants cannot have the same key; the message names both and not the key."""

    def __init__(self, tenant: str, holder: str) -> None:
        super().__init__(f"a key of tenant {tenant!r} already belongs to tenant {holder!r}")
        self.tenant, self.holder = tenant, holder


class Tenants:
    """Who may come in. `by_name` has all of them."""

    def __init__(self, broker: Broker, replicas: int = 1) -> None:
        self._view = KvView[Tenant | ApiKey](broker, BUCKET, _decode, replicas)

    @classmethod
    async def open(
        cls, broker: Broker, *, replicas: int = 1, seconds: float = OPEN_SECONDS
    ) -> Self:
        """Tenants with their keys loaded, current until `close`.

        Raises `BrokerUnavailable` if they have not come after `seconds`.
        """
        tenants = cls(broker, replicas)
        await tenants._view.open(seconds)
        return tenants

    async def close(self) -> None:
        """Stop following changes. Idempotent."""
        await self._view.close()

    @property
    def keys(self) -> list[ApiKey]:
        """The holders of all keys."""
        return [holder for holder in self._view.values.values() if isinstance(holder, ApiKey)]

    @property
    def by_name(self) -> dict[str, Tenant]:
        """All tenants by name."""
        return {t.name: t for t in self._view.values.values() if isinstance(t, Tenant)}

    def get(self, name: str) -> Tenant | None:
        found = self._view.values.get(_TENANT + name)
        return found if isinstance(found, Tenant) else None

    def authenticate(self, key: str) -> Tenant | None:
        """The tenant that a key belongs to, with the key if that has limits of its own.

        Compares hashes by lookup: the time it takes says nothing about any key.
        """
        holder = self._view.values.get(_KEY + hash_key(key))
        if not isinstance(holder, ApiKey):
            return None
        tenant = self.get(holder.tenant)
        if tenant and (holder.has_limits or holder.has_connection_limits):
            return tenant.model_copy(update={"key": holder})
        return tenant

    def on_change(self, observer: Callable[[], None]) -> None:
        """Call `observer` after each change, on the event loop; it must neither block nor raise."""
        self._view.on_change(observer)

    async def upsert(self, tenant: Tenant, keys: Iterable[str] = ()) -> None:
        """Add or replace a tenant, and add keys to those it has.

        Raises `KeyTaken` before anything is written if a key is another tenant's.
        """
        records = _make_records(tenant, [KeySettings(key=SecretStr(key)) for key in keys])
        _refuse_taken_keys(records, self._view.values)
        await self._write(records)

    async def apply_config(self, configured: Mapping[str, TenantSettings]) -> None:
        """Make the tenants and keys that came from a configuration equal to this one.

        Those no longer in it are removed; those that came another way stay. Idempotent. Raises
        `KeyTaken` before anything is written if two tenants have the same key.
        """
        kept = self._records_not_from("config")
        records: dict[str, Tenant | ApiKey] = {}
        if any(isinstance(v, ApiKey) and v.source == "api_key" for v in kept.values()):
            whose = Tenant(name=DEFAULT, source="api_key")  # where the configuration has none
            records = {k: v for k, v in _make_records(whose, ()).items() if k not in kept}
        for name, settings in configured.items():
            tenant = Tenant(name=name, **settings.model_dump(exclude={"keys"}))
            _refuse_taken_keys(added := _make_records(tenant, settings.keys), {**kept, **records})
            records |= added
        await self._replace(records, kept)

    async def apply_api_key(self, key: SecretStr) -> None:
        """Make this the API key of the tenant `default`, beside those of a configuration.

        The tenant is made unless it is there; a key that was declared so before is removed.
        Idempotent. Raises `KeyTaken` before anything is written if it is another tenant's.
        """
        kept = self._records_not_from("api_key")
        tenant = Tenant(name=DEFAULT, source="api_key")
        _refuse_taken_keys(records := _make_records(tenant, [KeySettings(key=key)]), kept)
        await self._replace({k: v for k, v in records.items() if k not in kept}, kept)

    def _records_not_from(self, source: Source) -> dict[str, Tenant | ApiKey]:
        return {k: v for k, v in self._view.values.items() if v.source != source}

    async def _replace(
        self, records: Mapping[str, Tenant | ApiKey], kept: Mapping[str, Tenant | ApiKey]
    ) -> None:
        """Have these records and those that are kept, and no other ones."""
        for key in self._view.values.keys() - kept.keys() - records.keys():
            await self._view.write(key, lambda _: None)
        await self._write(records)

    async def _write(self, records: Mapping[str, Tenant | ApiKey]) -> None:
        for key, record in records.items():
            await self._view.write(key, _replace_with(record.model_dump_json().encode()))


def hash_key(key: str) -> str:
    """What is kept of a key: its sha256 in hex."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def _make_records(tenant: Tenant, keys: Iterable[KeySettings]) -> dict[str, Tenant | ApiKey]:
    """What the bucket holds for a tenant and some of its keys."""
    records: dict[str, Tenant | ApiKey] = {_TENANT + token(tenant.name): tenant}
    for settings in keys:
        digest = hash_key(settings.key.get_secret_value())
        records[_KEY + digest] = ApiKey(
            **settings.model_dump(exclude={"key", "name"}),
            tenant=tenant.name,
            name=settings.name or digest[:_SHORT_DIGEST],
            source=tenant.source,
        )
    return records


def _refuse_taken_keys(
    added: Mapping[str, Tenant | ApiKey], known: Mapping[str, Tenant | ApiKey]
) -> None:
    for key, record in added.items():
        other = known.get(key)
        if not isinstance(record, ApiKey) or not isinstance(other, ApiKey):
            continue
        if other.tenant != record.tenant:
            raise KeyTaken(record.tenant, other.tenant)


def _replace_with(value: bytes) -> Callable[[object], bytes]:
    return lambda _: value


def _decode(key: str, value: bytes) -> Tenant | ApiKey:
    if key.startswith(_TENANT):
        return Tenant.model_validate_json(value)
    if key.startswith(_KEY):
        return ApiKey.model_validate_json(value)
    raise ValueError("neither a tenant nor a key")
