"""Drops the beginning of a conversation that is too long for its model, if a client wants that."""

from collections.abc import Awaitable, Callable, Sequence

from api.endpoints.completion_endpoint import CHAT
from api.responses.chat_translation import to_chat
from api.schemas.completions import ChatRequest
from api.schemas.responses import Item, MessageItem, ResponseRequest
from api.submission.submission_record import Submission
from streams.errors import ContextLengthExceeded

Validate = Callable[[Submission], Awaitable[object]]  # raises `ContextLengthExceeded`


async def fit_chat(
    body: ResponseRequest, earlier: Sequence[Item], validate: Validate
) -> ChatRequest:
    """Return the chat of a response, without as many of its first items as must go.

    What stays begins with a message of a user. Instructions stay. Raises what `validate` raises:
    `ContextLengthExceeded` if even the last message of a user does not fit. It is called once more
    for each halving of the conversation.
    """
    items = [*earlier, *body.input]
    begins = [0, *(at for at, item in enumerate(items) if at and _is_users(item))]

    async def build(number: int) -> ChatRequest:
        chat = to_chat(body.model_copy(update={"input": items[begins[number] :]}))
        (submission,) = CHAT.to_submissions(chat)
        await validate(submission)
        return chat

    try:
        return await build(0)
    except ContextLengthExceeded:
        fits = await build(len(begins) - 1)
    too_long, last = 0, len(begins) - 1
    while last - too_long > 1:
        middle = (too_long + last) // 2
        try:
            fits, last = await build(middle), middle
        except ContextLengthExceeded:
            too_long = middle
    return fits


def _is_users(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"
