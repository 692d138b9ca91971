"""Hashes the JSON of a large value in small pieces, so that no event loop waits for it. Pure.

`json.dumps` is one call into C, which holds Python's lock to its end, in a thread, too: 5 to 20 ms
for 1 MB. A piece takes a fraction of a millisecond, and hashing it releases the lock.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

PIECE = 16_384  # about so many characters are encoded at once
NUMBERS = 4096  # of a list, that are encoded at once
_NUMBER_WEIGHT = 8  # characters that stand for anything that is neither a text nor a container

_encode = json.JSONEncoder(default=vars, sort_keys=True).encode  # as `json.dumps` with these


def sha256_of_json(value: object) -> str:
    """Return, in hexadecimal, the SHA-256 of `json.dumps(value, default=vars, sort_keys=True)`.

    Keys of objects must be text. Raises TypeError for what is not JSON and has no `vars`.
    """
    hashed = hashlib.sha256()
    _add(value, lambda text: hashed.update(text.encode()))
    return hashed.hexdigest()


def _add(value: Any, write: Callable[[str], None]) -> None:
    if value is None or isinstance(value, (int, float)) or _weigh(value) <= PIECE:
        write(_encode(value))
    elif isinstance(value, str):
        pieces = (value[start : start + PIECE] for start in range(0, len(value), PIECE))
        write('"')
        for piece in pieces:
            write(_encode(piece)[1:-1])
        write('"')
    elif isinstance(value, dict):
        for number, key in enumerate(sorted(value)):
            write(f"{', ' if number else '{'}{_encode(key)}: ")
            _add(value[key], write)
        write("}")
    elif isinstance(value, (list, tuple)):
        _add_items(value, write)
    else:
        _add(vars(value), write)


def _add_items(items: list[Any] | tuple[Any, ...], write: Callable[[str], None]) -> None:
    for number, batch in enumerate(_batches(items)):
        write(", " if number else "[")
        if len(batch) == 1:
            _add(batch[0], write)
        else:
            write(_encode(batch)[1:-1])
    write("]")


def _batches(items: list[Any] | tuple[Any, ...]) -> Iterable[list[Any] | tuple[Any, ...]]:
    """Yield the items in order, as many in a batch as are to be encoded at once; at least one."""
    for start in range(0, len(items), NUMBERS):
        part = items[start : start + NUMBERS]
        if _are_numbers(part):
            yield part
            continue
        batch, weight = list[Any](), 0
        for item in part:
            weight += (more := _weigh(item))
            if batch and weight > PIECE:
                yield batch
                batch, weight = [], more
            batch.append(item)
        yield batch


def _weigh(value: Any) -> int:
    """Return about how many characters a value's JSON has; any number above `PIECE` if more."""
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, dict):
        return _sum_weights(part for item in value.items() for part in item)
    if isinstance(value, (list, tuple)):
        if len(value) > PIECE or _are_numbers(value):
            return len(value) * _NUMBER_WEIGHT
        return _sum_weights(value)
    if value is None or isinstance(value, (int, float)):
        return _NUMBER_WEIGHT
    return _weigh(vars(value))


def _are_numbers(items: list[Any] | tuple[Any, ...]) -> bool:
    return set(map(type, items)) == {int}


def _sum_weights(values: Iterable[Any]) -> int:
    weight = 2
    for value in values:
        weight += _weigh(value)
        if weight > PIECE:
            break
    return weight
