"""Tenants, their API keys and their quotas, as they are stored. Pure."""

from typing import Literal

from pydantic import Field

from registry.models import Record

Source = Literal["config", "api_key", "api"]


class QuotaLimits(Record):
    """Quotas over all gateways; None: unlimited. A day is one of UTC."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None
    spend_per_day: float | None = None  # in the currency of the models' prices

    @property
    def has_limits(self) -> bool:
        return any(getattr(self, name) is not None for name in QuotaLimits.model_fields)


class ApiKey(QuotaLimits):
    """Whose key has the hash that this is stored under, and what it may use of its tenant's."""

    tenant: str
    max_connections: int | None = None  # these two: of each gateway
    frames_per_second: int | None = None
    name: str = ""  # "": of a release that did not name keys
    source: Source = "config"

    @property
    def has_connection_limits(self) -> bool:
        return self.max_connections is not None or self.frames_per_second is not None


class Tenant(QuotaLimits):
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
    key: ApiKey | None = Field(default=None, exclude=True)  # came in by it, and it has limits
