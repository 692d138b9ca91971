"""Uploads that are torn by a death: nothing accepted is lost, nothing half is there."""

import asyncio
import os
from pathlib import Path

import openai

from streams import topology
from streams.broker.broker_client import Broker
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, gateways
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.service_process import service_process

HEAD = b'--b\r\nContent-Disposition: form-data; name="%b"; filename="a.txt"\r\n\r\n'
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
DATA = os.urandom(3_000_000)  # six chunks


def sdk(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)


async def has_chunks(broker: Broker) -> bool:
    return (await broker.js.stream_info(topology.FILES)).state.messages >= 2


async def test_a_gateway_that_is_killed_leaves_no_half_of_a_file(
    nats_url: str, tmp_path: Path
) -> None:
    """The part that was stored is no file; the next gateway stores it whole."""
    port = free_port()
    async with (
        gateways(nats_url) as (other,),
        sdk(other) as client,
        connect(nats_url, "t") as broker,
    ):
        kept = await client.files.create(file=("kept.txt", b"kept"), purpose="user_data")
        log = tmp_path / "gateway.log"
        with service_process("gateway", nats_url, log, port=port) as killed:
            doomed = RunningGateway(port, asyncio.Event())
            await eventually(doomed.answers)
            body = HEAD % b"file" + DATA[:2_000_000]
            torn = await doomed.open(
                "POST", "/v1/files", body, headers={**FORM, "Content-Length": "3000100"}
            )
            await eventually(lambda: has_chunks(broker))
            killed.kill()
            torn.abort()
        assert [each.filename async for each in client.files.list()] == ["kept.txt"]
        again = await client.files.create(file=("a.txt", DATA), purpose="user_data")
        assert (await client.files.content(again.id)).content == DATA
        assert (await client.files.content(kept.id)).content == b"kept"


async def test_a_broker_that_is_killed_in_the_middle_of_a_file_loses_none_of_it(
    nats_server: NatsServer,
) -> None:
    """The gateway stores the chunks again that the broker has not confirmed."""
    async with (
        gateways(nats_server.url) as (gateway,),
        sdk(gateway) as client,
        connect(nats_server.url, "t") as broker,
    ):
        body = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        body += HEAD % b"file" + DATA + b"\r\n--b--\r\n"
        exchange = await gateway.open(
            "POST",
            "/v1/files",
            body[:2_000_000],
            headers={**FORM, "Content-Length": str(len(body))},
        )
        await eventually(lambda: has_chunks(broker))
        nats_server.kill()
        exchange.write(body[2_000_000:])
        nats_server.start()
        await exchange.read_head()
        assert exchange.status == 200, await exchange.read_body()
        exchange.abort()
        (file,) = [each async for each in client.files.list()]
        assert (await client.files.content(file.id)).content == DATA
