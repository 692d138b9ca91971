"""Estimates what a batch's input may take, before any of it runs: tokens, cost, and results' bytes.

An upper bound of each line's answer is what the line itself asks for. Prompts are estimated from
some of them, which are tokenised.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from api.batches.batch_line import BatchLine, InputLine, WrongLine, parse_line
from api.batches.input_lines import MAX_LINES, iterate_lines
from api.endpoints.completion_endpoint import COMPLETION
from registry.models import Model
from registry.price_book import PriceBook
from registry.store import Registry
from registry.tenant_records import Tenant
from streams.errors import BadRequest, ModelNotFound
from streams.records.files.file_records import StoredFile
from streams.records.files.file_store import FileStore
from streams.usage_accounts import Price

SAMPLED_LINES = 64  # whose prompts are tokenised
RECORD_BYTES = 512  # of a result beside its text or vectors, with its subject and headers
TOKEN_BYTES = 8  # of text; most tokens have four or fewer
LOGPROB_BYTES = 128  # of one token and its log probability
_BREATH_LINES = 200  # looked at before others get a turn of the event loop: some 2 ms
CountPrompt = Callable[[BatchLine], Awaitable[int]]


@dataclass
class ModelShare:
    """The lines of one model: how many, the bytes of their bodies, and the most they may generate.

    `price` is that of its tokens now.
    """

    price: Price
    lines: int = 0
    bytes: int = 0
    completion_tokens: int = 0


@dataclass
class InputEstimate:
    """Most that an input may take; lines that its endpoint would refuse count as lines alone.

    `result_bytes` is an upper bound of what its results take in RESULTS.
    """

    lines: int = 0
    result_bytes: int = 0
    models: dict[str, ModelShare] = field(default_factory=dict)
    sample: list[tuple[BatchLine, int]] = field(default_factory=list)  # with their bytes

    @property
    def completion_tokens(self) -> int:
        """The most tokens that all lines may generate."""
        return sum(share.completion_tokens for share in self.models.values())


class InputEstimator:
    """Reads inputs of batches of one tenant."""

    def __init__(self, registry: Registry, prices: PriceBook, tenant: Tenant) -> None:
        self._registry, self._prices, self._tenant = registry, prices, tenant
        self._random = Random(0)  # the same input has the same estimate

    async def read(self, files: FileStore, file: StoredFile, endpoint: str) -> InputEstimate:
        """Read a file to its end.

        Raises `BadRequest` for more than `MAX_LINES` (1,000,000) lines, `ChunkMissing`, or
        `BrokerUnavailable`.
        """
        found = InputEstimate()
        async for line in iterate_lines(files, file):
            if line.index >= MAX_LINES:
                raise BadRequest(f"the file has more than {MAX_LINES} lines", "input_file_id")
            self._add(found, line, endpoint)
            if not line.index % _BREATH_LINES:
                await asyncio.sleep(0)
        return found

    def _add(self, found: InputEstimate, source: InputLine, endpoint: str) -> None:
        found.lines += 1
        found.result_bytes += RECORD_BYTES
        try:
            line = parse_line(source.data or b"", endpoint)
            model = self._registry.resolve_target(str(line.body.get("model")))[0]
        except (WrongLine, ModelNotFound):
            return
        size = source.end - source.offset
        share = found.models.get(model.name)
        if share is None:
            price = self._prices.entry_for(model).price
            share = found.models[model.name] = ModelShare(price)
        share.lines += 1
        share.bytes += size
        tokens = self._most_tokens(line, model)
        share.completion_tokens += tokens
        found.result_bytes += answer_bytes(line, model, tokens)
        self._sample(found, line, size)

    def _sample(self, found: InputEstimate, line: BatchLine, size: int) -> None:
        """Keep each line with the same probability."""
        if len(found.sample) < SAMPLED_LINES:
            found.sample.append((line, size))
        elif (at := self._random.randrange(found.lines)) < SAMPLED_LINES:
            found.sample[at] = (line, size)

    def _most_tokens(self, line: BatchLine, model: Model) -> int:
        if model.task != "generate":
            return 0
        body = line.body
        default = model.default_max_tokens or model.default.context_length
        if line.url == "/v1/completions":
            default = COMPLETION.default_max_tokens or default
        told = body.get("max_completion_tokens") or body.get("max_tokens")
        limits = (
            model.default.context_length,
            model.max_output_tokens,
            self._tenant.max_output_tokens,
        )
        wanted = told if isinstance(told, int) and told > 0 else default
        return min(wanted, *(limit for limit in limits if limit is not None))


def answer_bytes(line: BatchLine, model: Model, tokens: int) -> int:
    """Return the most bytes that the answer to a line takes, if it has so many tokens at most."""
    body = line.body
    if model.task == "generate":
        if not body.get("logprobs"):
            return tokens * TOKEN_BYTES
        told = max(_number(body.get("top_logprobs")), _number(body.get("logprobs")))
        return tokens * (TOKEN_BYTES + LOGPROB_BYTES * (1 + told))
    inputs = body.get("input", body.get("documents"))
    count = len(inputs) if isinstance(inputs, list) else 1
    version = model.default
    return count * 4 * max(version.embedding_dimensions or 1, version.num_labels or 1, 16)


def _number(told: Any) -> int:
    return told if isinstance(told, int) else 0


async def count_prompt_tokens(found: InputEstimate, count: CountPrompt) -> tuple[int, int]:
    """Return the prompt tokens of an input, and of how many lines they were counted.

    Those of the sample by `count`, which may raise `BadRequest` for a line that is refused; the
    others are taken to have as many for each byte.
    """
    tokens = size = counted = 0
    for line, line_bytes in found.sample:
        try:
            tokens += await count(line)
        except BadRequest:
            continue
        size += line_bytes
        counted += 1
    total = sum(share.bytes for share in found.models.values())
    return (round(total * tokens / size) if size else 0), counted
