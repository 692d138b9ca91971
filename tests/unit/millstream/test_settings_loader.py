"""Where settings come from, which source wins, and what a slip of the finger says."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from admin.settings import AdminSettings
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from millstream.admin.settings import LagSettings, WhySettings
from millstream.batch.settings import SubmitSettings
from millstream.bench.settings import BenchSettings
from millstream.broker.backup_settings import BackupSettings
from millstream.command_table import COMMANDS
from millstream.keys.settings import CreateKeySettings
from millstream.models.settings import AddSettings, ListSettings
from millstream.settings_loader import UsageError, load_settings
from millstream.tenants.settings import ChangeTenantSettings
from millstream.up import state_file
from millstream.up.settings import UpSettings
from streams.accounts.access import UserClass
from streams.base_settings import ServiceSettings


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file and no running `millstream up` but the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def write(text: str) -> Path:
    path = Path("millstream.toml")
    path.write_text(text)
    return path


def test_a_flag_wins_over_the_environment_which_wins_over_the_file() -> None:
    """The nearer to the person, the stronger."""
    write("port = 1\nhost = 'file'\ngrace_seconds = 3")
    environment = {"MILLSTREAM_PORT": "2", "MILLSTREAM_HOST": "variable"}
    settings = load_settings(GatewaySettings, {"port": "3"}, environment)
    assert isinstance(settings, GatewaySettings)
    assert (settings.port, settings.host, settings.grace_seconds) == (3, "variable", 3)


def test_the_file_in_the_working_directory_needs_no_naming() -> None:
    """`millstream up` beside a millstream.toml means that file."""
    write("port = 9")
    assert load_settings(UpSettings, {}, {}).model_dump()["port"] == 9


def test_a_named_file_replaces_the_one_in_the_working_directory(tmp_path: Path) -> None:
    """Two files are never mixed."""
    write("port = 9\nworkers = 4")
    other = tmp_path / "other.toml"
    other.write_text("port = 10")
    for flags, environment in (
        ({"config": str(other)}, {}),
        ({}, {"MILLSTREAM_CONFIG": str(other)}),
    ):
        settings = load_settings(UpSettings, flags, environment)
        assert isinstance(settings, UpSettings)
        assert (settings.port, settings.workers, settings.config) == (10, 1, other)


def test_one_file_serves_all_commands() -> None:
    """A key that another command knows is passed over."""
    write("lease_seconds = 3\nmax_sequences = 8\n[tenants.acme]\nkeys = ['sk-acme']")
    settings = load_settings(WorkerSettings, {"model": ["m"]}, {"MILLSTREAM_WATCH": "true"})
    assert isinstance(settings, WorkerSettings)
    assert settings.max_sequences == 8


def test_tenants_come_from_tables_of_the_file() -> None:
    """The shape that the documentation promises."""
    write("[tenants.acme]\nkeys = ['sk-acme']\nweight = 2\nmax_queued = 200")
    settings = load_settings(AdminSettings, {}, {})
    assert isinstance(settings, AdminSettings)
    acme = settings.tenants["acme"]
    assert (acme.weight, acme.max_queued) == (2, 200)
    assert [key.key.get_secret_value() for key in acme.keys] == ["sk-acme"]


def test_a_table_may_be_there_or_not() -> None:
    """That it is there says that machines are started as a plan wants them."""
    table = "[fleet.types.small]\nprice_per_hour = 1"
    for text, is_there in (("", False), (table, True)):
        write(text)
        settings = load_settings(UpSettings, {}, {})
        assert isinstance(settings, UpSettings)
        assert (settings.fleet is not None) is is_there


def test_a_table_is_of_the_file_alone() -> None:
    """A variable that would be ignored stops the start."""
    with pytest.raises(UsageError, match="unknown variable MILLSTREAM_FLEET"):
        load_settings(UpSettings, {}, {"MILLSTREAM_FLEET": "{}"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "millstream.toml: prot: unknown key; did you mean port?"),
        ("[tenant.acme]\nkeys = []", "millstream.toml: tenant: unknown key; did you mean tenants?"),
        (
            "[tenants.acme]\nkeys = [{key = 'sk-a', tokens_per_dya = 2}]",
            "millstream.toml: tenants.acme.keys.0.tokens_per_dya: unknown key",
        ),
        (
            "[tenants.acme]\nwieght = 2",
            "millstream.toml: tenants.acme.wieght: unknown key; did you mean weight?",
        ),
        ("port = 'x'", "millstream.toml: port: Input should be a valid integer"),
        ("port = ", "cannot read millstream.toml"),
        ("config = 'x.toml'", "millstream.toml: config: unknown key"),
        ("[tenants.'>']", "millstream.toml: tenants.>"),
        ("[fleet]", "millstream.toml: fleet.types: Field required"),
        ("[fleet]\nprovidr = 'x'\n[fleet.types]", "millstream.toml: fleet.providr: unknown key"),
        (
            "[fleet.types.a]\nprice_per_hour = 1\nstep_model = {step_ms = -1}",
            "millstream.toml: fleet.types.a.step_model: step_ms is -1.0",
        ),
        ("fleet = true", "millstream.toml: fleet: Input should be a valid dictionary"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(text: str, message: str) -> None:
    """An operator should have to read one line to repair it."""
    write(text)
    with pytest.raises(UsageError) as error:
        load_settings(UpSettings, {}, {})
    assert str(error.value).startswith(message)


def test_an_unknown_variable_stops_the_start_with_the_nearest_name() -> None:
    """MILLSTREAM_PROT=80 must not be ignored in silence."""
    with pytest.raises(UsageError, match="MILLSTREAM_PROT; did you mean MILLSTREAM_PORT"):
        load_settings(GatewaySettings, {}, {"MILLSTREAM_PROT": "80"})


def test_variables_with_keys_of_remote_servers_have_names_of_their_own() -> None:
    """A worker's, of which every service of a machine may find some in its environment."""
    keys = {"MILLSTREAM_UPSTREAM_FAR": "sk-far", "MILLSTREAM_UPSTREAM_HOST": "far, corn:80"}
    worker = load_settings(WorkerSettings, {"model": ["m"]}, keys)
    assert worker.model_dump()["upstream_host"] == ("far", "corn:80")
    assert load_settings(GatewaySettings, {}, keys).model_dump()["port"] == 8080


