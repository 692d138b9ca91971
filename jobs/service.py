"""`millstream jobs`: builds the parts of one jobs process and runs them."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import structlog

from api.grammar_checker import GrammarChecker
from api.submission.ledger_space import LedgerSpace
from api.submission.quotas import Quotas
from api.submission.request_limits import DeadlineLimits
from api.submission.validation import SubmissionValidator
from api.tokenizer import TokenizerCache
from jobs.batches.batch_runner import RunnerParts
from jobs.batches.batch_supervisor import BatchSupervisor
from jobs.batches.item_feeder import ItemFeeder
from jobs.file_sweeper import FileSweeper
from jobs.responses.background_responses import BackgroundResponses
from jobs.settings import JobsSettings
from jobs.webhooks.webhook_call import WebhookCaller
from jobs.webhooks.webhook_deliverer import WebhookDeliverer
from registry.credentials.keys import Keys
from registry.price_book import PriceBook
from registry.store import Registry
from registry.tenants import Tenants
from registry.webhook_policy import WebhookPolicy
from streams import topology
from streams.broker.broker_client import Broker, connect
from streams.broker.clock_sync import sync_clock
from streams.broker.declaration import WAIT_SECONDS
from streams.broker.stream_monitor import StreamMonitor
from streams.coordination.lease import Lease
from streams.coordination.lease_bucket import LeaseBucket
from streams.metrics_server import not_yet, serve_metrics
from streams.records.files.file_store import FileStore
from streams.records.jobs.batch_store import BatchStore

log = structlog.get_logger()

FILES_LEASE, WEBHOOKS_LEASE, RESPONSES_LEASE = "jobs.files", "jobs.webhooks", "jobs.responses"
_STREAMS = (
    topology.FILE_RECORDS,
    topology.BATCHES,
    topology.RESULTS,
    topology.RESPONSES,
    topology.WEBHOOKS,
    topology.WEBHOOK_ENDPOINTS,
    topology.DELIVERIES,
    topology.THRESHOLDS,
)


async def run(settings: JobsSettings, stop: asyncio.Event) -> None:
    """Work until `stop` is set; then release all leases, so that another process goes on at once.

    Raises `BrokerUnavailable` if the broker does not answer at the start, in an exception group
    later.
    """
    checks = {"nats": not_yet, "running": not_yet}
    async with AsyncExitStack() as stack:
        stack.enter_context(serve_metrics(settings, checks))
        name = f"jobs-{settings.id}"
        broker = await stack.enter_async_context(connect(settings.nats, name, settings.nats_files))
        checks["nats"] = lambda: broker.is_connected
        streams = StreamMonitor(broker)
        await streams.open(_STREAMS)
        await sync_clock(broker)
        quotas = Quotas(broker)
        await quotas.open()
        ledger_space = LedgerSpace(broker)
        parts = await _build_parts(stack, settings, broker, quotas, ledger_space)
        leases = files_lease, webhooks_lease, responses_lease = [
            Lease(broker, name, settings.id, LeaseBucket(broker))
            for name in (FILES_LEASE, WEBHOOKS_LEASE, RESPONSES_LEASE)
        ]
        for lease in leases:
            stack.push_async_callback(lease.release)
        caller = WebhookCaller(WebhookPolicy(settings.webhook_network))
        stack.callback(caller.close)
        webhooks = WebhookDeliverer(broker, webhooks_lease, caller, settings.webhook_retry_seconds)
        responses = BackgroundResponses(broker, parts.registry, parts.feeder, responses_lease)
        batches = BatchSupervisor(parts, settings.id)
        streams.on_replaced = partial(_repeat_requests, batches, responses)
        async with asyncio.TaskGroup() as tasks:
            working = [
                *(tasks.create_task(each.run(), name="lease") for each in leases),
                tasks.create_task(quotas.run(), name="quotas"),
                tasks.create_task(ledger_space.run(), name="ledger"),
                tasks.create_task(FileSweeper(broker, files_lease).run(), name="files"),
                tasks.create_task(webhooks.run(), name="webhooks"),
                tasks.create_task(batches.run(), name="batches"),
                tasks.create_task(responses.run(), name="responses"),
            ]
            checks["running"] = lambda: not stop.is_set()
            log.info("jobs_running", id=settings.id)
            await stop.wait()
            for task in working:
                task.cancel()


def _repeat_requests(batches: BatchSupervisor, responses: BackgroundResponses, stream: str) -> None:
    """Publish requests again that may have been lost with the stream in which they were queued."""
    if stream == topology.REQUESTS:
        batches.repeat_requests()
        responses.repeat_requests()


async def _build_parts(
    stack: AsyncExitStack,
    settings: JobsSettings,
    broker: Broker,
    quotas: Quotas,
    ledger_space: LedgerSpace,
) -> RunnerParts:
    registry = await Registry.open(broker, seconds=WAIT_SECONDS)
    stack.push_async_callback(registry.close)
    tenants = await Tenants.open(broker, seconds=WAIT_SECONDS)
    stack.push_async_callback(tenants.close)
    keys = await Keys.open(broker, seconds=WAIT_SECONDS)
    stack.push_async_callback(keys.close)
    prices = await PriceBook.open(broker, seconds=WAIT_SECONDS)
    stack.push_async_callback(prices.close)
    tokenizers = TokenizerCache()
    stack.callback(tokenizers.close)
    grammars = GrammarChecker()
    stack.callback(grammars.close)
    longest = float(topology.MAX_DEADLINE_SECONDS)
    deadlines = DeadlineLimits(longest, longest)
    validator = SubmissionValidator(broker, registry, prices, tokenizers, grammars, deadlines)
    return RunnerParts(
        broker,
        registry,
        BatchStore(broker),
        FileStore(broker),
        ItemFeeder(broker, tenants, keys, validator, quotas, ledger_space),
        settings.shards,
        settings.max_batch_lines,
        settings.batch_window,
    )
