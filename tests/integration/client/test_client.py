"""The Python client with real gateways: what dies on the way is not seen by who reads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import admin.service
import dispatcher.service
import gpu_worker.service
from millstream_client import (
    Chunk,
    Client,
    ContextLengthExceeded,
    DeadlineExceeded,
    ModelNotFound,
    NotConnected,
    PayloadTooLarge,
    Stream,
    Unauthenticated,
)
from streams.base_settings import TenantSettings
from tests.integration.gateway.replies.test_cancel import outcomes
from tests.support.certificates import CertificateAuthority
from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, cell, register
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess, service_process
from tests.support.services import admin_settings, dispatcher_settings, running, worker_settings

SLOW = {"ttft_ms": 1, "itl_ms": 2}


def a_client(*gateways: RunningGateway, **options: Any) -> Client:
    return Client([each.url for each in gateways], api_key=KEY, **options)


def tokens(chunks: list[Chunk]) -> list[int]:
    """The indices of all tokens, as they came."""
    return [i for chunk in chunks for i in range(chunk.index, chunk.index + chunk.count)]


async def whole(gateway: RunningGateway, prompt: str, max_tokens: int) -> str:
    """The undisturbed answer."""
    return (await gateway.complete(prompt, max_tokens=max_tokens, seed=1)).text


async def test_a_stream_is_a_loop_over_its_chunks(nats_url: str) -> None:
    """The shortest use there is; the end tells what everything took."""
    async with cell(nats_url) as (gateway,), a_client(gateway) as client:
        stream = client.generate(model="mock", prompt="hello", max_tokens=20, seed=1)
        chunks = [chunk async for chunk in stream]
        assert tokens(chunks) == list(range(20))
        assert "".join(chunk.text for chunk in chunks) == await whole(gateway, "hello", 20)
        assert stream.done
        assert stream.done.finish_reason == "length"
        assert stream.done.usage.total_tokens == 25
        assert stream.done.timing.total > 0
        assert stream.started
        assert stream.started.attempt == 1


async def test_the_stop_string_that_came_is_named(nats_url: str) -> None:
    """`stop_sequence` is the one of several that ended the text; None where none did."""
    async with cell(nats_url) as (gateway,), a_client(gateway) as client:
        asked: dict[str, Any] = {"model": "mock", "prompt": "hello", "max_tokens": 20, "seed": 1}
        word = (await whole(gateway, "hello", 20)).split()[3]
        stopped = client.generate(**asked, stop=["nowhere to be seen", word])
        cut = client.generate(**asked)
        for stream in (stopped, cut):
            assert [chunk async for chunk in stream]
            assert stream.done
        assert stopped.done
        assert (stopped.done.finish_reason, stopped.done.stop_sequence) == ("stop", word)
        assert cut.done
        assert cut.done.stop_sequence is None


async def test_many_requests_share_one_socket(nats_url: str) -> None:
    """Each gets its own answer, however they are interleaved."""
    async with cell(nats_url) as (gateway,), a_client(gateway) as client:
        prompts = [f"prompt {i}" for i in range(50)]
        streams = [client.generate(model="mock", prompt=p, max_tokens=30, seed=1) for p in prompts]
        texts = await asyncio.gather(*(stream.text() for stream in streams))
        assert texts == [await whole(gateway, prompt, 30) for prompt in prompts]
        assert await gateway.metric("millstream_open_websockets") == 1


async def test_texts_are_embedded_and_classified(nats_url: str) -> None:
    """One vector for each input, in their order, over the same socket as streams."""
    async with cell(nats_url) as (gateway,), a_client(gateway) as client:
        found = await client.embed(model="vectors", input=["a", "b", "a"], dimensions=4)
        assert [len(vector) for vector in found.vectors] == [4, 4, 4]
        assert found.vectors[0] == found.vectors[2] != found.vectors[1]
        assert found.usage.prompt_tokens == 3


async def test_an_error_is_raised_as_what_it_is(nats_url: str) -> None:
    """One class for each code; the others on the socket do not notice."""
    async with cell(nats_url, mock=SLOW) as (gateway,), a_client(gateway) as client:
        async with client.generate(model="mock", prompt="hello", max_tokens=100) as stream:
            with pytest.raises(ModelNotFound, match="nothing"):
                await client.generate(model="nothing", prompt="hello").text()
            with pytest.raises(ContextLengthExceeded) as raised:
                async with client.generate(model="mock", prompt="hello", max_tokens=10**6):
                    raise AssertionError
            assert raised.value.retry_after is None
            assert len(tokens([chunk async for chunk in stream])) == 100


async def test_a_wrong_key_is_told_at_once(nats_url: str) -> None:
    """Trying again would not help."""
    async with cell(nats_url) as (gateway,), Client(gateway.url, api_key="sk-wrong") as client:
        with pytest.raises(Unauthenticated, match="not known"):
            await client.generate(model="mock", prompt="hello").text()


async def test_no_gateway_within_the_patience_is_an_error(nats_url: str) -> None:
    """With the last reason; a client that was made before its gateways are up just waits."""
    async with Client(f"http://127.0.0.1:{free_port()}", api_key=KEY, patience=0.3) as client:
        with pytest.raises(NotConnected, match="within 0.3 s: .*Connect call failed"):
            await client.generate(model="mock", prompt="hello").text()


async def test_what_is_too_large_fails_alone(nats_url: str) -> None:
    """The gateway cannot say whose frame it did not read, or closes the socket over it."""
    async with cell(nats_url, max_body_bytes=2000) as (gateway,), a_client(gateway) as client:
        for size in (3000, 20_000):
            small = client.generate(model="mock", prompt="x", max_tokens=10)
            large = client.generate(model="mock", prompt="x" * size, max_tokens=1)
            results = await asyncio.gather(small.text(), large.text(), return_exceptions=True)
            assert isinstance(results[0], str)
            assert isinstance(results[1], PayloadTooLarge)


async def left(nats_url: str, client: Client, how: Any) -> None:
    """Leave a long stream in some way after its first chunk; the ledger must say cancelled."""
    stream = client.generate(model="mock", prompt="hello", max_tokens=8000)
    await how(stream)
    del stream
    ((outcome, used),) = await eventually(lambda: outcomes(nats_url))
    assert outcome == "cancelled"
    assert used < 8000


async def by_leaving_the_context(stream: Stream) -> None:
    async with stream:
        await anext(stream)


async def by_an_error_in_the_loop(stream: Stream) -> None:
    async def divide() -> None:
        async with stream:
            async for chunk in stream:
                chunk.index / 0

    with pytest.raises(ZeroDivisionError):
        await divide()


async def by_being_cancelled(stream: Stream) -> None:
    async def read() -> None:
        async with stream:
            await stream.text()

    task = asyncio.create_task(read())
    await eventually(lambda: stream.started)
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize(
    "how", [by_leaving_the_context, by_an_error_in_the_loop, by_being_cancelled]
)
async def test_what_is_left_is_cancelled(nats_url: str, how: Any) -> None:
    """Nobody pays for what nobody reads."""
    async with cell(nats_url, mock=SLOW) as (gateway,), a_client(gateway) as client:
        await left(nats_url, client, how)


async def test_what_is_left_while_it_is_behind_is_cancelled(nats_url: str) -> None:
    """The gateway goes on with what its reader has no room for: it has to be told to stop."""
    async with cell(nats_url, mock=SLOW) as (gateway,), a_client(gateway) as client:
        long = client.generate(model="mock", prompt="hello", max_tokens=8000, logprobs=5)
        async with long as stream:
            await eventually(lambda: stream._state.is_behind)
        ((outcome, used),) = await eventually(lambda: outcomes(nats_url))
        assert outcome == "cancelled"
        assert used < 4000


async def test_a_loop_that_is_broken_out_of_cancels(nats_url: str) -> None:
    """A plain loop has no context to leave: its stream goes with its last reference."""
    async with cell(nats_url, mock=SLOW) as (gateway,), a_client(gateway) as client:
        async for _ in client.generate(model="mock", prompt="hello", max_tokens=8000):
            break
        assert (await eventually(lambda: outcomes(nats_url)))[0][0] == "cancelled"


async def test_closing_the_client_cancels_what_runs(nats_url: str) -> None:
    """At once, and not when the grace period is over."""
    async with cell(nats_url, mock=SLOW, grace_seconds=300) as (gateway,):
        async with a_client(gateway) as client:
            stream = client.generate(model="mock", prompt="hello", max_tokens=8000)
            await anext(stream)
        assert (await eventually(lambda: outcomes(nats_url)))[0][0] == "cancelled"


async def test_a_cancelled_stream_can_be_read_to_its_end(nats_url: str) -> None:
    """What was generated by then is billed, so it can be had."""
    async with cell(nats_url, mock=SLOW) as (gateway,), a_client(gateway) as client:
        async with client.generate(model="mock", prompt="hello", max_tokens=8000) as stream:
            chunks = [await anext(stream)]
            stream.cancel()
            chunks += [chunk async for chunk in stream]
        assert stream.done
        assert stream.done.finish_reason == "cancelled"
        assert tokens(chunks) == list(range(stream.done.usage.completion_tokens))


async def test_a_deadline_ends_the_call_wherever_its_time_went(nats_url: str) -> None:
    """Here nobody can even be reached."""
    async with Client(f"http://127.0.0.1:{free_port()}", api_key=KEY) as client:
        with pytest.raises(DeadlineExceeded, match="0.2 s"):
            await client.generate(model="mock", prompt="hello", deadline=0.2).text()


async def test_a_reader_that_is_slow_misses_nothing_and_holds_up_nobody(nats_url: str) -> None:
    """More than fits its buffer waits for it in the token log; the others' tokens pass by."""
    async with cell(nats_url) as (gateway,), a_client(gateway) as client:
        long = {"model": "mock", "max_tokens": 6000, "seed": 1, "logprobs": 1}
        async with client.generate(prompt="slow", **long) as slow:  # type: ignore[arg-type]
            first = await anext(slow)
            others = (client.generate(prompt=f"{i}", **long) for i in range(2))  # type: ignore[arg-type]
            await asyncio.gather(*(other.text() for other in others))
            chunks = [first, *[chunk async for chunk in slow]]
        assert tokens(chunks) == list(range(6000))


