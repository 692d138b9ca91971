"""The sequences that an engine runs before it serves: the largest step, and a warm-up. Pure."""

from collections.abc import Iterator

from gpu_worker.engines.engine import Sequence
from streams.messages import Sampling

WARM_UP_SEQUENCES = 8


def largest_step_sequences(
    max_batch_tokens: int, max_sequences: int, context: int
) -> Iterator[Sequence]:
    """Yield `max_sequences` sequences that together make up the largest step.

    Their prompts have `max_batch_tokens` tokens in total, or as many as fit where each is limited
    by `context`, and one token is sampled for each of them.
    """
    remaining_tokens = max_batch_tokens
    for sequences_left in reversed(range(max_sequences)):
        length = min(remaining_tokens - sequences_left, context - 2)
        remaining_tokens -= length
        sampling = Sampling(max_tokens=2, temperature=1.0, ignore_eos=True)
        yield Sequence(f"largest-{sequences_left}", [1] * length, sampling)


def warmup_sequences(longest: int, max_sequences: int) -> Iterator[Sequence]:
    """Yield sequences that make an engine run full and small batches, prefill and decode.

    The first has a prompt of `longest` tokens, the others of 1, 2, 3, … tokens. There are at most
    `WARM_UP_SEQUENCES` (8) of them and no more than `max_sequences`. Each generates two tokens,
    alternately greedy and at random.
    """
    lengths = [longest, *range(1, min(WARM_UP_SEQUENCES, longest, max_sequences))]
    for number, length in enumerate(lengths):
        sampling = Sampling(max_tokens=2, temperature=float(number % 2), ignore_eos=True)
        yield Sequence(f"warm-up-{number}", [number] * length, sampling)
