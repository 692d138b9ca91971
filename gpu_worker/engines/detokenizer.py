"""Turns tokens into text one at a time: never half a character, never the start of a stop string.

The text for a token depends only on the tokens before it, not on how they were grouped. A later
attempt therefore replays the stored tokens, discards their text, and continues exactly.
Pure.
"""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT_CHARACTER = "\ufffd"  # stands for bytes that do not form a character (yet)
MAX_PENDING = 64  # tokens: bounds the cost of a model that emits only invalid bytes
PROMPT_TAIL = 6  # prompt tokens used as context, as in vLLM and TGI


class Decoder(Protocol):
    """The one method of `tokenizers.Tokenizer` that detokenising needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, without that of special tokens unless told otherwise."""


class Detokenizer:
    """Turns one sequence's tokens into text as they come, at a cost of O(1) each.

    The joined text has the same spaces as all tokens decoded at once. `prompt` is only context,
    whose text is not returned. Only a window of tokens is decoded for each new one: the pending
    ones, whose text is not out yet, after the last ones whose text is out, since many decoders
    treat the first token of a text specially.
    """

    def __init__(
        self, decoder: Decoder, prompt: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decoder, self._skip = decoder, skip_special_tokens
        self._context: list[int] = []
        self._pending = list(prompt[-PROMPT_TAIL:])
        self._move_to_context()

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes; empty inside a character.

        After 64 tokens without a whole character, invalid bytes are returned as U+FFFD.
        """
        self._pending.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT_CHARACTER) and len(self._pending) < MAX_PENDING:
            return ""
        self._move_to_context()
        return text

    def flush(self) -> str:
        """Return the text held back, without a character that the output's end has cut."""
        text = self._text().rstrip(REPLACEMENT_CHARACTER)
        self._move_to_context()
        return text

    def _text(self) -> str:
        """The text of the pending tokens, behind their context."""
        text = self._decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(self._pending)  # invalid bytes changed even the context's text

    def _move_to_context(self) -> None:
        """Make the pending tokens, whose text was returned, the context of the next ones."""
        self._context, self._pending = self._pending or self._context, []
        self._context_text = self._decode(self._context)

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=self._skip) if tokens else ""


class StopStringFilter:
    """Cuts one growing text before its first stop string, and holds back what may begin one.

    `matched` is the stop string that was found, empty until then: the one that begins first, and of
    those that begin together the shortest. Without stop strings all text passes at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched = ""

    def push(self, text: str) -> str:
        """Add text, and return all that certainly comes before any stop string.

        The result may be empty and may include text held back earlier; `flush` returns what is held
        back at the end. Once a stop string has `matched` it is always empty.
        """
        if self.matched or not self._stops:
            return "" if self.matched else text
        text = self._held + text
        found = [(at, len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            sure, length = min(found)
            self._held, self.matched = "", text[sure : sure + length]
        else:
            sure = len(text) - self._longest_partial_match(text)
            self._held = text[sure:]
        return text[:sure]

    def flush(self) -> str:
        """Return the text still held back, at the end of the output; empty after a match.

        It looked like the beginning of a stop string, but none followed.
        """
        held, self._held = self._held, ""
        return held

    def _longest_partial_match(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The generated text of one sequence, token by token, until a stop string begins in it.

    Of `stops` the one that begins first counts; it is not part of the text. The tokens of `prompt`
    are only the context in which the first generated ones are decoded. With `skip_special_tokens`
    special tokens have no text.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        stops: Sequence[str],
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(decoder, prompt, skip_special_tokens)
        self._stops = StopStringFilter(stops)

    @property
    def matched_stop(self) -> str:
        """The stop string that has appeared, after which no text follows; empty until then."""
        return self._stops.matched

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain by now; may be empty.

        Text is held back while a character is incomplete or a stop string may have begun. Once
        one has appeared, the result is always empty.
        """
        return self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """Return the text still held back at the end of the output; empty after a stop string."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
