"""Every error a caller can meet, split by what the caller can do about it.

    MillstreamError
    ├── BadRequest           change the request
    │   ├── UnknownField, UnsupportedValue, TokenOutOfRange, BadGrammar
    │   ├── ContextLengthExceeded, InputTooLong, OutputTooLong
    │   ├── Unauthenticated
    │   │   └── TokenRefused, CredentialExpired, CredentialRevoked
    │   ├── Forbidden
    │   │   └── InsufficientScope, ModelNotAllowed, AddressNotAllowed
    │   ├── NotFound, MethodNotAllowed
    │   ├── ModelNotFound, RequestNotFound, IdempotencyConflict, AnswerLost
    │   ├── PayloadTooLarge, UnsupportedMediaType, HeadTooLarge, TooSlow
    │   └── LargerThanQuota, StorageQuotaExceeded
    ├── Refused              try again later
    │   ├── LaneFull, TooManyConnections, TooManyTransfers, TooManyWrongKeys
    │   ├── RateLimited
    │   │   └── QuotaSpent
    │   ├── Overloaded, TenantBacklog, NoWorkers, LedgerFull, StorageFull
    │   └── BrokerUnavailable
    │       └── NotConnected, NotPermitted
    ├── BrokerMisconfigured  tell an operator: no retry helps
    │   └── InvalidServerUrl, TopologyMismatch
    ├── InternalError        a fault of ours: the service's log says more
    └── Ended                the request was accepted and ended without its full answer

`code` travels on every wire; `HTTP_STATUS` is the one table from code to HTTP status. Pure.
"""

from collections.abc import Sequence
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
    "invalid_token": 401,
    "key_expired": 401,
    "key_revoked": 401,
    "forbidden": 403,
    "insufficient_scope": 403,
    "model_not_allowed": 403,
    "address_not_allowed": 403,
    "storage_quota_exceeded": 403,
    "not_found": 404,
    "model_not_found": 404,
    "request_not_found": 404,
    "tenant_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "idempotency_conflict": 409,
    "answer_lost": 410,
    "key_taken": 409,
    "key_not_found": 404,
    "key_ended": 409,
    "admin_key_exists": 409,
    "no_key_pepper": 409,
    "no_broker_keys": 409,
    "tenant_not_publishing": 409,
    "account_not_found": 404,
    "name_taken": 409,
    "tenant_configured": 409,
    "tenant_exists": 409,
    "version_exists": 409,
    "alias_moved": 409,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "queue_full": 429,
    "too_many_connections": 429,
    "too_many_transfers": 429,
    "too_many_wrong_keys": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "tenant_backlog": 429,
    "headers_too_large": 431,
    "upstream_refused": 400,
    "cancelled": 499,
    "adapter_failed": 500,
    "engine_failed": 500,
    "file_lost": 500,
    "internal_error": 500,
    "attempts_exhausted": 500,
    "upstream_failed": 502,
    "overloaded": 503,
    "no_workers": 503,
    "issuer_unreachable": 503,
    "ledger_full": 503,
    "audit_full": 503,
    "broker_unavailable": 503,
    "accounts_not_told": 503,
    "log_lost": 503,
    "work_lost": 503,
    "deadline_exceeded": 504,
    "storage_full": 507,
}


class MillstreamError(Exception):
    """Root of all errors: `message` is a sentence for people, `code` is a word for programs.

    `retry_after_seconds` says when to try again; None means that a retry is not suggested.
    `may_have_succeeded` is True where no answer came, so that the outcome is unknown.
    """

    code: ClassVar[str] = "internal_error"
    retry_after_seconds: float | None = None
    may_have_succeeded: ClassVar[bool] = False  # the outcome is unknown: no answer came

    @property
    def message(self) -> str:
        """The error as one sentence for people."""
        return str(self)


class BadRequest(MillstreamError):
    """The request cannot be served unless its sender changes it.

    `field` names the part of the request that is at fault; None if no single part is.
    """

    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownField(BadRequest):
    """The request has a field that this version of Millstream does not know."""

    code = "unknown_field"


class UnsupportedValue(BadRequest):
    """A known field of the request has a value that is not supported."""

    code = "unsupported_value"


class UnsupportedMediaType(BadRequest):
    """The request's body is encoded in a way that is not supported."""

    code = "unsupported_media_type"


class ContextLengthExceeded(BadRequest):
    """Prompt and `max_tokens` together exceed the model's context length or the tenant's limit.

    `limit` is in tokens. `owner` says in the message whose limit it is.
    """

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int, owner: str) -> None:
        super().__init__(
            f"{prompt_tokens} prompt tokens and up to {max_tokens} output tokens exceed "
            f"the limit of {limit} tokens of {owner}",
            "max_tokens" if prompt_tokens < limit else "prompt",
        )
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit


