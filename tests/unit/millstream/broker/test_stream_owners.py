"""The table of streams and accounts that operators write for a move."""

import json

import pytest

from millstream.broker.stream_owners import OwnersUnusable, assign_owners, parse_owners

ONE, TWO, THREE = ("A" + letter * 55 for letter in "BCD")


def test_the_exact_name_counts_then_the_longest_pattern() -> None:
    """So a table may be short, and still say everything."""
    owners = parse_owners(json.dumps({"KV_*": ONE, "KV_leases": TWO, "KV_le*": THREE}))
    assert assign_owners(["KV_tenants", "KV_leases", "KV_lender"], owners) == {
        "KV_tenants": ONE,
        "KV_leases": TWO,
        "KV_lender": THREE,
    }


def test_every_stream_without_an_account_is_named() -> None:
    """A stream that stays behind is a stream that is lost from sight."""
    with pytest.raises(OwnersUnusable, match="no account for DEAD, WORK; nothing was changed"):
        assign_owners(["WORK", "LEDGER", "DEAD"], {"LEDGER": ONE})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ("{}", "no JSON object"),
        ('{"LEDGER": 1}', "LEDGER: 1 is not an account's public key"),
        ('{"LEDGER": "CONTROL"}', "'CONTROL' is not an account's public key"),
        (f'{{"LEDGER": "../{ONE}"}}', "is not an account's public key"),
        (f'{{"LEDGER": "U{ONE[1:]}"}}', "is not an account's public key"),
    ],
)
def test_what_is_no_table_of_accounts_is_refused(text: str, said: str) -> None:
    """An account becomes the name of a folder."""
    with pytest.raises(OwnersUnusable, match=said):
        parse_owners(text)
