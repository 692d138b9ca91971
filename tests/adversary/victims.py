"""Requests of other tenants that run throughout; each must end right, once, where it began.

Each prompt has a canary in it. What an answer should be is known: the mock's text is a function of
its prompt.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import nats.errors
from websockets.exceptions import WebSocketException

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.mock import MockEngine
from streams import messages
from streams.headers import MESSAGE_ID, ROUTE
from streams.messages import Sampling
from tests.adversary.canaries import OF_BATCHES, OF_RESPONSES, Canaries
from tests.adversary.cell import KEYS, MODEL, NORTHWIND, SECOND, TAILSPIN, RunningCell
from tests.support.accounts_cell import AccountClient
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway, text_of

PROMPTS = {
    (NORTHWIND, MODEL): "mulberry-55d1e0",
    (NORTHWIND, SECOND): "tamarind-b80c3f",
    (TAILSPIN, MODEL): "cardamom-27fa9d",
}
LINE = "juniper-4e71b2"  # in prompts of lines of batches
INPUT = "saffron-c3d908"  # of stored responses
STUCK_SECONDS = 20.0
LINES = 2  # of a batch
NO_EVENT = "quota.threshold_reached"  # the victims have no quotas
_FINAL = ("completed", "failed", "expired", "cancelled", "incomplete")
SHORT, LONG = 12, 200  # tokens; a long one is there for a second to be aimed at


def expected_text(prompt: str, max_tokens: int) -> str:
    """Answer of the mock to a prompt."""
    engine, text = MockEngine(ttft_ms=0, itl_ms=0), ""
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
    engine.add(Sequence("expected", list(prompt.encode()), sampling))
    while not engine.idle:
        text += "".join(output.text for output in engine.step())
    return text


@dataclass
class Victims:
    """Running clients of two tenants. `wrong` has what ended otherwise than it should."""

    cell: RunningCell
    canaries: Canaries
    ended: int = 0
    wrong: list[str] = field(default_factory=list)
    live: dict[tuple[str, str], str] = field(default_factory=dict)  # newest request by its prompts
    batch: str = ""  # the newest one, and its input file
    file: str = ""
    response: str = ""  # the newest one that is stored
    webhook: str = ""  # an endpoint to which nothing is sent
    _rounds: list[int] = field(default_factory=lambda: [0] * 5)

    def request_of(self, tenant: str, model: str) -> str:
        """The id of the newest request of one kind; it may run, and it may have ended."""
        return self.live[tenant, model]

    async def settle(self) -> None:
        """Return once every client has begun a request, and ended it, from now on.

        A request that does not end is noted as wrong.
        """
        wanted = [each + 2 for each in self._rounds]
        try:
            await eventually(
                lambda: all(a >= b for a, b in zip(self._rounds, wanted, strict=True)),
                STUCK_SECONDS,
            )
        except AssertionError:
            late = [n for n, (a, b) in enumerate(zip(self._rounds, wanted, strict=True)) if a < b]
            self.wrong.append(f"requests of clients {late} do not end in {STUCK_SECONDS:g} s")

    def _begin(self, tenant: str, model: str) -> str:
        return f"{PROMPTS[tenant, model]} {secrets.token_hex(4)}"

    def _note(self, tenant: str, model: str, request_id: str) -> None:
        self.live[tenant, model] = request_id
        self.canaries.request_ids.add(request_id.encode())

    def _end(self, who: str, found: object, wanted: object) -> None:
        self.ended += 1
        if found != wanted:
            self.wrong.append(f"{who}: {str(found)[:200]!r}, not {str(wanted)[:200]!r}")

    async def run(self) -> None:
        """Ask, until cancelled."""
        clients: list[Callable[[], Awaitable[None]]] = [
            self._ask_by_http,
            self._ask_by_websocket,
            self._ask_by_nats,
            self._ask_by_batch,
            self._ask_by_response,
        ]
        async with asyncio.TaskGroup() as tasks:
            for number, ask in enumerate(clients):
                tasks.create_task(self._repeat(number, ask), name=f"victim-{number}")

    async def _repeat(self, number: int, ask: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await ask()
            except (
                OSError,
                TimeoutError,
                EOFError,
                WebSocketException,
                nats.errors.Error,
                httpx.HTTPError,
            ) as error:
                self._end(ask.__name__, repr(error), "an answer")
            self._rounds[number] += 1

    async def _ask_by_http(self) -> None:
        gateway = self.cell.gateways[self._rounds[0] % len(self.cell.gateways)]
        prompt = self._begin(NORTHWIND, MODEL)
        answer = await gateway.complete(prompt, key=KEYS[NORTHWIND], max_tokens=SHORT)
        self._note(NORTHWIND, MODEL, answer.headers["x-request-id"])
        said = answer.text if answer.status == 200 else answer.body
        self._end("http", said, expected_text(prompt, SHORT))

    async def _ask_by_websocket(self) -> None:
        prompt = self._begin(NORTHWIND, SECOND)
        async with self.cell.gateways[1].socket(key=KEYS[NORTHWIND]) as socket:
            asked = {"model": SECOND, "prompt": prompt, "max_tokens": LONG}
            await socket.send(type="generate", id="victim", **asked)
            (accepted,) = await socket.receive_until("victim", "accepted", "error")
            self._note(NORTHWIND, SECOND, accepted.get("request_id", ""))
            frames = await socket.receive_rest("victim")
        attempts = [each["attempt"] for each in frames if each["type"] == "started"]
        found = (frames[-1].get("finish_reason"), attempts, text_of(frames))
        self._end("websocket", found, ("length", [1], expected_text(prompt, LONG)))

    async def _ask_by_batch(self) -> None:
        gateway = self.cell.gateways[self._rounds[3] % len(self.cell.gateways)]
        prompts = [f"{LINE} {secrets.token_hex(4)}" for _ in range(LINES)]
        async with _http_client(gateway) as client:
            made = await _submit_batch(client, prompts)
            self.batch, self.file = made["id"], made["input_file_id"]
            for name in (self.batch, self.file):
                self.canaries.batch_ids.add(name[-24:].encode())
            found = await _read_ended(client, f"/v1/batches/{self.batch}")
            output = await client.get(f"/v1/files/{found['output_file_id']}/content")
        said = [_answer(line) for line in output.text.splitlines()]
        self._end("batch", said, [expected_text(prompt, SHORT) for prompt in prompts])

    async def _ask_by_response(self) -> None:
        """Ask for a response, and compare what is stored of it with the answer."""
        gateway = self.cell.gateways[self._rounds[4] % len(self.cell.gateways)]
        asked = {"model": MODEL, "input": f"{INPUT} {secrets.token_hex(4)}"}
        async with _http_client(gateway) as client:
            answer = await client.post("/v1/responses", json={**asked, "max_output_tokens": SHORT})
            told = answer.raise_for_status().json()
            self.response = told["id"]
            self.canaries.request_ids.add(told["id"].removeprefix("resp_").encode())
            stored = await _read_ended(client, f"/v1/responses/{told['id']}")
        self._end(
            "response", (stored.get("output"), told["status"]), (told["output"], "incomplete")
        )

    async def make_endpoint(self) -> None:
        """An endpoint of webhooks whose event does not come."""
        asked = {"name": "ours", "url": "http://127.0.0.1:9/", "event_types": [NO_EVENT]}
        async with _http_client(self.cell.gateways[0]) as client:
            made = await client.post("/v1/webhook_endpoints", json=asked)
        self.webhook = made.raise_for_status().json()["id"]
        self.canaries.add_webhook(made.json()["signing_secret"])

    async def _ask_by_nats(self) -> None:
        async with self.cell.broker.connected(self.cell.tenant_user(TAILSPIN)) as client:
            for _ in range(20):
                await self._submit(client)
                self._rounds[2] += 1

    async def _submit(self, client: AccountClient) -> None:
        prompt, route = self._begin(TAILSPIN, MODEL), f"route-{secrets.token_hex(4)}"
        replies = await client.subscribe(f"infer.reply.{TAILSPIN}.{route}.>")
        await client.flush()
        body = json.dumps({"prompt": prompt, "max_tokens": SHORT, "temperature": 0.0}).encode()
        headers = {MESSAGE_ID: secrets.token_hex(8), ROUTE: route}
        subject = f"infer.submit.{TAILSPIN}.{MODEL}.standard"
        await client.jetstream(timeout=30).publish(subject, body, headers=headers)
        records = [messages.unpack((await replies.next_msg(60)).data)]
        self._note(TAILSPIN, MODEL, records[0].get("request_id", ""))
        while records[-1]["type"] not in messages.TERMINAL_TYPES:
            records.append(messages.unpack((await replies.next_msg(60)).data))
        await replies.unsubscribe()
        text = "".join(each["text"] for each in records if each["type"] == "chunk")
        attempts = [each["attempt"] for each in records if each["type"] == "started"]
        self._end("nats", (attempts, text), ([1], expected_text(prompt, SHORT)))


def _http_client(gateway: RunningGateway) -> httpx.AsyncClient:
    """A client with a victim's key; it speaks no TLS, whose certificates take long to be read."""
    return httpx.AsyncClient(
        base_url=gateway.url,
        headers={"Authorization": f"Bearer {KEYS[NORTHWIND]}"},
        timeout=STUCK_SECONDS,
        verify=False,
    )


