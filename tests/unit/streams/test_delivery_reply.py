"""Reply subjects of deliveries, in both forms that servers have, and others."""

import pytest

from streams.delivery_reply import DeliveryReply

WANTED = DeliveryReply("WORK", "pool", 2, 17, 1_700_000_000_000_000_000)
FIELDS = "WORK.pool.2.17.5.1700000000000000000.3"


@pytest.mark.parametrize(
    "fields",
    [FIELDS, f"_.ACCOUNT.{FIELDS}", f"domain.ACCOUNT.{FIELDS}", f"_.ACCOUNT.{FIELDS}.token"],
)
def test_both_forms_are_read(fields: str) -> None:
    """Newer servers tell domain and account, and perhaps add a token."""
    assert DeliveryReply.parse(f"$JS.ACK.{fields}") == WANTED


@pytest.mark.parametrize(
    "reply", ["", "_INBOX.a.b", f"$JS.API.{FIELDS}", "$JS.ACK.WORK.pool.2", "$JS.ACK.a.b.c.d.e.f.g"]
)
def test_other_subjects_are_refused(reply: str) -> None:
    """No part of them is taken for a number of a delivery."""
    with pytest.raises((ValueError, IndexError)):
        DeliveryReply.parse(reply)
