"""Tests of connections run over the event loop that services use, and with and without TLS."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop

from tests.support.certificates import CertificateAuthority

Transport = dict[str, Any]  # what `gateways` and `cell` need for it


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop's transports differ from asyncio's, most of all in how they end."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module", params=["plain", "tls"])
def transport(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Transport:
    if request.param == "plain":
        return {}
    authority = CertificateAuthority(tmp_path_factory.mktemp("tls"))
    return {**authority.make_server(), "tls": authority.client_context()}
