"""Stored records: answers producers that have missed replies.

Replies are core messages, so a producer that was slow or away has missed some. Rights at the broker
let nobody read a part of a stream by subject, so a gateway reads it for them.
"""

from typing import Any

import orjson
import structlog
from nats.aio.msg import Msg

from streams import messages, subjects, topology
from streams.broker.broker_client import Broker
from streams.broker.responses import MessagePage
from streams.errors import (
    BadRequest,
    BrokerUnavailable,
    InternalError,
    MillstreamError,
    PayloadTooLarge,
)
from streams.headers import ACCEPT
from streams.records.token_log import read_log_begin
from streams.records.token_log_cache import MAX_PAGE_RECORDS
from streams.subjects import InvalidToken, LogAddress

log = structlog.get_logger()
MAX_PAGE_BYTES = 262_144
QUEUE = "gateways"
# What the servers make of a reply subject that crosses accounts, and clients' own; on any other one
# an answer would be taken for something else, with this gateway's rights
REPLIES = ("_R_.", "_INBOX.")
_MAX_QUESTION_BYTES = 256
_JSON = "application/json"
_SEQUENCES = range(2**63)


class StoredRecords:
    """Answers questions on `infer.records.<tenant>.<route>.<request>`, one gateway each.

    A question is empty or `{"after": <sequence>}`. The answer is a msgpack map: `records`, each as
    a pair of stored sequence and packed record, in order, at most 200 and about 256 KiB; and
    `remaining`, how many more follow. Of a question that cannot be answered it is `error`, with
    `code` and `message`. A question with the header `Accept: application/json` is answered in JSON,
    with records as maps. Whoever may ask on a subject gets the records of that log alone: the
    broker's rights say whose those are. A gateway reads one log at a time, and answers no question
    whose reply subject is not an inbox.
    """

    def __init__(self, broker: Broker, shards: int) -> None:
        self._broker, self._shards = broker, shards

    async def open(self) -> None:
        """Answer from now on, until the connection closes. Raises `BrokerUnavailable`."""
        await self._broker.subscribe(subjects.ALL_RECORDS, self._on_question, queue=QUEUE)

    async def _on_question(self, msg: Msg) -> None:
        if not msg.reply.startswith(REPLIES):
            return
        pack = _pack_json if (msg.headers or {}).get(ACCEPT) == _JSON else messages.pack
        answer = pack(await self._answer(msg))
        if len(answer) > self._broker.max_payload:  # a record of nearly that size, alone
            answer = pack(_refusal(PayloadTooLarge(len(answer), self._broker.max_payload)))
        try:
            await self._broker.publish(msg.reply, answer)
        except BrokerUnavailable as error:
            log.warning("stored_records_not_sent", reason=str(error))

    async def _answer(self, msg: Msg) -> dict[str, Any]:
        try:
            address, after = subjects.parse_records(msg.subject), _parse_after(msg.data)
            page = await self._read(address, after)
        except InvalidToken as error:
            return _refusal(BadRequest(str(error)))
        except MillstreamError as error:
            return _refusal(error)
        except Exception:  # whatever a record is that cannot be read, its reader must not wait
            log.exception("stored_records_unreadable", subject=msg.subject)
            return _refusal(
                InternalError("a stored record cannot be read; the gateway's log says why")
            )
        return {"records": [(m.seq, m.data) for m in page.messages], "remaining": page.remaining}

    async def _read(self, address: LogAddress, after: int) -> MessagePage:
        stream = topology.token_stream_of(address.request_id, self._shards)
        query: dict[str, int | str] = {
            "next_by_subj": subjects.log(address, self._shards),
            "seq": after + 1,
            "batch": MAX_PAGE_RECORDS,
            "max_bytes": MAX_PAGE_BYTES,
        }
        if after:
            return await self._broker.read_page(stream, query)
        return await read_log_begin(self._broker, stream, query)


def _parse_after(payload: bytes) -> int:
    """Return the stored sequence that a question names, 0 for none; raises `BadRequest`."""
    if len(payload) > _MAX_QUESTION_BYTES:
        raise BadRequest(f"the question has {len(payload)} bytes, more than {_MAX_QUESTION_BYTES}")
    try:
        found: Any = orjson.loads(payload or b"{}")
    except ValueError:
        raise BadRequest("the question is no JSON") from None
    after = found.get("after", 0) if isinstance(found, dict) else None
    if type(after) is not int or after not in _SEQUENCES:
        raise BadRequest('the question is no map with a sequence of 0 or more, {"after": 0}')
    return after


def _pack_json(answer: dict[str, Any]) -> bytes:
    """Encode an answer as JSON, with its records as maps."""
    records = [
        [seq, orjson.Fragment(messages.pack_record(messages.unpack_record(data), "json"))]
        for seq, data in answer.get("records", ())
    ]
    return orjson.dumps(answer | ({"records": records} if "records" in answer else {}))


def _refusal(error: MillstreamError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": str(error)}}
