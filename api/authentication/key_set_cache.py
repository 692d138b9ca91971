"""An identity provider's public keys as last fetched, kept while the provider does not answer."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPMessage
from typing import IO
from urllib.error import URLError

import structlog

from api.authentication.key_set import KeySet
from api.authentication.oidc_settings import OidcSettings, check_url
from streams.errors import Refused

log = structlog.get_logger()

MAX_BYTES = 256 * 1024
FETCH_SECONDS = 5.0
RETRY_SECONDS = 30.0  # between fetches for key ids that are not known
FIRST_RETRY_SECONDS = 2.0  # between fetches while there are no keys at all
REFRESH_SECONDS = 600.0  # a key that the issuer withdrew is used no longer than this
Fetch = Callable[[str], bytes]


class IssuerUnreachable(Refused):
    """The public keys of a token's issuer cannot be had, so the token can be neither way judged."""

    code = "issuer_unreachable"

    def __init__(self, issuer: str) -> None:
        super().__init__(f"the keys of the issuer {issuer} cannot be had; try again", 2.0)
        self.issuer = issuer


class _RedirectRefusal(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        """Follow nothing: a redirect could lead to a host that nobody has named."""


_OPENER = urllib.request.build_opener(_RedirectRefusal)


def fetch_document(url: str) -> bytes:
    """Return what a URL has, blocking; raises OSError or ValueError, also for a redirect."""
    try:
        with _OPENER.open(url, timeout=FETCH_SECONDS) as response:
            data: bytes = response.read(MAX_BYTES + 1)
    except HTTPException as error:
        raise URLError(repr(error)) from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"{url} has more than {MAX_BYTES} bytes")
    return data


class KeySetCache:
    """The key set of one issuer: fetched when first needed, for unknown ids, and now and then.

    At most one fetch runs at a time, and one begins at most every `RETRY_SECONDS`, or every
    `FIRST_RETRY_SECONDS` until the first has succeeded.
    """

    def __init__(
        self,
        settings: OidcSettings,
        fetch: Fetch = fetch_document,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._fetch, self._monotonic = settings, fetch, monotonic
        self._keys: KeySet | None = None
        self._fetched_at = self._tried_at = -float("inf")  # monotonic seconds
        self._fetching: asyncio.Task[None] | None = None

    async def find(self, kid: str | None) -> KeySet:
        """Return the key set, fetched anew if it is old or lacks this id (None: any will do).

        Cancelling leaves a fetch running for others. Raises `IssuerUnreachable` if no key set was
        ever had.
        """
        if self._is_wanted(kid):
            self._start_fetch()
        if self._fetching and self._lacks(kid):
            await asyncio.shield(self._fetching)
        if self._keys is None:
            raise IssuerUnreachable(self._settings.issuer)
        return self._keys

    def _lacks(self, kid: str | None) -> bool:
        return self._keys is None or (kid is not None and not self._keys.has(kid))

    def _is_wanted(self, kid: str | None) -> bool:
        now = self._monotonic()
        is_old = now - self._fetched_at >= REFRESH_SECONDS
        pause = RETRY_SECONDS if self._keys else FIRST_RETRY_SECONDS
        return (is_old or self._lacks(kid)) and now - self._tried_at >= pause

    def _start_fetch(self) -> None:
        if self._fetching is None:
            self._tried_at = self._monotonic()
            self._fetching = asyncio.create_task(self._refresh(), name="key-set")

    async def _refresh(self) -> None:
        try:
            found = await asyncio.to_thread(self._load)
        except (OSError, ValueError) as error:
            log.warning("key_set_unreachable", issuer=self._settings.issuer, error=repr(error))
        else:
            self._keys, self._fetched_at = found, self._monotonic()
            log.info("key_set_loaded", issuer=self._settings.issuer, keys=len(found))
        finally:
            self._fetching = None

    def _load(self) -> KeySet:
        return KeySet(self._fetch(self._settings.jwks_url or self._discover()))

    def _discover(self) -> str:
        """Return the URL of the key set, by OpenID Connect Discovery 1.0."""
        issuer = self._settings.issuer
        url = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
        document = json.loads(self._fetch(url))
        if not isinstance(document, dict) or document.get("issuer") != issuer:
            raise ValueError(f"the discovery document at {url} is not about this issuer")
        return check_url(str(document.get("jwks_uri")))

    async def close(self) -> None:
        """End a fetch that runs. Idempotent."""
        if self._fetching:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])
