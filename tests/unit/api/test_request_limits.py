"""May this request come in: limits of model and tenant, deadlines."""

from typing import Any

import pytest

from api.submission.request_limits import DeadlineLimits, PackedRequest, pack_request
from api.submission.submission_record import Submission
from registry.models import Model, Target, mock_model
from registry.tenant_records import Tenant
from streams import messages
from streams.errors import (
    BadRequest,
    ContextLengthExceeded,
    InputTooLong,
    OutputTooLong,
    UnsupportedValue,
)
from streams.messages import (
    NEUTRAL_SAMPLING,
    Request,
    RequestKind,
    Sampling,
    SamplingDefaults,
    unpack_tokens,
)
from streams.subjects import Priority
from tests.support.versions import make_version

MODEL = mock_model(context_length=100)
TENANT = Tenant(name="acme")
DEADLINES = DeadlineLimits(default_seconds=60, max_seconds=600)


def submission(kind: RequestKind = "generate", max_tokens: int = 0, **options: Any) -> Submission:
    made = {"deadline_ms": None, "sampling": Sampling(max_tokens=max_tokens), **options}
    return Submission(kind, "mock", Priority.STANDARD, **made)


def pack(asked: Submission, model: Model, *rest: Any) -> PackedRequest:
    return pack_request(asked, Target(model, model.default), *rest)


@pytest.mark.parametrize(
    ("prompt", "asked", "granted"),
    [(10, 90, 90), (99, 1, 1), (10, 0, 90), (99, 0, 1)],
)
def test_prompt_and_output_fit_the_context(prompt: int, asked: int, granted: int) -> None:
    """Cost is what is reserved: the prompt and the most that may be generated."""
    admitted = pack(submission(max_tokens=asked), MODEL, TENANT, [[1] * prompt])
    request = Request.unpack(admitted.payload)
    assert request.sampling.max_tokens == granted
    assert unpack_tokens(request.prompt) == [1] * prompt
    assert (admitted.prompt_tokens, admitted.cost) == (prompt, prompt + granted)


@pytest.mark.parametrize("said", [{}, {"temperature": 0.5, "repetition_penalty": 1.0}])
def test_sampling_that_a_request_leaves_open_is_the_workers_to_fill(said: dict[str, float]) -> None:
    """Unless the model's record says that its files do not count; what was said stays."""
    asked = submission(sampling=Sampling(max_tokens=1, **said))  # type: ignore[arg-type]
    own = SamplingDefaults(0.1, 0.2, 3, 0.4, 1.5)
    for choice, defaults in (("auto", own), ("none", NEUTRAL_SAMPLING)):
        model = MODEL.model_copy(update={"generation_config": choice})
        packed = pack(asked, model, TENANT, [[1]]).payload
        expected = {**vars(defaults), **said}
        assert vars(Request.unpack(packed).sampling.resolve(own)).items() >= expected.items()


def test_open_sampling_is_no_null_on_the_wire() -> None:
    """A worker of the release before would take a null for a number."""
    packed = pack(submission(), MODEL, TENANT, [[1]]).payload
    assert None not in messages.unpack(packed)["sampling"].values()


@pytest.mark.parametrize(("prompt", "asked"), [(10, 91), (100, 1), (100, 0), (101, 0)])
def test_what_does_not_fit_the_context_is_refused(prompt: int, asked: int) -> None:
    """Here and not in the engine, so that the client learns it at once."""
    with pytest.raises(ContextLengthExceeded, match="100 tokens of model 'mock'"):
        pack(submission(max_tokens=asked), MODEL, TENANT, [[1] * prompt])


@pytest.mark.parametrize(
    ("tenants", "models", "most", "whose"),
    [(7, None, 7, "this tenant"), (None, 7, 7, "model 'mock'"), (9, 7, 7, "model 'mock'")],
)
def test_limits_of_tenant_and_model_are_tighter(
    tenants: int | None, models: int | None, most: int, whose: str
) -> None:
    """What was not asked for is cut to them, what was asked for is refused."""
    tenant = Tenant(name="small", max_output_tokens=tenants)
    model = MODEL.model_copy(update={"max_output_tokens": models})
    admitted = pack(submission(), model, tenant, [[1] * 50])
    assert Request.unpack(admitted.payload).sampling.max_tokens == most
    of_endpoint = pack(submission(default_max_tokens=16), model, tenant, [[1] * 50])
    assert Request.unpack(of_endpoint.payload).sampling.max_tokens == most
    pack(submission(max_tokens=most), model, tenant, [[1] * 50])
    with pytest.raises(OutputTooLong, match=f"is 8, the limit of {whose} is 7") as refused:
        pack(submission(max_tokens=most + 1), model, tenant, [[1] * 50])
    assert (refused.value.code, refused.value.field) == ("context_length_exceeded", "max_tokens")


