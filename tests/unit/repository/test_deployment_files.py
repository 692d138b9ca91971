"""The deployment files agree with the command line, with each other and with nats-server."""

import asyncio
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream import cli
from millstream.broker import commands
from millstream.broker.settings import InitSettings
from millstream.command_table import find_command
from millstream.settings_loader import load_settings
from millstream.up.settings import UpSettings
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.claims_token import decode
from streams.accounts.credentials_file import read_credentials
from streams.base_settings import Settings

ROOT = Path(__file__).parents[3]
SECRETS = "/run/secrets/"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def words_of(service: dict[str, Any]) -> list[str]:
    """Words of the command line, behind the image's own entrypoint."""
    words: list[str] = service["command"]
    return words


def parsed(words: list[str]) -> Settings:
    found = find_command(words)
    assert found, words
    return cli.parse_settings(*found)


def containers(name: str) -> list[str]:
    return [service for service in SERVICES if re.fullmatch(rf"{name}(-\d)?", service)]


@pytest.fixture(autouse=True)
def _in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that compose gives, with the file where it lies here."""
    monkeypatch.setenv("MILLSTREAM_CONFIG", str(ROOT / "deploy/millstream.toml"))


def test_it_is_one_cell() -> None:
    """No single process is the only one of its kind, but for the worker."""
    kinds = ("nats", "admin", "gateway", "dispatcher", "jobs", "fleet", "worker")
    counts = {kind: len(containers(kind)) for kind in kinds}
    assert counts == dict(zip(kinds, (3, 2, 2, 2, 2, 2, 1), strict=True))
    assert "prometheus" in SERVICES


@pytest.mark.parametrize("name", OURS)
def test_every_command_is_one_that_the_command_line_takes(name: str) -> None:
    """A renamed option must not be found out in production."""
    settings = parsed(words_of(OURS[name])).model_dump()
    assert settings["nats"].count("nats://") == 3


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_one_that_the_settings_take(name: str) -> None:
    """An unknown MILLSTREAM_ variable stops a service."""
    environment = {
        **OURS[name]["environment"],
        "MILLSTREAM_CONFIG": os.environ["MILLSTREAM_CONFIG"],
    }
    load_settings(UpSettings, {}, environment)


@pytest.mark.parametrize("name", OURS)
def test_every_image_is_a_target_of_the_dockerfile(name: str) -> None:
    """One file builds them all."""
    assert f" AS {OURS[name]['build']['target']}\n" in DOCKERFILE


def test_the_default_command_of_every_image_is_one_that_the_command_line_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`docker run millstream-worker` without words."""
    monkeypatch.setenv("MILLSTREAM_MODEL", "mine")
    commands = [yaml.safe_load(line[4:]) for line in DOCKERFILE.splitlines() if line[:4] == "CMD "]
    images = ["admin", "dispatcher", "fleet", "gateway", "jobs", "worker"]
    assert sorted(words[0] for words in commands) == images
    for words in commands:
        parsed(words)


def test_the_dockerfile_copies_every_package() -> None:
    """A new room must not be missing in the image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for package in packages:
        assert f"COPY {package} {package}\n" in DOCKERFILE
        assert f"!{package}" in ignored


def test_services_keep_three_copies_in_a_cluster_of_three() -> None:
    """A cell must lose a broker without losing a request."""
    settings = parsed(["admin"]).model_dump()
    assert settings["replicas"] == 3


def test_containers_may_take_longer_to_stop_than_services_to_drain() -> None:
    """Docker must not kill what is still draining."""
    for name, service in OURS.items():
        settings = parsed(words_of(service))
        assert int(service["stop_grace_period"].rstrip("s")) > settings.shutdown_timeout_seconds, (
            name
        )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory that the command at the top of compose.yaml makes, in place of `./broker`."""
    text = (ROOT / "compose.yaml").read_text()
    (words,) = re.findall(r"^#   millstream (broker init .*?) *#", text, re.MULTILINE)
    made = tmp_path_factory.mktemp("cell") / "broker"
    settings = parsed(words.replace(" broker ", f" {made} ").split())
    assert isinstance(settings, InitSettings)
    asyncio.run(commands.init(settings, asyncio.Event()))
    return made