async def _read_ended(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """A batch or a response once it has ended; a replica of the store may be behind."""
    while True:
        found: dict[str, Any] = (await client.get(path)).json()
        if found.get("status") in _FINAL:
            return found
        await asyncio.sleep(0.05)


async def _submit_batch(client: httpx.AsyncClient, prompts: list[str]) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": SHORT, "temperature": 0.0}
    lines = [
        {
            "custom_id": f"l{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "prompt": prompt},
        }
        for number, prompt in enumerate(prompts)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    form = {"file": ("lines.jsonl", text)}
    file = await client.post("/v1/files", data={"purpose": "batch"}, files=form)
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    asked["input_file_id"] = file.raise_for_status().json()["id"]
    made = await client.post("/v1/batches", json=asked)
    found: dict[str, Any] = made.raise_for_status().json()
    return found


def _answer(line: str) -> str:
    """The text of a line's answer; the line as it is if it has none."""
    response = json.loads(line).get("response")
    return str(response["body"]["choices"][0]["text"]) if response else line


@asynccontextmanager
async def running_victims(cell: RunningCell) -> AsyncIterator[Victims]:
    """Victims that ask until the block ends, once each of them has had answers."""
    canaries = Canaries()
    for tenant in (NORTHWIND, TAILSPIN):
        canaries.add_tenant(tenant, KEYS[tenant])
    for (_, model), canary in PROMPTS.items():
        canaries.add_prompt(model, canary)
    canaries.add_prompt(OF_BATCHES, LINE)
    canaries.add_prompt(OF_RESPONSES, INPUT)
    victims = Victims(cell, canaries)
    await victims.make_endpoint()
    running = asyncio.create_task(victims.run(), name="victims")
    try:
        await victims.settle()
        yield victims
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
