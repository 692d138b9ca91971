"""NATS subjects of what outlives its client's connection: files, batches, responses, webhooks."""

from enum import StrEnum
from typing import Literal

from streams.subjects import PREFIX, token

_FILE_RECORDS = "$KV.files."
_BATCH_RECORDS = "$KV.batches."
_RESPONSE_RECORDS = "$KV.responses."
_PENDING_RESPONSES = f"{_RESPONSE_RECORDS}_pending."  # `_pending` is no tenant's name
_WEBHOOK_ENDPOINTS, _DELIVERIES = "$KV.webhooks.", "$KV.deliveries."
_TRY = "try-"


class JobOperation(StrEnum):
    """Operations on batches that a producer may ask a gateway for."""

    BEGIN = "begin"
    ADD = "add"
    START = "start"
    STATUS = "status"
    CANCEL = "cancel"
    CONTENT = "content"


def file_chunk(tenant: str, part: str, number: int) -> str:
    """Return the subject on which a chunk of a part of a tenant's file is stored.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.file.{token(tenant)}.{token(part)}.{number}"


def file_chunks(tenant: str, part: str) -> str:
    """Return the filter (a subject with wildcards) for all chunks of a part of a tenant's file.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.file.{token(tenant)}.{token(part)}.*"


def file_record(tenant: str, file: str) -> str:
    """Return the subject, in the bucket `files`, of the record of a tenant's file.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_FILE_RECORDS}{token(tenant)}.{token(file)}"


def file_records_of(tenant: str) -> str:
    """Return the filter (a subject with wildcards) for the records of all files of one tenant.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_FILE_RECORDS}{token(tenant)}.*"


def result(tenant: str, job: str, index: int) -> str:
    """Return the subject on which the result of a line of a tenant's job is stored.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.result.{token(tenant)}.{token(job)}.{index}"


def result_part(tenant: str, job: str, index: int, part: str) -> str:
    """Return the subject of a part of a result that is too large for one message.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{result(tenant, job, index)}.{token(part)}"


def failed_try(tenant: str, job: str, index: int, attempt: int) -> str:
    """Return the subject on which it is stored how a try failed that is not the last.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return result_part(tenant, job, index, f"{_TRY}{attempt}")


def results_of(tenant: str, job: str) -> str:
    """Return the filter (a subject with wildcards) for all that RESULTS has of a tenant's job.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.result.{token(tenant)}.{token(job)}.>"


def parse_result(subject: str) -> tuple[str, str, int]:
    """Return tenant, job and index of a subject on which a result, or a part of it, is stored."""
    _, _, tenant, job, index, *_ = subject.split(".")
    return tenant, job, int(index)


def result_kind(subject: str) -> Literal["result", "try", "part"]:
    """Return what is stored on a subject of RESULTS."""
    last = subject.split(".")[5:]
    if not last:
        return "result"
    return "try" if last[0].startswith(_TRY) else "part"


def resulted(tenant: str, job: str) -> str:
    """Return the filter on which it is heard that RESULTS has stored something of a job.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.resulted.{token(tenant)}.{token(job)}.>"


def batch_record(tenant: str, batch: str) -> str:
    """Return the subject, in the bucket `batches`, of the record of a tenant's batch.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_BATCH_RECORDS}{token(tenant)}.{token(batch)}"


def batch_records_of(tenant: str) -> str:
    """Return the filter (a subject with wildcards) for the records of all batches of one tenant.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_BATCH_RECORDS}{token(tenant)}.*"


def batch_changed(tenant: str, batch: str) -> str:
    """Return the subject on which jobs services hear that a client has changed a batch.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.batch.{token(tenant)}.{token(batch)}"


def response_record(tenant: str, response: str) -> str:
    """Return the subject, in the bucket `responses`, of the record of a tenant's response.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_RESPONSE_RECORDS}{token(tenant)}.{token(response)}"


def pending_response(tenant: str, response: str) -> str:
    """Return the subject, in the bucket `responses`, of the note that a response needs work.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_PENDING_RESPONSES}{token(tenant)}.{token(response)}"


