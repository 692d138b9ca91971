"""A response's result as the events that its log gave, and as the whole object. Pure."""

from collections.abc import Iterator

from api.endpoints.completion_endpoint import make_tool_parser
from api.openai_bodies import JsonBody
from api.responses.chat_translation import to_chat
from api.responses.response_bodies import ResponseEnd, ResponseHead, response_object
from api.responses.response_events import ResponseEvents
from registry.models import Model
from streams.records.jobs.item_results import ItemResult


def make_events(head: ResponseHead, model: Model | None, version: str = "") -> ResponseEvents:
    """Return what makes the events of a response that `model` answers, None if that is gone.

    `version` is the id of the version that has answered; empty if nobody knows yet.
    """
    chat = to_chat(head.body)
    parser = make_tool_parser(chat, model.find_version(version), head.id) if model else None
    return ResponseEvents(head, parser)


def iterate_events(events: ResponseEvents, result: ItemResult) -> Iterator[list[JsonBody]]:
    """Yield the events of a response that has its result: those of each chunk, then the last."""
    yield events.created()
    begin = token = 0
    for count, characters in result.chunks:
        logprobs = result.logprobs and result.logprobs[token : token + count]
        yield events.chunk(count, result.text[begin : begin + characters], logprobs)
        begin, token = begin + characters, token + count
    yield events.end(ResponseEnd.from_result(result))


def result_object(head: ResponseHead, model: Model | None, result: ItemResult) -> JsonBody:
    """Return the whole `response` object of a response that has its result."""
    events, end = make_events(head, model, result.version), ResponseEnd.from_result(result)
    events.chunk(sum(count for count, _ in result.chunks), result.text, result.logprobs)
    events.end(end)
    return response_object(head, end, events.output)
