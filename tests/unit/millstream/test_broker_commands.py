"""`millstream broker` makes keys, users and configurations, and says where they are."""

import asyncio
import json
from pathlib import Path

import pytest

from millstream import cli
from millstream.broker import commands, rotation_commands
from millstream.broker.rotation_settings import RotationSettings
from millstream.broker.settings import InitSettings, UserSettings
from millstream.command_table import find_command
from millstream.settings_loader import UsageError
from millstream.tls.commands import CertificatesNotMade
from streams.accounts.cell_directory import InvalidCellDirectory
from streams.accounts.claims_token import decode
from streams.accounts.credentials_file import read_credentials
from streams.accounts.key_rotation import RotationRefused


def parse(words: str) -> InitSettings | UserSettings | RotationSettings:
    found = find_command(words.split())
    assert found
    settings = cli.parse_settings(*found)
    assert isinstance(settings, InitSettings | UserSettings | RotationSettings)
    return settings


async def init(directory: Path, *options: str) -> None:
    settings = parse(f"broker init {directory} {' '.join(options)}")
    assert isinstance(settings, InitSettings)
    await commands.init(settings, asyncio.Event())


async def add_user(directory: Path, *options: str) -> None:
    settings = parse(f"broker user {directory} {' '.join(options)} --json")
    assert isinstance(settings, UserSettings)
    await commands.add_user(settings, asyncio.Event())


async def test_a_cluster_is_made_with_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are there, and a second run keeps every key."""
    await init(tmp_path, "--nodes", "n1,n2", "--nodes", "n3", "--json")
    made = json.loads(capsys.readouterr().out)
    assert list(made["nodes"]) == ["n1", "n2", "n3"]
    assert made["nodes"]["n2"] == str(tmp_path / "nodes/n2.conf")
    before = {c: read_credentials(file, 0).user for c, file in made["users"].items()}
    assert list(before) == [
        "admin",
        "gateway",
        "dispatcher",
        "jobs",
        "fleet",
        "worker",
        "operator",
        "ledger",
        "supervisor",
        "system",
    ]
    await init(tmp_path)
    assert "nats: nats-server -c" in capsys.readouterr().out
    assert {c: read_credentials(file, 0).user for c, file in made["users"].items()} == before


async def test_a_worker_is_pinned_to_its_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By tags of its claims, which the servers put into the rights of its class."""
    await init(tmp_path)
    capsys.readouterr()
    await add_user(tmp_path, "w7 --class worker --model a.b@v1 --model c --expires 1h")
    made = json.loads(capsys.readouterr().out)
    assert (made["name"], made["class"], made["account"]) == ("w7", "worker", "WORKERS")
    credentials = read_credentials(made["file"], 0)
    assert credentials.expires_at == made["expires_at"] == credentials.issued_at + 3600
    tags = decode(credentials.token)["nats"]["tags"]
    assert {"class:worker", "id:w7", "pool:a_2eb.v1", "pool:c.*", "consumer:*"} <= set(tags)
    await add_user(tmp_path, "w8 --class worker --any-id")
    free = read_credentials(json.loads(capsys.readouterr().out)["file"], 0)
    assert {"id:*", "pool:*.*"} <= set(decode(free.token)["nats"]["tags"])


async def rotate(directory: Path, options: str) -> None:
    settings = parse(f"broker rotate {directory} {options}")
    assert isinstance(settings, RotationSettings)
    await rotation_commands.rotate(settings, asyncio.Event())


async def test_keys_are_replaced_without_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files are written, and the output says who must be told, and how."""
    await init(tmp_path, "--nodes", "n1,n2")
    capsys.readouterr()
    await rotate(tmp_path, "--what accounts")
    assert "n1, n2 must be told before users' credentials" in capsys.readouterr().out
    await rotate(tmp_path, "--what users --json")
    renewed = json.loads(capsys.readouterr().out)
    assert "gateway" in renewed["users"]
    assert "before processes use the new files" in renewed["next"][0]
    await rotate(tmp_path, "--what accounts --finish")
    finished = capsys.readouterr().out
    assert "accounts: finished" in finished
    assert "so that the old keys end: run `--what accounts --finish` with --nats" in finished
    seed = tmp_path / "kept.seed"
    (tmp_path / "keys/identity/operator.seed").rename(seed)
    await rotate(tmp_path, f"--what operator --operator-seed {seed}")
    assert f"{tmp_path}/nodes/n1.conf" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--what users --finish", "--what accounts --finish"),
        ("--what operator --finish", "needs --nats"),
    ],
)
async def test_steps_that_there_are_not(tmp_path: Path, options: str, message: str) -> None:
    """With the step that there is."""
    await init(tmp_path)
    with pytest.raises(RotationRefused, match=message):
        await rotate(tmp_path, options)


async def test_what_cannot_be_done_is_told(tmp_path: Path) -> None:
    """With what to do, or what would be right."""
    with pytest.raises(InvalidCellDirectory, match="make it with `broker init`"):
        await add_user(tmp_path, "w7 --class worker")
    for words in ("init . --nodes a,a", "init . --nodes ", "user . w7 --class tenant", "user . W7"):
        with pytest.raises(UsageError):
            parse(f"broker {words}")


async def test_servers_get_certificates_that_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without the option does not make the servers talk plainly again."""
    await init(tmp_path, "--nodes", "n1,n2", "--tls", "--json")
    made = json.loads(capsys.readouterr().out)
    assert made["ca"] == str(tmp_path / "tls/ca.pem")
    names = {"ca", "n1", "n2"}
    written = {f"{name}{end}.pem" for name in names for end in ("", "-key")}
    assert {file.name for file in (tmp_path / "tls").iterdir()} == written
    ca = (tmp_path / "tls/ca.pem").read_text()
    await init(tmp_path, "--nodes", "n1,n2")
    assert "--nats-ca" in capsys.readouterr().out
    assert (tmp_path / "tls/ca.pem").read_text() == ca
    for name in ("n1", "n2"):
        text = (tmp_path / f"nodes/{name}.conf").read_text()
        assert text.count(f'"/etc/nats/tls/{name}.pem"') == 2
        assert "handshake_first: true" in text
        assert "verify: true" in text.partition("cluster {")[2].partition("}")[0]
    (tmp_path / "tls/ca-key.pem").write_text("nonsense")
    with pytest.raises(CertificatesNotMade, match="cannot make certificates"):
        await init(tmp_path)
