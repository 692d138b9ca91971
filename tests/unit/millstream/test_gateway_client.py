"""A server that is no gateway, and a file of authorities that is none, are told as such."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from millstream.gateway_client import AuthorityUnreadable, GatewayClient, GatewayUnreachable
from streams.base_settings import GatewayClientSettings


class OtherServer(BaseHTTPRequestHandler):
    """Any server that answers with a page; to `/cut` with less than it has promised."""

    def do_GET(self) -> None:
        """Answer with a page."""
        page = b"<p>hello\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(page) + (self.path == "/cut")))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Write nothing to stderr."""


@contextmanager
def other_server() -> Iterator[GatewayClient]:
    with HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            yield GatewayClient(GatewayClientSettings(url=url))
        finally:
            server.shutdown()
            thread.join()


def test_a_page_is_no_answer_of_a_gateway() -> None:
    """A proxy's page, or another program on the port."""
    with other_server() as client, pytest.raises(GatewayUnreachable) as refused:
        client.call("GET", "/v1/batches")
    assert str(refused.value) == (
        "what answered with the status 200 is no gateway: name one with --url"
    )


def test_an_answer_that_breaks_off_is_told() -> None:
    """Its gateway has died."""
    with other_server() as client, pytest.raises(GatewayUnreachable, match="no gateway answers"):
        client.call("GET", "/cut")


def test_a_server_without_http_is_named_in_one_line() -> None:
    """Such as a NATS server, whose greeting is no line of HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = GatewayClient(
            GatewayClientSettings(url=f"http://127.0.0.1:{server.getsockname()[1]}")
        )

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b'INFO {"server_id": "N"}\r\n')

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(GatewayUnreachable) as refused:
            client.call("GET", "/v1/batches")
        thread.join()
    assert "(what answers does not speak HTTP): start one" in str(refused.value)


def test_authorities_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """The error names the file, and why it is none."""
    missing = tmp_path / "none.pem"
    with pytest.raises(AuthorityUnreadable, match="none.pem cannot be used: No such file"):
        GatewayClient(GatewayClientSettings(ca=missing))
    missing.write_text("nothing\n")
    with pytest.raises(AuthorityUnreadable, match="it has no certificates in PEM"):
        GatewayClient(GatewayClientSettings(ca=missing))
