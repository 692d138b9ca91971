"""Where a remote engine's calls go, on real sockets: only where the worker's settings allow."""

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from structlog.testing import capture_logs

from gpu_worker.engines.remote.engine import RemoteEngine
from gpu_worker.models.loading import Loader
from registry.destination_policy import DestinationPolicy
from registry.remote_models import RemoteServer, remote_model
from tests.support.remote_engine import (
    QUICK,
    joined_text,
    make_sequence,
    only_error,
    open_engine,
    run_to_end,
)
from tests.support.services import worker_settings
from tests.support.stub_upstream import (
    ANSWER,
    respond_status,
    running_upstream,
    stream_answer,
)

REFUSED = ("upstream_failed", "the model's server is none that this worker may call")


def allowing(*hosts: str) -> DestinationPolicy:
    return DestinationPolicy(frozenset(hosts))


@contextmanager
def resolving(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[str]]) -> Iterator[None]:
    """A resolver that gives each name's next answer, of which the last one stays."""
    real: Callable[..., Any] = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host not in answers:
            return real(host, port, *args, **options)
        given = answers[host]
        address = given.pop(0) if len(given) > 1 else given[0]
        return real(address, port, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolve)
        yield


@pytest.mark.parametrize(
    "host",
    [
        "evil.example.com",
        "169.254.169.254",
        "2852039166",
        "0xA9FEA9FE",
        "[fe80::1]",
        "0",
        "10.0.0.8",
    ],
)
def test_a_host_that_is_not_allowed_gets_no_call(host: str) -> None:
    """Refused at once, and not tried until the deadline; the log says why, the client does not."""
    with capture_logs() as events, open_engine(f"http://{host}:1/v1") as engine:
        assert only_error(run_to_end(engine, make_sequence())["r"]) == REFUSED
    (refused,) = (each for each in events if each["event"] == "upstream_refused")
    assert "allow" in refused["reason"]


@pytest.mark.parametrize("address", ["169.254.169.254", "::ffff:169.254.169.254", "0.0.0.0"])
def test_a_listed_name_at_a_dangerous_address_gets_no_call(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Whoever has the name's zone could send the prompts, and the key, to a metadata service."""
    with (
        resolving(monkeypatch, {"corn.test": [address]}),
        running_upstream(stream_answer) as server,
        open_engine(
            f"http://corn.test:{server.server_port}", policy=allowing("corn.test")
        ) as engine,
    ):
        assert only_error(run_to_end(engine, make_sequence())["r"]) == REFUSED
        assert server.calls == []


def test_what_is_connected_to_is_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resolver that answers otherwise the second time is not asked a second time."""
    with (
        resolving(monkeypatch, {"corn.test": ["127.0.0.1", "169.254.169.254"]}),
        running_upstream(stream_answer) as server,
        open_engine(
            f"http://corn.test:{server.server_port}", policy=allowing("corn.test")
        ) as engine,
    ):
        assert joined_text(run_to_end(engine, make_sequence())["r"]) == ANSWER
        assert server.calls[0].headers["host"] == f"corn.test:{server.server_port}"
        assert only_error(run_to_end(engine, make_sequence("again"))["again"]) == REFUSED
        assert len(server.calls) == 1


def test_the_next_address_is_tried_where_one_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`localhost` is ::1 first on many machines, and servers listen on 127.0.0.1."""
    real = socket.getaddrinfo

    def both(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        found = [real(each, port, *args, **options) for each in ("127.0.0.2", "127.0.0.1")]
        return [each for answers in found for each in answers]

    with running_upstream(stream_answer) as server:
        with monkeypatch.context() as patched:
            patched.setattr(socket, "getaddrinfo", both)
            with open_engine(f"http://localhost:{server.server_port}") as engine:
                assert joined_text(run_to_end(engine, make_sequence())["r"]) == ANSWER


def test_a_redirect_is_not_followed() -> None:
    """It could lead anywhere, and the prompt with it."""
    with running_upstream(stream_answer) as other:
        away = respond_status(307, location=f"{other.url}/completions")
        with running_upstream(away) as server, open_engine(server.url) as engine:
            code, message = only_error(run_to_end(engine, make_sequence())["r"])
        assert (code, other.calls) == ("upstream_failed", [])
    assert "307, a redirect, and none is followed" in message


def test_a_proxy_of_the_environment_is_not_followed_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would see the prompts, and resolve names that nobody has checked."""
    with running_upstream(stream_answer) as proxy, running_upstream(stream_answer) as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@127.0.0.1:{proxy.server_port}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        with capture_logs() as events, open_engine(server.url) as engine:
            assert joined_text(run_to_end(engine, make_sequence())["r"]) == ANSWER
        assert proxy.calls == []
    (ignored,) = (each for each in events if each["event"] == "proxies_ignored")
    assert "HTTP_PROXY" in ignored["variables"]
    assert "secret" not in str(events)


async def test_a_records_own_policy_is_none() -> None:
    """The record is a stranger's; the worker's settings come last."""
    made = remote_model(RemoteServer(url="http://evil.invalid", model="m"), "far", context=1000)
    options = {**made.default.options, **QUICK, "policy": {"hosts": ["evil.invalid"]}}
    version = made.default.model_copy(update={"options": options})
    engine = (await Loader(worker_settings("nats://unused")).load(made, version, None)).engine
    assert isinstance(engine, RemoteEngine)
    try:
        assert only_error(run_to_end(engine, make_sequence())["r"]) == REFUSED
    finally:
        engine.close()


def test_a_certificate_is_checked_for_the_name_and_not_for_the_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The connection goes to a checked address; who answers there must still be the host."""
    certificate, key = write_certificate(tmp_path, "corn.test")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with (
        resolving(monkeypatch, {"corn.test": ["127.0.0.1"], "wheat.test": ["127.0.0.1"]}),
        running_upstream(stream_answer) as server,
    ):
        server.socket = context.wrap_socket(server.socket, server_side=True)
        port, policy = server.server_port, allowing("corn.test", "wheat.test")
        with open_engine(f"https://corn.test:{port}", policy=policy) as engine:
            assert joined_text(run_to_end(engine, make_sequence())["r"]) == ANSWER
        with (
            capture_logs() as events,
            open_engine(f"https://wheat.test:{port}", policy=policy) as e,
        ):
            e.add(make_sequence())
            while not any(each["event"] == "remote_call_retried" for each in events):
                assert e.step() == []
        assert len(server.calls) == 1


def write_certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """A certificate for `host` that is its own authority, and its key, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "certificate.pem", folder / "key.pem"
    certificate_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate_file, key_file
