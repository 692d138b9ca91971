"""Signing keys are replaced in steps, each of which may be killed anywhere and repeated."""

import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from streams.accounts.access import UserClass
from streams.accounts.cell_directory import InvalidCellDirectory
from streams.accounts.claims_token import decode
from streams.accounts.credentials_file import read_credentials
from streams.accounts.key_rotation import KeyRotation, RotationRefused
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.accounts.rights import Pins
from streams.accounts.server_configuration import embedded_configuration, node_configuration

SIGNING = "keys/signing"


class Killed(BaseException):
    """The process ended here."""


@pytest.fixture
def cell(tmp_path: Path) -> KeyRotation:
    KeyRotation.create(tmp_path / "keys", shards=1)
    made = KeyRotation.open(tmp_path / "keys")
    made.add_user("w1", UserClass.WORKER, Pins(id="w1", pools=(("m", "v1"),)))
    made.add_user("system", UserClass.SYSTEM)
    made.write_node("n1", node_configuration(made.accounts_block(), "n1", ["n1", "n2"], "/store"))
    return made


def account_keys(cell: KeyRotation) -> set[str]:
    accounts = cell.read().accounts.values()
    listed = [keys for each in accounts for keys in (each.signing, *each.roles.values())]
    return {key for keys in (*listed, cell.read().tenant_signing) for key in keys}


def seeds_in_use(cell: KeyRotation) -> set[str]:
    files = (cell.path / SIGNING).glob("*.seed")
    used = [file for file in files if not file.stem.endswith(".next")]
    pairs = [KeyPair.from_seed(file.read_text()) for file in used]
    return {pair.public for pair in pairs if pair.kind is KeyKind.ACCOUNT}


def issuer(cell: KeyRotation, name: str) -> str:
    return str(decode(read_credentials(cell.user_file(name), 0).token)["iss"])


def rotate_accounts(cell: KeyRotation) -> None:
    cell.begin_accounts()
    cell.renew_users()
    cell.finish_accounts()


def rotate_operator(cell: KeyRotation) -> None:
    cell.begin_operator()
    cell.use_operator_key()
    cell.finish_operator()


def test_accounts_list_old_and_new_keys_until_the_end(cell: KeyRotation) -> None:
    """Whoever has old credentials works on until new ones are everywhere."""
    old, user = account_keys(cell), read_credentials(cell.user_file("w1"), 0)
    cell.begin_accounts()
    both = account_keys(cell)
    assert old < both
    assert len(both) == 2 * len(old)
    assert cell.old_keys() == old
    cell.begin_accounts()
    assert account_keys(cell) == both
    cell.renew_users()
    cell.finish_accounts()
    assert account_keys(cell) == both - old == seeds_in_use(cell)
    new = read_credentials(cell.user_file("w1"), 0)
    assert new.user != user.user
    assert decode(new.token)["nats"] == decode(user.token)["nats"]


def test_users_with_old_credentials_hold_up_the_end(cell: KeyRotation) -> None:
    """Nobody is cut off because somebody forgot a step; those that have expired are not missed."""
    cell.add_user("gone", UserClass.GATEWAY, seconds=-1)
    cell.begin_accounts()
    before = account_keys(cell)
    with pytest.raises(RotationRefused, match=r"^system\.creds, w1\.creds would be cut off"):
        cell.finish_accounts()
    assert account_keys(cell) == before
    assert cell.renew_users() == ["system", "w1"]
    cell.finish_accounts()
    assert cell.renew_users() == ["system", "w1"]


def test_a_user_of_another_cell_is_told(cell: KeyRotation, tmp_path: Path) -> None:
    """Its account is not here, so nothing here could sign it."""
    other = KeyRotation.create(tmp_path / "other", shards=1)
    shutil.copy(other.add_user("g1", UserClass.GATEWAY), cell.user_file("g1"))
    with pytest.raises(InvalidCellDirectory, match="a user 'g1' that was not made here"):
        cell.renew_users()


def test_a_tenants_claims_change_with_the_keys_that_make_them(cell: KeyRotation) -> None:
    """So the admin service knows when to make them anew; old users are good meanwhile."""
    first, (old,) = cell.tenant_basis(), cell.read().tenant_signing
    cell.begin_accounts()
    both = cell.read().tenant_signing
    assert both[0] == old
    assert len(both) == 2
    assert decode(cell.sign_tenant_user("acme", both[1], 1).token)["iss"] == both[1]
    assert old in cell.old_keys()
    during = cell.tenant_basis()
    cell.renew_users()
    cell.finish_accounts()
    assert cell.read().tenant_signing == both[1:]
    assert len({first, during, cell.tenant_basis()}) == 3


