"""The order of `millstream up`: starts all services, waits until ready, keeps and stops them."""

import asyncio
import json
import os
import socket
import sys
from contextlib import AbstractAsyncContextManager
from functools import partial
from urllib.parse import urlsplit

import structlog
from pydantic import SecretStr

from millstream.admin.admin_client import HttpAdminClient
from millstream.up import health_probe, model_registration, nats_server, ports, state_file
from millstream.up.broker_accounts import mint_accounts
from millstream.up.broker_health import connect_health
from millstream.up.child_process import ChildProcess
from millstream.up.data_directory import DataDirectory, open_data_directory
from millstream.up.launch_plan import ADMIN_HOST, LaunchPlan
from millstream.up.machines.leftovers import kill_leftovers
from millstream.up.machines.process_provider import ProcessProvider, withdraw_machines
from millstream.up.nats_watchdog import restart_when_unhealthy
from millstream.up.process_manager import ProcessManager
from millstream.up.ready_message import render_ready_message
from millstream.up.settings import UpSettings
from millstream.up.worker_rights import WorkerRights
from registry.store import Registry
from registry.tenants import check_keys
from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.broker import declaration
from streams.broker.broker_client import Broker, StoreRefused, connect
from streams.broker.clock_sync import sync_clock
from streams.broker.declaration import WAIT_SECONDS
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
        listener = ports.bind_socket(settings.host, settings.port, "--port")
        with listener:
            plan = _make_plan(settings, directory, models, listener)
            await asyncio.to_thread(kill_leftovers, plan.accounts.users)
            async with asyncio.TaskGroup() as tasks:
                manager = ProcessManager(tasks, directory, plan)
                service = tasks.create_task(_run_services(manager, models), name="serve")
                await stop.wait()
                service.cancel()
                listener.close()  # so that clients are refused once the gateways have ended
                await manager.stop()


def _make_plan(
    settings: UpSettings,
    directory: DataDirectory,
    models: dict[str, str],
    listener: socket.socket,
) -> LaunchPlan:
    key = settings.api_key.get_secret_value() if settings.api_key else directory.load_api_key()
    directory.mint_key_pepper()
    check_keys(settings.tenants, SecretStr(key))
    port = listener.getsockname()[1]
    nats_port = ports.claim_port(nats_server.HOST, settings.nats_port, "--nats-port")
    admin_port = ports.claim_port(ADMIN_HOST, settings.admin_port, "--admin-port")
    accounts = mint_accounts(directory, settings.shards)
    fd = listener.fileno()
    return LaunchPlan(settings, port, nats_port, admin_port, key, models, accounts, fd)


async def _run_services(manager: ProcessManager, models: dict[str, str]) -> None:
    """Start everything, then watch nats-server's health until cancelled."""
    plan, store = manager.plan, manager.directory.nats_store
    program = nats_server.make_program(plan.nats_port, store, plan.accounts.configuration)
    nats = manager.add("nats", program)
    await _start_services(manager, models)
    async with _connect_supervisor(plan, "millstream-up-fleet") as broker:
        provider = await _open_provider(manager, broker)
        registry = await Registry.open(broker, seconds=WAIT_SECONDS)
        await _wait_until_ready(plan)
        manager.mark_started()
        shows_key = sys.stdout.isatty()  # a service manager's journal is no place for it
        text = render_ready_message(plan, manager.directory, shows_key=shows_key)
        print(text, flush=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_watch_nats(manager, nats), name="nats watchdog")
            tasks.create_task(WorkerRights(plan, registry).run(), name="worker rights")
            if provider:
                tasks.create_task(provider.run(), name="machines")


async def _watch_nats(manager: ProcessManager, nats: ChildProcess) -> None:
    plan, store = manager.plan, manager.directory.nats_store
    async with connect_health(plan.nats_url, plan.accounts.file(UserClass.SYSTEM)) as health:
        await restart_when_unhealthy(nats, health, store, plan.kill_after_seconds("nats"))


async def _open_provider(manager: ProcessManager, broker: Broker) -> ProcessProvider | None:
    """Return what starts and ends machines; None, and no machine is left, without `[fleet]`."""
    await declaration.wait_for_stream(broker, topology.FLEET)
    if manager.plan.settings.fleet is None:
        await withdraw_machines(broker)
        return None
    await sync_clock(broker)
    announce = partial(_announce_death, manager.plan)
    provider = ProcessProvider(broker, manager, announce)
    await provider.open()
    return provider


def _connect_supervisor(plan: LaunchPlan, name: str) -> AbstractAsyncContextManager[Broker]:
    files = ConnectionFiles(creds=plan.accounts.file(UserClass.SUPERVISOR))
    return connect(plan.nats_url, name, files)


async def _start_services(manager: ProcessManager, models: dict[str, str]) -> None:
    """Start all services behind a nats-server that was started; they are not ready yet."""
    plan, directory = manager.plan, manager.directory
    await nats_server.wait_until_answering(plan.nats_port)
    manager.add("admin", plan.admin_program())  # the others wait for what it declares
    manager.add("dispatcher", plan.dispatcher_program())
    for program in plan.gateway_programs():
        manager.add("gateway", program)
    manager.add("jobs", plan.jobs_program())
    await _wait_until_admin_is_ready(plan)
    directory.save_api_key(plan.api_key)
    state = state_file.UpState(
        pid=os.getpid(),
        nats=plan.nats_url,
        url=plan.gateway_url,
        admin=plan.admin_url,
        nats_users=str(plan.accounts.users),
        gateways=plan.gateway_names,
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
    try:
        async with (
            asyncio.timeout(ANNOUNCE_SECONDS),
            _connect_supervisor(plan, "millstream-up") as broker,
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
    """Return True once the gateway is ready and knows a worker for each model.

    With a table `[fleet]` a model needs none: it is enough that there is a fleet.
    """
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
    if plan.settings.fleet:  # whose plan may want no machine yet
        return workers.keys() >= set(plan.models)
    return all(workers.get(model) for model in plan.models)
