"""Tenants and their API keys in the KV bucket `tenants`, as a live view; keys are hashed."""

import hashlib
from collections.abc import Callable, Iterable, Mapping

from pydantic import SecretStr

from registry.credentials.key_strength import is_weak
from registry.kv_records import KvRecords
from registry.kv_view import Declares, never
from registry.tenant_records import ApiKey, Source, Tenant
from streams.base_settings import KeySettings, TenantSettings
from streams.broker.broker_client import Broker
from streams.errors import MillstreamError
from streams.subjects import token

BUCKET = "tenants"
_TENANT, _KEY = "tenant.", "key."
_SHORT_DIGEST = 8  # digits of a key's hash that serve as the name of a key without one
DEFAULT = "default"  # the tenant of the key given by `--api-key`; it may submit over NATS


class KeyTaken(MillstreamError):
    """An API key already belongs to another tenant; the message names both tenants, not the key."""

    code = "key_taken"

    def __init__(self, tenant: str, holder: str) -> None:
        super().__init__(f"a key of tenant {tenant!r} already belongs to tenant {holder!r}")
        self.tenant, self.holder = tenant, holder


class CertificateTaken(MillstreamError):
    """The name of a client certificate already stands for another tenant."""

    def __init__(self, identity: str, tenant: str, holder: str) -> None:
        super().__init__(
            f"the certificate {identity!r} of tenant {tenant!r} already stands for {holder!r}"
        )
        self.identity, self.tenant, self.holder = identity, tenant, holder


class TenantExists(MillstreamError):
    """A tenant that is to be added is there already."""

    code = "tenant_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"the tenant {name!r} exists already")
        self.name = name


class TenantNotFound(MillstreamError):
    """No tenant has this name."""

    code = "tenant_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no tenant {name!r}: `millstream tenants list` shows all")
        self.name = name


class TenantConfigured(MillstreamError):
    """The tenant comes from a configuration file, which would undo a change made elsewhere."""

    code = "tenant_configured"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the tenant {name!r} comes from the configuration file of the admin service: change "
            f"the table [tenants.{name}] there and start the service again"
        )
        self.name = name


