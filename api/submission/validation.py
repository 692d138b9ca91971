"""Validates a submission: finds its model and deadline, its tokens, and what it must reserve."""

import hmac
import time
from dataclasses import dataclass

from api.grammar_checker import GrammarChecker
from api.submission.open_reservations import Reservation
from api.submission.quota_checks import RequestAmounts
from api.submission.request_limits import (
    DeadlineLimits,
    PackedRequest,
    check_task,
    check_tools,
    pack_request,
)
from api.submission.submission_record import Submission
from api.tokenizer import TokenizerCache, check_token_ids
from registry.models import Model, Target, Version
from registry.price_book import PriceBook
from registry.store import Registry
from registry.tenant_records import Tenant
from streams import headers
from streams.broker.broker_client import Broker
from streams.errors import ModelNotAllowed, PayloadTooLarge
from streams.headers import Envelope
from streams.records.responses.response_records import make_item_ref
from streams.subjects import Lane
from streams.usage_accounts import PriceEntry

_USER_DIGITS = 16


@dataclass(frozen=True)
class ValidatedRequest:
    """One request that has passed all checks but those of load and quotas, ready to be queued.

    `lane` is the queue of its tenant, model and priority. `pinned_version` is the model version
    that must serve it; empty means the default version at the time of dispatch, unless that takes
    other tokens than those of `version`. `deadline_seconds`
    count from its acceptance.
    """

    tenant: Tenant
    submission: Submission
    model: Model
    version: Version  # for which it is tokenised
    lane: Lane
    pinned_version: str
    packed: PackedRequest
    deadline_seconds: float
    started_at: float  # when its validation began, by the monotonic clock
    adapter_name: str  # empty without one
    price: PriceEntry
    stores_result: bool = False  # whoever ends it stores its result, as that of a response

    @property
    def amounts(self) -> RequestAmounts:
        """The most that the request may use, to be reserved in the quotas of its tenant."""
        prompt = self.packed.prompt_tokens
        return RequestAmounts(prompt, self.packed.cost - prompt, self.price.price)

    def build_envelope(
        self,
        request_id: str,
        route: str,
        reservation: Reservation | None,
        wait_seconds: float | None,
        now_ms: int,
    ) -> Envelope:
        """Return the headers of the message with which the request is queued.

        `route` is where the replies go, and `wait_seconds` the estimated wait, None if it is not
        known. `now_ms` is the time in epoch ms, from which the deadline counts. With a
        `reservation` (`Quotas.find`) the request was accepted when that was made, so both belong to
        one day.
        """
        return Envelope(
            request_id=request_id,
            tenant=self.tenant.name,
            route=route,
            cost=self.packed.cost,
            prompt_tokens=self.packed.prompt_tokens,
            deadline=now_ms + int(self.deadline_seconds * 1000),
            accepted=reservation.reserved_ms if reservation else now_ms,
            version=self.pinned_version,
            tokenized_for=self.version.id,
            adapter=self.adapter_name,
            account=reservation.packed_account if reservation else "",
            estimated_wait_ms=None if wait_seconds is None else round(wait_seconds * 1000),
            prefix_hashes=self.packed.prompt_hashes,
            goal_ms=self._goal_ms,
            key=self.tenant.key.name if self.tenant.key else "",
            user=hash_user(self.tenant.name, self.submission.end_user),
            price=self.price.pack(),
            item=make_item_ref(request_id, 1) if self.stores_result else None,
        )

    @property
    def _goal_ms(self) -> int | None:
        goals = self.model.goals.get(self.submission.priority)
        ms = goals.time_to_first_token_ms if goals else None
        return None if ms is None else round(ms)


