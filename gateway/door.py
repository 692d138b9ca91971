"""What every face of the gateway needs: who is asking, and the ways in and back."""

import asyncio
from dataclasses import dataclass, field
from weakref import WeakSet

from gateway.guests import Guests
from gateway.intake import Intake
from gateway.porter import Porter
from gateway.reader import Reader
from gateway.relay import Relay
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizers
from registry.store import Registry
from registry.tenants import Tenant, Tenants
from streams.connection import Broker
from streams.errors import Refused, Unauthenticated


@dataclass(frozen=True)
class Door:
    """One gateway's parts, put together by its service."""

    settings: GatewaySettings
    broker: Broker
    registry: Registry
    tenants: Tenants
    tokenizers: Tokenizers
    intake: Intake
    relay: Relay
    porter: Porter = field(default_factory=Porter)
    guests: Guests = field(default_factory=Guests)
    readers: WeakSet[Reader] = field(default_factory=WeakSet)  # of answers over HTTP
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    def authenticate(self, key: str | None) -> Tenant:
        """The tenant of a credential; raises `Unauthenticated`."""
        if not key:
            raise Unauthenticated("no API key: send `Authorization: Bearer <key>`")
        tenant = self.tenants.authenticate(key)
        if tenant is None:
            raise Unauthenticated("this API key is not known")
        return tenant

    def check_open(self) -> None:
        """Raises `Refused` while draining: another gateway takes what is new."""
        if self.draining.is_set():
            raise Refused("this gateway is shutting down")

    @property
    def has_served(self) -> bool:
        """True once any model has had a worker: what waits from then on waits in a queue."""
        return self.intake.has_served

    @property
    def workers(self) -> dict[str, int]:
        """Live workers of each registered model."""
        return {name: self.intake.workers(name) for name in self.registry.models}
