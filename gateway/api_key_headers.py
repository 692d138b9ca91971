"""API keys in the headers of requests, wherever popular clients put them."""

from collections.abc import Iterable

# Of Azure OpenAI's clients, of Anthropic's, of Google's
KEY_HEADERS = (b"api-key", b"x-api-key", b"x-goog-api-key")


def find_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the API key in the headers of a request, whose names are in lower case; else None.

    A key in `Authorization: Bearer` comes before one in a header of `KEY_HEADERS`.
    """
    found = dict(headers)
    if key := _parse_bearer(found.get(b"authorization", b"")):
        return key
    return next((_decode(found[name]) for name in KEY_HEADERS if found.get(name)), None)


def _parse_bearer(header: bytes) -> str | None:
    scheme, _, key = header.strip().replace(b"\t", b" ").partition(b" ")
    return _decode(key) if scheme.lower() == b"bearer" else None


def _decode(key: bytes) -> str:
    """The text of a key: clients send letters beyond ASCII as UTF-8, some as Latin-1."""
    try:
        return key.decode().strip()
    except UnicodeDecodeError:
        return key.decode("latin-1").strip()
