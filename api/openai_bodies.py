"""Response bodies in OpenAI's shapes: completions, chats, embeddings and models.

Classifications and rerankings have vLLM's shapes, since OpenAI has none.

Log probabilities come in as the token log has them: maps with `token`, `text`, `logprob` and
`top`, a list of `[token, text, logprob]`.
"""

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import orjson

from api.tool_calls import ToolCall
from registry.models import Adapter, Model
from streams import messages
from streams.logprob_token_text import bare_text, count_characters, to_bytes

JsonBody = dict[str, Any]
Usage = messages.TokenUsage
Logprobs = Sequence[Mapping[str, Any]]
FinishReason = Literal["stop", "length", "tool_calls"]
MODEL_OWNER = "millstream"


def page_body(data: Sequence[JsonBody], *, has_more: bool) -> JsonBody:
    """Return one page of a list of objects that have an `id`."""
    return {
        "object": "list",
        "data": data,
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def completion_id(request_id: str) -> str:
    """Return the `id` of a /v1/completions response to the request `request_id`."""
    return f"cmpl-{request_id}"


def chat_id(request_id: str) -> str:
    """Return the `id` of a /v1/chat/completions response to the request `request_id`."""
    return f"chatcmpl-{request_id}"


def body_head(answer_id: str, kind: str, created: int, model: str) -> JsonBody:
    """Return the fields with which a response body, or each chunk of a stream, begins.

    `answer_id` is the value of `id`, `kind` that of `object`; `created` is in epoch seconds.
    """
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def completion(
    request_id: str, model: str, created: int, choices: Sequence[JsonBody], usage: Usage
) -> JsonBody:
    """Return the body of a /v1/completions response that is not streamed.

    `choices` are from `completion_choice`; `created` is in epoch seconds.
    """
    head = body_head(completion_id(request_id), "text_completion", created, model)
    return {**head, "choices": choices, "usage": usage}


def chat_completion(
    request_id: str, model: str, created: int, choices: Sequence[JsonBody], usage: Usage
) -> JsonBody:
    """Return the body of a /v1/chat/completions response that is not streamed.

    `choices` are from `chat_choice`; `created` is in epoch seconds.
    """
    head = body_head(chat_id(request_id), "chat.completion", created, model)
    return {**head, "choices": choices, "usage": usage}


def completion_choice(
    index: int, text: str, reason: FinishReason, logprobs: Logprobs | None = None
) -> JsonBody:
    """Return one entry of `choices` of a /v1/completions response.

    `index` is the choice's place in that list. `logprobs` None gives null in the entry.
    """
    return {
        "index": index,
        "text": text,
        "logprobs": None if logprobs is None else completion_logprobs(logprobs, 0),
        "finish_reason": reason,
    }


def chat_choice(
    index: int,
    text: str,
    reason: FinishReason,
    logprobs: Logprobs | None = None,
    calls: Sequence[ToolCall] = (),
) -> JsonBody:
    """Return one entry of `choices` of a /v1/chat/completions response.

    `index` is the choice's place in that list. `logprobs` None gives null in the entry. If there
    are `calls`, an empty text becomes null, and the finish reason `stop` becomes `tool_calls`.
    """
    message: JsonBody = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text or None, "tool_calls": [tool_call(call) for call in calls]}
    return {
        "index": index,
        "message": message,
        "logprobs": None if logprobs is None else chat_logprobs(logprobs),
        "finish_reason": choose_finish_reason(calls, reason),
    }


