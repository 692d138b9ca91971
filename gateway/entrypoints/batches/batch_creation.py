"""Creates batches: of a file that a client has stored, or of the failed lines of another batch."""

from secrets import token_bytes

import structlog

from api import batch_bodies, file_bodies
from api.batches.input_estimate import InputEstimate, InputEstimator
from api.schemas.batches import BatchOptions
from api.schemas.files import MAX_EXPIRY_SECONDS
from gateway.context import GatewayContext
from gateway.entrypoints.files.file_routes import find_ready
from registry.tenant_records import Tenant
from streams.errors import BadRequest
from streams.records.files.file_records import StoredFile
from streams.records.jobs.batch_records import Batch
from streams.records.jobs.result_space import create_with_space
from streams.records.jobs.run_hours import RunHours

log = structlog.get_logger()


async def find_input(context: GatewayContext, tenant: str, told: str) -> StoredFile:
    """Return a tenant's file for batches; raises `NotFound`, or `BadRequest` for another file."""
    file = await find_ready(context, tenant, told)
    if file.purpose != file_bodies.BATCH:
        raise BadRequest(
            f"the file {told!r} has the purpose {file.purpose!r}, not 'batch'", "input_file_id"
        )
    return file


async def estimate_input(
    context: GatewayContext, tenant: Tenant, file: StoredFile, endpoint: str
) -> InputEstimate:
    """Read an input to its end; raises `TooManyTransfers`, `ChunkMissing`, `BrokerUnavailable`."""
    estimator = InputEstimator(context.registry, context.prices, tenant)
    with context.transfer_slots.take(tenant.name):
        return await estimator.read(context.files, file, endpoint)


async def create_batch(
    context: GatewayContext,
    tenant: Tenant,
    key: str,
    batch_id: str,
    file: StoredFile,
    endpoint: str,
    options: BatchOptions,
    retry_of: str = "",
) -> Batch:
    """Store a new batch, whose results have their room reserved.

    `key` is the API key that creates it, as JSON; empty for a producer over NATS. Raises
    `RecordChanged` if there is a batch of this id, `StorageFull` if there is no room, `BadRequest`
    if it could not run within its time, and as `estimate_input` does.
    """
    now, window = (
        int(context.broker.clock.now()),
        batch_bodies.window_seconds(options.completion_window),
    )
    begin, hours = max(now, options.not_before or 0), options.run_hours
    _check_hours(hours, begin, window)
    if file.expires_at is not None and begin >= file.expires_at:
        raise BadRequest(
            f"the batch is not to begin before {begin}, and its input file expires at "
            f"{file.expires_at}",
            "not_before",
        )
    estimate = await estimate_input(context, tenant, file, endpoint)
    expiry = options.output_expires_after
    batch = Batch(
        tenant=tenant.name,
        id=batch_id,
        endpoint=endpoint,
        input_file=file.id,
        window_seconds=window,
        created_at=now,
        expires_at=begin + window,
        secret=token_bytes(32),
        key=key,
        metadata=options.metadata,
        output_expires_after_seconds=expiry.seconds if expiry else MAX_EXPIRY_SECONDS,
        not_before=options.not_before or 0,
        run_hours=hours,
        reserved_bytes=estimate.result_bytes,
        retry_of=retry_of,
    )
    stored = await create_with_space(context.broker, context.batches, batch)
    log.info(
        "batch_created",
        tenant=batch.tenant,
        batch=batch.id,
        bytes=file.size,
        reserved_bytes=batch.reserved_bytes,
    )
    return stored


def _check_hours(hours: RunHours | None, begin: int, window: int) -> None:
    if hours and hours.next_opening(begin) >= begin + window:
        raise BadRequest(
            f"the batch may run from {hours} only, and its completion_window of "
            f"{window // 3600} h is over before that",
            "run_between",
        )
