"""Metrics port of a service: `/metrics` for Prometheus, `/healthz` and `/readyz` for probes.

Requests are answered in threads of their own, so that a service whose event loop hangs can still
say so. A web page may let its own name resolve to 127.0.0.1, and then reads what services on its
visitor's machine say without a key: the `Host` gives it away.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

import structlog
from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from streams.base_settings import ServiceSettings
from streams.errors import MillstreamError

log = structlog.get_logger()

LOOP_SECONDS = 2.0  # an event loop that has not answered by then hangs
_SHOWN_CHARACTERS = 100  # of a stranger's `Host`
Checks = Mapping[str, Callable[[], bool]]


def names_this_machine(host: str | None) -> bool:
    """Return whether a `Host` is `localhost` or an address, with or without a port, or is missing.

    Those are no names that anybody else could let resolve to this machine.
    """
    if not host:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


def host_refusal(host: str | None) -> str:
    """Return the sentence for whoever asks by another name."""
    shown = repr((host or "")[:_SHOWN_CHARACTERS])
    return f"this is for this machine alone: ask 127.0.0.1 or localhost, not {shown}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class MetricsAddressUnusable(MillstreamError):
    """The metrics port cannot be bound: it is taken, or its host is not on this machine."""


def not_yet() -> bool:
    """Return False: the check of a part that is not built yet."""
    return False


@contextmanager
def serve_metrics(
    settings: ServiceSettings, checks: Checks, on_scrape: Callable[[], None] | None = None
) -> Iterator[None]:
    """Serve the metrics port until the block ends; without `metrics_port` there is none.

    `/readyz` calls `checks` on the running event loop and answers 200 if all of them return True,
    else 503; the body has each one's answer. `/healthz` answers 503 only if the event loop does
    not turn. On loopback, `/metrics` is for who asks by an address or as `localhost`. `on_scrape`
    is called before each scrape, in another thread. Raises `MetricsAddressUnusable`.
    """
    if not settings.metrics_port:
        yield
        return
    is_local = _is_loopback(settings.metrics_host)
    application = _Application(asyncio.get_running_loop(), checks, on_scrape, is_local)
    server = _bind(settings.metrics_host, settings.metrics_port, application)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True)
    thread.start()
    log.info("metrics_listening", host=settings.metrics_host, port=settings.metrics_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _bind(host: str, port: int, application: "_Application") -> ThreadingWSGIServer:
    server_class = _Ipv6Server if ":" in host else ThreadingWSGIServer
    try:
        return make_server(host, port, application, server_class, _SilentHandler)
    except OSError as error:
        reason = f"cannot serve metrics on {host}:{port}: {error.strerror or error}"
        raise MetricsAddressUnusable(reason) from error


class _Ipv6Server(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    timeout = 10.0  # for a client to send its request

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: a scrape every few seconds is no event."""


class _Application:
    """The WSGI application: the three paths, and 404 for any other."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        checks: Checks,
        on_scrape: Callable[[], None] | None,
        is_local: bool,
    ) -> None:
        self._loop, self._checks, self._on_scrape = loop, checks, on_scrape
        self._is_local = is_local
        self._metrics = make_wsgi_app()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST")
        match environ["PATH_INFO"]:
            case "/metrics" if self._is_local and not names_this_machine(host):
                return _send(start_response, HTTPStatus.FORBIDDEN, {"error": host_refusal(host)})
            case "/metrics":
                if self._on_scrape:
                    self._on_scrape()
                metrics: Iterable[bytes] = self._metrics(environ, start_response)
                return metrics
            case "/healthz":
                return _respond(start_response, self._evaluate({}))
            case "/readyz":
                return _respond(start_response, self._evaluate(self._checks))
        return _send(start_response, HTTPStatus.NOT_FOUND, {"error": "no such path"})

    def _evaluate(self, checks: Checks) -> dict[str, bool]:
        """Call the checks on the event loop and return their answers, with the loop's own."""
        future = asyncio.run_coroutine_threadsafe(_call_all(checks), self._loop)
        try:
            return {"event_loop": True, **future.result(LOOP_SECONDS)}
        except TimeoutError:
            future.cancel()
            return {"event_loop": False}


async def _call_all(checks: Checks) -> dict[str, bool]:
    return {name: check() for name, check in checks.items()}


def _respond(start_response: StartResponse, facts: dict[str, bool]) -> list[bytes]:
    is_ok = all(facts.values())
    status = HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE
    return _send(start_response, status, {"ok": is_ok, **facts})


def _send(start_response: StartResponse, status: HTTPStatus, content: object) -> list[bytes]:
    body = json.dumps(content).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    start_response(f"{status.value} {status.phrase}", headers)
    return [body]
