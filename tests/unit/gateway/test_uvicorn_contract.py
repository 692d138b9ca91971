"""The undocumented members of uvicorn and websockets that `gateway/server` builds on, each named.

uvicorn is pinned to a minor version in pyproject.toml. When the pin moves this test says which of
them are gone or have changed.
"""

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from gateway.server.http_protocol import HttpProtocol
from gateway.server.response_framing import ResponseCycle
from gateway.server.uvicorn_server import GatewayServer
from gateway.server.websocket_protocol import WebSocketProtocol

ROOT = Path(__file__).parents[3]
SERVER_METHODS = {
    "capture_signals": "(self)",
    "serve": "(self, sockets=None)",
    "shutdown": "(self, sockets=None)",
}
HTTP_STATE = {
    "app_state",
    "config",
    "connections",
    "cycle",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "scope",
    "timeout_keep_alive",
    "transport",
}
CYCLE_STATE = {
    "chunked_encoding",
    "disconnected",
    "expected_content_length",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "scope",
    "waiting_for_100_continue",
}
HTTP_METHODS = {
    "_unset_keepalive_if_required": "(self)",
    "connection_lost": "(self, exc)",
    "connection_made": "(self, transport)",
    "data_received": "(self, data)",
    "eof_received": "(self)",
    "handle_websocket_upgrade": "(self)",
    "on_body": "(self, body)",
    "on_header": "(self, name, value)",
    "on_headers_complete": "(self)",
    "on_message_begin": "(self)",
    "on_message_complete": "(self)",
    "on_response_complete": "(self)",
    "on_url": "(self, url)",
    "pause_writing": "(self)",
    "resume_writing": "(self)",
    "send_400_response": "(self, msg)",
}
WEBSOCKET_STATE = {
    "close_sent",
    "config",
    "conn",
    "frames",
    "handshake_initiated",
    "initial_response",
    "logger",
    "loop",
    "ping_interval",
    "read_paused",
    "transport",
    "writable",
}
WEBSOCKET_METHODS = {
    "connection_lost": "(self, exc)",
    "connection_made": "(self, transport)",
    "data_received": "(self, data)",
    "eof_received": "(self)",
    "handle_cont": "(self, event)",
    "handle_parser_exception": "(self)",
    "handle_ping": "(self)",
    "handle_pong": "(self, event)",
    "keepalive_timeout": "(self)",
    "pause_writing": "(self)",
    "receive": "(self)",
    "resume_writing": "(self)",
    "schedule_ping": "(self)",
    "send_receive_event_to_app": "(self)",
    "stop_keepalive": "(self)",
}


def signature(function: object) -> str:
    """Names and defaults of the parameters, without types."""
    assert callable(function)
    found = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(inspect.Signature(bare))


async def made(protocol: type[Any]) -> Any:
    """A protocol as uvicorn makes one for a new connection."""
    config = uvicorn.Config(Starlette(), lifespan="off", log_config=None)
    config.load()
    return protocol(config, ServerState(), {})


def test_the_minor_version_is_pinned() -> None:
    """A patch release may still change them; then the other tests of this file fail."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (pin,) = [found for found in dependencies if found.startswith("uvicorn")]
    major, minor, *_ = version("uvicorn").split(".")
    assert pin == f"uvicorn=={major}.{minor}.*"


@pytest.mark.parametrize(("name", "parameters"), sorted(SERVER_METHODS.items()))
def test_a_server_has_the_methods_that_are_overridden(name: str, parameters: str) -> None:
    """With TLS, connections are accepted beside uvicorn, and must end when its own would."""
    assert signature(getattr(uvicorn.Server, name)) == parameters
    assert signature(getattr(GatewayServer, name)) == parameters
    assert hasattr(uvicorn.Server(uvicorn.Config(Starlette())), "server_state")


async def test_an_http_protocol_has_the_state_that_is_read_or_written() -> None:
    """Heads are bounded, and idle connections counted, by what uvicorn keeps of them."""
    protocol = await made(HttpToolsProtocol)
    assert {name for name in HTTP_STATE if not hasattr(protocol, name)} == set()
    assert "self.url = " in inspect.getsource(HttpToolsProtocol)  # from the first line on
    made_by = inspect.getsource(RequestResponseCycle.__init__)
    assert {name for name in CYCLE_STATE if f"self.{name}" not in made_by} == set()
    assert signature(RequestResponseCycle.send) == signature(ResponseCycle.send)
    assert httptools_impl.STATUS_LINE[200].startswith(b"HTTP/1.1 200 ")


async def test_a_websocket_protocol_has_the_state_that_is_read_or_written() -> None:
    """What is parsed, and when, follows from what uvicorn has handed on."""
    protocol = await made(WebSocketsSansIOProtocol)
    initialised = inspect.getsource(WebSocketsSansIOProtocol.__init__)
    missing = {n for n in WEBSOCKET_STATE if not hasattr(protocol, n) and n not in initialised}
    assert missing == set()
    assert hasattr(ServerProtocol(), "current_size")
    assert signature(ServerProtocol.reject) == "(self, status, text)"
    assert hasattr(StreamReader(), "buffer")


@pytest.mark.parametrize(("name", "parameters"), sorted(HTTP_METHODS.items()))
def test_an_http_protocol_has_the_methods_that_are_called_or_overridden(
    name: str, parameters: str
) -> None:
    """An override that is no longer called would let a bound go, in silence."""
    assert signature(getattr(HttpToolsProtocol, name)) == parameters
    assert signature(getattr(HttpProtocol, name)) == parameters


@pytest.mark.parametrize(("name", "parameters"), sorted(WEBSOCKET_METHODS.items()))
def test_a_websocket_protocol_has_the_methods_that_are_called_or_overridden(
    name: str, parameters: str
) -> None:
    """An override that is no longer called would let a bound go, in silence."""
    assert signature(getattr(WebSocketsSansIOProtocol, name)) == parameters
    assert signature(getattr(WebSocketProtocol, name)) == parameters


def test_every_override_of_uvicorn_is_named_here() -> None:
    """Else this list would no longer say what a new version of uvicorn may break."""
    for ours, theirs, named in (
        (HttpProtocol, HttpToolsProtocol, HTTP_METHODS),
        (WebSocketProtocol, WebSocketsSansIOProtocol, WEBSOCKET_METHODS),
    ):
        mine = {
            name
            for cls in ours.__mro__
            if cls.__module__.startswith("gateway.")
            for name, value in vars(cls).items()
            if inspect.isfunction(value)
        }
        overridden = {n for n in mine if hasattr(theirs, n) and not n.startswith("__")}
        assert overridden - named.keys() == set()
