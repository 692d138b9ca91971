"""Signed claims, the JSON web tokens of NATS: encode, decode, and check who signed them.

The header names NATS's own algorithm, `ed25519-nkey`: the signature is that of the key in `iss`.
https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/jwt. Pure.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from streams.accounts.nkeys import InvalidKey, KeyPair, verifies
from streams.errors import BrokerMisconfigured

Claims = dict[str, Any]
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}


class InvalidClaims(BrokerMisconfigured, ValueError):
    """A text is no token of NATS, or was not signed by whom it names."""


def encode(claims: Mapping[str, Any], signer: KeyPair) -> str:
    """Return the claims as a token signed by `signer`, which becomes their issuer (`iss`)."""
    body = {**claims, "iss": signer.public}
    digest = hashlib.sha256(_json(body)).digest()
    body["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    signed = f"{_base64(_json(_HEADER))}.{_base64(_json(body))}"
    return f"{signed}.{_base64(signer.sign(signed.encode()))}"


def decode(token: str) -> Claims:
    """Return the claims of a token whose signature is that of its issuer.

    Who the issuer is, and whether the claims have expired, is the caller's to judge. Raises
    `InvalidClaims`; the message has nothing of the token.
    """
    try:
        signed, _, signature = token.strip().rpartition(".")
        header, body = (json.loads(_from_base64(part)) for part in signed.split("."))
        is_ours = header.get("alg") == _HEADER["alg"] and isinstance(body["nats"], dict)
        is_signed = verifies(body["iss"], signed.encode(), _from_base64(signature))
    except (ValueError, KeyError, TypeError, AttributeError, InvalidKey) as error:
        raise InvalidClaims("the text is no token of NATS, or a part of one") from error
    if not is_ours:
        raise InvalidClaims(f"the token is signed by {header.get('alg')!r}, not {_HEADER['alg']!r}")
    if not is_signed:
        raise InvalidClaims("the token was changed after it was signed")
    return dict(body)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_base64(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:
        raise ValueError("no base64") from error
