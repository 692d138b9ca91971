"""Idempotency keys: the first submission under a key names the request, later ones find it.

One record per tenant and key in the KV bucket `idempotency`, made by compare-and-set, forgotten
with the token log that it leads to.
"""

import asyncio
import hashlib
import json
from dataclasses import dataclass, replace

from nats.js.api import DiscardPolicy, StreamConfig

from streams import declaration, topology
from streams.connection import STORE_SECONDS, Broker, StoreRefused
from streams.errors import BrokerUnavailable, IdempotencyConflict
from streams.headers import EXPECTED_LAST
from streams.subjects import token
from streams.topology import Scale

BUCKET = "idempotency"
_READS, _READ_SECONDS = 20, 0.05


@dataclass(frozen=True)
class Known:
    """The request that a key stands for; `first` when this very call has made it so."""

    request_id: str
    digest: str
    first: bool = True


class Idempotency:
    """The keys of all tenants."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def open(self, replicas: int) -> None:
        """Create the bucket if it is missing. Raises what `declaration.declare_stream` raises."""
        await declaration.declare_stream(self._broker.js, _bucket(), Scale(replicas))

    async def find(self, tenant: str, key: str) -> str | None:
        """The request that a key stands for, if any. Raises `BrokerUnavailable`."""
        query = {"last_by_subj": _subject(tenant, key)}
        found = await self._broker.read(f"KV_{BUCKET}", query)
        return Known(**json.loads(found[0].data)).request_id if found else None

    async def claim(self, tenant: str, key: str, request_id: str, digest: str) -> Known:
        """Bind `key` to `request_id`, or find what it is bound to.

        Raises `IdempotencyConflict` if that had another digest, `BrokerUnavailable`.
        """
        subject = _subject(tenant, key)
        mine = {"request_id": request_id, "digest": digest}
        try:
            await self._broker.store_retrying(
                subject, json.dumps(mine).encode(), {EXPECTED_LAST: "0"}, STORE_SECONDS
            )
        except StoreRefused as refusal:
            if not refusal.lost_race:
                raise
            return await self._found(subject, request_id, digest)
        return Known(request_id, digest)

    async def _found(self, subject: str, request_id: str, digest: str) -> Known:
        """What the key is bound to; to `request_id` if only the confirmation of that got lost."""
        known = Known(**json.loads(await self._read(subject)))
        if known.digest != digest:
            raise IdempotencyConflict("this idempotency key was used with a different request")
        return replace(known, first=known.request_id == request_id)

    async def _read(self, subject: str) -> bytes:
        """The record that is known to be there; a replica may learn of it a moment later."""
        for _ in range(_READS):
            found = await self._broker.read(f"KV_{BUCKET}", {"last_by_subj": subject})
            if found:
                return found[0].data
            await asyncio.sleep(_READ_SECONDS)
        raise BrokerUnavailable("the record of this idempotency key cannot be read")


def _bucket() -> StreamConfig:
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
