"""Admin services of a test, in this process, and clients of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr

import admin.service
from millstream.admin.admin_client import AdminRefused, AdminUnreachable, HttpAdminClient
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.services import admin_settings, running

ADMIN_KEY = "sk-admin"


@asynccontextmanager
async def running_admin(nats_url: str, **settings: Any) -> AsyncIterator[HttpAdminClient]:
    """An admin service that answers, and a client with its key."""
    port = free_port()
    told = {"admin_key": SecretStr(ADMIN_KEY), "admin_port": port, **settings}
    async with running(admin.service, admin_settings(nats_url, **told)):
        client = HttpAdminClient(f"http://127.0.0.1:{port}", ADMIN_KEY)
        await eventually(lambda: answers(client))
        yield client


async def answers(client: HttpAdminClient) -> bool:
    try:
        await client.call("models.list")
    except AdminUnreachable:
        return False
    except AdminRefused as refusal:
        return refusal.code != "broker_unavailable"
    return True
