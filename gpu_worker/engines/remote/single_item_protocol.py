"""Request bodies and answers of a single-item API, as of Hugging Face's inference API. Pure.

generate  {"inputs": text, "parameters": {…}}  →  [{"generated_text": text}], or the object alone
embed     {"inputs": text}                     →  [number, …], or one such row in a list
"""

from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from gpu_worker.engines.engine import EngineError
from gpu_worker.engines.remote.call_errors import RetryableError
from streams.messages import Sampling

_DEFAULT_SAMPLING = Sampling().resolve()
_UNSUPPORTED_FIELDS = (
    "grammar",
    "logprobs",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
)


class _Generated(BaseModel):
    generated_text: str


_TEXTS: TypeAdapter[_Generated | list[_Generated]] = TypeAdapter(_Generated | list[_Generated])
_ROWS: TypeAdapter[list[float] | list[list[float]]] = TypeAdapter(list[float] | list[list[float]])


def generation_body(text: str, sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return the JSON body of a generation.

    Temperature 0 is sent as `do_sample: false`, since the API takes no zero. Raises `EngineError`
    for a sampling parameter that the API has no field for.
    """
    sampling = sampling.resolve()
    if unsupported := [
        name
        for name in _UNSUPPORTED_FIELDS
        if getattr(sampling, name) != getattr(_DEFAULT_SAMPLING, name)
    ]:
        raise EngineError(
            "unsupported_value", f"the server does not support {', '.join(unsupported)}"
        )
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "do_sample": sampling.temperature > 0,
        "return_full_text": False,
        "seed": seed,
    }
    if sampling.temperature > 0:
        parameters |= {"temperature": sampling.temperature}
        parameters |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        parameters |= {"top_k": sampling.top_k} if sampling.top_k else {}
    if sampling.repetition_penalty != 1:
        parameters["repetition_penalty"] = sampling.repetition_penalty
    if sampling.stop:
        parameters["stop"] = sampling.stop
    return {"inputs": text, "parameters": parameters}


def parse_text(answer: bytes) -> str:
    """Return the generated text of an answer. Raises `RetryableError` for a malformed one."""
    try:
        found = _TEXTS.validate_json(answer)
    except ValidationError:
        raise _malformed_answer(answer) from None
    texts = found if isinstance(found, list) else [found]
    if len(texts) != 1:
        raise _malformed_answer(answer)
    return texts[0].generated_text


def embedding_body(text: str) -> dict[str, Any]:
    """Return the JSON body of a request for the embedding of one text."""
    return {"inputs": text}


def parse_vector(answer: bytes) -> list[float]:
    """Return the embedding in an answer. Raises `RetryableError` for a malformed one."""
    try:
        found: list[Any] = _ROWS.validate_json(answer)
    except ValidationError:
        raise _malformed_answer(answer) from None
    if found and isinstance(found[0], list):
        if len(found) != 1:
            raise _malformed_answer(answer)
        return list(found[0])
    return found


def _malformed_answer(answer: bytes) -> RetryableError:
    shown = answer[:80].decode(errors="replace")
    return RetryableError(
        "garbage", f"the server's answer is malformed: {shown!r}", suspicious=True
    )
