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
    def ids(self) -> list[int]:
        """Token ids of the text that was encoded."""


class TokenizerLike(Decoder, Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding:
        """Return the tokens of a text, with special ones such as `<bos>` unless told otherwise."""


class OutputDecoder(Protocol):
    """Turns the events of one stream, which continues what was stored before, into outputs."""

    @property
    def matched_stop(self) -> str:
        """The stop string that has appeared, after which no text follows; empty until then."""

    def continuation_prompt(self) -> TextOrTokens:
        """Return what the server is to continue: the prompt and everything generated before.

        The result is token ids or text. Raises `EngineError` if the text cannot be encoded exactly.
        """

    def decode_delta(self, delta: Delta) -> Output:
        """Return the output that an event adds; its tokens and text may be empty.

        Text that may begin a stop string is held back. Raises `EngineError` if the event lacks
        token ids that are needed.
        """

    def flush(self) -> Output:
        """Return the output held back; call it once, at the end of the stream."""


def extend_sequence(sequence: Sequence, output: Output) -> Sequence:
    """Return a copy of `sequence` to which the tokens and the text of `output` are appended."""
    generated = [*sequence.generated, *output.tokens]
    return replace(sequence, generated=generated, text=sequence.text + output.text)


@dataclass
class TextOutputDecoder:
    """Decodes the stream of a server that sends no token ids, so that only its text is known.

    Each token is given as `UNKNOWN_TOKEN`. Text that may begin a stop string is held back until
    more text decides, and its tokens are held back with it. `continuation_prompt` is encoded with
    `tokenizer`; without one (None) it is text.
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
    def matched_stop(self) -> str:
        """The stop string that has appeared, after which no text follows; empty until then."""
        return self._stops.matched

    def continuation_prompt(self) -> TextOrTokens:
        """Return the prompt and the text so far: token ids if there is a tokeniser, else text.

        Raises `EngineError` if the tokeniser cannot encode the text after the prompt exactly.
        """
        if self.tokenizer is None:
            return bytes_to_text(self.sequence.prompt) + self.sequence.text
        return self.sequence.prompt + _encode_continuation(self.tokenizer, self.sequence)

    def decode_delta(self, delta: Delta) -> Output:
        """Return the text that an event completes, with tokens held back so far; may be empty."""
        self._pending_tokens += delta.token_count
        self._logprobs += map(_to_unknown_logprob, delta.logprobs)
        text = self._drop_repeated(self._stops.push(delta.text))
        return self._release(text) if text else Output(self.sequence.request_id)

    def flush(self) -> Output:
        """Return the text and tokens held back; call it once, at the end of the stream."""
        return self._release(self._drop_repeated(self._stops.flush()))

    def _drop_repeated(self, text: str) -> str:
        known, self._repeated_chars = self._repeated_chars, max(0, self._repeated_chars - len(text))
        return text[known:]

    def _release(self, text: str) -> Output:
        tokens, logprobs = [UNKNOWN_TOKEN] * self._pending_tokens, self._logprobs
        self._pending_tokens, self._logprobs = 0, []
        return Output(self.sequence.request_id, tokens, text, logprobs or None)


class TokenOutputDecoder:
    """Decodes the stream of a server that sends token ids; the text is made from these alone."""

    def __init__(self, sequence: Sequence, decoder: Decoder) -> None:
        self._sequence, self._decoder = sequence, decoder
        self._text = TextStream(decoder, sequence.prompt, sequence.sampling.stop)
        for token in sequence.generated:
            self._text.push(token)

    @property
    def matched_stop(self) -> str:
        """The stop string that has appeared, after which no text follows; empty until then."""
        return self._text.matched_stop

    def continuation_prompt(self) -> TextOrTokens:
        """Return the token ids of the prompt and of all that was generated before."""
        return self._sequence.prompt + self._sequence.generated

    def decode_delta(self, delta: Delta) -> Output:
        """Return the tokens of an event, up to one that completes a stop string, and their text.

        Raises `EngineError` for an event with text but without token ids.
        """
        if delta.tokens is None and delta.text:
            raise _missing_token_ids()
        tokens, text = [], ""
        for token in delta.tokens or ():
            if self.matched_stop:
                break
            tokens.append(token)
            text += self._text.push(token)
        logprobs = [self._to_logprob(each) for each in delta.logprobs[: len(tokens)]]
        return Output(self._sequence.request_id, tokens, text, logprobs or None)

    def flush(self) -> Output:
        """Return the text held back, without tokens; call it once, at the end of the stream."""
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
    """Return the text whose UTF-8 bytes are `tokens`, as for a model without tokeniser.

    Raises ValueError if a token is not a byte or the bytes are not UTF-8.
    """
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
