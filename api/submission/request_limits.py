"""May this request come in: limits of model and tenant, deadline. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from api.chat_template import PLAIN_STOPS
from api.submission.submission import Submission
from api.tool_calls import detect_format
from registry.models import Model
from registry.tenant_records import Tenant
from streams import prefix_hashes
from streams.errors import (
    BadRequest,
    ContextLengthExceeded,
    InputTooLong,
    OutputTooLong,
    UnsupportedValue,
)
from streams.messages import AdapterRef, Request, pack_tokens


@dataclass(frozen=True)
class DeadlineLimits:
    """What a request that names no deadline gets, and the latest it may name; seconds."""

    default_seconds: float
    max_seconds: float

    def deadline_seconds(self, submission: Submission) -> float:
        """Raises `BadRequest` for a deadline out of range."""
        if submission.deadline_ms is None:
            return self.default_seconds
        most = self.max_seconds * 1000
        if not 0 < submission.deadline_ms <= most:
            message = f"deadline_ms {submission.deadline_ms} is not within 1..{most:g}"
            raise BadRequest(message, "deadline_ms")
        return submission.deadline_ms / 1000


@dataclass(frozen=True)
class PackedRequest:
    """A request that fits, packed, with what it reserves and the marks of its prompt."""

    payload: bytes
    prompt_tokens: int
    cost: int
    prompt_marks: str = ""


def pack_request(
    submission: Submission,
    model: Model,
    tenant: Tenant,
    encoded: list[list[int]],
    splits: Sequence[int] = (),
    adapter: AdapterRef | None = None,
) -> PackedRequest:
    """The request for the engine; `encoded` is the prompt, or each input, as token ids.

    `splits` are for inputs that are pairs: where in each the second text begins. Raises
    `ContextLengthExceeded`, `InputTooLong` or `OutputTooLong`, or `UnsupportedValue` for a model of
    another task.
    """
    if model.task != submission.kind:
        raise UnsupportedValue(
            f"the model {model.name!r} serves {model.task!r}, not {submission.kind!r}", "model"
        )
    if submission.kind != "generate":
        return _pack_inputs(submission, model, tenant, encoded, splits)
    return _pack_prompt(submission, model, tenant, encoded[0], adapter)


def _pack_prompt(
    submission: Submission,
    model: Model,
    tenant: Tenant,
    prompt: list[int],
    adapter: AdapterRef | None,
) -> PackedRequest:
    count = model.token_count(prompt)
    if count == 0:
        raise BadRequest("the prompt has no tokens", "prompt")
    _check_tenant_limit("prompt", count, tenant)
    max_tokens = _max_tokens(submission, model, tenant, count)
    if count + max_tokens > model.context_length:
        whose = f"model {model.name!r}"
        raise ContextLengthExceeded(count, max_tokens, model.context_length, whose)
    stops = PLAIN_STOPS if submission.chat and model.chat_template is None else []
    sampling = submission.sampling_with(max_tokens, stops)
    packed = pack_tokens(prompt)
    request = Request("generate", packed, sampling=sampling, adapter=adapter)
    salt = prefix_hashes.make_salt(tenant.name, adapter.digest if adapter else "")
    found = prefix_hashes.to_header(prefix_hashes.hash_prompt(packed, salt))
    return PackedRequest(request.pack(), count, count + max_tokens, found)


def _max_tokens(submission: Submission, model: Model, tenant: Tenant, prompt_tokens: int) -> int:
    """What was asked for, or else the default as far as context and limits allow."""
    asked, limits = submission.sampling.max_tokens, []
    for owner, whose in ((tenant, "this tenant"), (model, f"model {model.name!r}")):
        if owner.max_output_tokens is not None:
            limits.append(owner.max_output_tokens)
            if asked > owner.max_output_tokens:
                raise OutputTooLong(asked, owner.max_output_tokens, whose)
    room = max(1, model.context_length - prompt_tokens)
    default = submission.default_max_tokens or model.default_max_tokens
    return asked or min(default, room, *limits)


def _pack_inputs(
    submission: Submission,
    model: Model,
    tenant: Tenant,
    inputs: list[list[int]],
    splits: Sequence[int],
) -> PackedRequest:
    _check_dimensions(submission.dimensions, model)
    field = "input"
    if submission.query is not None:
        _check_single_score(model)
        field = "documents"
    for index, tokens in enumerate(inputs):
        _check_input(f"{field}[{index}]", model.token_count(tokens), model, tenant)
    count = sum(map(model.token_count, inputs))
    request = Request(
        submission.kind,
        inputs=[pack_tokens(tokens) for tokens in inputs],
        dimensions=submission.dimensions,
        splits=list(splits),
    )
    return PackedRequest(request.pack(), count, count)


def _check_input(field: str, count: int, model: Model, tenant: Tenant) -> None:
    if count == 0:
        raise BadRequest(f"{field} has no tokens", field)
    if count > model.context_length:
        raise InputTooLong(field, count, model.context_length, f"model {model.name!r}")
    _check_tenant_limit(field, count, tenant)


def _check_tenant_limit(field: str, count: int, tenant: Tenant) -> None:
    most = tenant.max_prompt_tokens
    if most is not None and count > most:
        raise InputTooLong(field, count, most, "this tenant")


def _check_single_score(model: Model) -> None:
    if model.num_labels != 1:
        raise UnsupportedValue(
            f"the model {model.name!r} has {model.num_labels} labels; only one with a single score "
            "can rank documents",
            "model",
        )


def _check_dimensions(asked: int | None, model: Model) -> None:
    most = model.embedding_dimensions
    if asked is not None and most is not None and not 1 <= asked <= most:
        raise BadRequest(f"dimensions {asked} is not within 1..{most}", "dimensions")


def check_tools(submission: Submission, model: Model) -> None:
    """Raises `UnsupportedValue` if the model cannot be told of tools, or its calls not be read."""
    if submission.tools and detect_format(model.chat_template) is None:
        raise UnsupportedValue(
            f"the chat template of the model {model.name!r} has no tools that are known here",
            "tools",
        )
