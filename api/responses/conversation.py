"""The stored responses that a response continues, as the items of one conversation."""

from collections.abc import Sequence

from api.responses.response_bodies import ResponseHead, parse_response_id, response_not_found
from api.responses.stored_events import result_object
from api.schemas.chat_messages import MAX_MESSAGES
from api.schemas.parsing import decode, parse
from api.schemas.responses import Item, ItemList, ResponseRequest
from registry.models import Model
from registry.store import Registry
from streams.errors import BadRequest, ModelNotFound, NotFound
from streams.records.responses.response_records import StoredResponse
from streams.records.responses.response_store import ResponseStore

MAX_EARLIER_BYTES = 4_000_000  # of all bodies of a conversation
_PARENT = "previous_response_id"


def head_of(response: StoredResponse) -> ResponseHead:
    """Return what a stored response says of itself whatever becomes of it."""
    body = parse(ResponseRequest, decode(response.body))
    return ResponseHead(response.id, response.created_at, body)


def find_model(registry: Registry, head: ResponseHead) -> Model | None:
    """Return the model that a response names; None if it was removed since."""
    try:
        return registry.resolve_target(head.body.model)[0]
    except ModelNotFound:
        return None


async def read_earlier(
    store: ResponseStore, registry: Registry, tenant: str, body: ResponseRequest
) -> list[Item]:
    """Return the items of the conversation that a response continues, the oldest first.

    Instructions of earlier responses are not inherited. Raises `NotFound` if one of them is gone
    or another tenant's, `BadRequest` if one has not ended or all are too long, `BrokerUnavailable`.
    """
    told = body.previous_response_id
    turns: list[Sequence[Item]] = []
    size = count = 0
    while told:
        response = await _find(store, tenant, told)
        size += len(response.body)
        turn, told = await _read_turn(store, registry, response)
        count += len(turn)
        if size > MAX_EARLIER_BYTES or count > MAX_MESSAGES:
            raise BadRequest(
                f"the conversation has more than {MAX_MESSAGES} items or {MAX_EARLIER_BYTES} "
                "bytes: begin a new one, with what matters of this one as its input",
                _PARENT,
            )
        turns.append(turn)
    return [item for turn in reversed(turns) for item in turn]


async def _find(store: ResponseStore, tenant: str, told: str) -> StoredResponse:
    try:
        found = await store.find(tenant, parse_response_id(told))
    except NotFound:
        found = None
    if found is None:
        raise NotFound(response_not_found(told).message, _PARENT)
    return found


async def _read_turn(
    store: ResponseStore, registry: Registry, response: StoredResponse
) -> tuple[Sequence[Item], str | None]:
    """Return the items of one earlier response, input and output, and which it continues."""
    head = head_of(response)
    result = await store.find_result(response)
    if result is None:
        raise BadRequest(f"the response {head.told_id!r} has not ended", _PARENT)
    output = result_object(head, find_model(registry, head), result)["output"]
    return [*head.body.input, *ItemList.validate_python(output)], head.body.previous_response_id
