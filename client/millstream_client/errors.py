"""All errors in which a request can end, divided by what the caller can do about them.

    MillstreamError
    ├── BadRequest           change the request
    │   ├── UnknownField, UnsupportedValue, ContextLengthExceeded, TokenOutOfRange, BadGrammar
    │   ├── Unauthenticated, Forbidden
    │   ├── ModelNotFound, RequestNotFound, IdempotencyConflict
    │   └── PayloadTooLarge, LargerThanQuota
    ├── Refused              try again later; the client has retried those with `retry_after`
    │   ├── QueueFull, RateLimited, QuotaSpent, TenantBacklog
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
    """Root of all errors, and the error of a code that this version does not know.

    `retry_after` is the number of seconds after which a retry makes sense; None: never.
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
    """The API key is valid but has no permission for this."""

    code = "forbidden"


class ModelNotFound(BadRequest):
    """There is no model, alias or version of this name."""

    code = "model_not_found"


class RequestNotFound(BadRequest):
    """The request has ended and been forgotten, or was never accepted."""

    code = "request_not_found"


class IdempotencyConflict(BadRequest):
    """The idempotency key was used with a different request."""

    code = "idempotency_conflict"


class PayloadTooLarge(BadRequest):
    """The request has more bytes than the gateway accepts."""

    code = "payload_too_large"


class HeadTooLarge(BadRequest):
    """The head of an HTTP request exceeds the gateway's limits."""

    code = "headers_too_large"


class TooSlow(BadRequest):
    """The gateway did not receive the whole request in time."""

    code = "request_timeout"


class LargerThanQuota(BadRequest):
    """The request needs more than a whole quota, so it can never be accepted."""

    code = "larger_than_quota"


class Refused(MillstreamError):
    """The request cannot be accepted now; nothing of it was accepted."""

    code = "overloaded"


class QueueFull(Refused):
    """The tenant has as many requests queued as it may."""

    code = "queue_full"


class TooManyConnections(Refused):
    """The tenant or the key has as many connections to this gateway as it may."""

    code = "too_many_connections"


class TooManyWrongKeys(Refused):
    """Too many wrong API keys came from this client's address."""

    code = "too_many_wrong_keys"


class RateLimited(Refused):
    """A quota per minute or of concurrent requests has no room for the request at present."""

    code = "rate_limit_exceeded"


class QuotaSpent(Refused):
    """A quota per day has no room for the request."""

    code = "insufficient_quota"


class TenantBacklog(Refused):
    """The tenant's own queued requests would make this one wait too long."""

    code = "tenant_backlog"


class NoWorkers(Refused):
    """No worker has served the model for a while."""

    code = "no_workers"


class BrokerUnavailable(Refused):
    """The gateway could not store the request in time."""

    code = "broker_unavailable"


class NotConnected(Refused):
    """No gateway could be reached within the client's patience; raised by the client itself."""

    code = "not_connected"


class Ended(MillstreamError):
    """The request was accepted and ended without its full answer."""


class DeadlineExceeded(Ended):
    """The request was not finished by its deadline."""

    code = "deadline_exceeded"


class Cancelled(Ended):
    """The request was cancelled by somebody else; or its reader closed it and then read again."""

    code = "cancelled"


class EngineFailed(Ended):
    """The engine could not run this request."""

    code = "engine_failed"


class AdapterFailed(Ended):
    """The worker could not load the adapter."""

    code = "adapter_failed"


class AttemptsExhausted(Ended):
    """Too many workers died while they ran the request."""

    code = "attempts_exhausted"


class LogLost(Ended):
    """A part of the output is lost, so that it would have a gap: send the request again."""

    code = "log_lost"


class WorkLost(Ended):
    """The request was removed from the broker before a worker had run it: send it again."""

    code = "work_lost"


class UpstreamRefused(Ended):
    """The server that runs this model refuses the request."""

    code = "upstream_refused"


class UpstreamFailed(Ended):
    """The server that runs this model kept failing, or its answer was invalid."""

    code = "upstream_failed"


def _all_subclasses(root: type[MillstreamError]) -> Iterator[type[MillstreamError]]:
    yield root
    for each in root.__subclasses__():
        yield from _all_subclasses(each)


BY_CODE = {each.code: each for each in reversed([*_all_subclasses(MillstreamError)])}


def error_of(facts: Mapping[str, Any]) -> MillstreamError:
    """Return the error described by an `error` frame or by the `error` of an HTTP body."""
    code = str(facts.get("code"))
    milliseconds = facts.get("retry_after_ms")
    retry_after = None if milliseconds is None else float(milliseconds) / 1000
    error_class = BY_CODE.get(code, MillstreamError)
    return error_class(str(facts.get("message")), retry_after, code)
