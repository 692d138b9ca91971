"""The order of things in `millstream up`: start, wait until ready, keep alive, stop."""

import asyncio
import os
from functools import partial

import structlog
from pydantic import SecretStr

from millstream.settings import UpSettings
from millstream.up import health_probe, model_registration, nats_server, state_file
from millstream.up.child_process import ChildProcess, OnDeath, Program
from millstream.up.data_directory import DataDirectory, open_data_directory
from millstream.up.launch_plan import DRAIN_SHARES, LaunchPlan
from millstream.up.nats_watchdog import restart_when_unhealthy
from millstream.up.ready_message import render_ready_message
from registry.tenants import Tenants
from streams import subjects
from streams.broker.connection import connect
from streams.errors import BrokerUnavailable

log = structlog.get_logger()

POLL_SECONDS = 0.05
PROBE_SECONDS = 2.0
ANNOUNCE_SECONDS = 2.0


async def run(settings: UpSettings, stop: asyncio.Event) -> None:
    """Everything on one machine until `stop`.

    Raises before anything starts when a model, a port or the data directory cannot be had, and
    `StartFailed` with its last lines when a service does not come up.
    """
    models = model_registration.resolve_models(settings)
    with open_data_directory(settings.data_dir) as home:
        plan = _make_plan(settings, home, tuple(models))
        async with asyncio.TaskGroup() as tasks:
            crew = ProcessManager(tasks, home, plan)
            service = tasks.create_task(_run_services(crew, models), name="serve")
            await stop.wait()
            service.cancel()
            await crew.stop()


def _make_plan(settings: UpSettings, home: DataDirectory, models: tuple[str, ...]) -> LaunchPlan:
    key = settings.api_key.get_secret_value() if settings.api_key else home.load_api_key()
    port = nats_server.claim_port(settings.host, settings.port, "--port")
    nats_port = nats_server.claim_port(nats_server.HOST, settings.nats_port, "--nats-port")
    return LaunchPlan(settings, port, nats_port, key, models)


class ProcessManager:
    """The children of one `millstream up`."""

    def __init__(self, tasks: asyncio.TaskGroup, home: DataDirectory, plan: LaunchPlan) -> None:
        self.home, self.plan = home, plan
        self._tasks = tasks
        self._children: dict[str, list[ChildProcess]] = {}  # by service

    def add(self, service: str, program: Program, mourn: OnDeath | None = None) -> ChildProcess:
        child = ChildProcess(program, self.home.logs, mourn)
        self._children.setdefault(service, []).append(child)
        self._tasks.create_task(child.keep_running(), name=program.name)
        return child

    def mark_started(self) -> None:
        """From now on a death is a reason to restart, not to give up."""
        for children in self._children.values():
            for child in children:
                child.is_starting = False

    async def stop(self) -> None:
        """End all: first those who take requests, then those who work on them, the broker last."""
        for service in DRAIN_SHARES:
            seconds = self.plan.kill_after_seconds(service)
            children = self._children.get(service, [])
            await asyncio.gather(*(child.stop(seconds) for child in children))
        state_file.remove(self.home.path)


async def _run_services(crew: ProcessManager, models: dict[str, str]) -> None:
    """Start everything, then look after the broker's health until cancelled."""
    plan, home = crew.plan, crew.home
    nats = crew.add("nats", nats_server.make_program(plan.nats_port, home.nats_store))
    await _start_services(crew, models)
    await restart_when_unhealthy(nats, home.nats_store, plan.kill_after_seconds("nats"))


async def _start_services(crew: ProcessManager, models: dict[str, str]) -> None:
    """Returns when all services are ready behind a broker that was started."""
    plan, home = crew.plan, crew.home
    await nats_server.wait_until_answering(plan.nats_port)
    state_file.write(
        home.path, state_file.UpState(pid=os.getpid(), nats=plan.nats_url, url=plan.gateway_url)
    )
    await _declare_tenants(plan)
    home.save_api_key(plan.api_key)
    crew.add("dispatcher", plan.dispatcher_program())
    crew.add("gateway", plan.gateway_program())
    await model_registration.register_models(models, plan.settings, plan.nats_url, home.logs)
    for program in plan.worker_programs():
        crew.add("worker", program, partial(_announce_death, plan, program.name))
    await _wait_until_ready(plan)
    crew.mark_started()
    print(render_ready_message(plan, home), flush=True)


async def _declare_tenants(plan: LaunchPlan) -> None:
    """Those of the configuration and the API key, and none that a former start had."""
    async with connect(plan.nats_url, "millstream-up") as broker:
        tenants = await Tenants.open(broker)
        try:
            await tenants.apply_config(plan.settings.tenants)
            await tenants.apply_api_key(SecretStr(plan.api_key))
        finally:
            await tenants.close()


async def _announce_death(plan: LaunchPlan, worker: str) -> None:
    """Have others go on at once with what a worker held that has died."""
    try:
        async with (
            asyncio.timeout(ANNOUNCE_SECONDS),
            connect(plan.nats_url, "millstream-up") as broker,
        ):
            await broker.publish(subjects.GONE, worker.encode())
    except (BrokerUnavailable, TimeoutError) as error:  # then the dispatcher notices it
        log.warning("worker_death_unannounced", worker=worker, reason=repr(error))


async def _wait_until_ready(plan: LaunchPlan) -> None:
    while not await _is_ready(plan):
        await asyncio.sleep(POLL_SECONDS)


async def _is_ready(plan: LaunchPlan) -> bool:
    host = plan.gateway_url.removeprefix("http://").rpartition(":")[0].strip("[]")
    answer = await health_probe.send_probe(host, plan.port, "/readyz", PROBE_SECONDS)
    return answer is not None and answer.is_healthy
