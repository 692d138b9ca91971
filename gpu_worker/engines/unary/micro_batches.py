"""Cuts a batch into micro-batches of inputs of like length, so that little is padding. Pure."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def split_into_micro_batches(
    items: Iterable[T], length: Callable[[T], int], max_tokens: int, max_padding: float
) -> list[list[T]]:
    """Cut items, shortest first, into micro-batches of at most `max_tokens` with their padding.

    A micro-batch has at most `max_padding` tokens of padding: beyond that, another micro-batch is
    cheaper. An item longer than `max_tokens` is a micro-batch by itself.
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
