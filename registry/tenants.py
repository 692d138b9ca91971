"""Tenants and their keys in the KV bucket `tenants`, as a live view; keys are kept as hashes."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Self

from pydantic import Field, SecretStr

from registry.models import Record
from registry.view import OPEN_SECONDS, View
from streams.connection import Broker
from streams.errors import MillstreamError
from streams.settings import KeySettings, TenantSettings
from streams.subjects import token

BUCKET = "tenants"
_TENANT, _KEY = "tenant.", "key."
_SHORT_DIGEST = 8  # of a key that has no name
DEFAULT = "default"  # whose key `--api-key` is
Source = Literal["config", "api_key", "api"]


class KeyTaken(MillstreamError):
    """Two tenants cannot have the same key; the message names both and not the key."""

    def __init__(self, tenant: str, holder: str) -> None:
        super().__init__(f"a key of tenant {tenant!r} already belongs to tenant {holder!r}")
        self.tenant, self.holder = tenant, holder


class Limits(Record):
    """Quotas over all gateways; None: unlimited. A day is one of UTC."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None
    spend_per_day: float | None = None  # in the currency of the models' prices

    @property
    def limited(self) -> bool:
        return any(getattr(self, name) is not None for name in Limits.model_fields)


class KeyHolder(Limits):
    """Whose key has the hash that this is stored under, and what it may use of its tenant's."""

    tenant: str
    max_connections: int | None = None  # these two: of each gateway
    frames_per_second: int | None = None
    name: str = ""  # "": of a release that did not name keys
    source: Source = "config"

    @property
    def bounds_connections(self) -> bool:
        return self.max_connections is not None or self.frames_per_second is not None


class Tenant(Limits):
    """Who pays and who is isolated, and how much of the fleet is theirs."""

    name: str
    weight: float = Field(default=1.0, gt=0)
    reserved_tokens: int = Field(default=0, ge=0)  # of each model's fleet, for its urgent requests
    max_queued: int = Field(default=1000, ge=1)  # per model and priority
    max_connections: int = Field(default=2000, ge=1)  # these two: of each gateway
    frames_per_second: int = Field(default=2000, ge=1)
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    publishes: bool = True  # may submit over NATS: it gets an ingress stream
    source: Source = "config"
    key: KeyHolder | None = Field(default=None, exclude=True)  # came in by it, and it has limits


class Tenants:
    """Who may come in. `by_name` has all of them."""

    def __init__(self, broker: Broker, replicas: int = 1) -> None:
        self._view = View[Tenant | KeyHolder](broker, BUCKET, _decode, replicas)

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
    def keys(self) -> list[KeyHolder]:
        """The holders of all keys."""
        return [holder for holder in self._view.values.values() if isinstance(holder, KeyHolder)]

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
        holder = self._view.values.get(_KEY + hashed(key))
        if not isinstance(holder, KeyHolder):
            return None
        tenant = self.get(holder.tenant)
        if tenant and (holder.limited or holder.bounds_connections):
            return tenant.model_copy(update={"key": holder})
        return tenant

    def on_change(self, observer: Callable[[], None]) -> None:
        """Call `observer` after each change, on the event loop; it must neither block nor raise."""
        self._view.on_change(observer)

    async def put(self, tenant: Tenant, keys: Iterable[str] = ()) -> None:
        """Add or replace a tenant, and add keys to those it has.

        Raises `KeyTaken` before anything is written if a key is another tenant's.
        """
        records = _records(tenant, [KeySettings(key=SecretStr(key)) for key in keys])
        _refuse_taken(records, self._view.values)
        await self._write(records)

    async def declare(self, configured: Mapping[str, TenantSettings]) -> None:
        """Make the tenants and keys that came from a configuration equal to this one.

        Those no longer in it are removed; those that came another way stay. Idempotent. Raises
        `KeyTaken` before anything is written if two tenants have the same key.
        """
        kept = self._not_from("config")
        records: dict[str, Tenant | KeyHolder] = {}
        if any(isinstance(v, KeyHolder) and v.source == "api_key" for v in kept.values()):
            whose = Tenant(name=DEFAULT, source="api_key")  # where the configuration has none
            records = {k: v for k, v in _records(whose, ()).items() if k not in kept}
        for name, settings in configured.items():
            tenant = Tenant(name=name, **settings.model_dump(exclude={"keys"}))
            _refuse_taken(added := _records(tenant, settings.keys), {**kept, **records})
            records |= added
        await self._replace(records, kept)

    async def declare_key(self, key: SecretStr) -> None:
        """Make this the API key of the tenant `default`, beside those of a configuration.

        The tenant is made unless it is there; a key that was declared so before is removed.
        Idempotent. Raises `KeyTaken` before anything is written if it is another tenant's.
        """
        kept = self._not_from("api_key")
        tenant = Tenant(name=DEFAULT, source="api_key")
        _refuse_taken(records := _records(tenant, [KeySettings(key=key)]), kept)
        await self._replace({k: v for k, v in records.items() if k not in kept}, kept)

    def _not_from(self, source: Source) -> dict[str, Tenant | KeyHolder]:
        return {k: v for k, v in self._view.values.items() if v.source != source}

    async def _replace(
        self, records: Mapping[str, Tenant | KeyHolder], kept: Mapping[str, Tenant | KeyHolder]
    ) -> None:
        """Have these records and those that are kept, and no other ones."""
        for key in self._view.values.keys() - kept.keys() - records.keys():
            await self._view.write(key, lambda _: None)
        await self._write(records)

    async def _write(self, records: Mapping[str, Tenant | KeyHolder]) -> None:
        for key, record in records.items():
            await self._view.write(key, _always(record.model_dump_json().encode()))


def hashed(key: str) -> str:
    """What is kept of a key: its sha256 in hex."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def _records(tenant: Tenant, keys: Iterable[KeySettings]) -> dict[str, Tenant | KeyHolder]:
    """What the bucket holds for a tenant and some of its keys."""
    records: dict[str, Tenant | KeyHolder] = {_TENANT + token(tenant.name): tenant}
    for settings in keys:
        digest = hashed(settings.key.get_secret_value())
        records[_KEY + digest] = KeyHolder(
            **settings.model_dump(exclude={"key", "name"}),
            tenant=tenant.name,
            name=settings.name or digest[:_SHORT_DIGEST],
            source=tenant.source,
        )
    return records


def _refuse_taken(
    added: Mapping[str, Tenant | KeyHolder], known: Mapping[str, Tenant | KeyHolder]
) -> None:
    for key, record in added.items():
        other = known.get(key)
        if not isinstance(record, KeyHolder) or not isinstance(other, KeyHolder):
            continue
        if other.tenant != record.tenant:
            raise KeyTaken(record.tenant, other.tenant)


def _always(value: bytes) -> Callable[[object], bytes]:
    return lambda _: value


def _decode(key: str, value: bytes) -> Tenant | KeyHolder:
    if key.startswith(_TENANT):
        return Tenant.model_validate_json(value)
    if key.startswith(_KEY):
        return KeyHolder.model_validate_json(value)
    raise ValueError("neither a tenant nor a key")
