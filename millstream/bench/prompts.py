"""Prompts of an exact number of tokens, of which no two soon begin alike. Pure."""

from random import Random

POOL = 1 << 16
STRIDE = 40503  # odd, so that a walk over the pool visits every start before it repeats one
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Prompts:
    """Token ids where the vocabulary is known, else as many letters as tokens were asked for.

    A prompt is a slice of one random pool: drawing every token would cost more than sending it.
    """

    def __init__(self, vocabulary: int | None, seed: int) -> None:
        random = Random(seed)
        self._vocabulary = vocabulary
        self._ids = random.choices(range(vocabulary or len(LETTERS)), k=POOL)
        self._start = 0

    def make_prompt(self, tokens: int) -> list[int] | str:
        """A prompt of `tokens` tokens."""
        self._start = (self._start + STRIDE) % POOL
        ids = self._ids[self._start : self._start + tokens]
        while len(ids) < tokens:
            ids += self._ids[: tokens - len(ids)]
        return ids if self._vocabulary else "".join(LETTERS[i] for i in ids)
