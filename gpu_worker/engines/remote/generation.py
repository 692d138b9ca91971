"""From what a server streams to tokens and text that any attempt can go on from. Pure.

Where the server tells token ids they are the truth, as in an engine of our own: text follows from
them, and who goes on replays them. Elsewhere the text is the truth. Its tokens are then
`UNKNOWN_TOKEN`, as many as the server's events stand for, and who goes on asks for what follows the
prompt and that text.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from typing import Protocol

from gpu_worker.detokenizer import Decoder, Detokenizer, StopStrings, TextStream
from gpu_worker.engine import EngineError, Output, Sequence
from gpu_worker.engines.remote.openai import Delta, Likely, Prompt
from streams.messages import Logprob

UNKNOWN_TOKEN = 0


class Encoding(Protocol):
    @property
    def ids(self) -> list[int]: ...


class Tokenizer(Decoder, Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding: ...


class Generation(Protocol):
    """One stream's output, behind what was stored before it."""

    @property
    def stopped(self) -> bool:
        """True once a stop string has appeared; no text follows."""

    def prompt(self) -> Prompt:
        """What the server is to continue: the prompt and everything that was stored behind it."""

    def take(self, delta: Delta) -> Output:
        """What an event adds; may be empty. Raises `Fault` or `EngineError` as events do."""

    def rest(self) -> Output:
        """What was held back, once nothing follows."""


def behind(sequence: Sequence, output: Output) -> Sequence:
    """The sequence as an attempt would find it that begins after this output."""
    generated = [*sequence.generated, *output.tokens]
    return replace(sequence, generated=generated, text=sequence.text + output.text)


@dataclass
class TextGeneration:
    """The text is the truth. Tokens wait for their text, so that what is stored agrees."""

    sequence: Sequence
    tokenizer: Tokenizer | None
    _stops: StopStrings = field(init=False)
    _known: int = field(init=False)  # characters that were released before, and come once more
    _waiting: int = 0
    _logprobs: list[Logprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = self.sequence.text
        self._stops = StopStrings(self.sequence.sampling.stop)
        self._known = len(text) - len(self._stops.push(text))

    @property
    def stopped(self) -> bool:
        return self._stops.hit

    def prompt(self) -> Prompt:
        """Raises `EngineError` if the tokeniser cannot put the text behind the prompt exactly."""
        if self.tokenizer is None:
            return text_of(self.sequence.prompt) + self.sequence.text
        return self.sequence.prompt + _encoded(self.tokenizer, self.sequence)

    def take(self, delta: Delta) -> Output:
        self._waiting += delta.count
        self._logprobs += map(_unnamed, delta.logprobs)
        text = self._fresh(self._stops.push(delta.text))
        return self._release(text) if text else Output(self.sequence.request_id)

    def rest(self) -> Output:
        return self._release(self._fresh(self._stops.flush()))

    def _fresh(self, text: str) -> str:
        known, self._known = self._known, max(0, self._known - len(text))
        return text[known:]

    def _release(self, text: str) -> Output:
        tokens, logprobs = [UNKNOWN_TOKEN] * self._waiting, self._logprobs
        self._waiting, self._logprobs = 0, []
        return Output(self.sequence.request_id, tokens, text, logprobs or None)


class TokenGeneration:
    """The token ids are the truth."""

    def __init__(self, sequence: Sequence, decoder: Decoder) -> None:
        self._sequence, self._decoder = sequence, decoder
        self._text = TextStream(decoder, sequence.prompt, sequence.sampling.stop)
        for token in sequence.generated:
            self._text.push(token)

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    def prompt(self) -> Prompt:
        return self._sequence.prompt + self._sequence.generated

    def take(self, delta: Delta) -> Output:
        """The tokens up to the one that completes a stop string."""
        if delta.tokens is None and delta.text:
            raise _no_vllm()
        tokens, text = [], ""
        for token in delta.tokens or ():
            if self.stopped:
                break
            tokens.append(token)
            text += self._text.push(token)
        logprobs = [self._named(each) for each in delta.logprobs[: len(tokens)]]
        return Output(self._sequence.request_id, tokens, text, logprobs or None)

    def rest(self) -> Output:
        return Output(self._sequence.request_id, text=self._text.finish())

    def _named(self, likely: Likely) -> Logprob:
        token, text = self._name(likely.text)
        top = [(*self._name(name), value) for name, value in likely.top.items()]
        return Logprob(token, text, likely.logprob, top)

    def _name(self, name: str) -> tuple[int, str]:
        """Of `token_id:<id>`: the id and its text."""
        number = name.removeprefix("token_id:")
        if not number.isdecimal():
            raise _no_vllm()
        token = int(number)
        return token, self._decoder.decode([token], skip_special_tokens=False)


def _no_vllm() -> EngineError:
    return EngineError("upstream_failed", "the server does not tell token ids: it is no vLLM")


def text_of(tokens: List[int]) -> str:
    """The text that travelled as UTF-8 bytes, to a model without tokeniser."""
    return bytes(tokens).decode()


def _unnamed(likely: Likely) -> Logprob:
    top = [(UNKNOWN_TOKEN, text, value) for text, value in likely.top.items()]
    return Logprob(UNKNOWN_TOKEN, likely.text, likely.logprob, top)


def _encoded(tokenizer: Tokenizer, sequence: Sequence) -> list[int]:
    if not sequence.text:
        return []
    ids = tokenizer.encode(sequence.text, add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, sequence.prompt)
    if "".join(map(detokenizer.push, ids)) + detokenizer.flush() != sequence.text:
        message = "the stream broke, and the model's tokenizer cannot continue its text exactly"
        raise EngineError("upstream_failed", message)
    return ids
