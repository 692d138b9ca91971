"""Every error a caller can meet, split by what the caller can do about it.

    MillstreamError
    ├── BadRequest           change the request
    │   ├── UnknownField, UnsupportedValue, TokenOutOfRange, BadGrammar
    │   ├── ContextLengthExceeded, InputTooLong, OutputTooLong
    │   ├── Unauthenticated, Forbidden
    │   ├── ModelNotFound, RequestNotFound, IdempotencyConflict
    │   ├── PayloadTooLarge, HeadTooLarge, TooSlow
    │   └── LargerThanQuota
    ├── Refused              try again later
    │   ├── LaneFull, TooManyConnections
    │   ├── RateLimited
    │   │   └── QuotaSpent
    │   ├── Overloaded, TenantBacklog, NoWorkers
    │   └── BrokerUnavailable
    │       └── NotConnected
    └── Ended                the request was accepted and ended without its full answer

`code` travels on every wire; `HTTP_STATUS` is the one table from code to HTTP status. Pure.
"""

from decimal import Decimal
from typing import ClassVar

HTTP_STATUS: dict[str, int] = {
    "invalid_request": 400,
    "unknown_field": 400,
    "unsupported_value": 400,
    "context_length_exceeded": 400,
    "token_out_of_range": 400,
    "larger_than_quota": 400,
    "bad_grammar": 400,
    "invalid_api_key": 401,
    "forbidden": 403,
    "not_found": 404,
    "model_not_found": 404,
    "request_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "idempotency_conflict": 409,
    "payload_too_large": 413,
    "queue_full": 429,
    "too_many_connections": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "tenant_backlog": 429,
    "headers_too_large": 431,
    "upstream_refused": 400,
    "cancelled": 499,
    "adapter_failed": 500,
    "engine_failed": 500,
    "internal_error": 500,
    "attempts_exhausted": 500,
    "upstream_failed": 502,
    "overloaded": 503,
    "no_workers": 503,
    "broker_unavailable": 503,
    "log_lost": 503,
    "work_lost": 503,
    "deadline_exceeded": 504,
}


class MillstreamError(Exception):
    """Root of all errors: a sentence for people, a `code` for programs.

    `retry_after_seconds` says when to try again; None: a retry is not suggested.
    """

    code: ClassVar[str] = "internal_error"
    retry_after_seconds: float | None = None
    may_have_succeeded: ClassVar[bool] = False  # the outcome is unknown: no answer came

    @property
    def message(self) -> str:
        """The sentence for people."""
        return str(self)


class BadRequest(MillstreamError):
    """The request must be changed before it can be served; `field` names the part at fault."""

    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownField(BadRequest):
    """A field that this version does not know."""

    code = "unknown_field"


class UnsupportedValue(BadRequest):
    """A known field with a value that is not supported."""

    code = "unsupported_value"


class ContextLengthExceeded(BadRequest):
    """Prompt and output together exceed the model's context length or the tenant's limit."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int, owner: str) -> None:
        super().__init__(
            f"{prompt_tokens} prompt tokens and up to {max_tokens} output tokens exceed "
            f"the limit of {limit} tokens of {owner}",
            "max_tokens" if prompt_tokens < limit else "prompt",
        )
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit


class InputTooLong(BadRequest):
    """A single input or prompt exceeds the model's context length or the tenant's limit."""

    code = "context_length_exceeded"

    def __init__(self, field: str, tokens: int, limit: int, owner: str) -> None:
        super().__init__(f"{field} has {tokens} tokens, the limit of {owner} is {limit}", field)
        self.tokens, self.limit = tokens, limit


class OutputTooLong(BadRequest):
    """`max_tokens` exceeds the tenant's or the model's limit of output tokens."""

    code = "context_length_exceeded"

    def __init__(self, max_tokens: int, limit: int, owner: str) -> None:
        super().__init__(
            f"max_tokens is {max_tokens}, the limit of {owner} is {limit}", "max_tokens"
        )
        self.max_tokens, self.limit = max_tokens, limit


class TokenOutOfRange(BadRequest):
    """A token id outside the model's vocabulary."""

    code = "token_out_of_range"

    def __init__(self, token: int, vocabulary: int, field: str) -> None:
        super().__init__(f"token id {token} is outside the vocabulary 0..{vocabulary - 1}", field)
        self.token, self.vocabulary = token, vocabulary