def test_the_operator_signs_with_a_new_key_once_servers_know_it(cell: KeyRotation) -> None:
    """They store claims of a key that they do not know, and do not use them."""
    (old,) = cell.read().operator_signing
    new = cell.begin_operator()
    assert cell.begin_operator() == new
    operator = decode((cell.path / "operator.jwt").read_text())
    assert operator["nats"]["signing_keys"] == [old, new]
    assert {decode(token)["iss"] for token in cell.account_tokens()} == {old}
    before = {decode(token)["sub"]: decode(token)["iat"] for token in cell.account_tokens()}
    cell.use_operator_key()
    told = [decode(token) for token in cell.account_tokens()]
    assert {each["iss"] for each in told} == {new}
    assert all(each["iat"] > before[each["sub"]] for each in told)
    cell.finish_operator()
    assert cell.read().operator_signing == (new,)
    assert decode((cell.path / "operator.jwt").read_text())["nats"]["signing_keys"] == [new]


def test_the_operators_identity_may_lie_elsewhere(cell: KeyRotation, tmp_path: Path) -> None:
    """The missing seed is asked for by name; nothing has changed until it is there."""
    seed = tmp_path / "offline.seed"
    (cell.path / "keys/identity/operator.seed").rename(seed)
    shutil.rmtree(cell.path / "keys/identity")
    before = cell.read()
    with pytest.raises(InvalidCellDirectory, match=r"No such file.*--operator-seed"):
        cell.begin_operator()
    other = tmp_path / "other.seed"
    other.write_text(KeyPair.generate(KeyKind.OPERATOR).seed)
    with pytest.raises(InvalidCellDirectory, match="another operator"):
        cell.begin_operator(other)
    other.write_text(cell.mint().accounts["WORK"].seed)
    with pytest.raises(InvalidCellDirectory, match="an account, not of an operator"):
        cell.begin_operator(other)
    assert cell.read() == before
    cell.begin_operator(seed)
    rotate_accounts(cell)


def test_configurations_follow(cell: KeyRotation) -> None:
    """A server that is restarted knows what others were told, and its store is where it was."""
    for rotate in (rotate_accounts, rotate_operator):
        rotate(cell)
        text = (cell.path / "nodes/n1.conf").read_text()
        assert text == node_configuration(cell.accounts_block(), "n1", ["n1", "n2"], "/store")


def test_servers_are_known_by_the_names_that_they_answer_by(cell: KeyRotation) -> None:
    """The server of `millstream up` is not called like its file."""
    block = cell.accounts_block()
    cell.write_node("nats", embedded_configuration(block, cell.path / "accounts"))
    assert (cell.list_nodes(), cell.list_servers()) == (["n1", "nats"], ["millstream", "n1"])


@pytest.mark.parametrize("rotate", [rotate_accounts, rotate_operator])
def test_a_rotation_that_is_killed_anywhere_can_be_repeated(
    cell: KeyRotation, rotate: Callable[[KeyRotation], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each rename: what signs is listed, and old credentials are good or made anew."""
    old = account_keys(cell) | set(cell.read().operator_signing)
    number, is_whole = 0, False
    while not is_whole:
        number += 1
        copy = KeyRotation(
            Path(shutil.copytree(cell.path, cell.path.with_name(f"killed-{number}")))
        )
        _kill_at(monkeypatch, number)
        try:
            rotate(copy)
            is_whole = True
        except Killed:
            _check_usable(copy)
        monkeypatch.undo()
        rotate(copy)
        _check_usable(copy)
        new = account_keys(copy) | set(copy.read().operator_signing)
        assert (len(new), bool(old - new)) == (len(old), True)
        assert not list((copy.path / SIGNING).glob("*.next.seed"))
        found = [*copy.path.rglob("*")]
        assert [each for each in found if stat.S_IMODE(each.stat().st_mode) & 0o077] == []
    assert number > 8


def test_what_a_killed_start_leaves_is_not_used_before_it_is_listed(
    cell: KeyRotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on with the next step, instead of repeating, shuts nobody out."""
    old = account_keys(cell), cell.read().operator_signing
    for begin in (cell.begin_accounts, cell.begin_operator):
        _kill_at(monkeypatch, 2)
        with pytest.raises(Killed):
            begin()
        monkeypatch.undo()
    cell.finish_accounts()
    cell.use_operator_key()
    cell.finish_operator()
    assert (account_keys(cell), cell.read().operator_signing) == old
    _check_usable(cell)
    rotate_accounts(cell)
    rotate_operator(cell)
    assert not account_keys(cell) & old[0]
    assert not list((cell.path / SIGNING).glob("*.next.seed"))


def _kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The process ends before its rename of this number."""
    left, replace = iter(range(1, number)), Path.replace

    def rename_or_die(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise Killed
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", rename_or_die)


def _check_usable(cell: KeyRotation) -> None:
    listed, state = account_keys(cell), cell.read()
    assert seeds_in_use(cell) <= listed
    assert cell.operator_signer() in state.operator_signing
    assert {issuer(cell, name) for name in ("w1", "system")} <= listed