class InputTooLong(BadRequest):
    """A single input or prompt alone exceeds the model's context length or the tenant's limit.

    `tokens` and `limit` are in tokens. `owner` says in the message whose limit it is.
    """

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
    """The request has a token id outside the model's vocabulary, which is 0..`vocabulary` - 1."""

    code = "token_out_of_range"

    def __init__(self, token: int, vocabulary: int, field: str) -> None:
        super().__init__(f"token id {token} is outside the vocabulary 0..{vocabulary - 1}", field)
        self.token, self.vocabulary = token, vocabulary


class BadGrammar(BadRequest):
    """The grammar that should constrain the output cannot be compiled or is too costly to enforce.

    A grammar is a JSON schema or a regular expression that the client sent with the request.
    """

    code = "bad_grammar"


class Unauthenticated(BadRequest):
    """The API key is missing or belongs to no tenant."""

    code = "invalid_api_key"


class TokenRefused(Unauthenticated):
    """The bearer token is none of a configured issuer, or claims something that is not accepted."""

    code = "invalid_token"


class CredentialExpired(Unauthenticated):
    """The API key or token was good, and its time is over."""

    code = "key_expired"


class CredentialRevoked(Unauthenticated):
    """The API key was revoked, disabled or removed, its tenant was, or the token is denied."""

    code = "key_revoked"


class Forbidden(BadRequest):
    """The API key is valid, but its tenant is not allowed to do what the request asks for."""

    code = "forbidden"


class InsufficientScope(Forbidden):
    """The API key or token lacks the scope that the request needs."""

    code = "insufficient_scope"

    def __init__(self, needed: str, held: tuple[str, ...]) -> None:
        super().__init__(f"this needs the scope {needed!r}; the key has: {', '.join(held) or '-'}")
        self.needed, self.held = needed, held


class ModelNotAllowed(Forbidden):
    """The API key is limited to other models than the one that was asked for."""

    code = "model_not_allowed"

    def __init__(self, name: str) -> None:
        super().__init__(f"this key may not use the model {name!r}", "model")
        self.name = name


class AddressNotAllowed(Forbidden):
    """The API key is limited to other networks than the one that the request came from."""

    code = "address_not_allowed"

    def __init__(self, address: str) -> None:
        super().__init__(f"this key may not be used from the address {address or 'unknown'}")
        self.address = address


class NotFound(BadRequest):
    """The service has nothing at the address that was asked for."""

    code = "not_found"


class MethodNotAllowed(BadRequest):
    """The path exists, but does not allow the HTTP method of the request."""

    code = "method_not_allowed"


class ModelNotFound(BadRequest):
    """No model, alias, version or adapter has this name; operators are told what is `near`."""

    code = "model_not_found"

    def __init__(self, name: str, near: Sequence[str] = (), remedy: str = "") -> None:
        meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        super().__init__(f"the model {name!r} does not exist{meant}{remedy}", "model")
        self.name, self.near = name, near


class RequestNotFound(BadRequest):
    """No token log (the stored answer) exists for this request id.

    The id was never accepted, belongs to another tenant, or its log has expired.
    """

    code = "request_not_found"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the request {request_id!r} is not known here", "request_id")
        self.request_id = request_id


class IdempotencyConflict(BadRequest):
    """The request's idempotency key was already used by a request with a different body."""

    code = "idempotency_conflict"


class AnswerLost(BadRequest):
    """The answer under a producer's id was stored, and is not there any more, or not whole."""

    code = "answer_lost"


class PayloadTooLarge(BadRequest):
    """The request's body is over the size limit; nothing of it was published to the broker.

    `size` and `limit` are in bytes.
    """

    code = "payload_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the body of {size} bytes is larger than the limit of {limit} bytes")
        self.size, self.limit = size, limit


class HeadTooLarge(BadRequest):
    """The request line or the headers of an HTTP request exceed a limit on their size or number."""

    code = "headers_too_large"


class TooSlow(BadRequest):
    """The client began a request but did not send all of it in time.

    `what` names the missing part in the message; `seconds` is the time that was allowed for it.
    """

    code = "request_timeout"

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} did not come within {seconds:g} s")
        self.seconds = seconds