def test_other_programs_variables_are_none_of_our_business() -> None:
    """Only the prefix is ours."""
    assert (
        load_settings(GatewaySettings, {}, {"PORT": "80", "MILL": "x"}).model_dump()["port"] == 8080
    )


def test_a_wrong_value_is_quoted_with_where_it_came_from() -> None:
    """Which of three sources held it is the question an operator has."""
    with pytest.raises(UsageError, match=r"^MILLSTREAM_PORT: .*not '99999'$"):
        load_settings(GatewaySettings, {}, {"MILLSTREAM_PORT": "99999"})
    with pytest.raises(UsageError, match=r"^--port: .*not 'x'$"):
        load_settings(GatewaySettings, {"port": "x"}, {})


def test_a_wrong_form_is_told_in_words() -> None:
    """A regular expression is no help to whoever mistyped a time."""
    wanted = "^--window: '1x' is not of this form: how long the batch may take, such as 24h or 3d$"
    with pytest.raises(UsageError, match=wanted):
        load_settings(SubmitSettings, {"file": "x", "window": "1x"}, {})


def test_the_form_of_a_name_is_told() -> None:
    """The option's description does not say which letters a name may have."""
    with pytest.raises(UsageError, match=r"^--tenant: 'A b' is not of this form: 1 to 63 of a-z"):
        load_settings(CreateKeySettings, {"tenant": "A b"}, {})


def test_a_network_that_is_none_is_one_mistake() -> None:
    """Not one for each kind of address that it is not."""
    with pytest.raises(UsageError) as refused:
        load_settings(GatewaySettings, {"webhook_network": ["x"]}, {})
    assert str(refused.value).startswith("--webhook-network.0: no network such as 10.0.0.0/8")
    assert len(str(refused.value).splitlines()) == 1


def test_a_wrong_element_is_all_that_is_wrong_with_a_list() -> None:
    """The list without it is none that anybody has given."""
    with pytest.raises(UsageError) as refused:
        load_settings(CreateKeySettings, {"tenant": "acme", "scope": ["wide"]}, {})
    assert str(refused.value).startswith("--scope.0: Input should be 'infer'")
    assert len(str(refused.value).splitlines()) == 1


