"""Every operation of the admin service: name, HTTP method and path, arguments. Pure.

The HTTP API, the NATS API, the OpenAPI document and the commands all read this table.
"""

import re
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from registry.credentials.key_records import Network
from registry.models import Adapter, Model, ModelName
from registry.price_records import CURRENCY, MillionPrice
from registry.tenant_records import DEFAULT_SCOPES, Scope
from streams.base_settings import QuotaSettings, Slug, TenantLimits
from streams.records.fleet.curves import Curve, CurveSource

PREFIX = "/admin/v1"
MAX_PAGE = 1000  # records of one answer
MAX_MACHINES = 1000  # of one type for one model
MAX_OVERRIDE_SECONDS = 30 * 86400
OperationScope = Literal["operator", "admin"]
_PLACEHOLDER = re.compile(r"\{(\w+)(?::path)?\}")


class Arguments(BaseModel):
    """Base of all operations' arguments; an unknown one is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class PageArguments(Arguments):
    """Arguments of a list: at most `limit` records with names after `after`."""

    limit: int = Field(100, ge=1, le=MAX_PAGE, description="most records of the answer")
    after: str = Field("", description="name of the last record that is known already")


class NameArguments(Arguments):
    """The name of one record."""

    name: str


class ReasonedArguments(Arguments):
    """A change, and why it is made; the audit log keeps the reason."""

    why: str = Field("", max_length=500, description="why; kept in the audit log")


class AliasNameArguments(ReasonedArguments):
    """The name of an alias that is to change."""

    name: ModelName


class ModelArguments(ReasonedArguments):
    """A model version to register, with another name for the model."""

    name: ModelName
    model: Model
    alias: ModelName | None = None

    @model_validator(mode="after")
    def _agrees_with_its_record(self) -> Self:
        if self.name != self.model.name:
            raise ValueError(f"the model's name is {self.model.name!r}, not {self.name!r}")
        for name, version in self.model.versions.items():
            if name != version.id:
                raise ValueError(f"the version's id is {version.id!r}, not {name!r}")
        return self

    @property
    def sets_price(self) -> bool:
        """True if the record says what the model costs."""
        return bool(self.model.model_fields_set & {"prompt_price", "completion_price"})


class AliasArguments(AliasNameArguments):
    """Another name for a model or for one of its versions; with `expected`, what it means now."""

    model: ModelName
    version: ModelName | None = None
    expected: str | None = Field(None, description="what it must mean now, as MODEL@VERSION")


class AdapterArguments(Arguments):
    """A LoRA adapter to register; its name is `MODEL:ADAPTER`."""

    name: str
    adapter: Adapter

    @model_validator(mode="after")
    def _has_one_name(self) -> Self:
        if self.name != self.adapter.id:
            raise ValueError(f"the adapter's name is {self.adapter.id!r}, not {self.name!r}")
        return self


class ServedArguments(Arguments):
    """A model, `MODEL[@VERSION]`, and the worker or type of machine `name` that serves it."""

    name: Slug
    model: str


class TenantArguments(TenantLimits):
    """A tenant with its limits and its share of the fleet."""

    name: Slug


class TenantNameArguments(Arguments):
    """The name of a tenant."""

    name: Slug


class CredentialsArguments(TenantNameArguments):
    """A tenant for which NATS credentials are issued, and what becomes of older ones."""

    expires_seconds: float | None = Field(None, gt=0, description="from now; null: never")
    overlap_seconds: float | None = Field(
        None, ge=0, description="how long older credentials stay good; null: as long as they were"
    )


class KeyLimits(QuotaSettings):
    """Limits of a managed API key beside its scopes: quotas, models, networks, expiry, rates."""

    models: tuple[str, ...] = Field((), description="models that it may use; none: all")
    force: bool = Field(False, description="take models that are not registered, too")
    networks: tuple[Network, ...] = Field((), description="CIDRs; none: from everywhere")
    expires_seconds: float | None = Field(None, gt=0, description="from now; null: never")
    max_connections: int | None = Field(None, ge=1, description="connections to each gateway")
    frames_per_second: int | None = Field(None, ge=1, description="frames to each gateway")


class KeyArguments(KeyLimits):
    """A managed API key: whose it is, what it may do, and its limits."""

    tenant: Slug
    name: Slug | None = Field(None, description="what usage calls it; by default its id")
    scopes: tuple[Scope, ...] = Field(DEFAULT_SCOPES, min_length=1)


class KeyChangeArguments(KeyLimits):
    """A managed key, and those of its limits that change; null or an empty list ends a limit."""

    id: str


class KeyIdArguments(Arguments):
    """The id of a managed key."""

    id: str


class RotationArguments(KeyIdArguments):
    """A key to replace, and for how many seconds more it works."""

    overlap_seconds: float = Field(3600, ge=0)


class BootstrapArguments(Arguments):
    """Arguments of `keys.bootstrap`; `force` makes a key even where another `admin` one works."""

    force: bool = False


class DenialArguments(Arguments):
    """Arguments of a denial: all tokens of an issuer, of one of its subjects, or with one `jti`.

    With `not_before` (epoch seconds) only those that were issued earlier.
    """

    issuer: str = Field(min_length=1)
    subject: str | None = None
    token_id: str | None = None
    not_before: float | None = None

    @model_validator(mode="after")
    def _names_one_thing(self) -> Self:
        if self.subject is not None and self.token_id is not None:
            raise ValueError("give a subject or a token_id, not both")
        return self


class PricePageArguments(Arguments):
    """Arguments of `prices.list`: at most `limit` entries with versions above `after`."""

    limit: int = Field(100, ge=1, le=MAX_PAGE, description="most records of the answer")
    after: int = Field(0, ge=0, description="version of the last record that is known already")
    model: str | None = Field(None, description="only of this model; none: of all")
    all: bool = Field(False, description="also the prices that hold no longer")


class PriceArguments(Arguments):
    """Arguments of `prices.set`: a model's new price, for a million tokens."""

    name: ModelName
    prompt: MillionPrice
    completion: MillionPrice
    cached: MillionPrice | None = Field(
        None, description="of prompt tokens that a prefix cache had; null: as `prompt`"
    )
    currency: str | None = Field(
        None, pattern=CURRENCY, description="code of ISO 4217; null: that of the newest price"
    )