# --- what dies on the way ---------------------------------------------------------------------


@asynccontextmanager
async def two_gateways(
    nats_url: str, tmp_path: Path, **mock: Any
) -> AsyncIterator[dict[str, ServiceProcess]]:
    """Two gateways as processes, by their URL as the client names it, and a cell behind them."""
    await register(nats_url, **{**SLOW, **mock})
    async with AsyncExitStack() as stack:
        told = admin_settings(nats_url, api_key=SecretStr(KEY))
        await stack.enter_async_context(running(admin.service, told))
        await stack.enter_async_context(running(dispatcher.service, dispatcher_settings(nats_url)))
        worker = worker_settings(nats_url, model=("mock", "vectors"))
        await stack.enter_async_context(running(gpu_worker.service, worker))
        found = {}
        for log in (tmp_path / "a.log", tmp_path / "b.log"):
            port = free_port()
            made = service_process("gateway", nats_url, log, port=port, drain_seconds=5)
            found[f"ws://127.0.0.1:{port}/v1/stream"] = stack.enter_context(made)
            await eventually(lambda port=port: RunningGateway(port, asyncio.Event()).is_ready())  # type: ignore[misc]
        yield found


def client_of(gateways: dict[str, ServiceProcess], **options: Any) -> Client:
    urls = [url.removesuffix("/v1/stream") for url in gateways]
    return Client(urls, api_key=KEY, **options)


