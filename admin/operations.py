"""Handlers of the operations on the registry and the tenants; they return JSON objects."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from admin.operation_table import (
    AdapterArguments,
    AliasArguments,
    AliasNameArguments,
    ModelArguments,
    NameArguments,
    PageArguments,
    TenantArguments,
    TenantNameArguments,
)
from registry.credentials.keys import Keys
from registry.models import Model
from registry.store import NameTaken, Registry
from registry.tenant_records import Tenant
from registry.tenants import TenantNotFound, Tenants

JsonBody = dict[str, Any]
K = TypeVar("K", str, int)
Handler = Callable[[Any], Awaitable[JsonBody]]
WithdrawCredentials = Callable[[str], Awaitable[None]]
# Of the records in one answer; more are on the next page. NATS carries a message of 1 MB
_PAGE_BYTES = 400_000


class Operations:
    """The operations of one admin service; each takes the arguments that the table names.

    A change is answered once it is stored. They raise the errors of `Registry` and `Tenants`.
    """

    def __init__(
        self, registry: Registry, tenants: Tenants, keys: Keys, withdraw: WithdrawCredentials
    ) -> None:
        """Take the records, and what cuts off the NATS users of a tenant, if it has any."""
        self._registry, self._tenants, self._keys = registry, tenants, keys
        self._withdraw = withdraw

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The coroutine function of each operation in the table, by its name."""
        return {
            "models.list": self._list_models,
            "models.show": self._show_model,
            "models.put": self._put_model,
            "models.remove": self._remove_model,
            "aliases.list": self._list_aliases,
            "aliases.put": self._put_alias,
            "aliases.back": self._move_alias_back,
            "adapters.put": self._put_adapter,
            "tenants.list": self._list_tenants,
            "tenants.show": self._show_tenant,
            "tenants.add": self._add_tenant,
            "tenants.change": self._change_tenant,
            "tenants.remove": self._remove_tenant,
        }

    async def _list_models(self, page: PageArguments) -> JsonBody:
        models = self._registry.models
        return make_page(
            models,
            lambda name: self._describe_model(models[name]),
            after=page.after,
            limit=page.limit,
        )

    async def _show_model(self, arguments: NameArguments) -> JsonBody:
        """Answer with the model, and with the version and the adapter that the name means."""
        if not self._registry.knows(arguments.name):
            raise self._registry.not_found(arguments.name)
        model, version, adapter = self._registry.resolve_target(arguments.name)
        return {
            "model": self._describe_model(model),
            "version": version.id,
            "adapter": adapter and dump_record(adapter),
        }

    async def _put_model(self, arguments: ModelArguments) -> JsonBody:
        model, alias = arguments.model, arguments.alias
        if alias in {*self._registry.models, model.name}:  # before anything is registered
            raise NameTaken(alias)
        await self._registry.add_model(model)
        if alias:
            await self._registry.set_alias(alias, model.name)
        return self._describe_model(self._registry.models.get(model.name, model))

    async def _remove_model(self, arguments: NameArguments) -> JsonBody:
        registry, name = self._registry, arguments.name
        if name not in {*registry.models, *registry.aliases, *registry.adapters}:
            raise registry.not_found(name)
        await registry.remove(name)
        return {"name": name, "removed": True}

    async def _list_aliases(self, page: PageArguments) -> JsonBody:
        aliases = self._registry.aliases
        return make_page(
            aliases, lambda name: dump_record(aliases[name]), after=page.after, limit=page.limit
        )

    async def _put_alias(self, arguments: AliasArguments) -> JsonBody:
        return dump_record(
            await self._registry.set_alias(
                arguments.name, arguments.model, arguments.version, arguments.expected
            )
        )

    async def _move_alias_back(self, arguments: AliasNameArguments) -> JsonBody:
        return dump_record(await self._registry.move_alias_back(arguments.name))

    async def _put_adapter(self, arguments: AdapterArguments) -> JsonBody:
        await self._registry.add_adapter(arguments.adapter)
        return dump_record(arguments.adapter)

    async def _list_tenants(self, page: PageArguments) -> JsonBody:
        tenants = self._tenants.by_name
        return make_page(
            tenants,
            lambda name: self._describe_tenant(tenants[name]),
            after=page.after,
            limit=page.limit,
        )

    async def _show_tenant(self, arguments: TenantNameArguments) -> JsonBody:
        return self._describe_tenant(self._get_tenant(arguments.name))

    async def _add_tenant(self, arguments: TenantArguments) -> JsonBody:
        tenant = Tenant(**arguments.model_dump(), source="api")
        await self._tenants.add(tenant)
        return self._describe_tenant(tenant)

    async def _change_tenant(self, arguments: TenantArguments) -> JsonBody:
        fields = arguments.model_dump(exclude_unset=True, exclude={"name"})
        await self._tenants.change(arguments.name, fields)
        if fields.get("publishes") is False:
            await self._withdraw(arguments.name)
        return self._describe_tenant(self._get_tenant(arguments.name))

    async def _remove_tenant(self, arguments: TenantNameArguments) -> JsonBody:
        await self._tenants.remove(arguments.name)
        await self._keys.remove_of(arguments.name)
        await self._withdraw(arguments.name)
        return {"name": arguments.name, "removed": True}

    def _get_tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            raise TenantNotFound(name)
        return tenant

    def _describe_model(self, model: Model) -> JsonBody:
        """Return a model's record with its aliases and adapters."""
        aliases = [a.name for a in self._registry.aliases.values() if a.model == model.name]
        adapters = [
            dump_record(a) for a in self._registry.adapters.values() if a.model == model.name
        ]
        return {**dump_record(model), "aliases": aliases, "adapters": adapters}

    def _describe_tenant(self, tenant: Tenant) -> JsonBody:
        """Return a tenant's record with the number of its API keys."""
        every = [*self._tenants.keys, *self._keys.all.values()]
        keys = sum(key.tenant == tenant.name for key in every)
        return {**dump_record(tenant), "keys": keys}


def dump_record(record: BaseModel) -> JsonBody:
    """Return a record as a JSON object."""
    return record.model_dump(mode="json")


def make_page(
    names: Iterable[K], describe: Callable[[K], JsonBody], *, after: K, limit: int
) -> JsonBody:
    """Return records in order of name, at most `limit` and as an answer may be large.

    Those up to `after` are left out. There is always one if any is left.
    """
    left = sorted(name for name in names if name > after)
    data: list[JsonBody] = []
    size = 0
    for name in left[:limit]:
        record = describe(name)
        size += len(orjson.dumps(record))
        if data and size > _PAGE_BYTES:
            break
        data.append(record)
    return {"object": "list", "data": data, "has_more": len(data) < len(left)}
