"""The order of things in `millstream up`: start, wait until ready, keep alive, stop."""

import asyncio
import os
from functools import partial

import structlog
from pydantic import SecretStr

from millstream import state
from millstream.settings import UpSettings
from millstream.up import broker, catalogue, probe
from millstream.up.child import Child, Mourn, Program
from millstream.up.health import keep_well
from millstream.up.home import Home, opened
from millstream.up.plan import SHARES, Plan
from millstream.up.welcome import welcome
from registry.tenants import Tenants
from streams import subjects
from streams.connection import connect
from streams.errors import BrokerUnavailable

log = structlog.get_logger()

LOOK_SECONDS = 0.05
ASK_SECONDS = 2.0
TELL_SECONDS = 2.0


async def run(settings: UpSettings, stop: asyncio.Event) -> None:
    """Everything on one machine until `stop`.

    Raises before anything starts when a model, a port or the data directory cannot be had, and
    `StartFailed` with its last lines when a service does not come up.
    """
    models = catalogue.wanted(settings)
    with opened(settings.data_dir) as home:
        plan = _plan(settings, home, tuple(models))
        async with asyncio.TaskGroup() as tasks:
            crew = Crew(tasks, home, plan)
            service = tasks.create_task(_serve(crew, models), name="serve")
            await stop.wait()
            service.cancel()
            await crew.stop()


def _plan(settings: UpSettings, home: Home, models: tuple[str, ...]) -> Plan:
    key = settings.api_key.get_secret_value() if settings.api_key else home.api_key()
    port = broker.claim_port(settings.host, settings.port, "--port")
    nats_port = broker.claim_port(broker.HOST, settings.nats_port, "--nats-port")
    return Plan(settings, port, nats_port, key, models)


class Crew:
    """The children of one `millstream up`."""

    def __init__(self, tasks: asyncio.TaskGroup, home: Home, plan: Plan) -> None:
        self.home, self.plan = home, plan
        self._tasks = tasks
        self._children: dict[str, list[Child]] = {}  # by service

    def add(self, service: str, program: Program, mourn: Mourn | None = None) -> Child:
        child = Child(program, self.home.logs, mourn)
        self._children.setdefault(service, []).append(child)
        self._tasks.create_task(child.keep(), name=program.name)
        return child

    def started(self) -> None:
        """From now on a death is a reason to restart, not to give up."""
        for children in self._children.values():
            for child in children:
                child.must_start = False

    async def stop(self) -> None:
        """End all: first those who take requests, then those who work on them, the broker last."""
        for service in SHARES:
            seconds = self.plan.patience(service)
            children = self._children.get(service, [])
            await asyncio.gather(*(child.stop(seconds) for child in children))
        state.remove(self.home.path)


async def _serve(crew: Crew, models: dict[str, str]) -> None:
    """Start everything, then look after the broker's health until cancelled."""
    plan, home = crew.plan, crew.home
    nats = crew.add("nats", broker.program(plan.nats_port, home.store))
    await _start(crew, models)
    await keep_well(nats, home.store, plan.patience("nats"))


async def _start(crew: Crew, models: dict[str, str]) -> None:
    """Returns when all services are ready behind a broker that was started."""
    plan, home = crew.plan, crew.home
    await broker.until_answers(plan.nats_port)
    state.write(home.path, state.State(pid=os.getpid(), nats=plan.nats, url=plan.url))
    await _declare_tenants(plan)
    home.keep_api_key(plan.key)
    crew.add("dispatcher", plan.dispatcher())
    crew.add("gateway", plan.gateway())
    await catalogue.register(models, plan.settings, plan.nats, home.logs)
    for program in plan.workers():
        crew.add("worker", program, partial(_tell_of_death, plan, program.name))
    await _until_ready(plan)
    crew.started()
    print(welcome(plan, home), flush=True)


async def _declare_tenants(plan: Plan) -> None:
    """Those of the configuration and the API key, and none that a former start had."""
    async with connect(plan.nats, "millstream-up") as broker:
        tenants = await Tenants.open(broker)
        try:
            await tenants.declare(plan.settings.tenants)
            await tenants.declare_key(SecretStr(plan.key))
        finally:
            await tenants.close()


async def _tell_of_death(plan: Plan, worker: str) -> None:
    """Have others go on at once with what a worker held that has died."""
    try:
        async with asyncio.timeout(TELL_SECONDS), connect(plan.nats, "millstream-up") as broker:
            await broker.publish(subjects.GONE, worker.encode())
    except (BrokerUnavailable, TimeoutError) as error:  # then the dispatcher notices it
        log.warning("death_not_told", worker=worker, reason=repr(error))


async def _until_ready(plan: Plan) -> None:
    while not await _is_ready(plan):
        await asyncio.sleep(LOOK_SECONDS)


async def _is_ready(plan: Plan) -> bool:
    host = plan.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    answer = await probe.ask(host, plan.port, "/readyz", ASK_SECONDS)
    return answer is not None and answer.is_well
