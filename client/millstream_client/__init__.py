"""Millstream's client for asyncio. It needs `websockets` and nothing else.

    async with Client(["http://10.0.0.1:8080", "http://10.0.0.2:8080"], api_key=key) as client:
        async for chunk in client.generate(model="gemma-3-270m", prompt="The old mill"):
            print(chunk.text, end="", flush=True)

The death of a gateway or worker is not seen: a request that a gateway has accepted continues at the
next gateway, without a lost or repeated token.

client            `Client`: one call makes one request; opens a session
request_params    the optional parameters of a request
request_handle    what the caller reads, cancels, closes (`Stream`)
session           all requests over one connection; resumes or sends them again on the next one
request_state     one request's progress across connections (pure)
connector, connection  the next gateway, with backoff; one WebSocket with its pings
backoff, retry_budget  when a retry may be sent (pure)
records, errors   what comes back
"""

from millstream_client.client import Client
from millstream_client.errors import (
    AdapterFailed,
    AddressNotAllowed,
    AttemptsExhausted,
    BadGrammar,
    BadRequest,
    BrokerUnavailable,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    Ended,
    EngineFailed,
    Forbidden,
    HeadTooLarge,
    IdempotencyConflict,
    InsufficientScope,
    IssuerUnreachable,
    KeyExpired,
    KeyRevoked,
    LargerThanQuota,
    LedgerFull,
    LogLost,
    MillstreamError,
    ModelNotAllowed,
    ModelNotFound,
    NotConnected,
    NoWorkers,
    PayloadTooLarge,
    QueueFull,
    QuotaSpent,
    RateLimited,
    Refused,
    RequestNotFound,
    TenantBacklog,
    TokenOutOfRange,
    TokenRefused,
    TooManyConnections,
    TooManyWrongKeys,
    TooSlow,
    Unauthenticated,
    UnknownField,
    UnsupportedValue,
    UpstreamFailed,
    UpstreamRefused,
    WorkLost,
)
from millstream_client.records import (
    Alternative,
    Chunk,
    Classification,
    Classifications,
    Done,
    Embeddings,
    Logprob,
    Started,
    Timing,
    Usage,
    Waking,
)
from millstream_client.request_handle import Stream

__all__ = [
    "AdapterFailed",
    "AddressNotAllowed",
    "Alternative",
    "AttemptsExhausted",
    "BadGrammar",
    "BadRequest",
    "BrokerUnavailable",
    "Cancelled",
    "Chunk",
    "Classification",
    "Classifications",
    "Client",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Done",
    "Embeddings",
    "Ended",
    "EngineFailed",
    "Forbidden",
    "HeadTooLarge",
    "IdempotencyConflict",
    "InsufficientScope",
    "IssuerUnreachable",
    "KeyExpired",
    "KeyRevoked",
    "LargerThanQuota",
    "LedgerFull",
    "LogLost",
    "Logprob",
    "MillstreamError",
    "ModelNotAllowed",
    "ModelNotFound",
    "NoWorkers",
    "NotConnected",
    "PayloadTooLarge",
    "QueueFull",
    "QuotaSpent",
    "RateLimited",
    "Refused",
    "RequestNotFound",
    "Started",
    "Stream",
    "TenantBacklog",
    "Timing",
    "TokenOutOfRange",
    "TokenRefused",
    "TooManyConnections",
    "TooManyWrongKeys",
    "TooSlow",
    "Unauthenticated",
    "UnknownField",
    "UnsupportedValue",
    "UpstreamFailed",
    "UpstreamRefused",
    "Usage",
    "Waking",
    "WorkLost",
]
