"""Certificates that `millstream tls init` makes, and all that speaks to a gateway with TLS."""

import json
import shlex
import ssl
import stat
import urllib.request
from pathlib import Path

import pytest

from tests.support.millstream_up import KEY, MillstreamUp, run_millstream, wait_until


def make_certificates(directory: Path, *words: str) -> dict[str, str]:
    made = run_millstream("tls", "init", str(directory), "--json", *words)
    assert made.returncode == 0, made.stderr
    found: dict[str, str] = json.loads(made.stdout)
    return found


def test_up_serves_tls_and_every_client_of_the_gateway_speaks_it(tmp_path: Path) -> None:
    """The page, the printed URL, `bench` through the state file, and a certificate for a key."""
    files = make_certificates(tmp_path / "tls", "--client", "acme")
    config = tmp_path / "millstream.toml"
    config.write_text('[tenants.acme]\ncertificates = ["spiffe://millstream/acme"]\n')
    words = ["--model", "mock", "--api-key", KEY, "--config", str(config)]
    for option in ("tls_cert", "tls_key"):
        words += [f"--{option.replace('_', '-')}", files[option]]
    words += ["--tls-client-ca", files["ca"]]
    with MillstreamUp(tmp_path, *words) as up:
        up.wait_until_ready()
        assert f"{up.url}/v1" in up.output.read_text()
        context = ssl.create_default_context(cafile=files["ca"])
        with urllib.request.urlopen(f"{up.url}/", context=context, timeout=30) as page:
            assert b"<html" in page.read()
        found = ["--data-dir", str(tmp_path / "data")]
        for protocol in ("ws", "sse"):
            load = ["bench", "--requests", "2", "--json", "--protocol", protocol]
            trusting = run_millstream(*load, *found, "--ca", files["ca"])
            assert trusting.returncode == 0, trusting.stderr
            untrusting = run_millstream(*load, *found)
            assert untrusting.returncode == 1
            assert "certificate verify failed" in untrusting.stderr
        context.load_cert_chain(files["acme_cert"], files["acme_key"])
        with urllib.request.urlopen(f"{up.url}/v1/models", context=context, timeout=30) as models:
            assert json.load(models)["data"][0]["id"] == "mock"

        before = serial(up.port)
        assert make_certificates(tmp_path / "tls")["ca"] == files["ca"]
        wait_until(lambda: serial(up.port) != before, 30)


def serial(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port))


def test_the_files_are_their_owners_alone_and_the_authority_stays(tmp_path: Path) -> None:
    """What was signed before is trusted after a renewal, too."""
    files = make_certificates(tmp_path / "tls", "--client", "acme", "--host", "gw.example")
    kept = Path(files["ca"]).read_bytes()
    assert len(files) == 5
    for file in (tmp_path / "tls").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = run_millstream("tls", "init", str(tmp_path / "tls"))
    assert Path(files["ca"]).read_bytes() == kept
    assert again.stdout.startswith(f"millstream up --tls-cert {shlex.quote(files['tls_cert'])}")


@pytest.mark.parametrize("broken", ["a file for a directory", "no key of the authority"])
def test_what_keeps_it_from_writing_is_said_in_a_sentence(tmp_path: Path, broken: str) -> None:
    directory = tmp_path / "tls"
    if broken == "a file for a directory":
        directory.write_text("")
    else:
        make_certificates(directory)
        (directory / "ca-key.pem").write_text("x")
    failed = run_millstream("tls", "init", str(directory))
    assert failed.returncode == 1
    assert failed.stderr.startswith("millstream: cannot ")
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tls-cert", "/nowhere.pem"], "give both --tls-cert and --tls-key"),
        (["--tls-client-auth", "required"], "needs --tls-client-ca"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], sentence: str) -> None:
    failed = run_millstream("up", "--model", "mock", *words)
    assert (failed.returncode, sentence in failed.stderr) == (2, True)