def test_a_value_is_quoted_once() -> None:
    """Also where the reason quotes it."""
    wanted = "^--expires: '5x' is no duration: write 20s, 15m, 2h or 7d$"
    with pytest.raises(UsageError, match=wanted):
        load_settings(CreateKeySettings, {"tenant": "acme", "expires": "5x"}, {})


def test_a_change_of_nothing_is_refused() -> None:
    """`acme: changed` would tell of a limit that was mistyped away."""
    with pytest.raises(UsageError, match="nothing is to be changed: give a limit"):
        load_settings(ChangeTenantSettings, {"name": "acme"}, {})


def test_a_key_is_never_quoted() -> None:
    """A message ends in logs and screenshots."""
    write("[tenants.acme]\nkeys = [7719]")
    with pytest.raises(UsageError) as error:
        load_settings(AdminSettings, {}, {})
    assert "7719" not in str(error.value)


def test_a_setting_without_default_is_asked_for() -> None:
    """There is no name that would do for any model."""
    with pytest.raises(UsageError, match="^--name is required$"):
        load_settings(AddSettings, {"remote": "http://127.0.0.1:1/v1"}, {})


def test_a_worker_without_a_model_says_to_which_records_it_looks() -> None:
    """One without a name of its own would wait for a record that nobody can write."""
    with pytest.raises(UsageError, match="model is missing: name one, or say by type or id"):
        load_settings(WorkerSettings, {}, {})
    by_type = load_settings(WorkerSettings, {"type": "l4"}, {})
    assert isinstance(by_type, WorkerSettings)
    assert by_type.model == ()


@pytest.mark.parametrize(
    "value", ["mock, all-minilm-l6-v2", '["mock", "all-minilm-l6-v2"]', "mock,all-minilm-l6-v2,"]
)
def test_a_list_in_a_variable_is_comma_separated_or_json(value: str) -> None:
    """A directory's name may hold a comma; the ordinary case should need no quoting."""
    settings = load_settings(WorkerSettings, {}, {"MILLSTREAM_MODEL": value})
    assert settings.model_dump()["model"] == ("mock", "all-minilm-l6-v2")


def test_a_tensor_parallel_worker_has_one_model() -> None:
    """Its processes are one group, which holds one model."""
    flags = {"model": ["a", "b"], "tensor_parallel_size": "2"}
    with pytest.raises(UsageError, match="tensor_parallel_size is 2: .* one model, not 2"):
        load_settings(WorkerSettings, flags, {})


def test_settings_are_frozen() -> None:
    """Nobody changes them after the start."""
    settings = load_settings(GatewaySettings, {}, {})
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[attr-defined]


def test_commands_find_the_server_of_a_running_up(tmp_path: Path) -> None:
    """`millstream lag` in another terminal needs no URL."""
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    running = state_file.UpState(pid=os.getpid(), nats="nats://127.0.0.1:7777", url="http://h:1")
    state_file.write(data_dir, running)
    found = load_settings(LagSettings, {}, {"MILLSTREAM_DATA_DIR": str(data_dir)})
    assert found.model_dump()["nats"] == running.nats
    environment = {"MILLSTREAM_NATS": "nats://elsewhere"}
    named = load_settings(LagSettings, {"data_dir": str(data_dir)}, environment)
    assert named.model_dump()["nats"] == running.nats
    told = load_settings(LagSettings, {"nats": "nats://a"}, {"MILLSTREAM_DATA_DIR": str(data_dir)})
    assert told.model_dump()["nats"] == "nats://a"
    assert (
        load_settings(BenchSettings, {"data_dir": str(data_dir)}, {}).model_dump()["url"]
        == running.url
    )


