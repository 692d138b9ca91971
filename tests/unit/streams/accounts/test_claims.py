"""Claims say what the servers are to enforce, and newer ones always win."""

import pytest

from streams.accounts.claims import (
    EVERYONE,
    AccountState,
    Export,
    Permissions,
    account_claims,
    activation_claims,
    next_issued_at,
    operator_claims,
    user_claims,
)
from streams.accounts.claims_token import InvalidClaims, decode, encode
from streams.accounts.nkeys import KeyKind, KeyPair

NOW = 1_800_000_000
OPERATOR, ACCOUNT = KeyPair.generate(KeyKind.OPERATOR), KeyPair.generate(KeyKind.ACCOUNT)


@pytest.mark.parametrize(("last", "now", "expected"), [(0, 5.9, 5), (5, 5.9, 6), (9, 5.9, 10)])
def test_claims_are_newer_by_a_second_at_least(last: int, now: float, expected: int) -> None:
    """Of two of the same second either may win, and a clock may be set back."""
    assert next_issued_at(last, now) == expected


def test_a_token_says_who_signed_it() -> None:
    """A server believes the issuer it knows."""
    claims = operator_claims("mill", OPERATOR.public, ["OX"], ACCOUNT.public)
    found = decode(encode(claims, OPERATOR))
    assert (found["iss"], found["sub"]) == (OPERATOR.public, OPERATOR.public)
    assert found["nats"]["signing_keys"] == ["OX"]
    assert found["nats"]["system_account"] == ACCOUNT.public


def test_a_token_that_was_changed_is_none() -> None:
    """So are half a token, and one that is signed in another way."""
    token = encode(account_claims(AccountState("A", ACCOUNT.public)), OPERATOR)
    other = encode(account_claims(AccountState("B", ACCOUNT.public)), OPERATOR)
    head, body, signature = token.split(".")
    for text in ("", head, f"{head}.{body}", f"{head}.{other.split('.')[1]}.{signature}", "a.b.c"):
        with pytest.raises(InvalidClaims):
            decode(text)


def test_a_disabled_account_has_no_connections() -> None:
    """It keeps its key, so that its streams and its name stay."""
    state = AccountState("A", ACCOUNT.public, is_disabled=True, revocations={EVERYONE: NOW})
    found = account_claims(state)["nats"]
    assert found["limits"]["conn"] == 0
    assert found["revocations"] == {"*": NOW}
    assert account_claims(AccountState("A", ACCOUNT.public))["nats"]["limits"]["conn"] == -1


def test_only_a_store_has_jetstream() -> None:
    """The answers of JetStream are written with the server's rights."""
    state = AccountState("A", ACCOUNT.public)
    assert "disk_storage" not in account_claims(state)["nats"]["limits"]
    assert account_claims(state, stores=True)["nats"]["limits"]["disk_storage"] == -1


def test_old_and_new_keys_are_listed_while_they_change() -> None:
    """Users that the old one signed go on until they have new credentials."""
    state = AccountState("A", ACCOUNT.public, ("A1", "A2"), {"worker": ("R1", "R2")})
    permissions = Permissions(("a",), ("b",))
    keys = account_claims(state, roles={"worker": permissions})["nats"]["signing_keys"]
    assert keys[:2] == ["A1", "A2"]
    assert [(k["key"], k["role"], k["template"]["pub"]) for k in keys[2:]] == [
        ("R1", "worker", {"allow": ["a"]}),
        ("R2", "worker", {"allow": ["a"]}),
    ]


def test_a_user_without_rights_has_none() -> None:
    """To NATS an empty list of what is allowed means everything."""
    assert Permissions((), ("b",)).claims() == {"pub": {"deny": [">"]}, "sub": {"allow": ["b"]}}
    found = user_claims("w1", "U", "A", NOW, permissions=Permissions((), ()), expires_at=NOW + 1)
    assert (found["exp"], found["nats"]["pub"]) == (NOW + 1, {"deny": [">"]})


def test_a_user_of_a_role_has_no_permissions_of_its_own() -> None:
    """The servers refuse one that has both."""
    assert not {"pub", "sub", "subs", "data"} & user_claims("w1", "U", "A", NOW)["nats"].keys()


def test_an_activation_never_expires_and_every_export_needs_one() -> None:
    """An import whose activation has expired stops without a word."""
    assert "exp" not in activation_claims("A", "B", "infer.submit.acme.>", "service", NOW)
    assert Export("infer.reply.>", "stream").claims()["token_req"]
    many = Export("$JS.API.>", "service", is_many=True).claims()
    assert (many["response_type"], many["response_threshold"]) == ("Stream", 5_000_000_000)
