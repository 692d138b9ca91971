"""The table of rights leaves no way around it, and the document shows it as it is."""

from itertools import combinations
from pathlib import Path

import pytest

from millstream.broker.settings import ProcessClass
from registry import price_book, store, tenants
from registry.credentials import keys, tenant_accounts
from streams import topology
from streams.accounts import access
from streams.accounts.access import ACCOUNT_OF, UserClass, exports_of, imports_of, rights_of
from streams.accounts.rights import STORES, BrokerAccount, Pins, widened
from streams.accounts.rights_table import render_table
from streams.coordination import lease_bucket

DOCUMENT = Path(__file__).parents[4] / "docs/accounts.md"
BEGIN, END = "<!-- the table of rights -->\n", "<!-- end of the table -->\n"


def overlap(one: str, other: str) -> bool:
    """Whether there is a subject that both patterns stand for."""
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return one.count(".") == other.count(".")


@pytest.mark.parametrize("account", BrokerAccount)
def test_every_service_is_imported_by_a_pattern(account: BrokerAccount) -> None:
    """An import without a wildcard is answered in other ways by the servers."""
    imports = [right for right in imports_of(account) if right.action == "publish"]
    assert [
        r.imported() for r in imports if "*" not in r.imported() and ">" not in r.imported()
    ] == []


@pytest.mark.parametrize("account", BrokerAccount)
def test_a_question_goes_to_one_store(account: BrokerAccount) -> None:
    """Two that are imported under one name would both answer."""
    imports = {
        (r.owner, r.local or r.imported())
        for r in imports_of(account, shards=2)
        if r.action == "publish"
    }
    both = [
        (a, b)
        for (a_owner, a), (b_owner, b) in combinations(imports, 2)
        if {a_owner, b_owner} == set(STORES) and overlap(a, b)
    ]
    assert both == []


@pytest.mark.parametrize("account", BrokerAccount)
def test_each_subject_is_exported_once(account: BrokerAccount) -> None:
    """Of two exports that fit, a server takes any: the wrong one cuts an answer short."""
    exports = exports_of(account, shards=2)
    for one, other in combinations(exports, 2):
        assert one.kind != other.kind or not overlap(one.subject, other.subject), (one, other)


def test_only_the_admin_service_may_ask_anything_of_the_stores() -> None:
    """Rights to make streams are rights to read them: a stream may copy any other."""
    changing = ("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "API.>")
    found = {
        (user_class, right.subject)
        for user_class in UserClass
        for right in rights_of(user_class)
        if any(word in right.subject for word in changing) or right.subject.endswith("*.STREAM.*")
    }
    assert found == {
        (UserClass.ADMIN, "$JS.API.>"),
        (UserClass.ADMIN, "$JS.EVENT.ADVISORY.STREAM.DELETED.*"),
        (UserClass.JOBS, "$JS.API.STREAM.PURGE.FILES"),
        (UserClass.JOBS, "$JS.API.STREAM.PURGE.KV_responses"),
        (UserClass.JOBS, "$JS.API.STREAM.PURGE.RESULTS"),
        (UserClass.JOBS, "$JS.API.STREAM.PURGE.TOKENS_jobs"),
        (UserClass.LEDGER, "$JS.API.STREAM.PURGE.LEDGER"),
        (UserClass.TENANT, "$JS.API.STREAM.PURGE.ANSWERS_{tenant}"),
    }


def test_only_the_admin_service_writes_what_operators_decide() -> None:
    """Whoever writes tenants' records gives himself a key."""
    decided = tuple(
        f"$KV.{bucket}." for bucket in ("registry", "tenants", "keys", "accounts", "prices")
    )
    writers = {
        user_class
        for user_class in UserClass
        for right in rights_of(user_class)
        if right.subject.startswith(decided)
    }
    assert writers == {UserClass.ADMIN}


def test_every_stream_has_a_store_and_a_reader() -> None:
    """A stream that nobody may ask about was forgotten here."""
    streams = [c.name or "" for c in topology.stream_configs(topology.Scale(shards=2), 1)]
    asked = {right.subject for each in UserClass for right in rights_of(each, shards=2)}
    unread = {s for s in (*streams, *access.BUCKETS) if f"$JS.API.STREAM.INFO.{s}" not in asked}
    assert unread == set()


def test_the_buckets_are_those_of_the_rooms_above() -> None:
    """They are named here, too, since this room cannot import those."""
    decided = (store, tenants, keys, tenant_accounts, price_book)
    names = {*(room.BUCKET for room in decided), topology.IDEMPOTENCY_BUCKET}
    assert {f"KV_{name}" for name in {*names, lease_bucket.BUCKET_NAME}} == set(access.BUCKETS)


def test_what_the_code_subscribes_to_is_what_the_table_has() -> None:
    """A subscription that is wider than a right is refused, not narrowed."""
    mock = Pins(id="w1", pools=(("mock", "v1"),))
    granted = {s for right in rights_of(UserClass.WORKER) for s in right.permitted(mock)}
    assert {
        "infer.alive.w1",
        "infer.find.>",
        "infer.written.w1",
        "infer.written",
        "infer.muster.mock",
        "infer.fleet.mock.*",
    } <= granted


@pytest.mark.parametrize(
    ("call", "subject"),
    [
        ("STREAM.INFO.LEDGER", "CONTROL.API.STREAM.INFO.LEDGER"),
        ("STREAM.MSG.GET.WORK", "WORK.API.STREAM.MSG.GET.WORK"),
        ("STREAM.LEADER.STEPDOWN.LEDGER", "CONTROL.API.STREAM.LEADER.STEPDOWN.LEDGER"),
        ("DIRECT.GET.KV_tenants.$KV.tenants.x", "CONTROL.API.DIRECT.GET.KV_tenants.$KV.tenants.x"),
        ("CONSUMER.DURABLE.CREATE.LEDGER.c", "CONTROL.API.CONSUMER.DURABLE.CREATE.LEDGER.c"),
        ("CONSUMER.CREATE.INGRESS_acme.c.f", "WORK.API.CONSUMER.CREATE.INGRESS_acme.c.f"),
        ("STREAM.NAMES", "WORK.API.STREAM.NAMES"),
    ],
)
def test_the_admin_service_asks_the_store_that_has_the_stream(call: str, subject: str) -> None:
    """Both stores have a JetStream of their own, of which the other does not know."""
    assert access.api_subject(UserClass.ADMIN, call) == subject
    for other in (None, UserClass.GATEWAY):
        assert access.api_subject(other, call) == f"$JS.API.{call}"


def test_a_command_makes_users_of_every_process() -> None:
    """A class that the command does not know cannot be given credentials."""
    assert set(ProcessClass.__args__) == set(ACCOUNT_OF)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("subject", "pattern"),
    [
        ("$JS.API.INFO", "$JS.API.*"),
        ("$JS.API.STREAM.INFO.WORK", "$JS.API.*.INFO.WORK"),
        ("$JS.API.DIRECT.GET.WORK", "$JS.API.*.GET.WORK"),
        ("infer.gone", "*.gone"),
        ("infer.alive.*", "infer.alive.*"),
        ("$JS.API.>", "$JS.API.>"),
    ],
)
def test_a_pattern_stands_for_one_call(subject: str, pattern: str) -> None:
    """A wildcard in the place of the store would be an import of everything."""
    assert widened(subject) == pattern


def test_the_document_has_the_table() -> None:
    """Run this file to write it."""
    text = DOCUMENT.read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == render_table()


if __name__ == "__main__":
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{render_table()}\n\n{END}{rest.split(END)[1]}")
