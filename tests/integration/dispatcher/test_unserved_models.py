"""A model without workers: whoever can start one hears of its first request at once."""

import pytest
from nats.aio.msg import Msg

import dispatcher.service
from dispatcher import model_dispatcher
from streams import subjects
from streams.accounts.access import UserClass
from streams.messages import Pressure
from tests.support.accounts_server import connect, process_files
from tests.support.eventually import eventually
from tests.support.services import broker_client, dispatcher_settings, running


async def test_the_first_request_is_reported_without_waiting_for_the_timer(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer's interval would be a part of every cold start."""
    monkeypatch.setattr(model_dispatcher, "TICK_SECONDS", 3600.0)
    heard: list[Pressure] = []

    async def on_pressure(msg: Msg) -> None:
        heard.append(Pressure.unpack(msg.data))

    files = process_files(nats_url, UserClass.FLEET, "listener")
    async with (
        broker_client(nats_url) as c,
        connect(nats_url, "listener", files) as listener,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        await listener.subscribe(subjects.pressure("mock"), on_pressure)
        await eventually(c.report)
        await c.send("hello", max_tokens=8)
        await eventually(lambda: heard)
        assert (heard[0].workers, heard[0].queued["standard"]) == (0, 1)
        assert tuple(heard[0].arrived["standard"]) == (1, 5, 8)
