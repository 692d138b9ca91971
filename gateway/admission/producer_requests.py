"""Producer requests: submits what producers publish to NATS, with replies on a route of theirs."""

from dataclasses import dataclass

from api.submission.validation import ValidatedRequest
from gateway.admission.answer_space import AnswerSpace
from gateway.admission.log_copy import LogCopy
from gateway.admission.submitter import ReplyForm, RequestClaim, Submitter
from gateway.metrics import ANSWERS_REPEATED
from gateway.replies import request_lookup
from streams import messages, subjects, topology
from streams.broker.broker_client import Broker, StoredMessage
from streams.errors import AnswerLost, IdempotencyConflict
from streams.headers import ENDED, AnswerRef
from streams.messages import Encoding, Record
from streams.records import request_queue
from streams.records.answers.answer_records import build_answer, replies_of
from streams.records.answers.answer_store import read_answer, store_answer
from streams.records.token_log import Fenced, TokenLog
from streams.subjects import LogAddress

_KEY_PREFIX = "submitted\n"  # keeps producers' keys apart from those in headers and frames
_DURABLE = "-durable"  # of the digest: a request either has a durable answer or not


@dataclass(frozen=True)
class ReplyWish:
    """Form of replies that a producer wants to its submission.

    `key` is its own id of the request, `answer_key` the same, escaped, if it wants a durable
    answer. `submitted_at` is when the submission was stored, in epoch seconds.
    """

    key: str
    route: str
    encoding: Encoding = "msgpack"
    answer_key: str | None = None
    submitted_at: float = 0.0