def sources() -> set[str]:
    """All files and folders of this one that containers get to see."""
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", [])]
    found = {mount.split(":")[0] for mount in mounts if mount.startswith("./")}
    secrets = {each["file"] for each in COMPOSE["secrets"].values() if "file" in each}
    return found | secrets


def test_every_mounted_file_exists(keys: Path) -> None:
    """Docker would make a directory in its place."""
    for source in sources() - {"./models"}:
        path = Path(source)
        found = keys / path.relative_to("broker") if path.parts[0] == "broker" else ROOT / path
        assert found.exists(), source


def test_no_keys_are_committed_or_sent_to_docker() -> None:
    """Who has them is anybody in the cell."""
    assert "/broker/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "!broker" not in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize("name", OURS)
def test_every_service_has_the_credentials_of_its_class_alone(keys: Path, name: str) -> None:
    """A stolen one does what its class may do; seeds that sign are the admin service's alone."""
    found = OURS[name]["environment"]["MILLSTREAM_NATS_CREDS"]
    secret = found.removeprefix(SECRETS)
    assert [s for s in OURS[name]["secrets"] if s.endswith("-creds")] == [secret]
    file = keys / Path(COMPOSE["secrets"][secret]["file"]).relative_to("broker")
    tags = decode(read_credentials(file, 0).token)["nats"]["tags"]
    wanted = re.sub(r"-\d$", "", name)
    assert f"class:{wanted}" in tags
    mounts = {m.split(":")[0] for m in OURS[name].get("volumes", []) if "broker" in m}
    signing = {"./broker/cell.json", "./broker/keys/signing", "./broker/users/system.creds"}
    assert mounts == (signing if wanted == "admin" else set())


def test_keys_are_made_for_as_many_streams_as_services_make(keys: Path) -> None:
    """Nobody has a right to a stream of token logs that the cell's keys do not know."""
    settings = parsed(["admin"]).model_dump()
    assert CellDirectory.open(keys).read().shards == settings["shards"]


def test_prometheus_scrapes_every_service_where_it_listens() -> None:
    """Metrics that nobody reads show nothing."""
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    for job in config["scrape_configs"]:
        (found,) = job["dns_sd_configs"]
        assert found["names"] == containers(job["job_name"])
        for name in found["names"]:
            settings = parsed(words_of(SERVICES[name])).model_dump()
            assert found["port"] == settings["metrics_port"]
            assert settings["metrics_host"] == "0.0.0.0"


def test_nothing_is_open_to_strangers_without_a_secret() -> None:
    """A default key is known to all who read the file; metrics and Prometheus ask for none."""
    for name in containers("admin"):
        key = SERVICES[name]["environment"]["MILLSTREAM_API_KEY"]
        assert re.fullmatch(r"\$\{MILLSTREAM_API_KEY:\?[^}]+\}", key)  # compose stops without it
        assert parsed(words_of(SERVICES[name])).model_dump()["admin_host"] == "127.0.0.1"
    for name in containers("gateway"):
        settings = parsed(words_of(SERVICES[name]))
        assert not settings.model_dump()["public_metrics"]
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            assert name.startswith("gateway") or port.startswith("127.0.0.1:")
        assert not [port for port in service.get("ports", []) if port.endswith(":9100")]


def test_a_broker_is_asked_for_its_own_health_where_it_tells_nobody_else(keys: Path) -> None:
    """A node that catches up, or that lacks the others, gains nothing by a restart."""
    for name in containers("nats"):
        text = (keys / f"nodes/{name}.conf").read_text()
        (address,) = re.findall(r'^http: "(127.0.0.1:\d+)"', text, re.MULTILINE)
        url = SERVICES[name]["healthcheck"]["test"][-1]
        assert url == f"http://{address}/healthz?js-enabled-only=true"
        assert SERVICES[name]["image"].endswith("-alpine")  # the others have no wget
        assert (
            f"./broker/nodes/{name}.conf:{SERVICES[name]['command'][1]}:ro"
            in (SERVICES[name]["volumes"])
        )


def test_an_acknowledged_message_is_on_disk_in_a_cluster(keys: Path) -> None:
    """JetStream acknowledges before it syncs unless told otherwise."""
    for name in containers("nats"):
        assert "sync_interval: always" in (keys / f"nodes/{name}.conf").read_text()
