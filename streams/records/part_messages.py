"""Values that may be larger than a message: in parts, of which the one that counts comes last."""

import secrets
from collections.abc import Awaitable, Callable

from streams.broker.broker_client import Broker, StoredMessage, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import EXPECTED_LAST, MAX_HEADER_BYTES

STORE_SECONDS = 30.0
REPLICATION_SECONDS = 30.0  # after so long, a part that a replica does not have was removed
MAX_PARTS = 1024
ReadLast = Callable[[str], Awaitable[StoredMessage | None]]
_PARTS = "Parts"  # how many messages hold a value; the one that counts is the last
_NONCE = "Nonce"  # names the parts before it


async def store_once(
    broker: Broker, subject: str, parts: str, payload: bytes, replaces: int = 0
) -> bool:
    """Store a value on a subject that has none yet; return False if it has one. Idempotent.

    With `replaces`, the sequence of a value that is there, it takes the place of that one. Parts of
    a large one are stored under the subject `parts`, each with a word behind. Raises
    `BrokerUnavailable`, or `StoreRefused` if there is no room.
    """
    headers = {EXPECTED_LAST: str(replaces)}
    limit = broker.max_payload - MAX_HEADER_BYTES
    pieces = [payload[at : at + limit] for at in range(0, len(payload), limit)]
    if len(pieces) > 1:
        nonce = secrets.token_hex(8)
        headers |= {_PARTS: str(len(pieces)), _NONCE: nonce}
        for number, piece in enumerate(pieces[:-1]):
            part = f"{parts}.{nonce}-{number}"
            await broker.store_retrying(part, piece, {}, STORE_SECONDS)
    try:
        await broker.store_retrying(subject, pieces[-1], headers, STORE_SECONDS)
    except StoreRefused as refusal:
        if not refusal.is_conflict:
            raise
        return False
    return True


async def join_parts(broker: Broker, message: StoredMessage, parts: str, read: ReadLast) -> bytes:
    """Return the value of which `message` is the part that counts.

    `read` returns the last message on a subject, of the others, which lie under `parts`. Raises
    `BrokerUnavailable` for parts that this replica does not have yet, ValueError for parts that
    were removed, and KeyError or ValueError for headers of another form.
    """
    count = int(message.headers.get(_PARTS, "1"))
    if count == 1:
        return message.data
    if not 1 < count <= MAX_PARTS:
        raise ValueError(f"it has {count} parts")
    pieces = []
    for number in range(count - 1):
        found = await read(f"{parts}.{message.headers[_NONCE]}-{number}")
        if found is None:
            if broker.clock.now() > message.stored_at + REPLICATION_SECONDS:
                raise ValueError(f"of its {count} parts, number {number} was removed")
            raise BrokerUnavailable(f"a part of the value on {message.subject} cannot be read yet")
        pieces.append(found.data)
    return b"".join((*pieces, message.data))
