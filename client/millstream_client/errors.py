"""Every error a request can end in, split by what the caller can do about it.

    MillstreamError
    ├── BadRequest           change the request
    │   ├── UnknownField, UnsupportedValue, ContextLengthExceeded, TokenOutOfRange, BadGrammar
    │   ├── Unauthenticated, Forbidden
    │   ├── ModelNotFound, RequestNotFound, IdempotencyConflict
    │   └── PayloadTooLarge, LargerThanQuota
    ├── Refused              try again later; what says when has been tried again already
    │   ├── QueueFull, RateLimited, QuotaSpent, TenantBacklog
    │   └── NoWorkers, BrokerUnavailable, TooManyConnections, NotConnected
    └── Ended                accepted, and ended without its full answer
        ├── DeadlineExceeded, Cancelled
        ├── EngineFailed, AdapterFailed, AttemptsExhausted, LogLost, WorkLost
        └── UpstreamRefused, UpstreamFailed

`code` is the one on the wire (docs/websocket.md). Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Any


class MillstreamError(Exception):
    """The root, and what an unknown code becomes. `retry_after` is in seconds, None: never."""

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
    """The request cannot be served as it is."""

    code = "invalid_request"


class UnknownField(BadRequest):
    """A field that the gateway does not know."""

    code = "unknown_field"


class UnsupportedValue(BadRequest):
    """Right in itself, and not supported, or not by this model."""

    code = "unsupported_value"


class ContextLengthExceeded(BadRequest):
    """Prompt and output together do not fit the model, or the tenant's limit."""

    code = "context_length_exceeded"


class TokenOutOfRange(BadRequest):
    """A token id outside the model's vocabulary."""

    code = "token_out_of_range"


class BadGrammar(BadRequest):
    """A JSON schema or regular expression that cannot be compiled or is too costly to follow."""

    code = "bad_grammar"


class Unauthenticated(BadRequest):
    """No key, or one that belongs to nobody."""

    code = "invalid_api_key"


class Forbidden(BadRequest):
    """The key is good and may not do this."""

    code = "forbidden"


class ModelNotFound(BadRequest):
    """No model, alias or version of this name."""

    code = "model_not_found"


class RequestNotFound(BadRequest):
    """It is over and forgotten, or was never accepted."""

    code = "request_not_found"


class IdempotencyConflict(BadRequest):
    """The idempotency key was used with a different request."""

    code = "idempotency_conflict"


class PayloadTooLarge(BadRequest):
    """The request is over the gateway's limit of bytes."""

    code = "payload_too_large"


class HeadTooLarge(BadRequest):
    """The head of an HTTP request is over the gateway's limits."""

    code = "headers_too_large"


class TooSlow(BadRequest):
    """What was begun did not come whole in time."""

    code = "request_timeout"


class LargerThanQuota(BadRequest):
    """It needs more than a whole quota: it can never come in."""

    code = "larger_than_quota"


class Refused(MillstreamError):
    """Not now: nothing was accepted."""

    code = "overloaded"


class QueueFull(Refused):
    """The tenant has as many requests queued as it may."""

    code = "queue_full"


class TooManyConnections(Refused):
    """The tenant or the key has as many connections to this gateway as it may."""

    code = "too_many_connections"


class RateLimited(Refused):
    """A quota has no room for the request just now."""

    code = "rate_limit_exceeded"


class QuotaSpent(Refused):
    """A quota of the day has no room for the request."""

    code = "insufficient_quota"


class TenantBacklog(Refused):
    """What the tenant has queued itself makes the wait too long."""

    code = "tenant_backlog"


class NoWorkers(Refused):
    """Nobody has served the model for a while."""

    code = "no_workers"


class BrokerUnavailable(Refused):
    """The gateway could not store the request in time."""

    code = "broker_unavailable"


class NotConnected(Refused):
    """No gateway could be reached for as long as the client's patience; the client's own."""

    code = "not_connected"


class Ended(MillstreamError):
    """The request was accepted and ended without its full answer."""


class DeadlineExceeded(Ended):
    """Not done by its deadline."""

    code = "deadline_exceeded"


class Cancelled(Ended):
    """Ended early, and not by who reads it; or left by its reader, and read again."""

    code = "cancelled"


class EngineFailed(Ended):
    """The engine could not run this request."""

    code = "engine_failed"


class AdapterFailed(Ended):
    """The worker could not load the adapter."""

    code = "adapter_failed"


class AttemptsExhausted(Ended):
    """Too many workers died over it."""

    code = "attempts_exhausted"


class LogLost(Ended):
    """A part of the output is lost, so it cannot go on without a gap: send it again."""

    code = "log_lost"


class WorkLost(Ended):
    """Its work was removed from the broker before a worker had done it: send it again."""

    code = "work_lost"


class UpstreamRefused(Ended):
    """The server that runs this model refuses the request."""

    code = "upstream_refused"


class UpstreamFailed(Ended):
    """The server that runs this model failed again and again."""

    code = "upstream_failed"


def _all_subclasses(root: type[MillstreamError]) -> Iterator[type[MillstreamError]]:
    yield root
    for each in root.__subclasses__():
        yield from _all_subclasses(each)


BY_CODE = {each.code: each for each in reversed([*_all_subclasses(MillstreamError)])}


def error_of(facts: Mapping[str, Any]) -> MillstreamError:
    """The error that an `error` frame, or the `error` of an HTTP body, tells of."""
    code = str(facts.get("code"))
    milliseconds = facts.get("retry_after_ms")
    retry_after = None if milliseconds is None else float(milliseconds) / 1000
    found = BY_CODE.get(code, MillstreamError)
    return found(str(facts.get("message")), retry_after, code)