def test_a_backup_finds_the_keys_of_a_running_up(tmp_path: Path) -> None:
    """The stores have no users; with NATS of another cell, its own keys are to be named."""
    users = str(tmp_path / "broker/users")
    state = state_file.UpState(pid=os.getpid(), nats="nats://n", url="http://h", nats_users=users)
    state_file.write(tmp_path, state)

    def keys(**flags: str) -> Path | None:
        given = {"data_dir": str(tmp_path), "dir": "d", **flags}
        settings = load_settings(BackupSettings, given, {})
        assert isinstance(settings, BackupSettings)
        return settings.broker_keys

    assert keys() == tmp_path / "broker"
    assert keys(nats="nats://other") is None
    assert keys(broker_keys="mine") == Path("mine")


def bench_key(flags: dict[str, str], environment: dict[str, str]) -> str | None:
    """The API key that `millstream bench` takes."""
    settings = load_settings(BenchSettings, flags, environment)
    assert isinstance(settings, BenchSettings)
    return settings.api_key.get_secret_value() if settings.api_key else None


def test_the_api_key_comes_from_where_the_address_does(tmp_path: Path) -> None:
    """A flag, the data directory that a flag names, the environment, the directory: in this order.

    A key of the environment may be another cell's. Services take none: theirs is what they declare.
    """
    data_dir = str(tmp_path)
    state_file.write(tmp_path, state_file.UpState(pid=os.getpid(), nats="nats://n", url="http://h"))
    named, elsewhere = {"data_dir": data_dir}, {"MILLSTREAM_DATA_DIR": data_dir}
    foreign = {"MILLSTREAM_API_KEY": "sk-foreign"}
    assert bench_key(named, foreign) == "sk-foreign", "nothing is kept there"
    (tmp_path / "api-key").write_text("sk-kept\n")
    assert bench_key({**named, "api_key": "sk-flag"}, foreign) == "sk-flag"
    assert bench_key(named, foreign) == "sk-kept"
    assert bench_key({}, {**foreign, **elsewhere}) == "sk-foreign"
    assert bench_key({}, {"MILLSTREAM_API_KEY": "", **elsewhere}) == "sk-kept"
    admin = load_settings(AdminSettings, named, {})
    assert isinstance(admin, AdminSettings)
    assert (admin.api_key, admin.admin_key) == (None, None)


def test_commands_ask_the_admin_service_of_the_cell_that_they_are_meant_for(tmp_path: Path) -> None:
    """That of a running `up`, with its key, unless NATS of another cell was named."""
    state = state_file.UpState(pid=os.getpid(), nats="nats://n", url="http://h", admin="http://a")
    state_file.write(tmp_path, state)
    (tmp_path / "api-key").write_text("sk-kept\n")
    named = {"data_dir": str(tmp_path)}

    def asked(flags: dict[str, str], environment: dict[str, str]) -> tuple[str | None, str]:
        settings = load_settings(ListSettings, {**named, **flags}, environment)
        assert isinstance(settings, ListSettings)
        return settings.admin, settings.read_admin_key()

    assert asked({}, {}) == ("http://a", "sk-kept")
    assert asked({"nats": "nats://other"}, {}) == (None, "")
    assert asked({"admin": "http://b"}, {}) == ("http://b", "")
    assert asked({}, {"MILLSTREAM_ADMIN_KEY": "sk-own"}) == ("http://a", "sk-own")
    (tmp_path / "key").write_text("sk-file\n")
    assert asked({"admin_key_file": str(tmp_path / "key")}, {}) == ("http://a", "sk-file")


def test_commands_have_credentials_for_the_nats_that_they_find(tmp_path: Path) -> None:
    """Those of the environment are another cell's, unless its NATS is named, too."""
    state = state_file.UpState(pid=os.getpid(), nats="nats://n", url="http://h", nats_users="/u")
    state_file.write(tmp_path, state)

    def creds(flags: dict[str, str], **environment: str) -> Path | None:
        told = {"MILLSTREAM_DATA_DIR": str(tmp_path)} | {
            f"MILLSTREAM_{key.upper()}": value for key, value in environment.items()
        }
        settings = load_settings(LagSettings, flags, told)
        assert isinstance(settings, LagSettings)
        assert not (settings.nats_creds and settings.nats_nkey)
        return settings.nats_creds

    assert creds({}) == Path("/u/operator.creds")
    assert creds({}, nats_creds="/mine") == Path("/u/operator.creds")
    assert creds({}, nats_nkey="/mine", nats_ca="/ca") == Path("/u/operator.creds")
    assert creds({"nats_creds": "/mine"}) == Path("/mine")
    assert creds({}, nats="nats://other") is None
    assert creds({}, nats="nats://other", nats_creds="/mine") == Path("/mine")
    assert creds({}, nats="nats://n") == Path("/u/operator.creds")
    assert creds({}, nats="nats://n", nats_creds="/mine") == Path("/mine")


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://me:secret@h"])
def test_an_address_of_the_admin_service_holds_no_credentials(url: str) -> None:
    """It is written into scripts and shown by `ps`."""
    with pytest.raises(UsageError, match="--admin: must") as refused:
        load_settings(ListSettings, {"admin": url}, {})
    assert "secret" not in str(refused.value)


