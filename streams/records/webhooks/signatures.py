"""Signatures of webhooks by the Standard Webhooks specification, version `v1`. Pure."""

import base64
import hashlib
import hmac
from collections.abc import Iterable

SECRET_PREFIX = "whsec_"  # nosec B105
SECRET_BYTES = 30  # 40 characters of base64, without padding


def show_secret(key: bytes) -> str:
    """Return a signing key as receivers write it down: `whsec_` and base64."""
    return SECRET_PREFIX + base64.b64encode(key).decode()


def signature_headers(
    keys: Iterable[bytes], message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Return the headers of a webhook, signed with each key; a receiver needs to know one of them.

    `timestamp` is in epoch seconds, of the attempt; receivers refuse one that is five minutes off.
    """
    signed = b"%s.%d.%s" % (message_id.encode(), timestamp, body)
    signatures = (
        base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in keys
    )
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{each}" for each in signatures),
    }
