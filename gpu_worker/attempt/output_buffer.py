"""Buffers an engine's outputs until the next append, and cuts them into log records. Pure."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from gpu_worker.engines.engine import Output

# Vectors per record: a gateway makes JSON of this much in 1 ms; its event loop runs in between.
MAX_RESULT_BYTES = 64_000
# Tokens per record: with twenty alternatives for each they take a quarter of max_payload.
MAX_CHUNK_TOKENS = 256


@dataclass
class OutputBuffer:
    """The engine's outputs for one request that are to be appended to its token log next.

    An output is what one engine step made for the request: tokens with their text, or vectors.
    While one append is under way, new outputs collect in a fresh buffer. `vectors` are float32
    little-endian rows, `labels` name their columns (classifiers alone); `final_output` is the
    output with a finish reason or an error, None until it comes.
    """

    outputs: list[Output] = field(default_factory=list)
    vectors: list[bytes] = field(default_factory=list)
    labels: list[str] | None = None
    final_output: Output | None = None

    def add(self, output: Output) -> None:
        """Add the engine's next output; one with a finish reason or error is also `final_output`.

        None may follow that.
        """
        if output.tokens or output.text:
            self.outputs.append(output)
        self.vectors += output.vectors or ()
        self.labels = self.labels or output.labels
        if output.finish or output.error:
            self.final_output = output

    @property
    def token_count(self) -> int:
        """The number of buffered tokens."""
        return _count(self.outputs)

    def iter_chunks(self, index: int, characters: int) -> Iterator[dict[str, Any]]:
        """Yield the buffered tokens and their text as `chunk` records of up to 256 tokens.

        `index` is the number of tokens, and `characters` the number of text characters, that the
        log holds before the first of these chunks. Each chunk states both for its own start, so
        that a reader need not read the records of tokens that it already has.

        The tokens of one output always share a chunk, which exceeds 256 tokens if that output alone
        does. Their text belongs to them as a whole: an attempt that continues after a chunk must
        neither miss nor repeat any.
        """
        group: list[Output] = []
        for output in self.outputs:
            if group and _count(group) + len(output.tokens) > MAX_CHUNK_TOKENS:
                chunk = _chunk(group, index, characters)
                yield chunk
                index += chunk["count"]
                characters += len(chunk["text"])
                group = []
            group.append(output)
        if group:
            yield _chunk(group, index, characters)

    def iter_results(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the buffered vectors as `result` records of up to 64 kB; nothing without vectors.

        A vector that is larger alone gets a record of its own. `index` is the number of vectors
        that the log holds before the first of these.
        """
        rows = max(1, MAX_RESULT_BYTES // len(self.vectors[0])) if self.vectors else 1
        labels = {"labels": self.labels} if self.labels else {}
        for start in range(0, len(self.vectors), rows):
            part = self.vectors[start : start + rows]
            record = {"type": "result", "index": index + start, "count": len(part)}
            yield record | {"vectors": part} | labels


def _count(group: list[Output]) -> int:
    return sum(len(output.tokens) for output in group)


def _chunk(group: list[Output], index: int, characters: int) -> dict[str, Any]:
    logprobs = [asdict(logprob) for output in group for logprob in output.logprobs or ()]
    chunk = {
        "type": "chunk",
        "index": index,
        "count": _count(group),
        "characters": characters,
        "text": "".join(output.text for output in group),
        "tokens": [token for output in group for token in output.tokens],
    }
    return chunk | ({"logprobs": logprobs} if logprobs else {})