def parse_pending_response(subject: str) -> tuple[str, str]:
    """Return tenant and id of a response from the subject of the note that it needs work."""
    tenant, response = subject.removeprefix(_PENDING_RESPONSES).split(".")
    return tenant, response


def response_changed(tenant: str, response: str) -> str:
    """Return the subject on which jobs services hear that a response needs work.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.response.{token(tenant)}.{token(response)}"


def event(tenant: str, kind: str, object_id: str) -> str:
    """Return the subject on which it is stored, once, that something happened to an object.

    `kind` is the event's type, such as `batch.completed`. Raises `InvalidToken` for a name that
    cannot be part of a subject.
    """
    words = (tenant, *kind.split("."), object_id)
    return ".".join([PREFIX, "webhook", *map(token, words)])


def parse_event_tenant(subject: str) -> str:
    """Return the tenant of a subject on which an event is stored, or that of a threshold."""
    return subject.split(".")[2]


def webhook_endpoint(tenant: str, endpoint: str) -> str:
    """Return the subject, in the bucket `webhooks`, of the record of a tenant's endpoint.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_WEBHOOK_ENDPOINTS}{token(tenant)}.{token(endpoint)}"


def webhook_endpoints_of(tenant: str) -> str:
    """Return the filter (a subject with wildcards) for the records of a tenant's endpoints.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_WEBHOOK_ENDPOINTS}{token(tenant)}.*"


def delivery(tenant: str, endpoint: str, event_id: str) -> str:
    """Return the subject, in the bucket `deliveries`, of the record of an event to an endpoint.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_DELIVERIES}{token(tenant)}.{token(endpoint)}.{token(event_id)}"


def deliveries_to(tenant: str, endpoint: str) -> str:
    """Return the filter (a subject with wildcards) for all deliveries to a tenant's endpoint.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{_DELIVERIES}{token(tenant)}.{token(endpoint)}.*"


def job_question(tenant: str, operation: str) -> str:
    """Return the subject on which a tenant's producer asks for an operation.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.jobs.{token(tenant)}.{token(operation)}"


def parse_job_question(subject: str) -> tuple[str, str]:
    """Return tenant and operation of a subject that `ALL_JOBS` matches."""
    _, _, tenant, operation = subject.split(".")
    return tenant, operation


def answer(tenant: str, key: str) -> str:
    """Return the subject on which the durable answer to a producer's request is stored.

    `key` is the producer's own id of the request, escaped. Raises `InvalidToken` for a tenant whose
    name cannot be part of a subject.
    """
    return f"{PREFIX}.answer.{token(tenant)}.{key}"


def answers_of(tenant: str) -> str:
    """Return the filter (a subject with wildcards) for all durable answers of a tenant, and parts.

    Raises `InvalidToken` for a name that cannot be part of a subject.
    """
    return f"{PREFIX}.answer.{token(tenant)}.>"


ALL_RESULTS = f"{PREFIX}.result.>"
ALL_BATCH_RECORDS = f"{_BATCH_RECORDS}*.*"
ALL_WEBHOOK_ENDPOINTS = f"{_WEBHOOK_ENDPOINTS}*.*"
ALL_DELIVERIES = f"{_DELIVERIES}*.*.*"
EVENT_CURSOR = f"{_WEBHOOK_ENDPOINTS}cursor"  # up to which event there are deliveries
ALL_EVENTS = f"{PREFIX}.webhook.*.*.*.*"
ALL_BATCH_CHANGES = f"{PREFIX}.batch.*.*"
ALL_RESPONSE_RECORDS = f"{_RESPONSE_RECORDS}*.*"
ALL_PENDING_RESPONSES = f"{_PENDING_RESPONSES}*.*"
ALL_RESPONSE_CHANGES = f"{PREFIX}.response.*.*"
ALL_FILES = f"{PREFIX}.file.*.*.*"
ALL_FILE_RECORDS = f"{_FILE_RECORDS}*.*"
ALL_JOBS = f"{PREFIX}.jobs.*.*"  # producers ask a gateway for what concerns their batches
ALL_ANSWERS = f"{PREFIX}.answer.*.>"  # and their parts