class Tenants(KvRecords[Tenant | ApiKey]):
    """All tenants and their API keys, kept current and looked up without waiting.

    Methods that write also raise `BrokerUnavailable` if the broker does not answer, or
    `StoreRefused`.
    """

    bucket = BUCKET

    def __init__(self, broker: Broker, declares: Declares = never, replicas: int = 1) -> None:
        super().__init__(broker, declares, replicas)
        self._holders: dict[str, set[str]] | None = None  # tenants by their certificates' names
        self._view.on_change(self._forget_holders)

    @property
    def keys(self) -> list[ApiKey]:
        """The records of all API keys of all tenants, without the keys themselves."""
        return [record for record in self._view.values.values() if isinstance(record, ApiKey)]

    @property
    def by_name(self) -> dict[str, Tenant]:
        """All tenants by name."""
        return {t.name: t for t in self._view.values.values() if isinstance(t, Tenant)}

    def get(self, name: str) -> Tenant | None:
        """Return the tenant called `name`; None if there is none."""
        found = self._view.values.get(_TENANT + name)
        return found if isinstance(found, Tenant) else None

    def authenticate(self, key: str) -> Tenant | None:
        """Return the tenant that an API key belongs to; None if there is none.

        That is so for an unknown key, and for a tenant that was removed. The key's record is in the
        result's `key`. The key's hash is looked up, so the time this takes says nothing about any
        key.
        """
        return self.find_key_holder(hash_key(key))

    def find_key_holder(self, digest: str) -> Tenant | None:
        """Return the tenant of the API key with this hash, as `authenticate` does."""
        record = self._view.values.get(_KEY + digest)
        if not isinstance(record, ApiKey):
            return None
        tenant = self.get(record.tenant)
        return tenant.model_copy(update={"key": record}) if tenant else None

    def find_certificate_holders(self, identities: Iterable[str]) -> set[str]:
        """Return the names of the tenants that list one of these names of a client certificate."""
        if self._holders is None:
            self._holders = {}
            for tenant in self.by_name.values():
                for identity in tenant.certificates:
                    self._holders.setdefault(identity, set()).add(tenant.name)
        return set().union(*(self._holders.get(identity, ()) for identity in identities))

    def _forget_holders(self) -> None:
        self._holders = None

    async def upsert(self, tenant: Tenant, keys: Iterable[str] = ()) -> None:
        """Add or replace a tenant, and add `keys` (in clear text) to the keys that it has.

        Raises `KeyTaken` or `CertificateTaken`, before anything is written, if a key or the name of
        a certificate belongs to another tenant.
        """
        records = _make_records(tenant, [KeySettings(key=SecretStr(key)) for key in keys])
        _refuse_taken(records, self._view.values)
        await self._write(records)

    async def add(self, tenant: Tenant) -> None:
        """Add a tenant without keys; raises `TenantExists`."""
        made = tenant.model_dump_json().encode()

        def change(old: Tenant | ApiKey | None) -> bytes:
            if old is not None:
                raise TenantExists(tenant.name)
            return made

        await self._view.write(_TENANT + token(tenant.name), change)

    async def change(self, name: str, fields: Mapping[str, object]) -> None:
        """Set some fields of a tenant's record, by name; the others stay.

        Raises `TenantNotFound`, or `TenantConfigured` for one that a configuration declares.
        """

        def change(old: Tenant | ApiKey | None) -> bytes:
            tenant = _check_changeable(name, old)
            changed = tenant.model_copy(update={**fields, "source": "api"})
            return changed.model_dump_json().encode()

        await self._view.write(_TENANT + name, change)

    async def remove(self, name: str) -> None:
        """Remove a tenant and then its keys; none of them works once this returns.

        Raises as `change`.
        """

        def delete(old: Tenant | ApiKey | None) -> None:
            _check_changeable(name, old)

        await self._view.write(_TENANT + name, delete)
        for key, record in list(self._view.values.items()):
            if isinstance(record, ApiKey) and record.tenant == name:
                await self._view.write(key, lambda _: None)

    async def apply_config(self, configured: Mapping[str, TenantSettings]) -> None:
        """Replace all tenants and keys that came from a configuration by those in `configured`.

        Tenants and keys that are no longer in it are removed; those from another source stay.
        Idempotent. Raises `KeyTaken` or `CertificateTaken`, before anything is written, if two
        tenants have the same key or the same certificate.
        """
        kept = self._records_not_from("config")
        records: dict[str, Tenant | ApiKey] = {}
        if any(isinstance(v, ApiKey) and v.source == "api_key" for v in kept.values()):
            # The tenant `default`, which owns that key, must exist even if not configured.
            owner = Tenant(name=DEFAULT, source="api_key", publishes=True)
            records = {k: v for k, v in _make_records(owner, ()).items() if k not in kept}
        for name, settings in configured.items():
            tenant = Tenant(name=name, **settings.model_dump(exclude={"keys"}))
            _refuse_taken(added := _make_records(tenant, settings.keys), {**kept, **records})
            records |= added
        await self._replace(records, kept)

    async def apply_api_key(self, key: SecretStr) -> None:
        """Set the key given by `--api-key` for the tenant `default`, beside configured keys.

        The tenant is created if it does not exist; the key that was set in this way before is
        removed. Idempotent. Raises `KeyTaken`, before anything is written, if the key belongs to
        another tenant.
        """
        kept = self._records_not_from("api_key")
        tenant = Tenant(name=DEFAULT, source="api_key", publishes=True)
        _refuse_taken(records := _make_records(tenant, [KeySettings(key=key)]), kept)
        await self._replace({k: v for k, v in records.items() if k not in kept}, kept)

    def _records_not_from(self, source: Source) -> dict[str, Tenant | ApiKey]:
        return {k: v for k, v in self._view.values.items() if v.source != source}

    async def _replace(
        self, records: Mapping[str, Tenant | ApiKey], kept: Mapping[str, Tenant | ApiKey]
    ) -> None:
        """Write `records` and delete all others except those in `kept`."""
        for key in self._view.values.keys() - kept.keys() - records.keys():
            await self._view.write(key, lambda _: None)
        await self._write(records)

    async def _write(self, records: Mapping[str, Tenant | ApiKey]) -> None:
        for key, record in records.items():
            await self._view.write(key, _replace_with(record.model_dump_json().encode()))

    @staticmethod
    def _decode(key: str, value: bytes) -> Tenant | ApiKey:
        if key.startswith(_TENANT):
            return Tenant.model_validate_json(value)
        if key.startswith(_KEY):
            record = ApiKey.model_validate_json(value)
            short = key.removeprefix(_KEY)[:_SHORT_DIGEST]
            return record if record.name else record.model_copy(update={"name": short})
        raise ValueError("neither a tenant nor a key")


