"""Makes prompts of an exact number of tokens whose beginnings do not soon repeat. Pure."""

from random import Random

POOL = 1 << 16
STRIDE = 40503  # odd, so that a walk over the pool visits every start before it repeats one
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Prompts:
    """Makes the prompts of a load: random token ids, or random letters for an unknown vocabulary.

    `vocabulary` is the number of token ids of the model; with None a prompt is text, with one
    letter for each token asked for. The same `seed` gives the same prompts. Each prompt is a slice
    of one random pool, because drawing every token would cost more than sending it. Of 65,536
    (`POOL`) prompts in a row, no two begin at the same place in the pool.
    """

    def __init__(self, vocabulary: int | None, seed: int) -> None:
        random = Random(seed)
        self._vocabulary = vocabulary
        self._ids = random.choices(range(vocabulary or len(LETTERS)), k=POOL)
        self._start = 0

    def make_prompt(self, tokens: int) -> list[int] | str:
        """Return the next prompt: a list of `tokens` token ids, or a text of `tokens` letters.

        It is a text only if the vocabulary is unknown.
        """
        self._start = (self._start + STRIDE) % POOL
        ids = self._ids[self._start : self._start + tokens]
        while len(ids) < tokens:
            ids += self._ids[: tokens - len(ids)]
        return ids if self._vocabulary else "".join(LETTERS[i] for i in ids)
