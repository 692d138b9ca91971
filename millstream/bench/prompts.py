"""Makes prompts of an exact number of tokens whose beginnings do not soon repeat. Pure."""

from random import Random

POOL = 1 << 16
STRIDE = 40503  # odd, so that a walk over the pool visits every start before it repeats one
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Prompts:
    """Makes prompts: token ids if the vocabulary is known, else a text of one letter per token.

    A prompt is a slice of one random pool, since drawing every token would cost more than sending
    it. A slice's start recurs only after all `POOL` of them.
    """

    def __init__(self, vocabulary: int | None, seed: int) -> None:
        random = Random(seed)
        self._vocabulary = vocabulary
        self._ids = random.choices(range(vocabulary or len(LETTERS)), k=POOL)
        self._start = 0

    def make_prompt(self, tokens: int) -> list[int] | str:
        """Return the next prompt, of `tokens` token ids or letters."""
        self._start = (self._start + STRIDE) % POOL
        ids = self._ids[self._start : self._start + tokens]
        while len(ids) < tokens:
            ids += self._ids[: tokens - len(ids)]
        return ids if self._vocabulary else "".join(LETTERS[i] for i in ids)