def hash_key(key: str) -> str:
    """Return the sha256 (hex) of an API key, under which its record is stored."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def check_keys(configured: Mapping[str, TenantSettings], api_key: SecretStr) -> None:
    """Raise `KeyTaken` or `CertificateTaken` if two tenants have the same key or certificate.

    `api_key` is one of the tenant `default`. So a service can tell before it starts that
    `apply_config` or `apply_api_key` would refuse.
    """
    known: dict[str, Tenant | ApiKey] = {}
    for name, settings in configured.items():
        tenant = Tenant(name=name, certificates=settings.certificates)
        _refuse_taken(added := _make_records(tenant, settings.keys), known)
        known |= added
    _refuse_taken(_make_records(Tenant(name=DEFAULT), (KeySettings(key=api_key),)), known)


async def check_tenant(broker: Broker, name: str) -> None:
    """Raise `TenantNotFound` unless a tenant has this name; `BrokerUnavailable` without an answer.

    For commands, which ask once.
    """
    tenants = await Tenants.open(broker)
    try:
        if tenants.get(name) is None:
            raise TenantNotFound(name)
    finally:
        await tenants.close()


def _make_records(tenant: Tenant, keys: Iterable[KeySettings]) -> dict[str, Tenant | ApiKey]:
    """Make the bucket's records, by key, for a tenant and some of its API keys."""
    records: dict[str, Tenant | ApiKey] = {_TENANT + token(tenant.name): tenant}
    for settings in keys:
        key = settings.key.get_secret_value()
        digest = hash_key(key)
        records[_KEY + digest] = ApiKey(
            **settings.model_dump(exclude={"key", "name"}),
            tenant=tenant.name,
            is_weak=is_weak(key),
            name=settings.name or digest[:_SHORT_DIGEST],
            source=tenant.source,
        )
    return records


def _refuse_taken(
    added: Mapping[str, Tenant | ApiKey], known: Mapping[str, Tenant | ApiKey]
) -> None:
    for key, record in added.items():
        if isinstance(record, Tenant) and record.certificates:
            _refuse_taken_certificates(record, known.values())
        other = known.get(key)
        if not isinstance(record, ApiKey) or not isinstance(other, ApiKey):
            continue
        if other.tenant != record.tenant:
            raise KeyTaken(record.tenant, other.tenant)


def _refuse_taken_certificates(tenant: Tenant, known: Iterable[Tenant | ApiKey]) -> None:
    others = (each for each in known if isinstance(each, Tenant) and each.name != tenant.name)
    for other in others:
        for identity in {*tenant.certificates} & {*other.certificates}:
            raise CertificateTaken(identity, tenant.name, other.name)


def _check_changeable(name: str, record: Tenant | ApiKey | None) -> Tenant:
    if not isinstance(record, Tenant):
        raise TenantNotFound(name)
    if record.source == "config":
        raise TenantConfigured(name)
    return record


def _replace_with(value: bytes) -> Callable[[object], bytes]:
    return lambda _: value