def test_a_tenants_prompts_have_a_limit() -> None:
    """As long as the context or not."""
    tenant = Tenant(name="small", max_prompt_tokens=5)
    pack(submission(), MODEL, tenant, [[1] * 5])
    with pytest.raises(InputTooLong, match="6 tokens, the limit of this tenant is 5") as refused:
        pack(submission(), MODEL, tenant, [[1] * 6])
    assert refused.value.field == "prompt"


def test_a_prompt_without_tokens_is_refused() -> None:
    """There is nothing to continue."""
    with pytest.raises(BadRequest, match="no tokens"):
        pack(submission(), MODEL, TENANT, [[]])


def test_the_models_task_decides(vectors: Model) -> None:
    """A generating model does not embed, nor the other way round."""
    with pytest.raises(UnsupportedValue):
        pack(submission("embed"), MODEL, TENANT, [[1]])
    with pytest.raises(UnsupportedValue):
        pack(submission(), vectors, TENANT, [[1]])


@pytest.fixture
def vectors() -> Model:
    return Model(
        name="vectors",
        engine="mock",
        task="embed",
        versions={"1": make_version(context_length=100, embedding_dimensions=8)},
        default_version="1",
    )


def test_inputs_are_bounded_one_by_one_and_cost_their_sum(vectors: Model) -> None:
    """Each is a sequence of its own."""
    admitted = pack(submission("embed"), vectors, TENANT, [[1] * 100, [2] * 50])
    assert admitted.cost == admitted.prompt_tokens == 150
    with pytest.raises(InputTooLong, match=r"input\[1\] has 101 tokens.*is 100"):
        pack(submission("embed"), vectors, TENANT, [[1], [1] * 101])
    with pytest.raises(InputTooLong, match="of this tenant is 5"):
        pack(submission("embed"), vectors, Tenant(name="small", max_prompt_tokens=5), [[1] * 6])
    with pytest.raises(BadRequest, match=r"input\[1\] has no tokens"):
        pack(submission("embed"), vectors, TENANT, [[1], []])


def test_pairs_are_bounded_as_documents(ranker: Model) -> None:
    """The client wrote documents; where the second text begins travels with the tokens."""
    pairs = submission("classify", query="q", inputs=["a", "b"])
    request = Request.unpack(pack(pairs, ranker, TENANT, [[1, 2], [1, 3]], [1, 1]).payload)
    assert (request.kind, request.splits) == ("classify", [1, 1])
    with pytest.raises(InputTooLong, match=r"documents\[1\] has 101 tokens"):
        pack(pairs, ranker, TENANT, [[1], [1] * 101], [1, 1])


def test_only_a_model_with_one_score_ranks(ranker: Model) -> None:
    """Of several probabilities none is the relevance."""
    versions = {"1": make_version(context_length=100, num_labels=3)}
    several = ranker.model_copy(update={"versions": versions})
    assert pack(submission("classify", inputs=["a"]), several, TENANT, [[1]]).cost == 1
    with pytest.raises(UnsupportedValue, match="3 labels"):
        pack(submission("classify", query="q", inputs=["a"]), several, TENANT, [[1]], [1])


@pytest.fixture
def ranker(vectors: Model) -> Model:
    versions = {"1": make_version(context_length=100, num_labels=1)}
    return vectors.model_copy(update={"task": "classify", "versions": versions})


@pytest.mark.parametrize(("dimensions", "fits"), [(1, True), (8, True), (9, False)])
def test_dimensions_are_the_models_at_most(vectors: Model, dimensions: int, fits: bool) -> None:
    """Fewer are the first ones."""
    wanted = submission("embed", dimensions=dimensions)
    if fits:
        assert pack(wanted, vectors, TENANT, [[1]]).cost == 1
    else:
        with pytest.raises(BadRequest, match="1..8"):
            pack(wanted, vectors, TENANT, [[1]])


@pytest.mark.parametrize(("asked", "seconds"), [(None, 60), (1, 0.001), (600_000, 600)])
def test_a_deadline_is_what_was_asked_or_the_default(asked: int | None, seconds: float) -> None:
    """Nothing waits without one."""
    assert DEADLINES.deadline_seconds(submission(deadline_ms=asked)) == seconds


@pytest.mark.parametrize("asked", [0, -1, 600_001])
def test_a_deadline_out_of_range_is_refused(asked: int) -> None:
    """A log does not outlive a later one."""
    with pytest.raises(BadRequest, match="1..600000"):
        DEADLINES.deadline_seconds(submission(deadline_ms=asked))


def test_an_answer_without_a_limit_may_fill_the_context() -> None:
    model = MODEL.model_copy(update={"default_max_tokens": None})
    admitted = pack(submission(), model, TENANT, [[1] * 30])
    assert Request.unpack(admitted.payload).sampling.max_tokens == 70
    quota = Tenant(name="small", tokens_per_day=50)
    admitted = pack(submission(), model, quota, [[1] * 30])
    assert admitted.cost == 50
