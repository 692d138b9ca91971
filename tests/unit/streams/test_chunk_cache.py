"""Chunks that were read last stay in memory, up to a limit in bytes."""

from streams.records.files.chunk_cache import ChunkCache


def test_a_chunk_is_found_until_others_need_its_room() -> None:
    """The chunk used least lately goes first; reading one counts as use."""
    cache = ChunkCache(max_bytes=20)
    cache.add("a", b"a" * 10)
    cache.add("b", b"b" * 10)
    assert cache.find("a") == b"a" * 10
    cache.add("c", b"c" * 10)
    assert cache.find("b") is None
    assert cache.find("a") == b"a" * 10
    assert cache.find("c") == b"c" * 10


def test_a_chunk_that_comes_twice_counts_once() -> None:
    """Two requests may read the same chunk at once."""
    cache = ChunkCache(max_bytes=20)
    for _ in range(3):
        cache.add("a", b"a" * 10)
    cache.add("b", b"b" * 10)
    assert cache.find("a") is not None


def test_a_chunk_that_is_too_large_is_not_kept() -> None:
    """The limit holds for a single chunk, too."""
    cache = ChunkCache(max_bytes=5)
    cache.add("a", b"a" * 6)
    assert cache.find("a") is None
    cache.add("b", b"b" * 5)
    assert cache.find("b") == b"b" * 5
