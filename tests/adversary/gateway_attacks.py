"""Attacks at the gateway and the admin port: with a tenant's API key, and by a web page."""

import asyncio
import re
import secrets
from collections.abc import Mapping
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

from admin.operation_table import OPERATIONS
from tests.adversary.canaries import Received
from tests.adversary.cell import KEYS, MALLORY, MODEL, NORTHWIND, TAILSPIN, RunningCell
from tests.adversary.target_subjects import DAY, MARK, Names
from tests.support.gateways import JSON, HttpResponse, RunningGateway

PUBLIC_HOST = "api.example.com"  # of a proxy before the gateway
PAGES_HOST = "page.example"
_PATHS = (
    "/",
    "/healthz",
    "/health",
    "/version",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/usage",
    "/v1/requests",
    "/v1/keys",
    "/v1/tenants",
    "/admin/v1/tenants",
    "/debug",
    "/.env",
    "/page/../service.py",
    "/page/%2e%2e/service.py",
)
_OF_A_BATCH = ("", "/results", "/items/l0", "/cancel", "/pause", "/resume", "/retry")
_OF_AN_UPLOAD = ("/parts", "/complete", "/cancel")
_OF_A_RESPONSE = ("", "?stream=true&starting_after=0", "/input_items", "/cancel")
_OF_AN_ENDPOINT = (
    "",
    "/rotate_secret",
    "/test",
    "/deliveries",
    f"/deliveries/evt_{MARK}/redeliver",
)
_SIMPLE_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_SECONDS = 20.0


class HttpAttacker:
    """Asks over HTTP, and counts tries and refusals (any status of 400 and above)."""

    def __init__(self, received: Received) -> None:
        self._received = received
        self.tries = self.refused = 0

    async def ask(
        self, server: RunningGateway, method: str, path: str, body: object = None, **options: Any
    ) -> HttpResponse:
        """An answer, all of which counts as read."""
        answer = await self.ask_blindly(server, method, path, body, **options)
        self.read(answer, path)
        return answer

    def read(self, answer: HttpResponse, path: str) -> None:
        """Count an answer as read, but for the path, which an error repeats."""
        head = "\n".join(f"{k}: {v}" for k, v in answer.headers.items())
        words = sorted(re.split(r"[/?=&]", path), key=len, reverse=True)
        said = answer.body
        for word in filter(None, words):
            said = said.replace(word.encode(), b"")
        self._received.add(head.encode(), said)

    async def ask_blindly(
        self, server: RunningGateway, method: str, path: str, body: object = None, **options: Any
    ) -> HttpResponse:
        """An answer that the asker cannot read."""
        self.tries += 1
        async with asyncio.timeout(_SECONDS):
            answer = await server.request(method, path, body, **options)
        self.refused += answer.status >= 400
        return answer

    def note(self, frame: object) -> None:
        self._received.add(repr(frame).encode())


async def use_key(cell: RunningCell, names: list[Names], received: Received) -> tuple[int, int]:
    """A tenant's key, at every path, with other tenants' requests, names and keys in all places."""
    attacker, host = HttpAttacker(received), {"Host": PUBLIC_HOST}
    key, server = KEYS[MALLORY], cell.gateways[0]
    for path in _PATHS:
        for method in ("GET", "POST", "DELETE", "PUT"):
            await attacker.ask(server, method, path, key=key, headers=host)
    for each in names:
        await _name_others(attacker, server, each)
    for wrong in (NORTHWIND, "null", "", KEYS[NORTHWIND][:-1], KEYS[NORTHWIND].upper(), "*", "%00"):
        await attacker.ask(server, "GET", "/v1/models", key=wrong, headers=host)
    await _use_key_at_admin_port(cell, attacker)
    return attacker.tries, attacker.refused


async def _name_others(attacker: HttpAttacker, server: RunningGateway, names: Names) -> None:
    """Others' ids in paths, in headers and in bodies."""
    key, host = KEYS[MALLORY], {"Host": PUBLIC_HOST}
    for path in _paths_of(names):
        for method in ("GET", "POST", "DELETE"):
            await attacker.ask(server, method, path, key=key, headers=host)
    for headers in _spoofed(names):
        asked = {"model": MODEL, "prompt": MARK, "max_tokens": 1, "user": names.tenant}
        spoofed = {**host, **headers}
        await attacker.ask(server, "POST", "/v1/completions", asked, key=key, headers=spoofed)
    for path, body, told in _bodies_of(names):
        answer = await attacker.ask_blindly(server, "POST", path, body, key=key, headers=host)
        attacker.read(answer, told)


def _paths_of(names: Names) -> list[str]:
    request, tenant = names.request, names.tenant
    return [
        f"/v1/completions/{request}",
        f"/v1/chat/completions/{request}",
        f"/v1/responses/{request}",
        *(f"/v1/responses/resp_{names.response}{each}" for each in _OF_A_RESPONSE),
        *(f"/v1/webhook_endpoints/we_{names.webhook}{each}" for each in _OF_AN_ENDPOINT),
        "/v1/webhook_endpoints?limit=100",
        f"/v1/requests/{request}",
        f"/v1/requests/{request}/cancel",
        *(f"/v1/batches/batch_{names.batch}{each}" for each in _OF_A_BATCH),
        *(f"/v1/files/file-{names.file}{each}" for each in ("", "/content")),
        *(f"/v1/uploads/upload_{names.file}{each}" for each in _OF_AN_UPLOAD),
        "/v1/batches?limit=100",
        "/v1/files?limit=100",
        "/v1/uploads",
        f"/v1/usage?tenant={tenant}",
        f"/v1/usage?by=key&start={DAY}&end={DAY}",
        f"/v1/models/{tenant}",
    ]


