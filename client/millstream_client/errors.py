"""All errors in which a request can end, divided by what the caller can do about them.

    MillstreamError
    ├── BadRequest           change the request
    │   ├── UnknownField, UnsupportedValue, ContextLengthExceeded, TokenOutOfRange, BadGrammar
    │   ├── Unauthenticated, Forbidden
    │   ├── ModelNotFound, RequestNotFound, IdempotencyConflict
    │   └── PayloadTooLarge, LargerThanQuota
    ├── Refused              try again later; the client has retried those with `retry_after`
    │   ├── QueueFull, RateLimited, QuotaSpent, TenantBacklog, LedgerFull
    │   └── NoWorkers, BrokerUnavailable, NotConnected, TooManyConnections, TooManyWrongKeys
    └── Ended                accepted, and ended without its full answer
        ├── DeadlineExceeded, Cancelled
        ├── EngineFailed, AdapterFailed, AttemptsExhausted, LogLost, WorkLost
        └── UpstreamRefused, UpstreamFailed

`code` is the error code on the wire (docs/websocket.md). Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Any


class MillstreamError(Exception):
    """Base class of all errors; raised itself for an error code that this version does not know.

    `code` is the gateway's error code and `message` its sentence for people. `retry_after` is the
    number of seconds after which the same request is worth sending again; None if the gateway named
    no time, and then the client does not retry.
    """

    code = "internal_error"

    def __init__(
        self, message: str, retry_after: float | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.retry_after = message, retry_after
        self.code = code or type(self).code

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class BadRequest(MillstreamError):
    """The request cannot be served as it is; sending it again unchanged fails again."""

    code = "invalid_request"


class UnknownField(BadRequest):
    """The request has a field that the gateway does not know."""

    code = "unknown_field"


class UnsupportedValue(BadRequest):
    """The request has a valid value that Millstream, or this model, does not support."""

    code = "unsupported_value"


class ContextLengthExceeded(BadRequest):
    """Prompt and output together exceed the model's context length or the tenant's limit."""

    code = "context_length_exceeded"


class TokenOutOfRange(BadRequest):
    """The request has a token id outside the model's vocabulary."""

    code = "token_out_of_range"


class BadGrammar(BadRequest):
    """The JSON schema or regular expression cannot be compiled, or is too costly to follow."""

    code = "bad_grammar"


class Unauthenticated(BadRequest):
    """The API key is missing or unknown."""

    code = "invalid_api_key"


class Forbidden(BadRequest):
    """The API key is valid but lacks the permission for this request."""

    code = "forbidden"


class ModelNotFound(BadRequest):
    """There is no model, alias or version of this name."""

    code = "model_not_found"


class RequestNotFound(BadRequest):
    """The gateway does not know the request: it was never accepted, or has ended long ago."""

    code = "request_not_found"


class IdempotencyConflict(BadRequest):
    """The idempotency key was used before, with a different request."""

    code = "idempotency_conflict"


class PayloadTooLarge(BadRequest):
    """The request has more bytes, or its prompt more tokens, than the gateway accepts."""

    code = "payload_too_large"


class HeadTooLarge(BadRequest):
    """The head of an HTTP request exceeds the gateway's limits."""

    code = "headers_too_large"


class TooSlow(BadRequest):
    """The gateway did not receive the whole HTTP request within the time that it allows."""

    code = "request_timeout"


class LargerThanQuota(BadRequest):
    """The request alone needs more than one of the tenant's or key's quotas, so it never fits."""

    code = "larger_than_quota"


class Refused(MillstreamError):
    """The request could not be served now, and may be at a later time.

    If the gateway named a time to try again (`retry_after`), the client has done so until its
    `patience` was over, and raises the last refusal. A request that no gateway accepted has not
    run.
    """

    code = "overloaded"


class QueueFull(Refused):
    """The tenant already has as many queued requests for this model and priority as it may have."""

    code = "queue_full"


class TooManyConnections(Refused):
    """The tenant or the API key already has as many connections to this gateway as it may have."""

    code = "too_many_connections"


class TooManyWrongKeys(Refused):
    """Too many wrong API keys came from this client's address."""

    code = "too_many_wrong_keys"


class RateLimited(Refused):
    """A quota per minute or of concurrent requests has no room for the request at present."""

    code = "rate_limit_exceeded"


class QuotaSpent(Refused):
    """A quota per day has no room for the request; it has room again the next day."""

    code = "insufficient_quota"


class TenantBacklog(Refused):
    """The tenant's own queued requests would make this one wait too long."""

    code = "tenant_backlog"


class NoWorkers(Refused):
    """No worker has served the model for a while, so the request was not queued."""

    code = "no_workers"


class LedgerFull(Refused):
    """The service has no room for the usage records of further requests; its operator must act."""

    code = "ledger_full"


class BrokerUnavailable(Refused):
    """The gateway could not store the request in time, because of a fault on the server's side."""

    code = "broker_unavailable"


class NotConnected(Refused):
    """No gateway could be reached within the client's patience, or the client was closed.

    Raised by the client itself, not by a gateway. A request that a gateway had accepted before may
    still run there.
    """

    code = "not_connected"


class Ended(MillstreamError):
    """The request was accepted, and ended with an error before its answer was complete."""


class DeadlineExceeded(Ended):
    """The request was not finished by its deadline."""

    code = "deadline_exceeded"


class Cancelled(Ended):
    """The request was cancelled by somebody else, or it is read after its handle was closed.

    Not raised after the reader's own call of `cancel`: the answer then ends early, with the finish
    reason `cancelled`.
    """

    code = "cancelled"


class EngineFailed(Ended):
    """The engine, which runs the model on a worker, could not run this request."""

    code = "engine_failed"


class AdapterFailed(Ended):
    """The worker could not load the LoRA adapter that the request names."""

    code = "adapter_failed"


class AttemptsExhausted(Ended):
    """All attempts that a request may have have failed, for example because workers died."""

    code = "attempts_exhausted"


class LogLost(Ended):
    """A part of the output was lost, so the answer would have a gap. Send the request again."""

    code = "log_lost"


class WorkLost(Ended):
    """The stored request was lost at the server before a worker had run it. Send it again."""

    code = "work_lost"


class UpstreamRefused(Ended):
    """The remote server that runs this model refused the request; `message` is its text."""

    code = "upstream_refused"


class UpstreamFailed(Ended):
    """The remote server that runs this model kept failing, or its answer was invalid."""

    code = "upstream_failed"


def _all_subclasses(root: type[MillstreamError]) -> Iterator[type[MillstreamError]]:
    yield root
    for each in root.__subclasses__():
        yield from _all_subclasses(each)


BY_CODE = {each.code: each for each in reversed([*_all_subclasses(MillstreamError)])}


def error_of(facts: Mapping[str, Any]) -> MillstreamError:
    """Return the exception for `facts`, an `error` frame or the `error` object of an HTTP body.

    Its class is the one whose `code` is that of `facts`, or `MillstreamError` for a code that this
    version does not know. The exception is not raised. Raises `ValueError` or `TypeError` if
    `retry_after_ms` is not a number.
    """
    code = str(facts.get("code"))
    milliseconds = facts.get("retry_after_ms")
    retry_after = None if milliseconds is None else float(milliseconds) / 1000
    error_class = BY_CODE.get(code, MillstreamError)
    return error_class(str(facts.get("message")), retry_after, code)
