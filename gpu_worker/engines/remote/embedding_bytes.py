"""Packs embeddings as the token log stores them: float32 little-endian rows. Pure."""

import math
import struct

from gpu_worker.engines.engine import EngineError


def pack_vector(vector: list[float], dimensions: int | None = None) -> bytes:
    """Return an embedding as float32 little-endian bytes, cut to its first `dimensions` if given.

    A vector that was cut is scaled to length one again. Raises `EngineError` for an empty vector,
    for values that are not finite, and for more `dimensions` than it has.
    """
    if not vector or not all(map(math.isfinite, vector)):
        raise EngineError("upstream_failed", "the server's embedding is not a list of numbers")
    if dimensions is not None and dimensions != len(vector):
        vector = _truncate(vector, dimensions)
    return struct.pack(f"<{len(vector)}f", *vector)


def _truncate(vector: list[float], dimensions: int) -> list[float]:
    if dimensions > len(vector):
        message = f"dimensions {dimensions} is more than the model's {len(vector)}"
        raise EngineError("unsupported_value", message)
    length = math.hypot(*vector[:dimensions])
    return [value / length if length else 0.0 for value in vector[:dimensions]]
