"""Requests over HTTP that follow no redirect."""

from typing import Any
from urllib.request import HTTPRedirectHandler


class NoRedirects(HTTPRedirectHandler):
    """A handler of urllib for which a redirect is an error.

    Followed, it would carry a key or token to another host, and turn a POST into a GET.
    """

    def redirect_request(self, *_: Any) -> None:
        """Follow none: the answer is an error then."""
