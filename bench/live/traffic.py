"""Sends a simulation's load to a running system, and reports each request as the simulator does."""

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

LEAD_SECONDS = 1.0  # from the opening of the sockets to the start of the load


@dataclass(frozen=True)
class SentRequest:
    """A request of the load and what its client saw of it."""

    spec: RequestSpec
    sample: Sample


class Traffic:
    """A load on a cluster, with a client for each tenant at each of its gateways.

    `sockets` is by tenant the number of sockets of each of its clients, by default one. `cores` is,
    after a run, the CPU use of the processes by name.
    """

    def __init__(self, cluster: Cluster, sockets: Mapping[str, int] | None = None) -> None:
        self._cluster, self._sockets = cluster, sockets or {}
        self._prompts = Prompts(None, seed=0)
        self._clients: dict[tuple[str, int], WebSocketClient] = {}
        self.sent: list[SentRequest] = []

    async def run(self, load: Workload, drain_seconds: float) -> Outcome:
        """Send each request at its time, whether or not earlier ones have ended.

        Returns the outcome. After the load, the awaited requests may run on for `drain_seconds`;
        all others are cancelled.
        """
        async with AsyncExitStack() as stack:
            await self._open(load.specs, stack)
            began = time.perf_counter() + LEAD_SECONDS
            self._cluster.start_cpu_meter()
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            running = [(await self._send_when_due(spec, began, tasks), spec) for spec in load.specs]
            await asyncio.sleep(began + load.seconds - time.perf_counter())
            self.cores = self._cluster.cores_used()
            if awaited := [task for task, spec in running if load.awaited(spec)]:
                await asyncio.wait(awaited, timeout=drain_seconds)
            for task, _ in running:
                task.cancel()
        return self._outcome(began, load.seconds)

    async def _open(self, specs: Sequence[RequestSpec], stack: AsyncExitStack) -> None:
        for tenant, gateway in {(each.tenant, each.gateway) for each in specs}:
            address, sockets = self._cluster.address(tenant, gateway), self._sockets.get(tenant, 1)
            client = WebSocketClient(address, "msgpack", sockets, time.perf_counter)
            self._clients[tenant, gateway] = await stack.enter_async_context(client)

    async def _send_when_due(
        self, spec: RequestSpec, began: float, tasks: asyncio.TaskGroup
    ) -> "asyncio.Task[None]":
        sent = SentRequest(spec, Sample(began + spec.at))
        await asyncio.sleep(max(0.0, sent.sample.due - time.perf_counter()))
        self.sent.append(sent)
        return tasks.create_task(self._send(sent))

    async def _send(self, sent: SentRequest) -> None:
        spec = sent.spec
        prompt = self._prompts.make_prompt(spec.prompt_tokens)
        request = LoadRequest(MODEL, prompt, spec.output_tokens, spec.priority.value)
        try:
            await self._clients[spec.tenant, spec.gateway].run_request(request, sent.sample)
        except asyncio.CancelledError:
            sent.sample.finish(time.perf_counter(), UNFINISHED)
            raise

    def _outcome(self, began: float, seconds: float) -> Outcome:
        computed = self._cluster.computed_tokens()
        requests = [_to_simulated(sent, began, computed) for sent in self.sent]
        served = sum(_service_before(sent, began + seconds) for sent in self.sent) / seconds
        return Outcome(requests, (), served, time.perf_counter() - began, 0)


def _to_simulated(sent: SentRequest, began: float, computed: Mapping[str, int]) -> SimulatedRequest:
    """The request as the simulator reports one, with times in seconds after the load began."""
    sample = sent.sample
    request = SimulatedRequest(sent.spec, sample.request_id)
    request.accepted = None if sample.accepted is None else sample.accepted - began
    request.first = sample.times[0] - began if sample.times else None
    if sample.ended is not None and sample.code != UNFINISHED:
        request.ended = sample.ended - began
    request.code, request.generated = sample.code, sample.tokens
    request.computed = computed.get(sample.request_id, 0)
    return request


def _service_before(sent: SentRequest, end: float) -> int:
    """The service tokens of the request that its client saw until `end`."""
    sample = sent.sample
    if not sample.times or sample.times[0] > end:
        return 0
    pieces = zip(sample.times, sample.counts, strict=True)
    return sent.spec.prompt_tokens + 2 * sum(count for time, count in pieces if time <= end)