class BadGrammar(BadRequest):
    """The JSON schema or regular expression cannot be compiled, or is too costly to enforce."""

    code = "bad_grammar"


class Unauthenticated(BadRequest):
    """The API key is missing or belongs to no tenant."""

    code = "invalid_api_key"


class Forbidden(BadRequest):
    """The API key is valid, but its tenant may not do this."""

    code = "forbidden"


class ModelNotFound(BadRequest):
    """No model, alias, version or adapter has this name."""

    code = "model_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {name!r} does not exist", "model")
        self.name = name


class RequestNotFound(BadRequest):
    """No token log of this request exists: never accepted, another tenant's, or expired by now."""

    code = "request_not_found"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the request {request_id!r} is not known here", "request_id")
        self.request_id = request_id


class IdempotencyConflict(BadRequest):
    """The same idempotency key was used before with a different body."""

    code = "idempotency_conflict"


class PayloadTooLarge(BadRequest):
    """The body is over the size limit; nothing was published."""

    code = "payload_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the body of {size} bytes is larger than the limit of {limit} bytes")
        self.size, self.limit = size, limit


class HeadTooLarge(BadRequest):
    """The request line and headers of an HTTP request are over a limit."""

    code = "headers_too_large"


class TooSlow(BadRequest):
    """A request was begun but not received completely in time."""

    code = "request_timeout"

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} did not come within {seconds:g} s")
        self.seconds = seconds


def plain_number(value: float) -> str:
    """Return a number without an exponent: whole from 100 on, else with three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{Decimal(f'{value:.3g}'):f}"


class LargerThanQuota(BadRequest):
    """The request alone needs more than a whole quota, so it can never be admitted."""

    code = "larger_than_quota"

    def __init__(self, quota: str, limit: float, amount: float) -> None:
        super().__init__(
            f"the request needs {plain_number(amount)}, {quota} is {plain_number(limit)}", quota
        )
        self.quota, self.limit, self.amount = quota, limit, amount


class Refused(MillstreamError):
    """Refused for now: nothing was accepted; a retry after `retry_after_seconds` may succeed.

    `estimated_wait_seconds` is how long the request would have waited, where that is the reason.
    """

    code = "overloaded"

    def __init__(
        self,
        message: str,
        retry_after_seconds: float = 1.0,
        estimated_wait_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.estimated_wait_seconds = estimated_wait_seconds


class LaneFull(Refused):
    """The tenant's lane holds as many queued requests as it may."""

    code = "queue_full"


class TooManyConnections(Refused):
    """The tenant or its key has as many connections to this gateway as it may."""

    code = "too_many_connections"

    def __init__(self, owner: str, limit: int) -> None:
        super().__init__(f"max_connections of {owner} is {limit}, and {limit} are open here")
        self.field, self.limit = "max_connections", limit


class RateLimited(Refused):
    """A quota has no room for the request at the moment; `field` is the name of the quota."""

    code = "rate_limit_exceeded"

    def __init__(self, quota: str, limit: float, used: float, retry_after_seconds: float) -> None:
        super().__init__(
            f"{quota} is {plain_number(limit)}, and {plain_number(used)} is in use; try again in "
            f"{plain_number(retry_after_seconds)} s",
            retry_after_seconds,
        )
        self.field, self.limit, self.used = quota, limit, used


class QuotaSpent(RateLimited):
    """A daily quota is used up; it has no room for the request before the next day."""

    code = "insufficient_quota"


class Overloaded(Refused):
    """The model, or a full stream of the broker, cannot take the request in the time it has."""

    code = "overloaded"


class TenantBacklog(Refused):
    """The tenant's own queued requests would make this one late; the model's load would not."""

    code = "tenant_backlog"


class NoWorkers(Refused):
    """The model is registered, but no worker has served it for a while."""

    code = "no_workers"


class BrokerUnavailable(Refused):
    """NATS did not answer in time: what was sent may or may not have been stored."""

    code = "broker_unavailable"
    may_have_succeeded = True


class NotConnected(BrokerUnavailable):
    """No connection to NATS exists: nothing was sent, so nothing was stored."""

    may_have_succeeded = False


class Ended(MillstreamError):
    """An accepted request ended in an error terminal; `code` is that terminal's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the terminal names it, not the class


def http_status(code: str) -> int:
    """Return the HTTP status of a wire code; 500 for an unknown code."""
    return HTTP_STATUS.get(code, 500)
