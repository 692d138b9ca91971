"""Records of webhook endpoints, as the bucket `webhooks` has them. Pure."""

from dataclasses import dataclass, replace
from typing import Any, Self

from streams import messages, subjects
from streams.records.cas.cas_record import CasRecord

OVERLAP_SECONDS = 24 * 3600  # for which an old secret still signs, where that is asked for
MAX_SECRETS = 8  # of one endpoint, if it is rotated again and again within the overlap


@dataclass(frozen=True)
class SigningSecret:
    """A key that signs; until `expires_at`, in epoch seconds, if that is not None."""

    key: bytes
    expires_at: int | None = None


@dataclass(frozen=True)
class WebhookEndpoint(CasRecord):
    """A server of a tenant's that is told of events: where it is, and of which.

    `secrets` are the newest first. Times are epoch seconds; `updated_at` is that of the last change
    of what a client may change. `disabled_reason` is not empty while nothing is sent: the server
    has said that it is gone, or a client has asked for that. A deleted endpoint has no secrets; a
    jobs service removes its record. `revision` is the sequence of the record in its stream.
    """

    tenant: str
    id: str
    name: str
    url: str
    event_types: tuple[str, ...]
    created_at: int
    updated_at: int
    secrets: tuple[SigningSecret, ...] = ()
    disabled_reason: str = ""
    is_deleted: bool = False

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the record that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire: dict[str, Any] = messages.unpack(data)
        known = messages.from_wire(cls, wire)
        return replace(
            known,
            tenant=subjects.token(known.tenant),
            id=subjects.token(known.id),
            event_types=tuple(known.event_types),
            created_at=int(known.created_at),
            secrets=tuple(messages.from_wire(SigningSecret, each) for each in wire["secrets"]),
            revision=revision,
        )

    def is_told(self, kind: str, at: float) -> bool:
        """Return True if it is to be told of an event of a type, which happened at `at`."""
        is_open = not self.is_deleted and not self.disabled_reason
        return is_open and kind in self.event_types and self.created_at <= at

    def signing_keys(self, now: float) -> list[bytes]:
        """Return the keys that sign at `now`, the newest first."""
        return [s.key for s in self.secrets if s.expires_at is None or now < s.expires_at]

    def rotated(self, key: bytes, now: int, *, keeps_old: bool) -> Self:
        """Return the record with a new key; the old ones sign for another 24 hours, or no more."""
        old: list[SigningSecret] = []
        if keeps_old:
            until = now + OVERLAP_SECONDS
            old = [
                replace(s, expires_at=until if s.expires_at is None else s.expires_at)
                for s in self.secrets
                if s.expires_at is None or now < s.expires_at
            ]
        secrets = (SigningSecret(key), *old[: MAX_SECRETS - 1])
        return replace(self, secrets=secrets, updated_at=now)

    def as_disabled(self, reason: str) -> Self:
        """Return the record of an endpoint to which nothing is sent until a client enables it."""
        return replace(self, disabled_reason=reason)

    def as_deleted(self) -> Self:
        """Return the record of an endpoint that is gone, which no longer holds a secret."""
        return replace(self, secrets=(), is_deleted=True)
