"""Request bodies and answers of OpenAI's completions and embeddings, with vLLM's additions. Pure.

vLLM's additions (its OpenAI-compatible server, "Extra parameters"): `return_token_ids` puts the
ids of each event's tokens beside their text; `return_tokens_as_token_ids` names the tokens of
`logprobs` `token_id:<id>`; `structured_outputs` holds a regular expression.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from gpu_worker.engines.engine import EngineError, FinishReason, UpstreamUsage
from gpu_worker.engines.remote.call_errors import RetryableError, error_message, rejection
from gpu_worker.engines.remote.embedding_bytes import pack_vector
from streams.messages import Grammar, Sampling

TextOrTokens = str | list[int]
DONE = "[DONE]"
_FAILURE_REASONS = frozenset({"error", "abort"})  # finish reasons of servers that could not go on


@dataclass(frozen=True)
class TokenLogprob:
    """A token's text and log probability; `alternatives` are other tokens' log probabilities.

    The alternatives are the likeliest tokens at that position, by their text.
    """

    text: str
    logprob: float
    alternatives: dict[str, float]


@dataclass(frozen=True)
class Delta:
    """One event of a stream: what it adds to the answer. All fields are empty or None by default.

    `tokens` is None where the server sends no token ids; `finish` is set by the event that ends the
    answer, and `matched_stop` if the server says which stop string did.
    """

    text: str = ""
    tokens: list[int] | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    matched_stop: str = ""
    usage: UpstreamUsage | None = None

    @property
    def token_count(self) -> int:
        """Number of tokens in the event.

        Without log probabilities it is an estimate, one for any text: most servers send one token
        per event.
        """
        return len(self.logprobs) or int(bool(self.text))


class _Logprobs(BaseModel):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _EventChoice(BaseModel):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    stop_reason: Any = None  # vLLM's, and SGLang's: the stop string, or the id of a stop token
    matched_stop: Any = None

    @property
    def matched_text(self) -> str:
        """The stop string that ended the text, where the server tells; else empty."""
        matched = self.stop_reason or self.matched_stop
        return matched if isinstance(matched, str) else ""


class _EventUsage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(BaseModel):
    choices: list[_EventChoice] = []
    usage: _EventUsage | None = None
    error: Any = None


class _EmbeddingItem(BaseModel):
    index: int
    embedding: list[float]


class _EmbeddingResponse(BaseModel):
    data: list[_EmbeddingItem]


class OpenAIProtocol:
    """Request bodies and answers of `model` that any OpenAI-compatible server knows.

    Parameters that have no effect are left out of bodies. `has_token_ids`: the server sends token
    ids. `output_dependent` are the parameters whose effect on a token depends on which tokens
    before it the same call has generated, so that it is another where these are in the prompt.
    """

    has_token_ids = False
    output_dependent: tuple[str, ...] = (
        "grammar",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )

    def __init__(self, model: str) -> None:
        self._model = model

    def completion_body(
        self, prompt: TextOrTokens, sampling: Sampling, seed: int
    ) -> dict[str, Any]:
        """Return the JSON body of a streamed completion, whose last event is to count the tokens.

        Raises `EngineError` for a grammar that the API has no field for.
        """
        sampling = sampling.resolve()
        optional = {
            "stop": sampling.stop,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "min_tokens": sampling.min_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "min_p": sampling.min_p,
            "repetition_penalty": _none_if_neutral(1, sampling.repetition_penalty),
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias},
            **self.grammar_fields(sampling.grammar),
        }
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if sampling.logprobs is None else {"logprobs": sampling.logprobs}),
            **({} if sampling.skip_special_tokens else {"skip_special_tokens": False}),
            **{name: value for name, value in optional.items() if value},
        }

    def grammar_fields(self, grammar: Grammar | None) -> dict[str, Any]:
        """Return the body's fields that make the output follow a grammar; empty for None.

        Raises `EngineError` for a regular expression, for which the API has no field.
        """
        if grammar is None:
            return {}
        if grammar.kind == "regex":
            raise EngineError("unsupported_value", "the server supports no regular expressions")
        response_format: dict[str, Any] = {"type": grammar.kind}
        if grammar.kind == "json_schema":
            response_format["json_schema"] = {
                "name": "output",
                "schema": json.loads(grammar.source),
            }
        return {"response_format": response_format}

    def parse_event(self, data: str) -> Delta:
        """Return the contents of one server-sent event, given its data.

        Raises `RetryableError` for malformed data and for an event that reports a failure of the
        server, and `RequestRejected` for one that rejects the request.
        """
        try:
            event = _Event.model_validate_json(data)
        except ValidationError:
            raise _malformed_answer(data) from None
        if event.error:
            raise _stream_error(event.error, data)
        usage = _to_usage(event.usage) if event.usage else None
        if not event.choices:
            return Delta(usage=usage)
        choice = event.choices[0]
        logprobs = _parse_logprobs(choice.logprobs) if choice.logprobs else []
        return Delta(
            choice.text,
            choice.token_ids or None,
            logprobs,
            _parse_finish_reason(choice.finish_reason),
            choice.matched_text,
            usage,
        )

    def embedding_body(self, inputs: list[TextOrTokens], dimensions: int | None) -> dict[str, Any]:
        """Return the JSON body of a request for the embeddings of `inputs`.

        `dimensions` is the wanted length of the vectors; None asks for the model's own.
        """
        body = {"model": self._model, "input": inputs, "encoding_format": "float"}
        return body if dimensions is None else {**body, "dimensions": dimensions}

    def parse_embeddings(self, answer: bytes, count: int, dimensions: int | None) -> list[bytes]:
        """Return an answer's vectors, in the order of the inputs, as float32 little-endian bytes.

        A vector longer than `dimensions` is cut. Raises `RetryableError` for a malformed answer or
        one that does not have `count` vectors, `EngineError` for a vector that is too short or not
        of finite numbers.
        """
        try:
            rows = _EmbeddingResponse.model_validate_json(answer).data
        except ValidationError:
            raise _malformed_answer(answer.decode(errors="replace")) from None
        if sorted(row.index for row in rows) != list(range(count)):
            raise RetryableError(
                "garbage", f"{len(rows)} embeddings for {count} inputs", suspicious=True
            )
        ordered = sorted(rows, key=lambda row: row.index)
        return [pack_vector(row.embedding, dimensions) for row in ordered]


class VLLMProtocol(OpenAIProtocol):
    """Request bodies and answers of vLLM, which sends token ids and takes regular expressions.

    Its `repetition_penalty` is for the tokens of prompt and output alike; that of others may not
    be (SGLang's is for the output alone).
    """

    has_token_ids = True
    output_dependent = ("grammar", "presence_penalty", "frequency_penalty")

    def completion_body(
        self, prompt: TextOrTokens, sampling: Sampling, seed: int
    ) -> dict[str, Any]:
        """Return the JSON body of a streamed completion whose events hold their token ids.

        Raises nothing for a grammar: vLLM has a field for each kind.
        """
        resolved = sampling.resolve()
        body = super().completion_body(prompt, sampling, seed) | {
            "return_token_ids": True,
            # Said also where they are off: the server's model may have defaults of its own
            "top_k": resolved.top_k or -1,
            "min_p": resolved.min_p,
            "repetition_penalty": resolved.repetition_penalty,
        }
        names = {"return_tokens_as_token_ids": True} if sampling.logprobs is not None else {}
        return body | names

    def grammar_fields(self, grammar: Grammar | None) -> dict[str, Any]:
        """Return the body's fields that make the output follow any grammar; empty for None."""
        if grammar is not None and grammar.kind == "regex":
            return {"structured_outputs": {"regex": grammar.source}}
        return super().grammar_fields(grammar)


def _to_usage(usage: _EventUsage) -> UpstreamUsage:
    return UpstreamUsage(usage.prompt_tokens, usage.completion_tokens)


def _parse_finish_reason(reason: str | None) -> FinishReason | None:
    if reason in _FAILURE_REASONS:
        raise RetryableError(
            "stream", f"the server ends the stream with {reason!r}", suspicious=True
        )
    if reason is None:
        return None
    return "length" if reason == "length" else "stop"


def _parse_logprobs(logprobs: _Logprobs) -> list[TokenLogprob]:
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    triples = zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=False)
    return [TokenLogprob(text, value or 0.0, top or {}) for text, value, top in triples]


def _malformed_answer(data: str) -> RetryableError:
    return RetryableError(
        "garbage", f"the server's answer is malformed: {data[:80]!r}", suspicious=True
    )


def _stream_error(error: object, data: str) -> Exception:
    """Return the error that the server sent in place of an event.

    With a status that rejects the request (4xx, except 408, 425 and 429) it is a `RequestRejected`.
    """
    message = f"the server ends the stream: {error_message(data.encode())}"
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 500 and code not in (408, 425, 429):
        return rejection(code, message)
    return RetryableError("stream", message, suspicious=True)


def _none_if_neutral(neutral: float, value: float) -> float | None:
    return None if value == neutral else value