class ProducerRequests:
    """Submits the requests of NATS producers; their replies go to routes that they chose."""

    def __init__(self, broker: Broker, submitter: Submitter, shards: int) -> None:
        self._broker, self._submitter, self._shards = broker, submitter, shards
        self._answer_space = AnswerSpace(broker)

    async def submit(self, validated: ValidatedRequest, wish: ReplyWish) -> bool:
        """Queue a request; return True once the broker has stored it, or its answer is repeated.

        The first record of the request's log tells the producer the request id that its own id has
        become. Idempotent: calls with the same id make one request. For one that was made with
        another route, its replies are copied to this one; False means that there will be more of
        them, so call again. What has a stored answer is answered from that, and what was submitted
        after the end of a request whose answer was removed since is a request of its own. Raises as
        `Submitter.submit` does, `StorageFull`, `AnswerLost`, and `IdempotencyConflict` if the
        request was made with another submission.
        """
        tenant, digest = validated.tenant.name, await self._submitter.compute_digest(validated)
        if wish.answer_key is not None:
            digest += _DURABLE
            if answer := await read_answer(self._broker, tenant, wish.answer_key):
                await self._repeat(tenant, answer, digest, wish)
                return True
        claim = await self._claim(tenant, wish, digest)
        if not claim.is_first:
            last = await self._find_last(tenant, claim.request_id)
            if last and (first := subjects.parse_log(last.subject)).route != wish.route:
                return await self._copy(first, wish)
            if await request_lookup.is_request_known(self._broker, tenant, claim.request_id):
                # With a log, an earlier delivery got as far: only its acknowledgement was lost.
                # Without, somebody is to write it, or writes it again if the request has ended
                return last is not None
            if last is None and await self._has_been_lost(validated, claim):
                return await self._settle_lost(tenant, wish, digest)
        if wish.answer_key is not None:
            await self._answer_space.check(tenant)
        await self._queue(validated, wish, claim, digest)
        return True

    async def _queue(
        self, validated: ValidatedRequest, wish: ReplyWish, claim: RequestClaim, digest: str
    ) -> None:
        """Begin the request's log with the record that tells the producer its id, and queue it."""
        address = LogAddress(validated.tenant.name, wish.route, claim.request_id)
        token_log = TokenLog(self._broker, address, self._shards, encoding=wish.encoding)
        try:
            await token_log.append(messages.accepted_record(wish.key, claim.request_id))
        except Fenced:
            pass  # an earlier delivery of the same submission has written it
        answer_ref = wish.answer_key and AnswerRef(wish.answer_key, digest)
        form = ReplyForm(wish.encoding, answer_ref or None)
        await self._submitter.submit(validated, claim, wish.route, form)

    async def refuse(self, tenant: str, wish: ReplyWish, request_id: str, error: Record) -> None:
        """Answer a submission that is not accepted: with the terminal `error`, unless it has one.

        `request_id` is that of its request, or a name for a submission that is none. Raises
        `BrokerUnavailable`.
        """
        if wish.answer_key is not None:
            ref, now_ms = AnswerRef(wish.answer_key, ""), self._broker.clock.now_ms()
            answer = build_answer(ref, request_id, now_ms, [], error)
            await store_answer(self._broker, tenant, ref.key, answer, wish.encoding)
        address = LogAddress(tenant, wish.route, request_id)
        token_log = TokenLog(self._broker, address, self._shards, encoding=wish.encoding)
        try:
            if (await token_log.read()).terminal is None:
                await token_log.append(error | {"id": wish.key})
        except Fenced:
            pass  # an earlier delivery was answered already

    async def find_request(self, tenant: str, key: str) -> str | None:
        """Return the id of the request that a producer's `key` has become; None if there is none.

        Raises `BrokerUnavailable`.
        """
        found = await self._submitter.find_key(tenant, _KEY_PREFIX + key)
        return found.request_id if found else None

    async def _claim(self, tenant: str, wish: ReplyWish, digest: str) -> RequestClaim:
        """Return the request id to submit under: a new one if that of the key has lost its answer.

        Then the producer has removed it, or a full stream has dropped it. What was submitted before
        that request's end is a repetition of it all the same.
        """
        key = _KEY_PREFIX + wish.key
        if wish.answer_key is not None and (used := await self._submitter.find_key(tenant, key)):
            last = await self._find_last(tenant, used.request_id)
            if used.digest.endswith(_DURABLE) and last and _has_ended(last, wish.submitted_at):
                return await self._submitter.claim_anew(tenant, key, used, digest)
        return await self._submitter.claim(tenant, key, digest)

    async def _has_been_lost(self, validated: ValidatedRequest, claim: RequestClaim) -> bool:
        """Return whether a request of which nobody knows, and which has no log, was queued once.

        Then it has ended, and the broker has dropped its log. Raises `BrokerUnavailable`.
        """
        if not await request_queue.has_been_queued(self._broker, validated.lane, claim.request_id):
            return False
        tenant = validated.tenant.name
        await request_lookup.ensure_unknown(self._broker, tenant, claim.request_id)
        return True

    async def _settle_lost(self, tenant: str, wish: ReplyWish, digest: str) -> bool:
        """Free the id of a request that has ended, and whose log and answer are gone.

        Returns False: what was submitted since is to be queued under a new request id, when it is
        looked at again; True for the very submission that has become the request. Raises
        `AnswerLost` if there never was an answer to be read and removed.
        """
        used = await self._submitter.find_key(tenant, _KEY_PREFIX + wish.key)
        if used is None:
            return False
        if wish.submitted_at < used.stored_at:
            return True
        if wish.answer_key is None:
            raise AnswerLost(
                f"the replies to {used.request_id}, which this Nats-Msg-Id stands for, are not "
                "stored any more: submit again under another id, with a durable answer if it is "
                "to outlast them"
            )
        await self._submitter.claim_anew(tenant, _KEY_PREFIX + wish.key, used, digest)
        return False

    async def _repeat(self, tenant: str, answer: Record, digest: str, wish: ReplyWish) -> None:
        """Send the replies that a stored answer stands for, unless the route has had them."""
        if answer["digest"] not in (digest, ""):
            raise IdempotencyConflict(
                f"under this Nats-Msg-Id the answer to another submission is stored, that of "
                f"{answer['request_id']}"
            )
        request = LogAddress(tenant, wish.route, answer["request_id"])
        if await self._find_last(tenant, answer["request_id"], wish.route) is None:
            ANSWERS_REPEATED.labels("answer").inc()
            copy = LogCopy(self._broker, request, wish.route, wish.encoding, self._shards)
            await copy.extend(list(replies_of(answer)))

    async def _copy(self, source: LogAddress, wish: ReplyWish) -> bool:
        """Copy what a log has by now to another route; True if that was all of it."""
        records = await LogCopy.read(self._broker, source, self._shards)
        copy = LogCopy(self._broker, source, wish.route, wish.encoding, self._shards)
        await copy.extend(records)
        is_whole = bool(records) and records[-1]["type"] in messages.TERMINAL_TYPES
        if is_whole:
            ANSWERS_REPEATED.labels("log").inc()
        return is_whole

    async def _find_last(
        self, tenant: str, request_id: str, route: str | None = None
    ) -> StoredMessage | None:
        """Return the last record of a request's log, on any route or this one; None without one."""
        stream = topology.token_stream_of(request_id, self._shards)
        if route is None:
            pattern = subjects.log_on_any_route(tenant, request_id, self._shards)
        else:
            pattern = subjects.log(LogAddress(tenant, route, request_id), self._shards)
        found = await self._broker.read(stream, {"last_by_subj": pattern})
        return found[0] if found else None


def _has_ended(last: StoredMessage, at: float) -> bool:
    """Return whether a request whose log has this last record had ended at an epoch second."""
    is_terminal = messages.unpack_record(last.data)["type"] in messages.TERMINAL_TYPES
    restored = last.headers.get(ENDED)  # in milliseconds
    return is_terminal and (int(restored) / 1000 if restored else last.stored_at) < at
