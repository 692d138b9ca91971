"""A cell's keys are made once; everything else is made anew from them."""

import json
import re
import shutil
import stat
from pathlib import Path

import pytest

from streams.accounts.access import UserClass
from streams.accounts.cell_directory import CellDirectory, InvalidCellDirectory
from streams.accounts.claims import AccountState
from streams.accounts.claims_token import decode
from streams.accounts.credentials_file import InvalidCredentials, read_credentials
from streams.accounts.minting import TooManyPins
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.accounts.rights import BrokerAccount, Pins
from streams.accounts.server_configuration import embedded_configuration, node_configuration


@pytest.fixture
def cell(tmp_path: Path) -> CellDirectory:
    return CellDirectory.create(tmp_path / "keys", shards=1)


def seeds(cell: CellDirectory) -> dict[str, str]:
    return {str(file): file.read_text() for file in (cell.path / "keys").rglob("*.seed")}


def test_keys_are_made_once_and_claims_anew(cell: CellDirectory) -> None:
    """An update of Millstream changes rights, and no key; the newer claims win."""
    before, state = seeds(cell), cell.read()
    again = CellDirectory.create(cell.path, shards=2)
    assert (seeds(again), again.read().shards) == (before, 2)
    for account in BrokerAccount:
        old, new = state.accounts[account], again.read().accounts[account]
        assert (new.public, new.signing, new.roles) == (old.public, old.signing, old.roles)
        assert new.issued_at > old.issued_at


def test_nobody_else_reads_any_of_it(cell: CellDirectory) -> None:
    """Whoever has a seed of an account is all its users."""
    cell.add_user("w1", UserClass.WORKER)
    cell.write_node("n1", "text")
    everything = [cell.path, *cell.path.rglob("*")]
    assert [each for each in everything if stat.S_IMODE(each.stat().st_mode) & 0o077] == []


def test_users_and_tenants_need_no_identity_seed(cell: CellDirectory) -> None:
    """Those lie where no thief of a running cell finds them."""
    shutil.rmtree(cell.path / "keys/identity")
    CellDirectory.create(cell.path, shards=1)
    cell.add_user("w1", UserClass.WORKER)
    accounts = {decode(token)["sub"] for token in cell.account_tokens()}
    assert accounts == {state.public for state in cell.read().accounts.values()}
    account = KeyPair.generate(KeyKind.ACCOUNT).public
    assert cell.sign_tenant_user("acme", account, 7).issued_at == 7


def test_a_directory_of_an_earlier_release_gets_the_key_of_tenants_users(
    cell: CellDirectory,
) -> None:
    """Also where it was killed before the key was listed; and only once."""
    file, state = cell.path / "keys/signing/tenant-users.seed", cell.read()
    saved = json.loads((cell.path / "cell.json").read_text())
    (cell.path / "cell.json").write_text(json.dumps({**saved, "tenant_signing": []}))
    seed = file.read_text()
    assert CellDirectory.create(cell.path, shards=1).read().tenant_signing == state.tenant_signing
    assert file.read_text() == seed


def test_a_tenant_imports_its_own_subjects_alone(cell: CellDirectory) -> None:
    """Each by an activation that names the tenant's account and the subject."""
    signing = cell.read().tenant_signing
    state = AccountState("T_acme", KeyPair.generate(KeyKind.ACCOUNT).public, signing)
    claims = decode(cell.tenant_token("acme", state))
    assert claims["nats"]["signing_keys"] == [*signing]
    imports = claims["nats"]["imports"]
    assert {each["subject"] for each in imports} == {
        "infer.submit.acme.*.*",
        "infer.cancel.acme.*",
        "infer.reply.acme.>",
        "infer.records.acme.*.*",
        "infer.jobs.acme.*",
        "$JS.API.*.GET.ANSWERS_acme",
        "$JS.API.DIRECT.GET.ANSWERS_acme.infer.answer.acme.>",
        "$JS.API.*.PURGE.ANSWERS_acme",
    }
    for each in imports:
        activation = decode(each["token"])
        assert activation["sub"] == claims["sub"]
        assert activation["nats"]["subject"] == each["subject"]