def plain_number(value: float) -> str:
    """Return a number without an exponent: whole from 100 on, else with three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{Decimal(f'{value:.3g}'):f}"


class LargerThanQuota(BadRequest):
    """The request alone needs more than a whole quota allows, so it can never be admitted.

    `field` is the name of the quota, `limit` its size, and `amount` what the request needs of it.
    """

    code = "larger_than_quota"

    def __init__(self, quota: str, limit: float, amount: float) -> None:
        super().__init__(
            f"the request needs {plain_number(amount)}, {quota} is {plain_number(limit)}", quota
        )
        self.quota, self.limit, self.amount = quota, limit, amount


class StorageQuotaExceeded(BadRequest):
    """The tenant's files would take more room, or be more, than the tenant may have."""

    code = "storage_quota_exceeded"


class Refused(MillstreamError):
    """The service refused the request for now; a retry after `retry_after_seconds` may succeed.

    Nothing was accepted, unless `may_have_succeeded` is True. `estimated_wait_seconds` is how long
    the request would have waited; None where the wait is not the reason.
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
    """The tenant already has as many queued requests for this model and priority as it may have."""

    code = "queue_full"


class TooManyConnections(Refused):
    """The tenant or its API key has as many open connections to this gateway as it may have."""

    code = "too_many_connections"

    def __init__(self, owner: str, limit: int) -> None:
        super().__init__(f"max_connections of {owner} is {limit}, and {limit} are open here")
        self.field, self.limit = "max_connections", limit


class TooManyTransfers(Refused):
    """The gateway, or the tenant at it, sends and takes in as many files as it may."""

    code = "too_many_transfers"


class TooManyWrongKeys(Refused):
    """The client's address has sent too many wrong API keys to this gateway."""

    code = "too_many_wrong_keys"

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__("too many wrong API keys came from this address", retry_after_seconds)


class RateLimited(Refused):
    """The request would exceed a quota at the moment; later, when use has fallen, it may fit.

    `field` is the name of the quota, `limit` its size, and `used` what is in use of it now. The
    message has `opens_at`, a time of UTC, where one is known.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self,
        quota: str,
        limit: float,
        used: float,
        retry_after_seconds: float,
        opens_at: str | None = None,
    ) -> None:
        when = f", at {opens_at}" if opens_at else ""
        super().__init__(
            f"{quota} is {plain_number(limit)}, and {plain_number(used)} is in use; try again in "
            f"{plain_number(retry_after_seconds)} s{when}",
            retry_after_seconds,
        )
        self.field, self.limit, self.used = quota, limit, used


class QuotaSpent(RateLimited):
    """A quota of a day or month is used up: nothing is admitted before the next one of UTC."""

    code = "insufficient_quota"


class Overloaded(Refused):
    """The model is too busy to serve the request in the time it has, or a broker stream is full."""

    code = "overloaded"


class TenantBacklog(Refused):
    """The tenant's own queued requests would make this request late.

    The model's load alone would not make it late.
    """

    code = "tenant_backlog"


class NoWorkers(Refused):
    """The model is registered, but no worker has served it for some time."""

    code = "no_workers"


class LedgerFull(Refused):
    """The ledger has no room for the records of further requests; those accepted still get one."""

    code = "ledger_full"


class StorageFull(Refused):
    """The broker has no room for further files of any tenant; those that are stored stay."""

    code = "storage_full"


class BrokerUnavailable(Refused):
    """NATS did not answer in time: what was sent may or may not have been stored.

    Its text is for logs and operators; clients get the same sentence whatever has happened.
    """

    code = "broker_unavailable"
    may_have_succeeded = True

    @property
    def message(self) -> str:
        return "the message broker does not answer at the moment; try again"


class NotConnected(BrokerUnavailable):
    """No connection to the broker (NATS) exists: nothing was sent, so nothing was stored."""

    may_have_succeeded = False


class NotPermitted(BrokerUnavailable):
    """The user of this connection may not publish to `subject`: nothing was sent.

    No retry helps before somebody gives it the right.
    """

    may_have_succeeded = False

    def __init__(self, subject: str, user: str, remedy: str) -> None:
        super().__init__(f"{user} may not publish to {subject}: {remedy}")
        self.subject = subject


class BrokerMisconfigured(MillstreamError):
    """NATS cannot serve as it is configured, and an operator must change something."""

    code = "broker_unavailable"

    @property
    def message(self) -> str:
        return "the message broker refuses to serve; an operator must look at it"


class InternalError(MillstreamError):
    """The service failed by a fault of its own; its log has the details."""


class Ended(MillstreamError):
    """An accepted request ended without its full answer, by an error or because it was cancelled.

    `code` is the error code of the record that ended the request, or `cancelled`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the terminal names it, not the class


def http_status(code: str) -> int:
    """Return the HTTP status for an error `code`; 500 for an unknown code."""
    return HTTP_STATUS.get(code, 500)