def test_a_key_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """In a sentence with the directory, before any request."""
    (tmp_path / "api-key").mkdir()
    with pytest.raises(UsageError, match=f"cannot read the API key in {tmp_path}: Is a directory"):
        load_settings(BenchSettings, {"data_dir": str(tmp_path), "url": "http://h"}, {})


@pytest.mark.parametrize("left", ["", "[]", "{}", '{"pid": 999999999, "nats": "n", "url": "u"}'])
def test_what_a_dead_up_left_behind_is_passed_over(left: str, tmp_path: Path) -> None:
    """A stale or torn file must not send a command to a server that is gone."""
    state_file.path(tmp_path).write_text(left)
    found = load_settings(LagSettings, {}, {"MILLSTREAM_DATA_DIR": str(tmp_path)})
    assert found.model_dump()["nats"] == "nats://127.0.0.1:4222"


def test_what_is_asked_once_is_no_setting() -> None:
    """`model` in the file is what `up` serves, not what `why` is asked about."""
    write("model = ['a', 'b']")
    settings = load_settings(WhySettings, {"tenant": "acme"}, {"MILLSTREAM_MODEL": "a"})
    assert isinstance(settings, WhySettings)
    assert (settings.tenant, settings.model) == ("acme", None)


@pytest.mark.parametrize("shown", ["0a1b", "cmpl-0a1b", "chatcmpl-0a1b"])
def test_a_request_may_be_named_as_its_answer_was(shown: str) -> None:
    """OpenAI's clients see that id and no other."""
    settings = load_settings(WhySettings, {"request_id": shown}, {})
    assert isinstance(settings, WhySettings)
    assert settings.request_id == "0a1b"


def test_what_the_file_says_for_remote_models_is_no_obstacle_to_others() -> None:
    """Only what is asked for must mean something."""
    write("api_key_variable = 'FAR_KEY'")
    assert load_settings(AddSettings, {"path": ".", "name": "m"}, {})
    with pytest.raises(UsageError, match="only for --remote: --api-key-variable"):
        load_settings(AddSettings, {"path": ".", "name": "m", "api_key_variable": "FAR_KEY"}, {})


def test_what_the_load_generator_is_set_to_is_no_limit_of_a_model() -> None:
    """Both call something `concurrency` and `max_output_tokens`."""
    write("concurrency = 8\nmax_output_tokens = 64")
    settings = load_settings(AddSettings, {"path": ".", "name": "m"}, {})
    assert isinstance(settings, AddSettings)
    assert settings.max_output_tokens is None


def test_a_service_that_finds_a_broker_has_the_credentials_of_its_class(tmp_path: Path) -> None:
    """An operator's would let it start, and do nothing. All services are named as their class."""
    state = state_file.UpState(pid=os.getpid(), nats="nats://n", url="http://h", nats_users="/u")
    state_file.write(tmp_path, state)
    told = {"MILLSTREAM_DATA_DIR": str(tmp_path), "MILLSTREAM_MODEL": "mock"}
    found = {}
    for command in COMMANDS:
        settings = command.load_settings()
        if issubclass(settings, ServiceSettings) and command.name in set(UserClass):
            found[command.name] = str(getattr(load_settings(settings, {}, told), "nats_creds", ""))
    assert found.keys() >= {"admin", "dispatcher", "fleet", "gateway", "jobs", "worker"}
    assert found == {name: f"/u/{name}.creds" for name in found}
