"""A background response while its services die: no event is lost or changed."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai

import dispatcher.service
import gpu_worker.service
from tests.integration.responses.test_background import ended, events_from, status_of
from tests.support.eventually import eventually
from tests.support.gateways import KEY, gateways, register
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess, service_process
from tests.support.services import dispatcher_settings, running, worker_settings


def sdk(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


async def is_up(port: int) -> bool:
    try:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
    except httpx.HTTPError:
        return False


async def test_a_stream_goes_on_when_gateway_and_jobs_are_killed(
    nats_url: str, tmp_path: Path
) -> None:
    """At another gateway, behind the last event; all of it is what a reader from 0 gets."""
    await register(nats_url, ttft_ms=1, itl_ms=20)
    async with (
        gateways(nats_url) as (other,),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
        AsyncExitStack() as stack,
    ):

        def start(command: str, **settings: Any) -> ServiceProcess:
            log = tmp_path / f"{command}.log"
            return stack.enter_context(service_process(command, nats_url, log, **settings))

        port = free_port()
        gateway, jobs = start("gateway", port=port), start("jobs")
        await eventually(lambda: is_up(port))
        client = await stack.enter_async_context(sdk(port))
        stream = await client.responses.create(
            model="mock", input="hi", max_output_tokens=400, background=True, stream=True
        )
        seen: list[dict[str, Any]] = []
        try:
            async for event in stream:
                seen.append(event.to_dict())
                if event.type == "response.output_text.delta" and gateway.process.poll() is None:
                    gateway.kill()
                    jobs.kill()
        except openai.APIConnectionError:
            pass  # its gateway is gone
        response = seen[0]["response"]["id"]
        survivor = await stack.enter_async_context(sdk(other.port))
        rest = await events_from(survivor, response, seen[-1]["sequence_number"])
        whole = [*seen, *rest]
        assert whole[-1]["type"] == "response.incomplete"
        assert await events_from(survivor, response) == whole


async def test_a_queued_response_is_run_by_the_next_jobs_service(
    nats_url: str, tmp_path: Path
) -> None:
    """It is answered once, whatever the killed one had done of it."""
    await register(nats_url)
    async with (
        gateways(nats_url) as (gateway,),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        sdk(gateway.port) as client,
    ):
        made = [
            await client.responses.create(
                model="mock", input=f"hi {number}", max_output_tokens=8, background=True
            )
            for number in range(5)
        ]
        with service_process("jobs", nats_url, tmp_path / "jobs-1.log") as jobs:
            await eventually(lambda: jobs.has_logged("jobs_running"))
            jobs.kill()
        assert {await status_of(client, each.id) for each in made} == {"queued"}
        with service_process("jobs", nats_url, tmp_path / "jobs-2.log"):
            async with running(gpu_worker.service, worker_settings(nats_url)):
                answers = await asyncio.gather(*(ended(client, each.id) for each in made))
        assert {each.status for each in answers} == {"incomplete"}
        assert all(each.usage.output_tokens == 8 for each in answers)