async def read(client: Client, prompt: str, **options: Any) -> tuple[str, list[int]]:
    stream = client.generate(model="mock", prompt=prompt, seed=1, **options)
    chunks = [chunk async for chunk in stream]
    return "".join(chunk.text for chunk in chunks), tokens(chunks)


async def test_a_killed_gateway_is_not_seen_by_its_readers(nats_url: str, tmp_path: Path) -> None:
    """Ten streams and an embedding in all states, and each the same as without the murder."""
    prompts = [f"prompt {i}" for i in range(10)]
    async with two_gateways(nats_url, tmp_path) as gateways, client_of(gateways) as client:
        undisturbed = [await read(client, prompt, max_tokens=300) for prompt in prompts[:2]]
        reading = [asyncio.create_task(read(client, p, max_tokens=300)) for p in prompts]
        async with client.generate(model="mock", prompt="watched", max_tokens=300) as watched:
            await anext(watched)
            embedding = asyncio.create_task(client.embed(model="vectors", input=["a", "b"]))
            late = asyncio.create_task(read(client, "late", max_tokens=10))
            await asyncio.sleep(0)
            assert client.gateway
            gateways[client.gateway].kill()
            answers = await asyncio.gather(*reading)
        assert all(indices == list(range(300)) for _, indices in answers)
        assert answers[:2] == undisturbed
        assert len((await embedding).vectors) == 2
        assert (await late)[1] == list(range(10))
        await eventually(lambda: ran(nats_url, 2 + 10 + 3))  # and nothing has run twice


