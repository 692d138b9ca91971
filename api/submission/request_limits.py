"""Checks a request against the limits of its model and tenant, and packs its payload. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from api.chat_template import PLAIN_STOPS
from api.submission.submission_record import Submission
from api.tool_calls import detect_format
from registry.models import Model, Target, Version
from registry.tenant_records import Tenant
from streams import prefix_hashes
from streams.errors import (
    BadRequest,
    ContextLengthExceeded,
    InputTooLong,
    OutputTooLong,
    UnsupportedValue,
)
from streams.messages import Request, pack_tokens


@dataclass(frozen=True)
class DeadlineLimits:
    """The deadline of a request that names none, and the longest that a request may name.

    Both are in seconds after acceptance.
    """

    default_seconds: float
    max_seconds: float

    def deadline_seconds(self, submission: Submission) -> float:
        """Return the submission's deadline, in seconds after its acceptance.

        Raises `BadRequest` if the client asked for one that is not above 0 or is over the maximum.
        """
        if submission.deadline_ms is None:
            return self.default_seconds
        limit = self.max_seconds * 1000
        if not 0 < submission.deadline_ms <= limit:
            message = f"deadline_ms {submission.deadline_ms} is not within 1..{limit:g}"
            raise BadRequest(message, "deadline_ms")
        return submission.deadline_ms / 1000


@dataclass(frozen=True)
class PackedRequest:
    """A request within all token limits, encoded as workers take it.

    `cost` is the number of its prompt tokens plus the most tokens that it may generate.
    `prompt_hashes` is the header by which the dispatcher finds workers whose cache holds a prefix
    of the prompt.
    """

    payload: bytes
    prompt_tokens: int
    cost: int
    prompt_hashes: str = ""


def pack_request(
    submission: Submission,
    target: Target,
    tenant: Tenant,
    encoded: list[list[int]],
    splits: Sequence[int] = (),
) -> PackedRequest:
    """Check a submission against the token limits of target and tenant, and return it encoded.

    `encoded` has the token ids of the prompt, or of each input. `splits` are for inputs that are
    pairs: the index in each where the second text begins. Raises `BadRequest` for a prompt or input
    without tokens, `ContextLengthExceeded`, `InputTooLong` or `OutputTooLong` for one over a limit,
    and `UnsupportedValue` for a model that serves another kind of request.
    """
    check_task(submission, target.model)
    if submission.kind != "generate":
        return _pack_inputs(submission, target, tenant, encoded, splits)
    return _pack_prompt(submission, target, tenant, encoded[0])


def check_task(submission: Submission, model: Model) -> None:
    """Raise `UnsupportedValue` if the model serves another kind of request."""
    if model.task != submission.kind:
        raise UnsupportedValue(
            f"the model {model.name!r} serves {model.task!r}, not {submission.kind!r}", "model"
        )


def _pack_prompt(
    submission: Submission, target: Target, tenant: Tenant, prompt: list[int]
) -> PackedRequest:
    model, version, adapter = target
    count = version.token_count(prompt)
    if count == 0:
        raise BadRequest("the prompt has no tokens", "prompt")
    _check_tenant_limit("prompt", count, tenant)
    max_tokens = _max_tokens(submission, target, tenant, count)
    if count + max_tokens > version.context_length:
        whose = f"model {model.name!r}"
        raise ContextLengthExceeded(count, max_tokens, version.context_length, whose)
    stops = PLAIN_STOPS if submission.chat and version.chat_template is None else []
    sampling = submission.sampling_with(max_tokens, stops)
    if model.generation_config == "none":
        sampling = sampling.resolve()
    packed = pack_tokens(prompt)
    request = Request(
        "generate", packed, sampling=sampling, adapter=adapter.ref if adapter else None
    )
    salt = prefix_hashes.make_salt(tenant.name, adapter.digest if adapter else "")
    prompt_hashes = prefix_hashes.to_header(prefix_hashes.hash_prompt(packed, salt))
    return PackedRequest(request.pack(), count, count + max_tokens, prompt_hashes)


def _max_tokens(submission: Submission, target: Target, tenant: Tenant, prompt_tokens: int) -> int:
    """The client's own limit of the output, or else the default as far as limits allow.

    The default is what is left of the context, unless endpoint or model have another. It also fits
    the tenant's quotas of tokens, so that no request is too large for them that names no limit.
    """
    model, version, _ = target
    requested, limits = submission.sampling.max_tokens, []
    for limited, whose in ((tenant, "this tenant"), (model, f"model {model.name!r}")):
        if limited.max_output_tokens is not None:
            limits.append(limited.max_output_tokens)
            if requested > limited.max_output_tokens:
                raise OutputTooLong(requested, limited.max_output_tokens, whose)
    context_left = max(1, version.context_length - prompt_tokens)
    default = submission.default_max_tokens or model.default_max_tokens or context_left
    limits += [max(1, quota - prompt_tokens) for quota in _token_quotas(tenant)]
    return requested or min(default, context_left, *limits)


def _token_quotas(tenant: Tenant) -> Iterator[int]:
    """Yield the quotas of tokens that a request of the tenant, or of the key used, must fit."""
    for limits in (tenant, tenant.key):
        for quota in ("tokens_per_minute", "tokens_per_day", "tokens_per_month"):
            if limits and limits.enforces(quota):
                yield getattr(limits, quota)


def _pack_inputs(
    submission: Submission,
    target: Target,
    tenant: Tenant,
    inputs: list[list[int]],
    splits: Sequence[int],
) -> PackedRequest:
    model, version, _ = target
    _check_dimensions(submission.dimensions, version)
    field = "input"
    if submission.query is not None:
        _check_single_score(model, version)
        field = "documents"
    for index, tokens in enumerate(inputs):
        _check_input(f"{field}[{index}]", version.token_count(tokens), target, tenant)
    count = sum(map(version.token_count, inputs))
    request = Request(
        submission.kind,
        inputs=[pack_tokens(tokens) for tokens in inputs],
        dimensions=submission.dimensions,
        splits=list(splits),
    )
    return PackedRequest(request.pack(), count, count)


def _check_input(field: str, count: int, target: Target, tenant: Tenant) -> None:
    if count == 0:
        raise BadRequest(f"{field} has no tokens", field)
    if count > (limit := target.version.context_length):
        raise InputTooLong(field, count, limit, f"model {target.model.name!r}")
    _check_tenant_limit(field, count, tenant)


def _check_tenant_limit(field: str, count: int, tenant: Tenant) -> None:
    limit = tenant.max_prompt_tokens
    if limit is not None and count > limit:
        raise InputTooLong(field, count, limit, "this tenant")


def _check_single_score(model: Model, version: Version) -> None:
    if version.num_labels != 1:
        raise UnsupportedValue(
            f"the model {model.name!r} has {version.num_labels} labels; only one with a single "
            "score can rank documents",
            "model",
        )


def _check_dimensions(requested: int | None, version: Version) -> None:
    limit = version.embedding_dimensions
    if requested is not None and limit is not None and not 1 <= requested <= limit:
        raise BadRequest(f"dimensions {requested} is not within 1..{limit}", "dimensions")


def check_tools(submission: Submission, model: Model, version: Version) -> None:
    """Raise `UnsupportedValue` if the submission has tools that its model cannot be told of.

    That is so if the version's chat template does not handle tools, or makes the model write calls
    in a form that is not known here. Without tools nothing is checked.
    """
    if submission.tools and detect_format(version.chat_template) is None:
        raise UnsupportedValue(
            f"the chat template of the model {model.name!r} has no tools that are known here",
            "tools",
        )
