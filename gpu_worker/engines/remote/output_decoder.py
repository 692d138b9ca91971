"""Decodes a server's stream into tokens and text that a later attempt can continue. Pure.

Where the server sends token ids they are authoritative, as in the local engines: text is decoded
from them, and a later attempt replays them. Elsewhere the text is authoritative. Its tokens are
then `UNKNOWN_TOKEN`, as many as the server's events stand for, and a later attempt asks for what
follows the prompt and that text.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from typing import Protocol

from gpu_worker.engines.detokenizer import Decoder, Detokenizer, StopStringFilter, TextStream
from gpu_worker.engines.engine import EngineError, Output, Sequence
from gpu_worker.engines.remote.openai_protocol import Delta, TextOrTokens, TokenLogprob
from streams.messages import Logprob

UNKNOWN_TOKEN = 0


class Encoding(Protocol):
    """The part of `tokenizers.Encoding` that is needed here."""

    @property
    def ids(self) -> list[int]: ...


class TokenizerLike(Decoder, Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding: ...


class OutputDecoder(Protocol):
    """Decodes one stream, which continues what was stored before it."""

    @property
    def is_stopped(self) -> bool:
        """True once a stop string has appeared; no text follows it."""

    def continuation_prompt(self) -> TextOrTokens:
        """Return what the server is to continue: the prompt and everything stored behind it."""

    def decode_delta(self, delta: Delta) -> Output:
        """Return the output that an event adds; it may be empty. Raises `EngineError`."""

    def flush(self) -> Output:
        """Return the output that was held back, at the end of the stream."""


def extend_sequence(sequence: Sequence, output: Output) -> Sequence:
    """Return the sequence as an attempt would get it that begins after this output."""
    generated = [*sequence.generated, *output.tokens]
    return replace(sequence, generated=generated, text=sequence.text + output.text)


@dataclass
class TextOutputDecoder:
    """Decodes the stream of a server that sends no token ids: the text is authoritative.

    Tokens are held back with their text, so that stored tokens and text agree.
    """

    sequence: Sequence
    tokenizer: TokenizerLike | None
    _stops: StopStringFilter = field(init=False)
    _repeated_chars: int = field(init=False)  # already emitted, to drop when they come again
    _pending_tokens: int = 0
    _logprobs: list[Logprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = self.sequence.text
        self._stops = StopStringFilter(self.sequence.sampling.stop)
        self._repeated_chars = len(text) - len(self._stops.push(text))

    @property
    def is_stopped(self) -> bool:
        return self._stops.hit

    def continuation_prompt(self) -> TextOrTokens:
        """Return the prompt and the text so far, as token ids if there is a tokeniser.

        Raises `EngineError` if the tokeniser cannot encode the text behind the prompt exactly.
        """
        if self.tokenizer is None:
            return bytes_to_text(self.sequence.prompt) + self.sequence.text
        return self.sequence.prompt + _encode_continuation(self.tokenizer, self.sequence)

    def decode_delta(self, delta: Delta) -> Output:
        self._pending_tokens += delta.token_count
        self._logprobs += map(_to_unknown_logprob, delta.logprobs)
        text = self._drop_repeated(self._stops.push(delta.text))
        return self._release(text) if text else Output(self.sequence.request_id)

    def flush(self) -> Output:
        return self._release(self._drop_repeated(self._stops.flush()))

    def _drop_repeated(self, text: str) -> str:
        known, self._repeated_chars = self._repeated_chars, max(0, self._repeated_chars - len(text))
        return text[known:]

    def _release(self, text: str) -> Output:
        tokens, logprobs = [UNKNOWN_TOKEN] * self._pending_tokens, self._logprobs
        self._pending_tokens, self._logprobs = 0, []
        return Output(self.sequence.request_id, tokens, text, logprobs or None)


class TokenOutputDecoder:
    """Decodes the stream of a server that sends token ids, which are authoritative."""

    def __init__(self, sequence: Sequence, decoder: Decoder) -> None:
        self._sequence, self._decoder = sequence, decoder
        self._text = TextStream(decoder, sequence.prompt, sequence.sampling.stop)
        for token in sequence.generated:
            self._text.push(token)

    @property
    def is_stopped(self) -> bool:
        return self._text.stopped

    def continuation_prompt(self) -> TextOrTokens:
        return self._sequence.prompt + self._sequence.generated

    def decode_delta(self, delta: Delta) -> Output:
        """Return the tokens of an event, up to one that completes a stop string.

        Raises `EngineError` for text without token ids.
        """
        if delta.tokens is None and delta.text:
            raise _missing_token_ids()
        tokens, text = [], ""
        for token in delta.tokens or ():
            if self.is_stopped:
                break
            tokens.append(token)
            text += self._text.push(token)
        logprobs = [self._to_logprob(each) for each in delta.logprobs[: len(tokens)]]
        return Output(self._sequence.request_id, tokens, text, logprobs or None)

    def flush(self) -> Output:
        return Output(self._sequence.request_id, text=self._text.finish())

    def _to_logprob(self, token_logprob: TokenLogprob) -> Logprob:
        token, text = self._parse_token(token_logprob.text)
        top = [
            (*self._parse_token(name), value) for name, value in token_logprob.alternatives.items()
        ]
        return Logprob(token, text, token_logprob.logprob, top)

    def _parse_token(self, name: str) -> tuple[int, str]:
        """Return the id and the text of a token named `token_id:<id>`."""
        number = name.removeprefix("token_id:")
        if not number.isdecimal():
            raise _missing_token_ids()
        token = int(number)
        return token, self._decoder.decode([token], skip_special_tokens=False)


def _missing_token_ids() -> EngineError:
    return EngineError("upstream_failed", "the server sends no token ids: it is no vLLM")


def bytes_to_text(tokens: List[int]) -> str:
    """Return the text whose UTF-8 bytes are the tokens of a model without tokeniser."""
    return bytes(tokens).decode()


def _to_unknown_logprob(token_logprob: TokenLogprob) -> Logprob:
    top = [(UNKNOWN_TOKEN, text, value) for text, value in token_logprob.alternatives.items()]
    return Logprob(UNKNOWN_TOKEN, token_logprob.text, token_logprob.logprob, top)


def _encode_continuation(tokenizer: TokenizerLike, sequence: Sequence) -> list[int]:
    if not sequence.text:
        return []
    ids = tokenizer.encode(sequence.text, add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, sequence.prompt)
    if "".join(map(detokenizer.push, ids)) + detokenizer.flush() != sequence.text:
        message = "the stream broke, and the model's tokenizer cannot continue its text exactly"
        raise EngineError("upstream_failed", message)
    return ids
