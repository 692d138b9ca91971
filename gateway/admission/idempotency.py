"""Idempotency keys: the first submission under a key names the request, later ones find it.

One record per tenant and key in the KV bucket `idempotency`, made by compare-and-set, forgotten
with the token log that it leads to.
"""

import asyncio
import hashlib
import json
from dataclasses import dataclass, replace

from nats.js.api import DiscardPolicy, StreamConfig

from streams import topology
from streams.broker import declaration
from streams.broker.connection import STORE_SECONDS, Broker, StoreRefused
from streams.errors import BrokerUnavailable, IdempotencyConflict
from streams.headers import EXPECTED_LAST
from streams.subjects import token
from streams.topology import Scale

BUCKET = "idempotency"
_READS, _READ_SECONDS = 20, 0.05


@dataclass(frozen=True)
class IdempotencyRecord:
    """The request that a key stands for; `first` when this very call has made it so."""

    request_id: str
    digest: str
    is_first: bool = True


class IdempotencyStore:
    """The keys of all tenants."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def open(self, replicas: int) -> None:
        """Create the bucket if it is missing. Raises what `declaration.declare_stream` raises."""
        await declaration.declare_stream(self._broker, _bucket_config(), Scale(replicas))

    async def find(self, tenant: str, key: str) -> str | None:
        """The request that a key stands for, if any. Raises `BrokerUnavailable`."""
        known = await self._read(_subject(tenant, key))
        return known.request_id if known else None

    async def claim(self, tenant: str, key: str, request_id: str, digest: str) -> IdempotencyRecord:
        """Bind `key` to `request_id`, or find what it is bound to.

        Any broker tells that, so that a client that comes back is not refused while they elect a
        leader. Raises `IdempotencyConflict` if that had another digest, `BrokerUnavailable`.
        """
        subject = _subject(tenant, key)
        if known := await self._read(subject):
            return _check_digest(known, request_id, digest)
        mine = {"request_id": request_id, "digest": digest}
        try:
            await self._broker.store_retrying(
                subject, json.dumps(mine).encode(), {EXPECTED_LAST: "0"}, STORE_SECONDS
            )
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                raise
            return _check_digest(await self._read_existing(subject), request_id, digest)
        return IdempotencyRecord(request_id, digest)

    async def _read_existing(self, subject: str) -> IdempotencyRecord:
        """The record that is known to be there; a replica may learn of it a moment later."""
        for _ in range(_READS):
            if known := await self._read(subject):
                return known
            await asyncio.sleep(_READ_SECONDS)
        raise BrokerUnavailable("the record of this idempotency key cannot be read")

    async def _read(self, subject: str) -> IdempotencyRecord | None:
        found = await self._broker.read(f"KV_{BUCKET}", {"last_by_subj": subject})
        return IdempotencyRecord(**json.loads(found[0].data)) if found else None


def _check_digest(known: IdempotencyRecord, request_id: str, digest: str) -> IdempotencyRecord:
    """What a key is bound to; to `request_id` if only the confirmation of that got lost."""
    if known.digest != digest:
        raise IdempotencyConflict("this idempotency key was used with a different request")
    return replace(known, is_first=known.request_id == request_id)


def _bucket_config() -> StreamConfig:
    """As every NATS client makes it (ADR-8)."""
    return StreamConfig(
        name=f"KV_{BUCKET}",
        subjects=[f"$KV.{BUCKET}.>"],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        max_age=topology.LOG_SECONDS,
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
    )


def _subject(tenant: str, key: str) -> str:
    hashed = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
    return f"$KV.{BUCKET}.{token(tenant)}.{hashed}"
