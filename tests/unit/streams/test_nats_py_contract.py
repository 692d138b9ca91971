"""The private members of nats-py that `streams/broker` builds on, each named.

They are nobody's promise, so nats-py is pinned to a minor version in pyproject.toml. When the pin
moves this test says which of them are gone or have changed.
"""

import ast
import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from nats.aio.client import Client, Srv
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.js import JetStreamContext
from nats.protocol.parser import Parser

from streams.broker.nats_client import PatchedNatsClient
from streams.broker.nats_wire import WireParser
from streams.broker.store_api import StoreApi

ROOT = Path(__file__).parents[3]
BUILT_ON = tuple(f"streams/broker/{name}.py" for name in ("nats_client", "nats_wire", "store_api"))
CLIENT_STATE = {
    "_flush_queue",
    "_flusher_task",
    "_max_payload",
    "_max_pending_size",
    "_pending",
    "_pending_data_size",
    "_pongs",
    "_ps",
    "_public_nkey",
    "_server_info",
    "_status",
    "_transport",
    "CONNECTED",
}
CLIENT_METHODS = {
    "_attempt_reconnect": "(self)",
    "_connect_to_server": "(self, s)",
    "_parse_header_lines": "(raw)",
    "_process_connect_init": "(self)",
    "_process_msg": "(self, sid, subject, reply, data, headers)",
    "_process_pong": "(self)",
    "_send_ping": "(self, future=None)",
    "_request_old_style": "(self, subject, payload, timeout=1)",
    "_remove_sub": "(self, sid, max_msgs=0)",
}
API_METHODS = {"_api_request": "(self, req_subject, req=b'', timeout=5)"}
PARSER_METHODS = {"reset": "(self)", "parse": "(self, data=b'')"}
ELSEWHERE = {"_error_cb", "_id", "_io_writer"}


def signature(function: object) -> str:
    """Names and defaults of the parameters, without types."""
    assert callable(function)
    found = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(inspect.Signature(bare))


def test_the_minor_version_is_pinned() -> None:
    """A patch release may still change them; then the other tests of this file fail."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (pin,) = [found for found in dependencies if found.startswith("nats-py")]
    major, minor, *_ = version("nats-py").split(".")
    assert pin == f"nats-py=={major}.{minor}.*"


@pytest.mark.parametrize("name", sorted(CLIENT_STATE))
def test_a_client_has_the_state_that_is_read_or_written(name: str) -> None:
    """Publishing at once writes where nats-py's own flusher reads."""
    assert hasattr(Client(), name)


@pytest.mark.parametrize(("name", "parameters"), sorted(CLIENT_METHODS.items()))
def test_a_client_has_the_methods_that_are_called_or_overridden(name: str, parameters: str) -> None:
    """An override with other parameters would fail in the middle of a reconnect."""
    assert signature(getattr(Client, name)) == parameters
    assert signature(getattr(PatchedNatsClient, name)) == parameters


@pytest.mark.parametrize(("name", "parameters"), sorted(PARSER_METHODS.items()))
def test_a_parser_has_the_methods_that_are_overridden(name: str, parameters: str) -> None:
    """nats-py's read loop calls them with each piece that it reads."""
    assert signature(getattr(Parser, name)) == parameters
    assert signature(getattr(WireParser, name)) == parameters


@pytest.mark.parametrize(("name", "parameters"), sorted(API_METHODS.items()))
def test_the_management_api_has_the_methods_that_are_overridden(name: str, parameters: str) -> None:
    """All its calls go through one method, with the subject first."""
    assert signature(getattr(JetStreamContext, name)) == parameters
    assert signature(getattr(StoreApi, name)) == parameters


def test_what_else_is_reached_is_there() -> None:
    """A subscription's number, a transport's writer, and the callback for errors while reading."""
    client = Client()
    assert Parser(client).nc is client
    assert Subscription(client, id=7)._id == 7
    assert hasattr(TcpTransport(), "_io_writer")  # type: ignore[no-untyped-call]
    assert "_error_cb" in inspect.getsource(Client)
    assert Srv.__name__ in inspect.getsource(Client._connect_to_server) + inspect.getsource(Client)


def test_no_other_private_member_is_used() -> None:
    """Else this list would no longer say what a new version of nats-py may break."""
    used, own = set[str](), set[str]()
    for name in BUILT_ON:
        tree = ast.parse((ROOT / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                used.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own.add(node.name)
    own |= set(vars(PatchedNatsClient())) - set(vars(Client()))
    own.add("_user_class")  # of a StoreApi
    own |= set(vars(WireParser(PatchedNatsClient(), {}))) - set(vars(Parser(Client())))
    named = CLIENT_STATE | CLIENT_METHODS.keys() | ELSEWHERE
    assert {name for name in used - named - own if not name.startswith("__")} == set()
