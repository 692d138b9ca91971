"""Lines of a batch: from the input's JSON to a submission, and from a result to the output's JSON.

The shapes are OpenAI's. A request that was refused, or failed, has its HTTP status and error body
in `response`; a line that never ran because the batch ended has an `error` of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from api import openai_bodies
from api.endpoints.completion_endpoint import (
    CHAT,
    COMPLETION,
    CompletionBody,
    CompletionEndpoint,
    make_tool_parser,
)
from api.error_bodies import error_body
from api.responses.chat_translation import to_chat
from api.responses.response_bodies import ResponseHead
from api.responses.stored_events import result_object
from api.schemas.classify_rerank import ClassifyRequest, RerankRequest
from api.schemas.completions import ChatRequest, CompletionRequest
from api.schemas.embeddings import EmbeddingRequest
from api.schemas.fields import Body
from api.schemas.parsing import parse
from api.schemas.responses import ResponseRequest
from api.submission.submission_record import Submission
from registry.models import Model
from streams.errors import BadRequest, Ended, MillstreamError, UnsupportedValue, http_status
from streams.records.jobs.item_results import ItemResult
from streams.subjects import Priority

_COMPLETIONS: dict[str, CompletionEndpoint] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
}
_UNARY: dict[str, type[EmbeddingRequest | ClassifyRequest | RerankRequest]] = {
    "/v1/embeddings": EmbeddingRequest,
    "/v1/classify": ClassifyRequest,
    "/v1/rerank": RerankRequest,
}
_RESPONSES = "/v1/responses"
ENDPOINTS = (*_COMPLETIONS, _RESPONSES, *_UNARY)
_OF_THEIR_OWN = ("stream", "background", "previous_response_id")  # of responses, not of lines
MAX_CUSTOM_ID = 512  # characters


class WrongLine(BadRequest):
    """A line is no request of a batch; `reason` is the code of it in the batch's errors."""

    def __init__(self, reason: str, message: str, field: str | None = None) -> None:
        super().__init__(message, field)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of a file, without its end; `offset` is where it begins, `end` where the next does.

    `data` is None if the line is too long. Empty lines have no `index` of their
    own: they are skipped.
    """

    index: int
    offset: int
    end: int
    data: bytes | None


@dataclass(frozen=True)
class BatchLine:
    """One line of a batch's input: its id, the endpoint that it names, and its body as it came."""

    custom_id: str
    url: str
    body: dict[str, Any]