class AuditPageArguments(Arguments):
    """Arguments of `audit.list`: at most `limit` records with sequences above `after`."""

    limit: int = Field(100, ge=1, le=MAX_PAGE, description="most records of the answer")
    after: int = Field(0, ge=0, description="sequence of the last record that is known already")
    who: str | None = Field(None, description="only of this key's id, `admin-key`, `nats`, …")
    what: str | None = Field(
        None, description="only of this operation or record, such as `tenants` or `tenant acme`"
    )
    since: float | None = Field(None, ge=0, description="only from then on, in epoch seconds")


class FleetPageArguments(Arguments):
    """Arguments of `fleet.show`: none."""


class FleetArguments(Arguments):
    """Arguments of `fleet.set`: how many machines of the type `name` are wanted for a model."""

    name: Slug
    model: ModelName
    count: int = Field(ge=0, le=MAX_MACHINES, description="machines; 0: none")
    seconds: float = Field(
        3600, gt=0, le=MAX_OVERRIDE_SECONDS, description="after which none of them is wanted"
    )


class CurveArguments(Arguments):
    """Arguments of `curves.put`: what a machine of a type does with a model version."""

    name: str = Field(description="`TYPE/MODEL@VERSION`")
    curve: Curve

    @model_validator(mode="after")
    def _can_be_stored(self) -> Self:
        if self.name != self.curve.name:
            raise ValueError(f"the curve's name is {self.curve.name!r}, not {self.name!r}")
        if self.curve.source is CurveSource.LIVE:
            raise ValueError("source is 'live': such curves come from workers; it is bench or file")
        return self


class FleetPauseArguments(Arguments):
    """Arguments of `fleet.pause`: for how long; 0 ends a pause."""

    seconds: float = Field(
        3600, ge=0, le=MAX_OVERRIDE_SECONDS, description="for which nothing is decided; 0: ends it"
    )