def _bodies_of(names: Names) -> list[tuple[str, dict[str, str], str]]:
    """Calls that name others' ids in a body: the path, the body, and the id."""
    file, response = f"file-{names.file}", f"resp_{names.response}"
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    continued = {"model": MODEL, "input": MARK, "previous_response_id": response}
    return [("/v1/batches", batch, file), ("/v1/responses", continued, response)]


def _spoofed(names: Names) -> list[dict[str, str]]:
    return [
        {"x-request-id": names.request},
        {"Idempotency-Key": names.request},
        {"OpenAI-Organization": names.tenant},
        {"X-Tenant": names.tenant, "X-Forwarded-User": names.tenant},
        {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1;host=localhost"},
        {"Last-Event-ID": f"{names.request}:0"},
    ]


async def _use_key_at_admin_port(cell: RunningCell, attacker: HttpAttacker) -> None:
    admin = RunningGateway(cell.admin_port, asyncio.Event())
    for operation in OPERATIONS.values():
        path = operation.documented_path
        for name in ("name", "id"):
            path = path.replace(f"{{{name}}}", NORTHWIND)
        body = {"name": MARK} if operation.has_body else None
        for key in (KEYS[MALLORY], None):
            await attacker.ask(admin, operation.method, path, body, key=key)


async def use_websocket(
    cell: RunningCell, names: list[Names], received: Received
) -> tuple[int, int]:
    """A tenant's key on a WebSocket: others' requests resumed and cancelled, and guessed ids."""
    attacker = HttpAttacker(received)
    ids = [each.request for each in names]
    guessed = [f"{int(each, 16) + step:032x}" for each in ids for step in (-1, 1)]
    guessed += [secrets.token_hex(16) for _ in range(20)]
    for server in cell.gateways:
        async with server.socket(key=KEYS[MALLORY]) as socket:
            wanted = (*ids, *guessed, "*", ">", f"{ids[0]}.>")
            for number, request in enumerate(wanted):
                for frame in (
                    {"type": "cancel", "id": "victim"},
                    {"type": "cancel", "id": request},
                    {"type": "resume", "id": f"r{number}", "request_id": request, "after": -1},
                ):
                    attacker.tries += 1
                    await socket.send(**frame)
            waiting = {f"r{number}" for number in range(len(wanted))}
            while waiting:
                frame = await socket.receive()
                attacker.note({k: v for k, v in frame.items() if k not in ("id", "message")})
                attacker.refused += frame["type"] == "error"
                if frame["type"] in ("error", "done"):
                    waiting.discard(frame.get("id", ""))
    return attacker.tries, attacker.refused


async def visit_page(cell: RunningCell, names: list[Names], received: Received) -> tuple[int, int]:
    """A page that the operator has open: cross-origin requests, DNS rebinding, and WebSockets.

    A browser sends simple requests, and reads an answer if it is of the same origin, as after
    rebinding, or if the answer allows it. A name that was rebound is that of the page.
    """
    attacker = HttpAttacker(received)
    for port in (cell.gateways[0].port, cell.gateways[1].port, cell.admin_port, cell.metrics_port):
        server = RunningGateway(port, asyncio.Event())
        for path in (*_PATHS, *_paths_of(names[0]), "/admin/v1/bootstrap", "/admin/v1/keys"):
            rebound = {"Host": f"{PAGES_HOST}:{port}", "Origin": f"http://{PAGES_HOST}:{port}"}
            await attacker.ask(server, "GET", path, key=None, headers=rebound)
            for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
                await _send_across(attacker, server, path, host)
        await _open_websocket(attacker, server)
    await _speak_nats(cell, attacker)
    return attacker.tries, attacker.refused


async def _send_across(
    attacker: HttpAttacker, server: RunningGateway, path: str, host: str
) -> None:
    """Whatever a page may send to another origin: it is read only if the answer says so."""
    origin = f"https://{PAGES_HOST}"
    asked = b'{"model": "mock", "prompt": "adversary", "max_tokens": 1, "name": "adversary"}'
    requests: list[tuple[str, bytes | None, Mapping[str, str]]] = [("GET", None, {})]
    requests += [("POST", asked, {"Content-Type": each}) for each in _SIMPLE_TYPES]
    wanted = {"Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "*"}
    requests.append(("OPTIONS", None, wanted))
    for method, body, headers in requests:
        told = {"Host": host, "Origin": origin, "Sec-Fetch-Site": "cross-site", **headers}
        answer = await attacker.ask_blindly(server, method, path, body, key=None, headers=told)
        if answer.headers.get("access-control-allow-origin") in ("*", origin):
            attacker.read(answer, path)


async def _open_websocket(attacker: HttpAttacker, server: RunningGateway) -> None:
    """A browser lets any page open a WebSocket, and sends no key."""
    for protocols in ((JSON,), (JSON, "bearer."), (JSON, "bearer.null"), ()):
        attacker.tries += 1
        try:
            async with server.socket(
                None,
                key=None,
                headers={"Origin": f"https://{PAGES_HOST}"},
                subprotocols=[Subprotocol(each) for each in protocols] or None,
            ) as socket:
                attacker.note(await socket.receive(2))
        except (InvalidHandshake, ConnectionClosed, OSError, EOFError, ValueError):
            attacker.refused += 1


async def _speak_nats(cell: RunningCell, attacker: HttpAttacker) -> None:
    """A request whose body is of NATS's protocol, to its port: what a form can send."""
    body = b"CONNECT {}\r\nPUB infer.cancel." + f"{TAILSPIN}.{MARK}".encode() + b" 0\r\n\r\n"
    for number in range(len(cell.broker.nodes)):
        attacker.tries += 1
        port = int(cell.url(number).rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(_SECONDS):
            said = await reader.read()  # until the server closes
        attacker.refused += b"-ERR" in said
        writer.close()
