"""Records of tenants, their API keys and quotas, as the bucket `tenants` stores them. Pure."""

from typing import Literal

from pydantic import Field

from registry.models import Record
from streams.base_settings import SoftQuota

Source = Literal["config", "api_key", "api"]
Scope = Literal["infer", "models:read", "usage:read", "jobs", "operator", "admin"]
# Of keys in configurations, and of records that were stored before keys had scopes
DEFAULT_SCOPES: tuple[Scope, ...] = ("infer", "models:read", "usage:read", "jobs")


class QuotaLimits(Record):
    """Quotas of a tenant or of one of its API keys; None means unlimited.

    Each applies to the sum over all gateways. Days and months are those of UTC. Of `soft_quotas` it
    is told how much is used, and no request is refused for them.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None
    spend_per_day: float | None = None  # in the currency of the models' prices
    tokens_per_month: int | None = None
    spend_per_month: float | None = None
    soft_quotas: tuple[SoftQuota, ...] = ()

    @property
    def has_limits(self) -> bool:
        """True if at least one quota is limited."""
        names = QuotaLimits.model_fields.keys() - {"soft_quotas"}
        return any(getattr(self, name) is not None for name in names)

    def enforces(self, quota: str) -> bool:
        """Return True if requests are refused for a quota: it is set, and is not soft."""
        return getattr(self, quota) is not None and quota not in self.soft_quotas


class ApiKey(QuotaLimits):
    """Record of an API key: its tenant, what it may do, and the key's own limits.

    The key's limits apply in addition to the tenant's; None means that only the tenant's limit
    applies. `models` and `networks` (CIDR) are empty where all are allowed. `expires_at` is in
    epoch seconds; None means never. A weak key is one that could be guessed.
    """

    tenant: str
    id: str = ""  # of a managed key, or of an identity provider's token; "": known by its hash
    scopes: tuple[Scope, ...] = DEFAULT_SCOPES
    models: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    expires_at: float | None = None
    is_weak: bool = False
    max_connections: int | None = None  # at each gateway
    frames_per_second: int | None = None  # at each gateway
    name: str = ""  # "": stored by a release that did not name keys
    source: Source = "config"

    def allows_model(self, name: str, model: str, *, is_adapter: bool) -> bool:
        """Return True if requests may ask for `name`, which means `model` or an adapter of it.

        A model that is allowed may be asked for by its aliases and pinned versions, too; an adapter
        by its own name alone.
        """
        return not self.models or name in self.models or (model in self.models and not is_adapter)


class Tenant(QuotaLimits):
    """A tenant: the unit of payment and isolation, with its limits and its share of the fleet."""

    name: str
    weight: float = Field(default=1.0, gt=0)
    reserved_tokens: int = Field(default=0, ge=0)  # of each model's fleet, for its urgent requests
    max_queued: int = Field(default=1000, ge=1)  # per model and priority
    max_connections: int = Field(default=2000, ge=1)  # at each gateway
    frames_per_second: int = Field(default=2000, ge=1)  # at each gateway
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_stored_bytes: int = Field(default=2**30, ge=0)  # of all its files together
    publishes: bool = False  # may submit over NATS: it gets an ingress stream
    certificates: tuple[str, ...] = ()  # names of client certificates that stand for this tenant
    source: Source = "config"
    # The key that authenticated the request; not stored.
    key: ApiKey | None = Field(default=None, exclude=True)
