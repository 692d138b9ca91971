"""Cuts a batch into micro-batches of inputs of like length, so that little is padding. Pure."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def split_into_micro_batches(
    items: Iterable[T], length: Callable[[T], int], max_tokens: int, max_padding: float
) -> list[list[T]]:
    """Group items of like length into micro-batches, each to be padded to its longest item.

    The shortest come first. `length` returns an item's tokens. A micro-batch has at most
    `max_tokens` tokens with padding, of which at most `max_padding` are padding: beyond that,
    another micro-batch is cheaper. An item longer than `max_tokens` is a micro-batch alone. No
    items give an empty list.
    """
    batches: list[list[T]] = []
    tokens = 0  # of the last micro-batch, without its padding
    for item in sorted(items, key=length):
        padded = (len(batches[-1]) + 1) * length(item) if batches else 0
        if not batches or padded > max_tokens or padded - tokens - length(item) > max_padding:
            batches.append([])
            tokens = 0
        batches[-1].append(item)
        tokens += length(item)
    return batches
