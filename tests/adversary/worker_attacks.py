"""Attacks by whoever has a worker's credentials: what bodies say that subjects do not.

Rights are told by subjects. A heartbeat's body names a worker, a model and deliveries, and a token
log's subject names no model.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from streams import messages, subjects
from streams.accounts.access import UserClass
from streams.headers import EXPECTED_LAST
from streams.messages import Heartbeat
from streams.subjects import LogAddress
from tests.adversary.api_calls import Call
from tests.adversary.broker_attacks import Attack, Attacker
from tests.adversary.cell import KEYS, MODEL, NORTHWIND, SECOND, STOLEN, RunningCell
from tests.adversary.target_subjects import MARK
from tests.support.accounts_cell import AccountClient
from tests.support.eventually import eventually
from tests.support.gateways import GatewaySocket

FORGED_TOKENS = 987_654_321  # of a worker's KV cache: in no true heartbeat
_LONG = 4000  # tokens of a request that outlives an attack
_BEATS = 20
# Fields of ledger records, of requests and of workers' time
_NUMBERS = (
    *("accepted", "finished", "prompt_tokens", "completion_tokens", "attempts", "compute_ns"),
    *("since", "until", "elapsed_ns", "idle_ns", "load_ns", "lost_ns"),
)
_NAMES = ("request_id", "tenant", "version", "outcome", "key")
# Subjects on which a leader may publish, and whose fifth and sixth parts are numbers, as those of a
# delivery's acknowledgement are
_LEADERS_OWN = (
    f"$KV.leases.{MARK}.x.1.{{seq}}",
    f"infer.work.{MARK}.{MARK}.1.{{seq}}",
    f"$JS.ACK.WORK.pool_{MODEL}_1_{MARK}.1.{{seq}}.1.1.0",
)


def _beat(worker: str, model: str, **facts: Any) -> bytes:
    """A heartbeat of a worker that has more room than any, and holds something."""
    numbers = dict.fromkeys(("free_sequences", "max_sequences", "running"), 1)
    tokens = dict.fromkeys(("free_tokens", "kv_tokens"), FORGED_TOKENS)
    told = {"waiting": 0, "generated_tokens": 0, "tokens_per_second": 1.0}
    return Heartbeat(worker, model, "1", **{**numbers, **tokens, **told, **facts}).pack()


def _record(model: str, worker: str) -> dict[str, Any]:
    """Fields of a ledger record of a request, and of one of a worker's time."""
    names = {"model": model, "worker": worker}
    return {**dict.fromkeys(_NUMBERS, 1), **dict.fromkeys(_NAMES, MARK), **names}


class WorkerAttacks:
    """Attacks by a worker of the second model."""

    def __init__(self, cell: RunningCell) -> None:
        self._cell = cell
        self.attacks: dict[str, Attack] = {
            "send heartbeats as others": self.send_heartbeats_as_others,
            "have a leader publish": self.have_leader_publish,
            "store forged ledger records": self.store_forged_records,
            "end a request of another model": self.end_request_of_other_model,
        }

    async def send_heartbeats_as_others(self, attacker: Attacker) -> None:
        """On its own subject, as another worker; on others' subjects, as answers of JetStream."""
        own = subjects.fleet(SECOND, STOLEN)
        for model, worker in ((SECOND, "w2"), (MODEL, "w1"), (MODEL, MARK)):
            await attacker.make([Call(own, _beat(worker, model))] * _BEATS)
            note = subjects.attempts(MARK, worker)
            await attacker.make([Call(note, _beat(worker, model))])
            query, place = {"last_by_subj": note}, subjects.fleet(model, worker)
            get = Call("$JS.API.DIRECT.GET.ATTEMPTS", query, reply=place)
            await attacker.make([get] * _BEATS)
            for name, told in (await self._workers(model)).items():
                if name == worker and told["kv_tokens"] == FORGED_TOKENS:
                    attacker.effects.append(f"the leader of {model} believes a beat of {name}")

    async def _workers(self, model: str) -> dict[str, dict[str, Any]]:
        """Workers as a model's leader knows them."""
        file = "asking-operator"
        async with self._cell.broker.client(UserClass.OPERATOR, file) as operator:
            report = await eventually(lambda: operator.ask(subjects.report(model)))
        return {each["worker"]: each for each in report["workers"]}

    async def have_leader_publish(self, attacker: Attacker) -> None:
        """Deliveries that a dead worker held are given back, on subjects that its beats name."""
        async with self._long_request(SECOND):
            own = subjects.fleet(SECOND, STOLEN)
            for pattern in _LEADERS_OWN:
                last = (await attacker.client.ask("$JS.API.STREAM.INFO.WORK"))["state"]["last_seq"]
                taken = [pattern.format(seq=seq) for seq in range(last - 40, last + 1)]
                await attacker.make([Call(own, _beat(STOLEN, SECOND, taken=taken))])
                await eventually(self._leader_thinks_that_it_is_gone)

    async def _leader_thinks_that_it_is_gone(self) -> bool:
        return STOLEN not in await self._workers(SECOND)

    @asynccontextmanager
    async def _long_request(self, model: str) -> AsyncIterator[tuple[GatewaySocket, str]]:
        """A request of a victim that is there to be attacked: its socket and its id."""
        gateway = self._cell.gateways[0]
        await eventually(gateway.is_ready)
        async with gateway.socket(key=KEYS[NORTHWIND]) as socket:
            asked = {"model": model, "prompt": "to be attacked", "max_tokens": _LONG}
            await socket.send(type="generate", id="attacked", **asked)
            frames = await socket.receive_until("attacked", "chunk", "error")
            yield socket, frames[0]["request_id"]
            await socket.send(type="cancel", id="attacked")

    async def store_forged_records(self, attacker: Attacker) -> None:
        """Every gateway adds up what is in the ledger: of another model, or with absurd numbers."""
        request, time = subjects.ledger(MARK, SECOND), subjects.worker_time(SECOND, STOLEN)
        for absurd in (10**17, -(10**17), 2**63, "many", None, [1]):
            for name in _NUMBERS:
                for body in (_record(MODEL, "w1"), _record(SECOND, STOLEN)):
                    data = messages.pack({**body, name: absurd})
                    await attacker.make([Call(request, data), Call(time, data)])
        usage = await self._cell.gateways[0].request("GET", "/v1/usage", key=KEYS[NORTHWIND])
        if usage.status != 200:
            attacker.effects.append(f"usage is no longer told: {usage.body.decode()}")

    async def end_request_of_other_model(self, attacker: Attacker) -> None:
        """Write an end of its own into the token log of a request that another model serves."""
        async with self._long_request(MODEL) as (socket, request_id):
            address = LogAddress(NORTHWIND, "gw-g1", request_id)
            log = subjects.log(address, 1)
            await eventually(lambda: _ends(attacker.client, log))
            frames = await socket.receive_rest("attacked")
            if frames[-1].get("message") == MARK:
                attacker.reached["requests of other models ended"] = 1


async def _ends(client: AccountClient, log: str) -> bool:
    """Whether an end was stored behind the log's last record; its writer may be faster."""
    found = await client.request(
        "$JS.API.DIRECT.GET.TOKENS_0", json.dumps({"last_by_subj": log}).encode(), timeout=10
    )
    last = (found.headers or {})["Nats-Sequence"]
    end = messages.error_record("internal_error", MARK, messages.openai_usage(0, 0))
    return "seq" in await client.ask(log, messages.pack(end), **{EXPECTED_LAST: last})
