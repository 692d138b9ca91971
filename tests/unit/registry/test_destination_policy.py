"""What a record may decide for a worker: tables of hosts, addresses, variables and directories."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from gpu_worker.models.record_checks import ModelRefused, check_directory, check_model
from gpu_worker.settings import WorkerSettings
from registry.destination_policy import (
    THIS_MACHINE_ONLY,
    DestinationPolicy,
    DestinationRefused,
    validate_upstream_host,
)
from registry.models import mock_model
from registry.remote_models import RemoteRefused, RemoteServer, find_needed_settings, remote_model
from registry.upstream_addresses import canonical_host

LISTED = DestinationPolicy(
    frozenset(
        {
            "api.example.com",
            "corn:8000",
            "10.0.0.7",
            "[fd00::7]:80",
            "2852039166",
            "::ffff:a9fe:a9fe",
        }
    )
)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/v1",
        "http://127.8.8.8",
        "http://[::1]:9/v1",
        "http://localhost:8000",
        "http://LOCALHOST.:8000",
        "http://2130706433",
        "http://0x7f.1",
        "http://[::ffff:127.0.0.1]",
        "https://api.example.com/v1",
        "http://api.example.com:8000",
        "https://API.Example.com./v1",
        "http://corn:8000/v1",
        "http://10.0.0.7",
        "http://0xA000007",
        "http://[fd00:0::7]",
    ],
)
def test_this_machine_and_listed_hosts_may_be_called(url: str) -> None:
    """However they are spelled."""
    LISTED.check_url(url)


@pytest.mark.parametrize(
    ("url", "setting"),
    [
        ("https://evil.example.com", "--upstream-host evil.example.com"),
        ("https://api.example.com.evil.org", "--upstream-host api.example.com.evil.org"),
        ("http://corn:8001", "--upstream-host corn"),
        ("http://10.0.0.8:8000/v1", "--upstream-host 10.0.0.8"),
        ("http://167772168", "--upstream-host 10.0.0.8"),
        ("http://[fd00::7]:81", r"--upstream-host \[fd00::7\]"),
        ("http://localhost.evil.org", "--upstream-host localhost.evil.org"),
        ("http://[64:ff9b::7f00:1]", "--upstream-host"),
    ],
)
def test_another_host_is_refused_with_the_setting_that_allows_it(url: str, setting: str) -> None:
    """An operator must see at once what to say, if he wants it."""
    with pytest.raises(DestinationRefused, match=f"allow it with {setting}"):
        LISTED.check_url(url)


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "2852039166",
        "0xA9FEA9FE",
        "0251.0376.0251.0376",
        "0xa9.0376.43518",
        "169.16689662",
        "[::ffff:169.254.169.254]",
        "[::ffff:a9fe:a9fe]",
        "[::169.254.169.254]",
        "[::ffff:0:a9fe:a9fe]",
        "[64:ff9b::a9fe:a9fe]",
        "[64:ff9b:1::a9fe:a9fe]",
        "[64:ff9b:1:a9fe:a9:fe00::]",
        "[2002:a9fe:a9fe::1]",
        "[fe80::1]",
        "[fec0::1]",
        "[fd00:ec2::254]",
        "[fd20:ce::254]",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "0.0.0.0",
        "0",
        "0.1.2.3",
        "[::]",
        "[::ffff:0.0.0.0]",
        "224.0.0.1",
        "[ff02::1]",
        "255.255.255.255",
    ],
)
def test_no_setting_allows_a_dangerous_address(host: str) -> None:
    """Neither as the text of a URL, nor as what a listed name resolves to."""
    everything = DestinationPolicy(frozenset({canonical_host(host.strip("[]")), host, "listed"}))
    with pytest.raises(DestinationRefused, match="no setting allows it"):
        everything.check_url(f"http://{host}:80/v1")
    with pytest.raises(DestinationRefused, match="listed is at .*no setting allows it"):
        everything.check_addresses("listed", ["10.0.0.7", host.strip("[]")])


def test_a_zone_hides_no_link_local_address() -> None:
    """Resolvers answer with `fe80::1%eth0`."""
    with pytest.raises(DestinationRefused, match="link-local"):
        LISTED.check_addresses("corn", ["fe80::1%eth0"])


def test_localhost_is_this_machine_or_refused() -> None:
    """A resolver, or a hosts file, may say otherwise."""
    LISTED.check_addresses("localhost", ["127.0.0.1", "::1"])
    with pytest.raises(DestinationRefused, match="which is not this machine"):
        LISTED.check_addresses("localhost", ["10.0.0.7"])


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("", True),
        ("MILLSTREAM_UPSTREAM_FAR", True),
        ("OPENAI_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", False),
        ("MILLSTREAM_API_KEY", False),
        ("millstream_upstream_far", False),
    ],
)
def test_keys_are_in_variables_of_one_prefix_or_listed(name: str, is_allowed: bool) -> None:
    """A worker's environment has secrets that are not for any server."""
    policy = DestinationPolicy(key_variables=frozenset({"OPENAI_API_KEY"}))
    if is_allowed:
        policy.check_key_variable(name)
    else:
        with pytest.raises(DestinationRefused, match=f"--upstream-key-variable {name}"):
            policy.check_key_variable(name)


