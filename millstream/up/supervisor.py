"""The order of `millstream up`: starts all services, waits until ready, keeps and stops them."""

import asyncio
import json
import os
import sys
from functools import partial
from urllib.parse import urlsplit

import structlog
from pydantic import SecretStr

from millstream.admin.admin_client import HttpAdminClient
from millstream.up import health_probe, model_registration, nats_server, state_file
from millstream.up.broker_accounts import mint_accounts
from millstream.up.broker_health import connect_health
from millstream.up.child_process import ChildProcess, OnDeath, Program
from millstream.up.data_directory import DataDirectory, open_data_directory
from millstream.up.launch_plan import ADMIN_HOST, DRAIN_SHARES, LaunchPlan
from millstream.up.nats_watchdog import restart_when_unhealthy
from millstream.up.ready_message import render_ready_message
from millstream.up.settings import UpSettings
from registry.tenants import check_keys
from streams import subjects
from streams.accounts.access import UserClass
from streams.broker.broker_client import StoreRefused, connect
from streams.connection_files import ConnectionFiles
from streams.errors import BrokerUnavailable

log = structlog.get_logger()

POLL_SECONDS = 0.05
PROBE_SECONDS = 2.0
ANNOUNCE_SECONDS = 2.0


async def run(settings: UpSettings, stop: asyncio.Event) -> None:
    """Run all services on this machine until `stop` is set, then stop them in order and return.

    Each service is a child process, which is started again if it dies. Raises a `MillstreamError`
    before anything starts if a model, a port or the data directory is not available, or if two
    tenants have the same key. Raises `StartFailed` (in an exception group) if a service dies 3
    times in a row before all are ready; the other services are then killed.
    """
    models = model_registration.resolve_models(settings)
    await asyncio.to_thread(model_registration.check_folders, models)
    with open_data_directory(settings.data_dir) as directory:
        plan = _make_plan(settings, directory, models)
        async with asyncio.TaskGroup() as tasks:
            manager = ProcessManager(tasks, directory, plan)
            service = tasks.create_task(_run_services(manager, models), name="serve")
            await stop.wait()
            service.cancel()
            await manager.stop()


def _make_plan(
    settings: UpSettings, directory: DataDirectory, models: dict[str, str]
) -> LaunchPlan:
    key = settings.api_key.get_secret_value() if settings.api_key else directory.load_api_key()
    directory.mint_key_pepper()
    check_keys(settings.tenants, SecretStr(key))
    port = nats_server.claim_port(settings.host, settings.port, "--port")
    nats_port = nats_server.claim_port(nats_server.HOST, settings.nats_port, "--nats-port")
    admin_port = nats_server.claim_port(ADMIN_HOST, settings.admin_port, "--admin-port")
    accounts = mint_accounts(directory, settings.shards)
    return LaunchPlan(settings, port, nats_port, admin_port, key, models, accounts)


class ProcessManager:
    """The child processes of one `millstream up`, which are kept running in a task group.

    `add` starts a process, and `stop` ends all of them in order.
    """

    def __init__(
        self, tasks: asyncio.TaskGroup, directory: DataDirectory, plan: LaunchPlan
    ) -> None:
        self.directory, self.plan = directory, plan
        self._tasks = tasks
        self._children: dict[str, list[ChildProcess]] = {}  # by service

    def add(self, service: str, program: Program, on_death: OnDeath | None = None) -> ChildProcess:
        """Return a new `ChildProcess` at once, and start its program in a task.

        `service` is a key of `DRAIN_SHARES`, by which `stop` orders the processes. The program is
        started again after each death; `on_death` is awaited before that. Until `mark_started` is
        called, 3 deaths in a row fail the task group with `StartFailed`.
        """
        child = ChildProcess(program, self.directory.logs, on_death)
        self._children.setdefault(service, []).append(child)
        self._tasks.create_task(child.keep_running(), name=program.name)
        return child

    def mark_started(self) -> None:
        """End the starting phase of all processes added so far.

        From now on these are started again however often they die; no `StartFailed` is raised.
        """
        for children in self._children.values():
            for child in children:
                child.is_starting = False

    async def stop(self) -> None:
        """Stop all processes, remove the state file, and return when all have ended.

        Gateways are stopped first, then the fleet service, workers, dispatchers, the jobs service,
        the ledger's export, the admin service and nats-server; the processes of one service are
        stopped together. Each gets SIGTERM, and SIGKILL if it still runs after its service's
        `kill_after_seconds`.
        """
        for service in DRAIN_SHARES:
            seconds = self.plan.kill_after_seconds(service)
            children = self._children.get(service, [])
            await asyncio.gather(*(child.stop(seconds) for child in children))
        state_file.remove(self.directory.path)