@dataclass(frozen=True)
class Operation:
    """One operation; `path` is below `/admin/v1`, and its placeholders are arguments, too.

    `scope` is what a managed key needs for it: `admin` for what changes keys, the deny-list,
    tenants or prices, else `operator`.
    """

    name: str
    method: str
    path: str
    scope: OperationScope
    arguments: type[BaseModel]
    summary: str

    @property
    def is_change(self) -> bool:
        """True if the operation may change a record."""
        return self.method != "GET"

    @property
    def path_arguments(self) -> list[str]:
        """The names of the arguments that are in the path."""
        return _PLACEHOLDER.findall(self.path)

    @property
    def has_body(self) -> bool:
        """True if the other arguments are the body's fields; else they are in the query."""
        return self.method in ("POST", "PUT", "PATCH")

    @property
    def documented_path(self) -> str:
        """The whole path, with its placeholders as OpenAPI writes them."""
        return PREFIX + _PLACEHOLDER.sub(r"{\1}", self.path)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("models.list", "GET", "/models", "operator", PageArguments, "List the models"),
        Operation(
            "models.show",
            "GET",
            "/models/{name:path}",
            "operator",
            NameArguments,
            "Show what a model's, alias's or adapter's name means",
        ),
        Operation(
            "models.put",
            "PUT",
            "/models/{name:path}",
            "operator",
            ModelArguments,
            "Register a model, or a new version of one",
        ),
        Operation(
            "models.remove",
            "DELETE",
            "/models/{name:path}",
            "operator",
            NameArguments,
            "Forget a model with its aliases and adapters, an alias, or an adapter",
        ),
        Operation("aliases.list", "GET", "/aliases", "operator", PageArguments, "List the aliases"),
        Operation(
            "aliases.put",
            "PUT",
            "/aliases/{name:path}",
            "operator",
            AliasArguments,
            "Make a name mean a model or one of its versions",
        ),
        Operation(
            "aliases.back",
            "POST",
            "/alias-returns/{name:path}",
            "operator",
            AliasNameArguments,
            "Make an alias mean what it meant before",
        ),
        Operation(
            "adapters.put",
            "PUT",
            "/adapters/{name:path}",
            "operator",
            AdapterArguments,
            "Register an adapter, or replace it",
        ),
        Operation(
            "served.list",
            "GET",
            "/served",
            "operator",
            PageArguments,
            "List which models the workers of a type, or one worker, serve",
        ),
        Operation(
            "served.add",
            "PUT",
            "/served/{name}",
            "operator",
            ServedArguments,
            "Have a model served by the workers of a type, or by one worker",
        ),
        Operation(
            "served.remove",
            "DELETE",
            "/served/{name}",
            "operator",
            ServedArguments,
            "Have a model served there no longer",
        ),
        Operation("tenants.list", "GET", "/tenants", "operator", PageArguments, "List the tenants"),
        Operation(
            "tenants.show",
            "GET",
            "/tenants/{name}",
            "operator",
            TenantNameArguments,
            "Show a tenant",
        ),
        Operation("tenants.add", "POST", "/tenants", "admin", TenantArguments, "Add a tenant"),
        Operation(
            "tenants.change",
            "PATCH",
            "/tenants/{name}",
            "admin",
            TenantArguments,
            "Change the limits of a tenant that are given",
        ),
        Operation(
            "tenants.remove",
            "DELETE",
            "/tenants/{name}",
            "admin",
            TenantNameArguments,
            "Remove a tenant with its keys",
        ),
        Operation(
            "accounts.list",
            "GET",
            "/accounts",
            "operator",
            PageArguments,
            "List the accounts at the broker of tenants that publish to NATS",
        ),
        Operation(
            "credentials.issue",
            "POST",
            "/tenants/{name}/credentials",
            "admin",
            CredentialsArguments,
            "Issue a tenant's NATS credentials; they are shown once",
        ),
        Operation(
            "credentials.withdraw",
            "DELETE",
            "/tenants/{name}/credentials",
            "admin",
            TenantNameArguments,
            "Cut off all NATS users of a tenant",
        ),
        Operation(
            "prices.list", "GET", "/prices", "operator", PricePageArguments, "List what models cost"
        ),
        Operation(
            "prices.set",
            "PUT",
            "/prices/{name:path}",
            "admin",
            PriceArguments,
            "Enter what a model costs from now on",
        ),
        Operation(
            "fleet.show",
            "GET",
            "/fleet",
            "operator",
            FleetPageArguments,
            "Show the machine types and machines, and what was decided for which reason",
        ),
        Operation(
            "fleet.set",
            "PUT",
            "/fleet/{name}",
            "operator",
            FleetArguments,
            "Want so many machines of a type for a model, for a time",
        ),
        Operation(
            "curves.list",
            "GET",
            "/curves",
            "operator",
            PageArguments,
            "List what machines of each type do with each model version",
        ),
        Operation(
            "curves.put",
            "PUT",
            "/curves/{name:path}",
            "operator",
            CurveArguments,
            "Store what machines of a type do with a model version",
        ),
        Operation(
            "fleet.pause",
            "POST",
            "/fleet-pauses",
            "operator",
            FleetPauseArguments,
            "Decide nothing about machines for a time",
        ),
        Operation("keys.list", "GET", "/keys", "operator", PageArguments, "List the managed keys"),
        Operation(
            "keys.create", "POST", "/keys", "admin", KeyArguments, "Create a key; it is shown once"
        ),
        Operation(
            "keys.bootstrap",
            "POST",
            "/bootstrap",
            "admin",
            BootstrapArguments,
            "Create the first key with the scope admin; it is shown once",
        ),
        Operation(
            "keys.change",
            "PATCH",
            "/keys/{id}",
            "admin",
            KeyChangeArguments,
            "Change the limits of a key that are given",
        ),
        Operation(
            "keys.rotate",
            "POST",
            "/keys/{id}/rotate",
            "admin",
            RotationArguments,
            "Replace a key by a new one, and let the old one expire",
        ),
        Operation(
            "keys.revoke", "DELETE", "/keys/{id}", "admin", KeyIdArguments, "Revoke a key for good"
        ),
        Operation(
            "audit.list",
            "GET",
            "/audit",
            "operator",
            AuditPageArguments,
            "List what was changed, by whom, in order",
        ),
        Operation(
            "denials.list", "GET", "/denials", "operator", PageArguments, "List the denied tokens"
        ),
        Operation(
            "denials.add", "POST", "/denials", "admin", DenialArguments, "Deny tokens of an issuer"
        ),
        Operation(
            "denials.remove",
            "DELETE",
            "/denials/{id}",
            "admin",
            KeyIdArguments,
            "Deny tokens no more",
        ),
    )
}
