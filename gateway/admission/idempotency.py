"""Idempotency keys: the first submission under a key names its request, later ones find it.

The KV bucket `idempotency` has one record per tenant and key. It is created by compare-and-set, and
expires with the token log that it leads to.
"""

import asyncio
import hashlib
import json
from dataclasses import dataclass, replace

from streams.broker.broker_client import STORE_SECONDS, Broker, StoreRefused
from streams.errors import BrokerUnavailable, IdempotencyConflict
from streams.headers import EXPECTED_LAST
from streams.subjects import token
from streams.topology import IDEMPOTENCY_BUCKET

_READS, _READ_SECONDS = 20, 0.05


@dataclass(frozen=True)
class IdempotencyRecord:
    """The request that an idempotency key stands for, and the digest of its submission.

    `is_first` is True if the call that returned the record has bound this request to the key, and
    `sequence` is the record's in the bucket, where it was stored at `stored_at`, in epoch seconds
    (0 if it is this call's).
    """

    request_id: str
    digest: str
    is_first: bool = True
    sequence: int = 0
    stored_at: float = 0.0


class IdempotencyStore:
    """The idempotency keys of all tenants and the requests they stand for, stored by the broker.

    A key expires with its request's token log.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def find(self, tenant: str, key: str) -> IdempotencyRecord | None:
        """Return what a tenant's key stands for; None if unused. Raises `BrokerUnavailable`."""
        return await self._read(_subject(tenant, key))

    async def claim(self, tenant: str, key: str, request_id: str, digest: str) -> IdempotencyRecord:
        """Bind `key` to `request_id`, or return the record of the request that it already names.

        `is_first` of the result tells which of the two happened. `digest` is that of the
        submission. Raises `IdempotencyConflict` if the key stands for a submission with another
        digest, and `BrokerUnavailable`. An existing record is read from any replica, so a client
        that comes back is served even while the brokers elect a leader.
        """
        subject = _subject(tenant, key)
        if record := await self._read(subject):
            return _check_digest(record, request_id, digest)
        return await self._bind(subject, 0, request_id, digest)

    async def rebind(
        self, tenant: str, key: str, old: IdempotencyRecord, request_id: str, digest: str
    ) -> IdempotencyRecord:
        """Bind a key to `request_id` in place of `old`; returns and raises as `claim`.

        If somebody else has bound it anew, that is the result.
        """
        return await self._bind(_subject(tenant, key), old.sequence, request_id, digest)

    async def _bind(
        self, subject: str, replaces: int, request_id: str, digest: str
    ) -> IdempotencyRecord:
        """Store a record if the last one of its key has this sequence; else return the newer."""
        record = json.dumps({"request_id": request_id, "digest": digest}).encode()
        expected = {EXPECTED_LAST: str(replaces)}
        try:
            stored = await self._broker.store_retrying(subject, record, expected, STORE_SECONDS)
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                raise
            return _check_digest(await self._read_newer(subject, replaces), request_id, digest)
        return IdempotencyRecord(request_id, digest, sequence=stored.seq)

    async def _read_newer(self, subject: str, old: int) -> IdempotencyRecord:
        """Read a record that is known to exist; a replica may learn of it a moment later."""
        for _ in range(_READS):
            if (record := await self._read(subject)) and record.sequence > old:
                return record
            await asyncio.sleep(_READ_SECONDS)
        raise BrokerUnavailable("the record of this idempotency key cannot be read")

    async def _read(self, subject: str) -> IdempotencyRecord | None:
        found = await self._broker.read(f"KV_{IDEMPOTENCY_BUCKET}", {"last_by_subj": subject})
        if not found:
            return None
        record, stored = IdempotencyRecord(**json.loads(found[0].data)), found[0]
        return replace(record, sequence=stored.seq, stored_at=stored.stored_at)


def _check_digest(record: IdempotencyRecord, request_id: str, digest: str) -> IdempotencyRecord:
    """Return the record with `is_first` set; raises `IdempotencyConflict` for another digest.

    A record that has this very `request_id` is ours: only its confirmation was lost.
    """
    if record.digest != digest:
        raise IdempotencyConflict("this idempotency key was used with a different request")
    return replace(record, is_first=record.request_id == request_id)


def _subject(tenant: str, key: str) -> str:
    key_digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
    return f"$KV.{IDEMPOTENCY_BUCKET}.{token(tenant)}.{key_digest}"