def test_a_user_keeps_its_key_and_its_class(cell: CellDirectory) -> None:
    """Whoever runs a command twice has not cut off a running process."""
    first = read_credentials(cell.add_user("x1", UserClass.GATEWAY), 0)
    again = read_credentials(cell.add_user("x1", UserClass.GATEWAY, seconds=60), 0)
    assert (again.user, again.account) == (first.user, first.account)
    assert again.expires_at
    with pytest.raises(InvalidCellDirectory, match="'x1' of the class gateway"):
        cell.add_user("x1", UserClass.DISPATCHER)
    cell.user_file("x2").write_text("nonsense")
    with pytest.raises(InvalidCredentials, match="malformed"):
        cell.add_user("x2", UserClass.DISPATCHER)


def test_a_user_with_too_many_pins_is_refused(cell: CellDirectory) -> None:
    """The servers would cut its connection, and say no more than that a line is too long."""
    pools = tuple((f"model-{number}", "0123456789ab") for number in range(40))
    with pytest.raises(TooManyPins, match="fewer models"):
        cell.add_user("w1", UserClass.WORKER, Pins(id="w1", pools=pools))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("cell.json", "has keys but no cell.json"),
        ("keys/signing/WORK.seed", "lacks keys/signing/WORK.seed"),
    ],
)
def test_a_lost_file_is_told(cell: CellDirectory, broken: str, message: str) -> None:
    """Other keys in its place would be those of another cell."""
    (cell.path / broken).unlink()
    before = seeds(cell)
    with pytest.raises(InvalidCellDirectory, match=message):
        CellDirectory.create(cell.path, shards=1).mint()
    assert seeds(cell) == before


def test_a_directory_of_something_else_is_told(tmp_path: Path) -> None:
    """Each with what to do about it."""
    with pytest.raises(InvalidCellDirectory, match="make it with `broker init`"):
        CellDirectory.open(tmp_path)
    (tmp_path / "cell.json").write_text("{}")
    with pytest.raises(InvalidCellDirectory, match="malformed cell.json"):
        CellDirectory.open(tmp_path)
    with pytest.raises(InvalidCellDirectory, match="cannot be written"):
        CellDirectory.create(tmp_path / "cell.json", shards=1)


def test_a_class_of_users_that_is_new_gets_a_key(cell: CellDirectory) -> None:
    """After an update; without one its users would have no limits within their account."""
    known = json.loads((cell.path / "cell.json").read_text())
    del known["accounts"]["OPERATORS"]["roles"]["ledger"]
    (cell.path / "cell.json").write_text(json.dumps(known))
    seed = (cell.path / "keys/signing/ledger-users.seed").read_text()
    for before in (seed, None):  # made by a try that was killed, and not made
        if before is None:
            (cell.path / "keys/signing/ledger-users.seed").unlink()
            (cell.path / "cell.json").write_text(json.dumps(known))
        made = CellDirectory.create(cell.path, shards=1)
        (key,) = made.read().accounts["OPERATORS"].roles["ledger"]
        user = made.add_user("l", UserClass.LEDGER)
        assert decode(read_credentials(user, 0).token)["iss"] == key


def test_configurations_have_no_seed_and_no_open_monitoring_port(cell: CellDirectory) -> None:
    """A monitoring port answers whoever reaches it, without credentials."""
    block = cell.accounts_block()
    texts = [
        embedded_configuration(block, cell.path / "accounts"),
        node_configuration(block, "n1", ["n1"]),
        node_configuration(block, "n1", ["n1", "n2", "n3"]),
        node_configuration(block, "n1", ["n1", "n2", "n3"], is_monitored=True),
    ]
    monitored = [re.findall(r"^http\w*: *(\S+)", text, re.MULTILINE) for text in texts]
    assert monitored == [[], [], [], ['"127.0.0.1:8222"']]
    for text in texts:
        assert "max_payload: 1MB" in text
        assert 'interval: "2s"' in text
        assert not [seed for seed in seeds(cell).values() if seed in text]
    assert ["cluster {" in text for text in texts] == [False, False, True, True]


def test_servers_of_a_cluster_ask_each_other_for_a_password(cell: CellDirectory) -> None:
    """Whoever joins them hears every message; one server alone has no such port."""
    password = (cell.path / "keys/routes").read_text()
    text = node_configuration(cell.accounts_block(), "n1", ["n1", "n2", "n3"])
    routes = [f"nats://node:{password}@{node}:6222" for node in ("n2", "n3")]
    assert f"  routes: {json.dumps(routes)}" in text
    assert f'  authorization {{ user: node, password: "{password}" }}' in text
    assert password not in node_configuration(cell.accounts_block(), "n1", ["n1"])
    assert password not in repr(cell.accounts_block())
    CellDirectory.create(cell.path, shards=1)
    assert (cell.path / "keys/routes").read_text() == password
