"""A server that is cancelled, rather than told to exit, listens no more."""

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvicorn
from starlette.applications import Starlette

from admin.http_server import AdminServer
from gateway.server.uvicorn_server import GatewayServer, build_config
from gateway.settings import GatewaySettings
from tests.support.eventually import eventually


def gateway() -> uvicorn.Server:
    return GatewayServer(build_config(Starlette(), GatewaySettings()))


@pytest.mark.parametrize("make", [gateway, lambda: AdminServer(Starlette())])
async def test_a_cancelled_server_stops_listening(make: Callable[[], uvicorn.Server]) -> None:
    """Its loop could not be closed with the socket open: uvloop would wait for it for ever."""
    server, listener = make(), socket.socket()
    listener.bind(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    await eventually(lambda: server.started)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert [each.is_serving() for each in server.servers] == [False]
    listener.close()