def parse_line(data: bytes, endpoint: str) -> BatchLine:
    """Return a line of the input of a batch for `endpoint`; raises `WrongLine` for any other."""
    try:
        line = orjson.loads(data)
    except ValueError as error:
        raise WrongLine("invalid_json_line", f"this is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise WrongLine("invalid_json_line", "this must be an object")
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        raise WrongLine("missing_required_parameter", message, "custom_id")
    if line.get("method", "POST") != "POST":
        raise WrongLine("invalid_method", f"method is {line['method']!r}, not 'POST'", "method")
    if line.get("url") != endpoint:
        message = f"url is {line.get('url')!r}, and the batch is for {endpoint!r}"
        raise WrongLine("url_mismatch", message, "url")
    if not isinstance(body, dict):
        raise WrongLine("missing_required_parameter", "body must be an object", "body")
    return BatchLine(custom_id, endpoint, body)


def parse_body(line: BatchLine) -> Body:
    """Return a line's body, checked; raises `BadRequest` as the endpoint itself would.

    Bodies that ask for a stream, or for several answers, are not supported in batches; nor are
    responses that run in the background or continue another one.
    """
    if line.url == _RESPONSES:
        return _parse_response(line)
    if endpoint := _COMPLETIONS.get(line.url):
        body = parse(endpoint.schema, line.body)
        if body.stream:
            raise UnsupportedValue("stream: true is not supported in a batch", "stream")
        if body.choice_count != 1 or len(body.prompts) != 1:
            raise UnsupportedValue("a line of a batch has one prompt and one answer", "n")
        return body
    return parse(_UNARY[line.url], line.body)


def _parse_response(line: BatchLine) -> ResponseRequest:
    """Return the body of a response, which is not stored: its line is its result."""
    body = parse(ResponseRequest, line.body)
    if asked := next((name for name in _OF_THEIR_OWN if getattr(body, name)), None):
        raise UnsupportedValue(f"{asked} is not supported in a batch", asked)
    if body.truncation == "auto":
        raise UnsupportedValue("truncation: 'auto' is not supported in a batch", "truncation")
    return body.model_copy(update={"store": False})


def to_submission(line: BatchLine, body: Body) -> Submission:
    """Return the submission of a line whose body was checked, at the priority of batches."""
    if isinstance(body, ResponseRequest):
        (submission,) = CHAT.to_submissions(to_chat(body))
    elif endpoint := _COMPLETIONS.get(line.url):
        assert isinstance(body, CompletionRequest | ChatRequest)
        (submission,) = endpoint.to_submissions(body)
    else:
        assert isinstance(body, EmbeddingRequest | ClassifyRequest | RerankRequest)
        submission = Submission.from_body(body)
    return replace(submission, priority=Priority.BATCH)


def render_result(line: BatchLine, result: ItemResult, model: Model | None) -> bytes:
    """Return the output line of a line that was answered, or has failed.

    `model` is its model, if there is one. Takes some 50 µs for a short answer.
    """
    if result.code:
        return render_error(line, result.request_id, Ended(result.code, result.message))
    assert model
    body = _answer_body(line, result, model)
    return _render(line, result.request_id, {"status_code": 200, "body": body}, None)


def render_error(line: BatchLine, request_id: str, error: MillstreamError) -> bytes:
    """Return the output line of a request that was refused, or that failed."""
    response = {"status_code": http_status(error.code), "body": error_body(error)}
    return _render(line, request_id, response, None)


BATCH_CANCELLED = {
    "code": "batch_cancelled",
    "message": "the batch was cancelled before this request had ended",
}
BATCH_EXPIRED = {
    "code": "batch_expired",
    "message": "the batch's time was over before this request had ended",
}


def render_unrun(line: BatchLine, request_id: str, error: dict[str, str]) -> bytes:
    """Return the output line of a request that did not end before the batch did."""
    return _render(line, request_id, None, error)


def _render(
    line: BatchLine,
    request_id: str,
    response: dict[str, Any] | None,
    error: dict[str, str] | None,
) -> bytes:
    answer = {
        "id": f"batch_req_{request_id}",
        "custom_id": line.custom_id,
        "response": response and {"request_id": request_id, **response},
        "error": error,
    }
    return orjson.dumps(answer, option=orjson.OPT_APPEND_NEWLINE)


def _answer_body(line: BatchLine, result: ItemResult, model: Model) -> Any:
    body, created = parse_body(line), result.ended // 1000
    if isinstance(body, ResponseRequest):
        return result_object(ResponseHead(result.request_id, created, body), model, result)
    if endpoint := _COMPLETIONS.get(line.url):
        assert isinstance(body, CompletionRequest | ChatRequest)
        return _completion_body(endpoint, body, result, model, created)
    assert isinstance(body, EmbeddingRequest | ClassifyRequest | RerankRequest)
    return orjson.loads(b"".join(_unary_parts(body, result, created)))


def _completion_body(
    endpoint: CompletionEndpoint,
    body: CompletionBody,
    result: ItemResult,
    model: Model,
    created: int,
) -> openai_bodies.JsonBody:
    version = model.find_version(result.version)
    parser = make_tool_parser(body, version, result.request_id)
    end, logprobs = result.to_terminal(), result.logprobs or []
    choice = endpoint.choice_of(body, parser, 0, result.text, end, logprobs)
    return endpoint.build_body(result.request_id, body.model, created, [choice], result.usage)


def _unary_parts(
    body: EmbeddingRequest | ClassifyRequest | RerankRequest, result: ItemResult, created: int
) -> Iterable[bytes]:
    rows = result.vectors
    if isinstance(body, EmbeddingRequest):
        encoding = body.encoding_format or "float"
        return openai_bodies.embeddings(body.model, rows, result.usage["prompt_tokens"], encoding)
    if isinstance(body, ClassifyRequest):
        head = openai_bodies.classification_head(
            result.request_id, body.model, created, result.usage
        )
        data = (openai_bodies.classification(i, row, result.labels) for i, row in enumerate(rows))
        return openai_bodies.iterate_list_json(head, "data", data)
    documents = None if body.return_documents is False else body.documents
    head = openai_bodies.rerank_head(result.request_id, body.model, result.usage)
    ranked = openai_bodies.rank_documents(rows, documents, body.top_n)
    return openai_bodies.iterate_list_json(head, "results", ranked)