def tool_call(call: ToolCall) -> JsonBody:
    """Return an entry of `tool_calls` for a call, in OpenAI's shape."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def choose_finish_reason(calls: object, reason: FinishReason) -> FinishReason:
    """Return `tool_calls` if the answer has tool calls and its reason is `stop`, else `reason`.

    An answer that was cut at its token limit keeps `length`, even if it has called a tool. `calls`
    may be any value that is true if there are calls.
    """
    return "tool_calls" if calls and reason == "stop" else reason


def total_usage(usages: Sequence[Usage], choices: int) -> Usage:
    """Return the token counts of a whole response, summed over its choices.

    `usages` has one entry per choice, in the order of the prompts, and `choices` is the number of
    choices for each prompt. The tokens of a prompt count once, however many choices it has.
    """
    if len(usages) == 1:
        return usages[0]
    prompt_tokens = sum(each["prompt_tokens"] for each in usages[::choices])
    completion_tokens = sum(each["completion_tokens"] for each in usages)
    cached_tokens = sum(map(messages.cached_tokens, usages[::choices]))
    return messages.openai_usage(prompt_tokens, completion_tokens, cached_tokens)


def completion_logprobs(logprobs: Logprobs, offset: int, cut: bytes = b"") -> JsonBody:
    """Return log probabilities as /v1/completions has them: parallel lists, one entry per token.

    `offset` is the number of characters of the choice's text before the first of these tokens.
    `cut` are the bytes of a character that earlier tokens have begun and these complete; empty if
    there is none.
    """
    counts, _ = count_characters([each["text"] for each in logprobs], cut)
    return {
        "tokens": [each["text"] for each in logprobs],
        "token_logprobs": [each["logprob"] for each in logprobs],
        "top_logprobs": [_top_logprobs(each) for each in logprobs],
        "text_offset": [offset + count for count in counts[:-1]],
    }


def _top_logprobs(each: Mapping[str, Any]) -> dict[str, float]:
    """Log probabilities of the likeliest texts and, as OpenAI has it, always of the chosen one."""
    return {text: value for _, text, value in each["top"]} | {each["text"]: each["logprob"]}


def chat_logprobs(logprobs: Logprobs) -> JsonBody:
    """Return log probabilities as /v1/chat/completions has them: one object per token."""
    content = [
        _token_logprob(each["text"], each["logprob"])
        | {"top_logprobs": [_token_logprob(text, value) for _, text, value in each["top"]]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def _token_logprob(text: str, logprob: float) -> JsonBody:
    return {"token": bare_text(text), "logprob": logprob, "bytes": list(to_bytes(text))}


def embeddings(
    model: str,
    vectors: Sequence[bytes],
    prompt_tokens: int,
    encoding: Literal["float", "base64"] = "float",
) -> Iterator[bytes]:
    """Return an iterator over the JSON body of /v1/embeddings, in parts of at most one vector each.

    The parts joined are the body, as with `iterate_list_json`. `vectors` are rows of little-endian
    float32. Each part is encoded when it is asked for. Encoding a large body in one go would block
    the event loop, so the caller should let the loop run between parts.
    """
    encode = _encode_base64 if encoding == "base64" else unpack_floats
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    items = (
        {"object": "embedding", "index": index, "embedding": encode(vector)}
        for index, vector in enumerate(vectors)
    )
    return iterate_list_json({"object": "list", "model": model, "usage": usage}, "data", items)


def iterate_list_json(head: JsonBody, name: str, items: Iterable[JsonBody]) -> Iterator[bytes]:
    """Yield a JSON object in parts: the fields of `head`, then a list of `items` under `name`.

    The first part goes up to the begin of the list, each further one holds one item, and the last
    one closes list and object. Each item is encoded when its part is asked for.
    """
    yield orjson.dumps(head)[:-1] + f',"{name}":['.encode()
    for number, item in enumerate(items):
        yield (b"," if number else b"") + orjson.dumps(item)
    yield b"]}"


def classification_head(request_id: str, model: str, created: int, usage: Usage) -> JsonBody:
    """Return the body of a /v1/classify response without its list `data`.

    `created` is in epoch seconds.
    """
    return {
        "id": f"classify-{request_id}",
        "object": "list",
        "created": created,
        "model": model,
        "usage": usage,
    }


def classification(index: int, row: bytes, labels: Sequence[str]) -> JsonBody:
    """Return one entry of `data` of a /v1/classify response, in vLLM's shape.

    `index` is the place of the input in the request. `row` has a probability for each of `labels`,
    in their order, as little-endian float32; the entry's label is the likeliest one.
    """
    probs = unpack_floats(row)
    likeliest = max(range(len(probs)), key=probs.__getitem__)
    return {
        "index": index,
        "label": labels[likeliest],
        "probs": probs,
        "num_classes": len(probs),
    }


def rerank_head(request_id: str, model: str, usage: Usage) -> JsonBody:
    """Return the body of a /v1/rerank response without its list `results`."""
    return {"id": f"rerank-{request_id}", "model": model, "usage": usage}


def rank_documents(
    rows: Sequence[bytes], documents: Sequence[str] | None, top_n: int | None
) -> Iterator[JsonBody]:
    """Yield the entries of `results` of a /v1/rerank response, the highest score first.

    `rows` has one score for each document, as little-endian float32. At most `top_n` entries are
    yielded; None or 0 means all. An entry has the document's text if `documents` are given.
    Documents of equal score keep their order in the request.
    """
    scores = [unpack_floats(row)[0] for row in rows]
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    for index in order[: top_n or None]:
        document = {"document": {"text": documents[index]}} if documents else {}
        yield {"index": index, "relevance_score": scores[index], **document}


def _encode_base64(vector: bytes) -> str:
    return b64encode(vector).decode()


def unpack_floats(vector: bytes) -> list[float]:
    """Return the numbers in a row of little-endian float32.

    Raises `ValueError` if the number of bytes is not a multiple of 4.
    """
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def model_card(model: Model, workers: int, name: str | None = None) -> JsonBody:
    """Return a model's entry in the list of /v1/models.

    `workers` is the number of workers that serve the model now. `name` is the alias under which it
    is listed; None lists it under its own name.
    """
    return {
        "id": name or model.name,
        "object": "model",
        "created": model.created,
        "owned_by": MODEL_OWNER,
        "task": model.task,
        "context_length": model.default.context_length,
        "max_output_tokens": model.max_output_tokens,
        "vocab_size": model.default.vocab_size,
        "workers": workers,
    }


def adapter_card(model: Model, workers: int, adapter: Adapter, name: str | None = None) -> JsonBody:
    """Return a LoRA adapter's entry in the list of /v1/models, in vLLM's shape.

    `model` is its base model, which the entry names as `parent`. `workers` is the number of workers
    that serve the base model now. `name` replaces the adapter's own id in the entry if given.
    """
    entry = model_card(model, workers, name or adapter.id)
    return entry | {"created": adapter.created, "parent": model.name}


def model_list(cards: Iterable[JsonBody]) -> JsonBody:
    """Return the body of a /v1/models response from the entries of models and adapters."""
    return {"object": "list", "data": list(cards)}