async def _run_services(manager: ProcessManager, models: dict[str, str]) -> None:
    """Start everything, then watch nats-server's health until cancelled."""
    plan, store = manager.plan, manager.directory.nats_store
    program = nats_server.make_program(plan.nats_port, store, plan.accounts.configuration)
    nats = manager.add("nats", program)
    await _start_services(manager, models)
    async with connect_health(plan.nats_url, plan.accounts.file(UserClass.SYSTEM)) as health:
        await restart_when_unhealthy(nats, health, store, plan.kill_after_seconds("nats"))


async def _start_services(manager: ProcessManager, models: dict[str, str]) -> None:
    """Start all services behind a nats-server that was started; return when they are ready."""
    plan, directory = manager.plan, manager.directory
    await nats_server.wait_until_answering(plan.nats_port)
    manager.add("admin", plan.admin_program())  # the others wait for what it declares
    manager.add("dispatcher", plan.dispatcher_program())
    manager.add("gateway", plan.gateway_program())
    manager.add("jobs", plan.jobs_program())
    await _wait_until_admin_is_ready(plan)
    directory.save_api_key(plan.api_key)
    state = state_file.UpState(
        pid=os.getpid(),
        nats=plan.nats_url,
        url=plan.gateway_url,
        admin=plan.admin_url,
        nats_users=str(plan.accounts.users),
    )
    state_file.write(directory.path, state)
    admin = HttpAdminClient(plan.admin_url, plan.api_key)
    await model_registration.register_models(models, plan.settings, admin, directory.logs)
    for program in plan.ledger_programs():
        manager.add("ledger", program)
    for program in plan.fleet_programs():
        manager.add("fleet", program)
    for program in plan.worker_programs():
        manager.add("worker", program, partial(_announce_death, plan, program.name))
    await _wait_until_ready(plan)
    manager.mark_started()
    shows_key = sys.stdout.isatty()  # a service manager's journal, or CI's log, is no place for it
    print(render_ready_message(plan, directory, shows_key=shows_key), flush=True)


async def _wait_until_admin_is_ready(plan: LaunchPlan) -> None:
    while True:
        answer = await health_probe.send_probe(
            ADMIN_HOST, plan.admin_port, "/readyz", PROBE_SECONDS
        )
        if answer and answer.is_healthy:
            return
        await asyncio.sleep(POLL_SECONDS)


async def _announce_death(plan: LaunchPlan, worker: str) -> None:
    """Announce a worker's death, so that others take over its requests at once."""
    files = ConnectionFiles(creds=plan.accounts.file(UserClass.SUPERVISOR))
    try:
        async with (
            asyncio.timeout(ANNOUNCE_SECONDS),
            connect(plan.nats_url, "millstream-up", files) as broker,
        ):
            await broker.store(subjects.GONE, worker.encode(), repeats=True)
    except (
        BrokerUnavailable,
        StoreRefused,
        TimeoutError,
    ) as error:  # the dispatcher will detect the death
        log.warning("worker_death_unannounced", worker=worker, reason=repr(error))


async def _wait_until_ready(plan: LaunchPlan) -> None:
    while not await _is_ready(plan):
        await asyncio.sleep(POLL_SECONDS)


async def _is_ready(plan: LaunchPlan) -> bool:
    """Return True once the gateway is ready and knows a worker for each model."""
    url = urlsplit(plan.gateway_url)
    probe = partial(
        health_probe.send_probe,
        url.hostname or "",
        plan.port,
        seconds=PROBE_SECONDS,
        uses_tls=url.scheme == "https",
    )
    answer = await probe("/readyz")
    if answer is None or not answer.is_healthy:
        return False
    listed = await probe("/v1/models", api_key=plan.api_key)
    if listed is None or not listed.is_healthy:
        return False
    workers = {card["id"]: card["workers"] for card in json.loads(listed.text)["data"]}
    return all(workers.get(model) for model in plan.models)
