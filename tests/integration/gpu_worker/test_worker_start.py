"""What a worker does about a model that is not registered."""

import asyncio

import pytest
from structlog.testing import capture_logs

from gpu_worker import service
from streams.errors import ModelNotFound
from tests.support.services import broker_client, worker_settings


async def test_a_worker_says_which_model_it_waits_for_and_at_last_that_there_is_none(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a typo would look like a worker that hangs, and then like a broker that does."""
    monkeypatch.setattr(service, "REGISTRATION_WAIT_SECONDS", 0.05)
    async with broker_client(nats_url):
        with capture_logs() as events, pytest.raises(ModelNotFound, match="mokc"):
            await service.run(worker_settings(nats_url, model=("mokc",)), asyncio.Event())
    assert {"waiting_for_model", "mokc"} <= {*events[0].values()}