@pytest.mark.parametrize(
    ("entry", "canonical"),
    [
        ("API.example.com.", "api.example.com"),
        ("corn:8000", "corn:8000"),
        ("[FD00:0::7]:80", "[fd00::7]:80"),
        ("167772167", "10.0.0.7"),
    ],
)
def test_a_listed_host_is_kept_as_it_is_compared(entry: str, canonical: str) -> None:
    """So that no spelling of a record misses it, or passes beside it."""
    assert validate_upstream_host(entry) == canonical


@pytest.mark.parametrize("entry", ["", "*", "http://corn", "corn/v1", "a b", "u@corn", "fd00::7"])
def test_a_listed_host_is_no_url_and_no_pattern(entry: str) -> None:
    """What is not understood must not be obeyed in part."""
    with pytest.raises(ValidationError, match="upstream_host"):
        WorkerSettings(model=("m",), upstream_host=(entry,))


def test_directories_lie_below_a_root_with_links_followed(tmp_path: Path) -> None:
    """A record's path may climb, or lead through a link; a root may be a link itself."""
    inside, outside = tmp_path / "models/llama", tmp_path / "models-of-others"
    inside.mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "models")
    (inside / "out").symlink_to(outside)
    settings = WorkerSettings(model=("m",), model_root=(tmp_path / "link",))
    for allowed in (inside, tmp_path / "link/llama", tmp_path / "models"):
        check_directory(settings.destinations, allowed)
    for refused in (outside, inside / "out", inside / "../../models-of-others", Path("/")):
        with pytest.raises(DestinationRefused, match="--model-root"):
            check_directory(settings.destinations, refused)
    check_directory(THIS_MACHINE_ONLY, outside)


def test_a_model_is_refused_by_its_name_before_it_is_followed(tmp_path: Path) -> None:
    """The operator of a worker with many models must know which one, and what to say."""
    server = RemoteServer(url="https://far.example.com/v1", model="m", api_key_variable="HOME")
    model = remote_model(server, "far", context=9, version="1")
    with pytest.raises(ModelRefused, match="'far@1' is refused.*--upstream-host far.example.com"):
        check_model(THIS_MACHINE_ONLY, model, model.default)
    listed = DestinationPolicy(frozenset({"far.example.com"}))
    with pytest.raises(ModelRefused, match="--upstream-key-variable HOME"):
        check_model(listed, model, model.default)
    version = model.default.model_copy(update={"directory": str(tmp_path)})
    with pytest.raises(ModelRefused, match=f"{tmp_path} is below none.*--model-root"):
        check_model(DestinationPolicy(model_roots=(tmp_path / "m",)), model, version)
    check_model(THIS_MACHINE_ONLY, mock_model(), mock_model().default)


@pytest.mark.parametrize(
    "url", [None, 7, "", "file:///etc/passwd", "http://a:b@corn", "http://x:y"]
)
def test_a_record_that_was_never_checked_is_refused_by_name(url: object) -> None:
    """Whoever writes to the registry need not have used `models add`."""
    model = remote_model(RemoteServer(url="http://corn", model="m"), "far", context=9)
    version = model.default.model_copy(update={"options": {"url": url}})
    with pytest.raises(ModelRefused, match=r"'far@\w+' is refused"):
        check_model(LISTED, model, version)


def test_what_a_worker_will_refuse_is_said_when_it_is_added() -> None:
    """Where the command can know: the settings are the worker's, but some URLs none can allow."""
    near = RemoteServer(url="http://127.0.0.1:8000", model="m")
    assert find_needed_settings(near) == []
    keyed = near.model_copy(update={"url": "https://far", "api_key_variable": "FAR_KEY"})
    host, key = find_needed_settings(keyed)
    assert "--upstream-host far" in host
    assert "--upstream-key-variable FAR_KEY" in key
    with pytest.raises(RemoteRefused, match="link-local"):
        find_needed_settings(near.model_copy(update={"url": "http://169.254.169.254/latest"}))