async def test_what_is_left_when_its_gateway_is_killed_is_cancelled(
    nats_url: str, tmp_path: Path
) -> None:
    """The dead one's grace period is dead as well; the next gateway is told."""
    async with two_gateways(nats_url, tmp_path) as gateways, client_of(gateways) as client:
        async with client.generate(model="mock", prompt="hello", max_tokens=8000) as stream:
            await anext(stream)
            assert client.gateway
            gateways[client.gateway].kill()
        ((outcome, used),) = await eventually(lambda: outcomes(nats_url))
        assert outcome == "cancelled"
        assert used < 4000


async def test_a_frozen_gateway_is_left(nats_url: str, tmp_path: Path) -> None:
    """It is treated like a dead one, though its machine still answers for it."""
    async with two_gateways(nats_url, tmp_path) as gateways, client_of(gateways) as client:
        async with client.generate(model="mock", prompt="hello", max_tokens=500) as stream:
            chunks = [await anext(stream)]
            assert client.gateway
            frozen = gateways[client.gateway]
            frozen.freeze()
            chunks += [chunk async for chunk in stream]
            frozen.thaw()
        assert tokens(chunks) == list(range(500))


async def test_a_draining_gateway_is_left_for_another(nats_url: str, tmp_path: Path) -> None:
    """Long streams go over at once, and it need not wait for them; what is new is not refused."""
    async with two_gateways(nats_url, tmp_path) as gateways, client_of(gateways) as client:
        async with client.generate(model="mock", prompt="hello", max_tokens=1000) as stream:
            chunks = [await anext(stream)]
            left = client.gateway
            assert left
            gateways[left].terminate()
            await eventually(lambda: client.gateway not in (left, None))
            assert not stream.done
            await eventually(lambda: gateways[left].process.poll() is not None)
            assert (await read(client, "new", max_tokens=10))[1] == list(range(10))
            chunks += [chunk async for chunk in stream]
        assert tokens(chunks) == list(range(1000))


async def test_a_broker_that_is_away_for_a_while_is_waited_for(
    nats_server: NatsServer,
) -> None:
    """The gateway refuses what it cannot store, says when to come again, and it runs once."""
    async with cell(nats_server.url) as (gateway,), a_client(gateway) as client:
        await client.generate(model="mock", prompt="before", max_tokens=1).text()
        nats_server.freeze()
        reading = asyncio.create_task(read(client, "hello", max_tokens=20))
        await eventually(lambda: refused(gateway, "broker_unavailable"))
        nats_server.thaw()
        assert (await reading)[1] == list(range(20))
        await eventually(lambda: ran(nats_server.url, 2))


async def refused(gateway: RunningGateway, code: str) -> bool:
    metrics = (await gateway.request("GET", "/metrics", key=None)).body.decode()
    return f'code="{code}"' in metrics


async def ran(nats_url: str, count: int) -> bool:
    return len(await outcomes(nats_url)) == count


async def test_it_speaks_tls_and_may_have_a_certificate_instead_of_a_key(
    nats_url: str, tmp_path: Path
) -> None:
    """With an authority of one's own; a gateway that it does not trust gets nothing."""
    authority = CertificateAuthority(tmp_path)
    mapped = {"acme": TenantSettings(certificates=("spiffe://cell/acme",))}
    tls = {**authority.make_server(), "tls_client_ca": authority.file, "tenants": mapped}
    context = authority.client_context("acme", "spiffe://cell/acme")
    async with cell(nats_url, tls=context, **tls) as (gateway,):
        async with Client(gateway.url, ssl=context) as client:
            assert await client.generate(model="mock", prompt="hello", max_tokens=3).text()
        async with Client(gateway.url, patience=0.5) as client:
            with pytest.raises(NotConnected, match="certificate verify failed"):
                await client.generate(model="mock", prompt="hello", max_tokens=3).text()
