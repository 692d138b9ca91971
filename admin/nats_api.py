"""Operations over NATS, for whoever has the broker's credentials: `infer.admin.<operation>`.

The payload is a JSON object with the arguments; the reply has either `result` or `error`, in the
shape of the HTTP API's error bodies. Of all admin services one answers.
"""

import asyncio
from collections.abc import Mapping

import orjson
import structlog
from nats.aio.msg import Msg

from admin.admin_api import AdminApi
from admin.caller import Caller
from admin.operations import JsonBody
from api.error_bodies import error_body
from api.schemas.parsing import decode
from streams import subjects
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable, MillstreamError, PayloadTooLarge
from streams.headers import REQUEST_INFO

log = structlog.get_logger()
_ANYBODY = "nats"  # who asks here has the broker's credentials, and may do everything
_QUEUE = "admin"
_HEAD_BYTES = 1024  # of a message's limit, for its headers


async def serve_nats(broker: Broker, api: AdminApi) -> None:
    """Answer operations until cancelled; those under way then get no answer."""
    async with asyncio.TaskGroup() as tasks:

        async def on_request(msg: Msg) -> None:
            tasks.create_task(_answer(broker, api, msg), name="admin-operation")

        subscription = await broker.subscribe(subjects.ALL_ADMIN, on_request, _QUEUE)
        try:
            await asyncio.Event().wait()
        finally:
            await subscription.unsubscribe()


async def _answer(broker: Broker, api: AdminApi, msg: Msg) -> None:
    caller = _find_caller(msg.headers or {}) if broker.has_accounts else Caller(_ANYBODY)
    answer = orjson.dumps(await _run(api, msg, caller))
    if len(answer) > (limit := broker.max_payload - _HEAD_BYTES):
        answer = orjson.dumps(error_body(PayloadTooLarge(len(answer), limit)))
    try:
        await broker.publish(msg.reply, answer)
    except BrokerUnavailable as error:
        log.warning("admin_answer_lost", subject=msg.subject, reason=str(error))


def _find_caller(headers: Mapping[str, str]) -> Caller:
    """Return the user and address that the servers tell; where there are accounts, they do."""
    try:
        told = orjson.loads(headers[REQUEST_INFO])
        return Caller(f"{_ANYBODY}:{told['name_tag']}", address=str(told["host"]))
    except (KeyError, ValueError, TypeError):
        return Caller(_ANYBODY)


async def _run(api: AdminApi, msg: Msg, caller: Caller) -> JsonBody:
    try:
        arguments = decode(msg.data or b"{}")
        return {"result": await api.run(subjects.parse_admin(msg.subject), arguments, caller)}
    except MillstreamError as error:
        return error_body(error)
