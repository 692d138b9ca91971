"""Endpoints and their secrets, and signatures that another implementation verifies."""

import time
from dataclasses import replace

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from streams.records.webhooks.endpoint_records import (
    MAX_SECRETS,
    OVERLAP_SECONDS,
    SigningSecret,
    WebhookEndpoint,
)
from streams.records.webhooks.signatures import SECRET_BYTES, show_secret, signature_headers

DAY = 86_400
KEYS = [bytes([number]) * SECRET_BYTES for number in range(20)]
ENDPOINT = WebhookEndpoint(
    "acme",
    "0" * 24,
    "ours",
    "https://h.example/",
    ("batch.completed",),
    100,
    100,
    (SigningSecret(KEYS[0]),),
)


@pytest.mark.parametrize("key", KEYS[:2])
def test_each_key_that_signs_verifies(key: bytes) -> None:
    """By the specification's own library."""
    headers = signature_headers(KEYS[:2], "evt_1", int(time.time()), b'{"a":1}')
    assert Webhook(show_secret(key)).verify(b'{"a":1}', headers) == {"a": 1}


def test_what_is_told_of_a_broken_record_has_no_secret() -> None:
    """It goes to the log, where the bytes that were read have no business."""
    with pytest.raises(ValueError, match="further bytes") as caught:
        WebhookEndpoint.unpack(ENDPOINT.pack() + b"\0", 1)
    assert repr(KEYS[0]) not in repr(caught.value)


def test_another_body_id_time_or_key_does_not_verify() -> None:
    """All of them are signed."""
    now = int(time.time())
    headers = signature_headers(KEYS[:1], "evt_1", now, b"{}")
    changed = [
        (show_secret(KEYS[0]), b"[]", headers),
        (show_secret(KEYS[0]), b"{}", {**headers, "webhook-id": "evt_2"}),
        (show_secret(KEYS[0]), b"{}", {**headers, "webhook-timestamp": str(now - 1)}),
        (show_secret(KEYS[1]), b"{}", headers),
    ]
    for secret, body, told in changed:
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(body, told)


def test_a_rotation_keeps_the_old_key_for_a_day_or_not_at_all() -> None:
    """From the rotation on, not from a later one."""
    kept = ENDPOINT.rotated(KEYS[1], 1000, keeps_old=True)
    assert kept.signing_keys(1000 + DAY - 1) == [KEYS[1], KEYS[0]]
    assert kept.signing_keys(1000 + OVERLAP_SECONDS) == [KEYS[1]]
    again = kept.rotated(KEYS[2], 2000, keeps_old=True)
    assert again.signing_keys(1000 + DAY) == [KEYS[2], KEYS[1]]
    assert again.rotated(KEYS[3], 3000, keeps_old=False).signing_keys(3000) == [KEYS[3]]


def test_the_secrets_of_an_endpoint_are_bounded() -> None:
    """Rotations within a day keep that many at most."""
    endpoint = ENDPOINT
    for key in KEYS:
        endpoint = endpoint.rotated(key, 1000, keeps_old=True)
    assert [secret.key for secret in endpoint.secrets] == KEYS[: -MAX_SECRETS - 1 : -1]


def test_a_record_is_read_back_and_a_deleted_one_has_no_secret() -> None:
    """The store keeps nothing that signs."""
    endpoint = ENDPOINT.rotated(KEYS[1], 1000, keeps_old=True)
    assert WebhookEndpoint.unpack(endpoint.pack(), 7) == replace(endpoint, revision=7)
    assert not any(key in endpoint.as_deleted().pack() for key in KEYS[:2])


def test_an_endpoint_is_told_what_it_asked_for_since_it_is_there() -> None:
    """And nothing while it is disabled or gone."""
    assert ENDPOINT.is_told("batch.completed", 100)
    assert not ENDPOINT.is_told("batch.completed", 99)
    assert not ENDPOINT.is_told("batch.failed", 100)
    assert not ENDPOINT.as_disabled("gone").is_told("batch.completed", 100)
    assert not ENDPOINT.as_deleted().is_told("batch.completed", 100)
