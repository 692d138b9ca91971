"""A simulation's load on a running system: sent when it is due, and what became of each request."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.live.cluster import MODEL, Cluster
from bench.simulation.runs import Outcome
from bench.simulation.workloads import Workload
from millstream.bench.load_client import LoadRequest
from millstream.bench.load_statistics import UNFINISHED, Sample
from millstream.bench.prompts import Prompts
from millstream.bench.websocket_client import WebSocketClient
from simulation.request import RequestSpec, SimulatedRequest

LEAD_SECONDS = 1.0  # from when the sockets are open to the first request


@dataclass(frozen=True)
class SentRequest:
    """A request and what its client saw of it."""

    asked: RequestSpec
    sample: Sample


class Traffic:
    """One load on a plant. `sockets`: how many a tenant has at each of its gateways, else one."""

    def __init__(self, plant: Cluster, sockets: Mapping[str, int] | None = None) -> None:
        self._plant, self._sockets = plant, sockets or {}
        self._prompts = Prompts(None, seed=0)
        self._clients: dict[tuple[str, int], WebSocketClient] = {}
        self.sent: list[SentRequest] = []

    async def run(self, load: Workload, drain_seconds: float) -> Outcome:
        """Send each at its time, whatever came of those before; then wait for the awaited.

        What has not ended by `drain_seconds` after the load, or is not awaited, is cancelled.
        """
        async with AsyncExitStack() as stack:
            await self._open(load.asked, stack)
            began = time.perf_counter() + LEAD_SECONDS
            self._plant.start_cpu_meter()
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            running = [
                (await self._send_when_due(asked, began, tasks), asked) for asked in load.asked
            ]
            await asyncio.sleep(began + load.seconds - time.perf_counter())
            self.cores = self._plant.cores_used()
            if awaited := [task for task, asked in running if load.awaited(asked)]:
                await asyncio.wait(awaited, timeout=drain_seconds)
            for task, _ in running:
                task.cancel()
        return self._outcome(began, load.seconds)

    async def _open(self, asked: Sequence[RequestSpec], stack: AsyncExitStack) -> None:
        for tenant, gateway in {(each.tenant, each.gateway) for each in asked}:
            address, sockets = self._plant.address(tenant, gateway), self._sockets.get(tenant, 1)
            client = WebSocketClient(address, "msgpack", sockets, time.perf_counter)
            self._clients[tenant, gateway] = await stack.enter_async_context(client)

    async def _send_when_due(
        self, asked: RequestSpec, began: float, tasks: asyncio.TaskGroup
    ) -> "asyncio.Task[None]":
        sent = SentRequest(asked, Sample(began + asked.at))
        await asyncio.sleep(max(0.0, sent.sample.due - time.perf_counter()))
        self.sent.append(sent)
        return tasks.create_task(self._send(sent))

    async def _send(self, sent: SentRequest) -> None:
        asked = sent.asked
        prompt = self._prompts.make_prompt(asked.prompt_tokens)
        ask = LoadRequest(MODEL, prompt, asked.output_tokens, asked.priority.value)
        try:
            await self._clients[asked.tenant, asked.gateway].run_request(ask, sent.sample)
        except asyncio.CancelledError:
            sent.sample.finish(time.perf_counter(), UNFINISHED)
            raise

    def _outcome(self, began: float, seconds: float) -> Outcome:
        computed = self._plant.computed_tokens()
        fates = [_fate(sent, began, computed) for sent in self.sent]
        served = sum(_service_before(sent, began + seconds) for sent in self.sent) / seconds
        return Outcome(fates, (), served, time.perf_counter() - began, 0)


def _fate(sent: SentRequest, began: float, computed: Mapping[str, int]) -> SimulatedRequest:
    sample = sent.sample
    fate = SimulatedRequest(sent.asked, sample.request_id)
    fate.accepted = None if sample.accepted is None else sample.accepted - began
    fate.first = sample.times[0] - began if sample.times else None
    if sample.ended is not None and sample.code != UNFINISHED:
        fate.ended = sample.ended - began
    fate.code, fate.generated = sample.code, sample.tokens
    fate.computed = computed.get(sample.request_id, 0)
    return fate


def _service_before(sent: SentRequest, end: float) -> int:
    """Virtual tokens that its client saw until then."""
    sample = sent.sample
    if not sample.times or sample.times[0] > end:
        return 0
    pieces = zip(sample.times, sample.counts, strict=True)
    return sent.asked.prompt_tokens + 2 * sum(count for time, count in pieces if time <= end)
