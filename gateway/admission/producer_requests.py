"""Producer requests: submits what producers publish to NATS, with replies on a route of theirs."""

from api.submission.validation import ValidatedRequest
from gateway.admission.submitter import Submitter
from gateway.replies import request_lookup
from streams import messages, subjects, topology
from streams.broker.broker_client import Broker
from streams.errors import IdempotencyConflict
from streams.records.token_log import Fenced, TokenLog
from streams.subjects import LogAddress

_KEY_PREFIX = "submitted\n"  # keeps producers' keys apart from those in headers and frames


class ProducerRequests:
    """Submits the requests of NATS producers; their replies go to routes that they chose."""

    def __init__(self, broker: Broker, submitter: Submitter, shards: int) -> None:
        self._broker, self._submitter, self._shards = broker, submitter, shards

    async def submit(self, validated: ValidatedRequest, key: str, route: str) -> None:
        """Queue a request with replies to `route`; return once the broker has stored it.

        The first record of the request's log tells the producer the request id that `key`, its own
        id, has become. Idempotent: calls with the same `key` make one request. Raises as
        `Submitter.submit` does, and `IdempotencyConflict` if the request of `key` was made with
        another route or another submission.
        """
        tenant, digest = validated.tenant.name, await self._submitter.compute_digest(validated)
        claim = await self._submitter.claim(tenant, _KEY_PREFIX + key, digest)
        request_id = claim.request_id
        address = LogAddress(tenant, route, request_id)
        if not claim.is_first:
            await self._check_route(address)
            if await request_lookup.is_request_known(self._broker, tenant, request_id):
                return  # an earlier delivery got as far: only its acknowledgement was lost
        token_log = TokenLog(self._broker, address, self._shards)
        try:
            await token_log.append(messages.accepted_record(key, request_id))
        except Fenced:
            pass  # an earlier delivery of the same submission has written it
        await self._submitter.submit(validated, claim, route)

    async def find_request(self, tenant: str, key: str) -> str | None:
        """Return the id of the request that a producer's `key` has become; None if there is none.

        Raises `BrokerUnavailable`.
        """
        return await self._submitter.find_request(tenant, _KEY_PREFIX + key)

    async def _check_route(self, address: LogAddress) -> None:
        """Raise `IdempotencyConflict` if a request has its log, and its replies, elsewhere."""
        tenant, route, request_id = address
        stream = topology.token_stream_of(request_id, self._shards)
        pattern = subjects.log_on_any_route(tenant, request_id, self._shards)
        subject = await self._broker.find_subject(stream, pattern)
        if subject and (first := subjects.parse_log(subject).route) != route:
            raise IdempotencyConflict(
                f"this Nats-Msg-Id is that of the request {request_id}, which answers on the "
                f"route {first!r}"
            )