class SubmissionValidator:
    """Checks submissions against model, tenant and limits, and tokenises them; queues nothing."""

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        prices: PriceBook,
        tokenizers: TokenizerCache,
        grammars: GrammarChecker,
        deadlines: DeadlineLimits,
    ) -> None:
        self._broker, self._registry, self._deadlines = broker, registry, deadlines
        self._prices = prices
        self._tokenizers, self._grammars = tokenizers, grammars

    async def validate(self, tenant: Tenant, submission: Submission) -> list[ValidatedRequest]:
        """Return one validated request for each choice of the submission, in order.

        Raises a subclass of `BadRequest` that says what the client must change, such as
        `ModelNotFound`, `ModelNotAllowed`, `ContextLengthExceeded` or `PayloadTooLarge`. Raises
        `ArtifactChanged` if the model's tokeniser cannot be read on this machine.
        """
        started_at = time.monotonic()
        target = self._resolve(tenant, submission)
        model, version, adapter = target
        seconds = self._deadlines.deadline_seconds(submission)
        check_tools(submission, model, version)
        await self._check_sampling(model, version, submission)
        if submission.query is None:
            encoded, splits = await self._encode(model, version, submission), list[int]()
        else:
            encoded, splits = await self._encode_pairs(model, version, submission)
        choices = submission.split_choices()
        packed = [pack_request(each, target, tenant, encoded, splits) for each in choices]
        _check_size(packed[0], self._broker.max_payload - headers.MAX_HEADER_BYTES)
        lane = Lane(tenant.name, model.name, submission.priority)
        pinned_version = _pinned_version(submission.model, model, version)
        name, price = adapter.name if adapter else "", self._prices.entry_for(model)
        return [
            ValidatedRequest(
                tenant,
                choice,
                model,
                version,
                lane,
                pinned_version,
                each,
                seconds,
                started_at,
                name,
                price,
            )
            for choice, each in zip(choices, packed, strict=True)
        ]

    async def count_prompt_tokens(self, tenant: Tenant, submission: Submission) -> int:
        """Return how many tokens the prompt of a generation has; nothing is queued or reserved.

        Raises as `validate` does, but checks no limit of tokens.
        """
        model, version, _ = self._resolve(tenant, submission)
        check_task(submission, model)
        check_tools(submission, model, version)
        (prompt,) = await self._encode(model, version, submission)
        return version.token_count(prompt)

    def _resolve(self, tenant: Tenant, submission: Submission) -> Target:
        """Return what serves the submission's model; raises unless the key allows it."""
        target = self._registry.resolve_target(submission.model)
        if tenant.key and not tenant.key.allows_model(
            submission.model, target.model.name, is_adapter=target.adapter is not None
        ):
            raise ModelNotAllowed(submission.model)
        return target

    async def _check_sampling(self, model: Model, version: Version, submission: Submission) -> None:
        """Raise `TokenOutOfRange` for a wrong token, `BadGrammar` for a wrong grammar."""
        sampling = submission.sampling
        if sampling.logit_bias:
            check_token_ids(
                model, version, [token for token, _ in sampling.logit_bias], "logit_bias"
            )
        if sampling.stop_token_ids:
            check_token_ids(model, version, sampling.stop_token_ids, "stop_token_ids")
        if sampling.grammar:
            await self._grammars.check(sampling.grammar, submission.grammar_field)

    async def _encode(
        self, model: Model, version: Version, submission: Submission
    ) -> list[list[int]]:
        """The prompt, or each input, as token ids; ids from the client are checked."""
        if submission.chat is not None:
            chat, tools, options = submission.chat, submission.tools, submission.template_options
            return [await self._tokenizers.encode_chat(model, version, chat, tools, options)]
        inputs = submission.inputs if submission.prompt is None else [submission.prompt]
        texts = [each for each in inputs if isinstance(each, str)]
        ids = [each for each in inputs if not isinstance(each, str)]
        for tokens in ids:
            check_token_ids(
                model, version, tokens, "prompt" if submission.kind == "generate" else "input"
            )
        return ids or await self._tokenizers.encode_texts(model, version, texts)

    async def _encode_pairs(
        self, model: Model, version: Version, submission: Submission
    ) -> tuple[list[list[int]], list[int]]:
        """The query paired with each input, as token ids, and the index where the input begins."""
        texts = [each for each in submission.inputs if isinstance(each, str)]
        assert submission.query is not None
        pairs = await self._tokenizers.encode_pairs(model, version, submission.query, texts)
        return [pair.tokens for pair in pairs], [pair.split for pair in pairs]


def hash_user(tenant: str, end_user: str) -> str:
    """Return 16 hex digits that stand for a tenant's end user; empty for none.

    The same name gives other digits at another tenant.
    """
    if not end_user:
        return ""
    digest = hmac.digest(tenant.encode(), end_user.encode(errors="surrogatepass"), "sha256")
    return digest.hex()[:_USER_DIGITS]


def _check_size(packed: PackedRequest, limit: int) -> None:
    if len(packed.payload) > limit:
        raise PayloadTooLarge(len(packed.payload), limit)


def _pinned_version(name: str, model: Model, version: Version) -> str:
    """The version that must serve the request; empty for the default at the time of dispatch."""
    return version.id if "@" in name or version.id != model.default_version else ""
