"""An encrypted connection: it is so from its first byte, or there is none."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streams.broker import reconnecting_client
from streams.connection_files import NO_FILES, ConnectionFiles
from streams.errors import BrokerMisconfigured, BrokerUnavailable
from tests.support.accounts_server import connect
from tests.support.certificates import Certificate, CertificateAuthority
from tests.support.nats_server import NatsServer

Start = Callable[..., str]


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


def tls_block(
    authority: CertificateAuthority,
    certificate: Certificate,
    *,
    first: bool = True,
    verify: bool = False,
) -> str:
    """The `tls` block of a server's configuration."""
    flags = f"handshake_first: {str(first).lower()}, verify: {str(verify).lower()}"
    files = f'cert_file: "{certificate.cert}", key_file: "{certificate.key}"'
    return f'tls {{ {files}, ca_file: "{authority.file}", {flags} }}'


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a server with JetStream and further configuration; returns its URL."""
    servers: list[NatsServer] = []

    def start_server(block: str = "") -> str:
        store = tmp_path_factory.mktemp("server")
        configuration = store / "server.conf"
        configuration.write_text(f'jetstream {{ store_dir: "{store}" }}\n{block}')
        servers.append(NatsServer(store, configuration=configuration))
        return servers[-1].url

    yield start_server
    for server in servers:
        server.kill()


async def refusal(url: str, files: ConnectionFiles, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence with which a first connection ends."""
    monkeypatch.setattr(reconnecting_client, "OPEN_SECONDS", 1.0)
    with pytest.raises((BrokerUnavailable, BrokerMisconfigured)) as caught, capture_logs():
        async with connect(url, "test", files):
            pass
    return str(caught.value)


async def test_a_connection_with_a_ca_is_encrypted(
    authority: CertificateAuthority, start: Start
) -> None:
    url = start(tls_block(authority, authority.issue("server")))
    async with connect(url, "test", ConnectionFiles(ca=authority.file)) as broker:
        assert await broker.client.request("$JS.API.INFO", timeout=9)


async def test_a_server_may_ask_for_a_certificate(
    authority: CertificateAuthority, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = authority.issue("client")
    url = start(tls_block(authority, authority.issue("server"), verify=True))
    async with connect(
        url, "test", ConnectionFiles(ca=authority.file, cert=own.cert, key=own.key)
    ) as broker:
        assert broker.is_connected
    said = await refusal(url, ConnectionFiles(ca=authority.file), monkeypatch)
    assert "give the certificate that the server wants, with --nats-cert and --nats-key" in said


async def test_a_certificate_of_another_ca_is_refused_by_the_server(
    authority: CertificateAuthority, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = CertificateAuthority(tmp_path, "other").issue("client")
    url = start(tls_block(authority, authority.issue("server"), verify=True))
    files = ConnectionFiles(ca=authority.file, cert=foreign.cert, key=foreign.key)
    assert "--nats-cert" in await refusal(url, files, monkeypatch)


async def test_a_server_of_another_ca_is_not_spoken_to(
    authority: CertificateAuthority, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be anybody's, and would be shown the credentials."""
    url = start(tls_block(authority, authority.issue("server")))
    other = CertificateAuthority(tmp_path, "other")
    said = await refusal(url, ConnectionFiles(ca=other.file), monkeypatch)
    assert "its certificate is not accepted: unable to get local issuer certificate" in said
    assert "--nats-ca" in said


async def test_a_certificate_for_another_host_is_not_spoken_to(
    authority: CertificateAuthority, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = start(tls_block(authority, authority.issue("server", "10.0.0.1")))
    said = await refusal(url, ConnectionFiles(ca=authority.file), monkeypatch)
    assert "is not valid for '127.0.0.1'" in said


@pytest.mark.parametrize("given", ["a file", "a URL"])
async def test_a_server_without_tls_gets_no_word_in_clear(
    authority: CertificateAuthority, start: Start, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py alone would speak plainly to it, and show its token to all who listen."""
    url = start()
    files = ConnectionFiles(ca=authority.file) if given == "a file" else NO_FILES
    shown = url if given == "a file" else url.replace("nats://", "tls://")
    said = await refusal(shown, files, monkeypatch)
    assert "the server does not begin with TLS: set `handshake_first: true`" in said


async def test_a_server_that_begins_with_tls_is_named_to_who_does_not(
    authority: CertificateAuthority, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = start(tls_block(authority, authority.issue("server")))
    assert "--nats-ca" in await refusal(url, NO_FILES, monkeypatch)


@pytest.mark.parametrize("content", [None, "", "no certificate"])
async def test_a_ca_that_is_no_file_of_certificates_ends_the_start_at_once(
    tmp_path: Path, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = tmp_path / "ca.pem"
    if content is not None:
        ca.write_text(content)
    said = await refusal("nats://127.0.0.1:1", ConnectionFiles(ca=ca), monkeypatch)
    assert f"the CA of NATS in {ca} " in said


async def test_a_key_of_another_certificate_ends_the_start_at_once(
    authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    files = ConnectionFiles(ca=authority.file, cert=one.cert, key=other.key)
    said = await refusal("nats://127.0.0.1:1", files, monkeypatch)
    assert f"{one.cert} and {other.key} are no certificate in PEM with its own" in said


@pytest.mark.parametrize(
    "given", [{"creds": "a", "nkey": "b"}, {"cert": "a"}, {"key": "a"}], ids=str
)
def test_files_that_do_not_go_together_are_refused(given: dict[str, str]) -> None:
    """One of them would be ignored."""
    with pytest.raises(BrokerMisconfigured, match="--nats-"):
        ConnectionFiles(**{name: Path(path) for name, path in given.items()})
