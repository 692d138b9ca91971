"""Attacks over a connection to the broker, whatever its credentials."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from gateway.entrypoints.nats_jobs import ERROR
from streams import subjects, topology
from streams.subjects import PoolKey, Priority
from tests.adversary import api_calls
from tests.adversary.api_calls import API_PREFIXES, Call, stream_names
from tests.adversary.canaries import Received
from tests.adversary.cell import MALLORY, MODEL, NORTHWIND, SECOND, TAILSPIN
from tests.adversary.promises import Promise
from tests.adversary.target_subjects import MADE_UP, MARK, WILDCARDS, Names, subjects_of
from tests.support.accounts_cell import AccountClient

_QUESTIONS = (None, {"seq": 1}, {"last_by_subj": f"infer.dead.{MARK}.{MARK}"})
_VICTIMS_POOL = f"pool_{SECOND}_1_standard"
_BATCH = 250
_DESTRUCTIVE = (
    "$JS.API.STREAM.DELETE.DEAD",
    "$JS.API.STREAM.PURGE.REQUESTS",
    "CONTROL.API.STREAM.DELETE.LEDGER",
    "WORK.API.STREAM.DELETE.DEAD",
)
# Calls that change nothing: they are made also by those whose job they are
_READING = (
    "DIRECT.GET",
    "STREAM.INFO",
    "STREAM.MSG.GET",
    "CONSUMER.INFO",
    "CONSUMER.NAMES",
    "INFO",
)


@dataclass
class Attacker:
    """A client that tries things, and counts what it was refused and what it was sent."""

    client: AccountClient
    inbox: str
    promise: Promise
    victims: Callable[[], list[Names]]
    received: Received
    tries: int = 0
    refused: int = 0
    reached: dict[str, int] = field(default_factory=dict)  # by its job, beside what is read
    effects: list[str] = field(default_factory=list)  # what others were made to believe
    _heard: list[Subscription] = field(default_factory=list)

    async def open(self) -> None:
        """Hear everything that is sent to the attacker itself."""
        await self.client.subscribe(f"{self.inbox}.>", cb=self.note)
        await self.client.flush()

    async def begin(self, received: Received) -> None:
        """Count anew, for another attack; what the last one heard is heard no more."""
        heard, self._heard = self._heard, []
        for each in heard:
            await each.unsubscribe()
        self.received, self.tries, self.refused = received, 0, 0
        self.effects, self.reached = [], {}

    async def note(self, message: Msg) -> None:
        answers = self.client._resp_sub_prefix  # to `ask`, which leaves out what it said itself
        if answers and message.subject.startswith(answers.decode()):
            return
        headers = "\n".join(f"{k}: {v}" for k, v in (message.headers or {}).items())
        self.received.add(message.subject.encode(), headers.encode(), message.data)

    async def make(self, calls: Iterable[Call]) -> None:
        """Publish all of them; answers go where each says, or to the attacker."""
        made = list(calls)
        for begin in range(0, len(made), _BATCH):
            batch = made[begin : begin + _BATCH]
            for number, call in enumerate(batch):
                reply = call.reply or f"{self.inbox}.{number}"
                await self.client.publish(
                    call.subject, call.payload, reply=reply, headers=call.headers or None
                )
            await self._count([call.subject for call in batch])

    async def listen(self, wanted: Iterable[str]) -> None:
        """Subscribe to all of them, alone and in a queue group."""
        subscribed = list(wanted)
        for subject in subscribed:
            for queue in ("", MARK):
                self._heard.append(await self.client.subscribe(subject, queue, cb=self.note))
        await self._count([*subscribed, *subscribed])

    async def ask(self, call: Call, told: Iterable[str]) -> None:
        """Make a call and read its answer, but for the words that it repeats of the question."""
        answer = await self.client.request(
            call.subject, call.payload, timeout=60, headers=call.headers or None
        )
        said = answer.data
        for word in told:
            said = said.replace(word.encode(), b"")
        self.received.add(said)
        self.tries += 1
        self.refused += ERROR in (answer.headers or {})

    async def _count(self, tried: Sequence[str]) -> None:
        """Add what was tried, and what the server has refused of it before it answered a ping."""
        await self.client.flush(60)
        await asyncio.sleep(0)
        self.tries += len(tried)
        # nats-py tells them in lower case
        self.refused += sum(subject.lower() in self.client.refused for subject in tried)
        self.client.refused.clear()

    def is_own(self, call: Call) -> bool:
        """Whether making the call is the class's job, and may change what others need."""
        reads = any(f".API.{word}" in call.subject for word in _READING)
        return self.promise.allows(call.subject) and not reads


Attack = Callable[[Attacker], Awaitable[None]]


async def publish_everywhere(attacker: Attacker) -> None:
    """Every subject, with the names of requests that run; where that is its job, made-up ones."""
    made_up = subjects_of(MADE_UP)
    for names in attacker.victims():
        aimed = zip(subjects_of(names), made_up, strict=True)
        chosen = [b if attacker.promise.allows(a) else a for a, b in aimed]
        await attacker.make(Call(each, f"{MARK}".encode()) for each in (*chosen, *made_up))


async def hear_everything(attacker: Attacker) -> None:
    """Every subject and many wildcards, while the victims' requests run on."""
    aimed = [each for names in attacker.victims() for each in subjects_of(names)]
    wide = [_widen(each) for each in subjects_of(MADE_UP)]
    await attacker.listen(dict.fromkeys((*WILDCARDS, *wide, *aimed)))


def _widen(subject: str) -> str:
    return ".".join("*" if part == MARK else part for part in subject.split("."))


async def ask_jetstream(attacker: Attacker) -> None:
    """Every call of the API, for each stream and bucket, under each prefix."""
    for names in attacker.victims()[:1]:
        for stream in stream_names(TAILSPIN, MALLORY):
            for prefix in API_PREFIXES:
                calls = api_calls.api_calls(stream, names, prefix)
                await attacker.make(call for call in calls if not attacker.is_own(call))


async def copy_streams(attacker: Attacker) -> None:
    """Streams that source or mirror others, and changes of others' configuration."""
    for stream in stream_names(TAILSPIN, MALLORY):
        for prefix in API_PREFIXES:
            await attacker.make(api_calls.copying_calls(stream, prefix))


async def answer_elsewhere(attacker: Attacker) -> None:
    """The confused deputy: whatever may be asked, to be answered on each subject of others."""
    made_up = [*_DESTRUCTIVE, *subjects_of(MADE_UP)]
    aimed = [each for names in attacker.victims() for each in subjects_of(names)]
    is_tenant = attacker.promise.account is None
    for subject in attacker.promise.own_subjects():
        if subject.endswith(_VICTIMS_POOL):
            continue  # what serves a model may take its work: that is its job
        places = [(question, place) for question in _QUESTIONS for place in made_up]
        places += [(None, place) for place in (aimed if is_tenant else aimed[: len(made_up)])]
        await attacker.make(Call(subject, question, reply=place) for question, place in places)


async def deliver_elsewhere(attacker: Attacker) -> None:
    """Consumers that would deliver to others' subjects, or to the attacker's own."""
    places = [f"{attacker.inbox}.stolen", *_DESTRUCTIVE, "$KV.tenants.victim", "infer.drain.w1"]
    names = attacker.victims()[0]
    places += [
        f"infer.reply.{NORTHWIND}.gw-g1.{names.request}",
        f"infer.heard.drain.{names.worker}",
    ]
    filters = {
        topology.WORK: subjects.work(PoolKey(MODEL, "1", Priority.STANDARD)),
        topology.REQUESTS: subjects.requests_of(MODEL),
    }
    for stream in stream_names(TAILSPIN, MALLORY):
        chosen = filters.get(stream, "infer.>")
        for prefix in API_PREFIXES:
            for consumer in (MARK, names.consumer):
                calls = api_calls.delivering_calls(stream, prefix, consumer, chosen, places)
                await attacker.make(call for call in calls if not attacker.is_own(call))


async def pull_others_work(attacker: Attacker) -> None:
    """Consumers of another model's pool and of other workers, and wider filters for its own."""
    wanted, body = [], {"batch": 100, "expires": 500_000_000}
    for priority in Priority:
        consumers = [f"pool_{MODEL}_1_{priority}", f"worker_{MODEL}_1_w1", "gateways"]
        wanted += [
            Call(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", body)
            for consumer in consumers
            for stream in (topology.WORK, topology.REQUESTS, f"INGRESS_{TAILSPIN}")
        ]
    own = f"worker_{SECOND}_1_{attacker.promise.pins.id}"
    for wide in ("infer.work.>", f"infer.work.{MODEL}.1.>", f"infer.work.{MODEL}.1.standard.any"):
        config = {
            "name": own,
            "durable_name": own,
            "ack_policy": "explicit",
            "filter_subject": wide,
        }
        made = {"stream_name": topology.WORK, "config": config}
        several = {**config, "filter_subject": "", "filter_subjects": [wide]}
        for name in (
            f"WORK.{own}.infer.work.{SECOND}.1.*.{attacker.promise.pins.id}",
            f"WORK.{own}.{wide}",
        ):
            wanted.append(Call(f"$JS.API.CONSUMER.CREATE.{name}", made))
            both = {"stream_name": topology.WORK, "config": several}
            wanted.append(Call(f"$JS.API.CONSUMER.CREATE.{name}", both))
    wanted = [each for each in wanted if not attacker.is_own(each)]
    await attacker.make([*wanted, Call(f"$JS.API.CONSUMER.MSG.NEXT.WORK.{own}", body)])


async def spoof_headers(attacker: Attacker) -> None:
    """Whatever may be published, with headers by which it would be more than that."""
    victim = attacker.victims()[0]
    for subject in attacker.promise.own_subjects():
        if subject.endswith(_VICTIMS_POOL):
            continue
        found = api_calls.spoofing_headers(MARK, f"infer.cancel.{NORTHWIND}.{victim.request}")
        found += api_calls.spoofing_headers(MARK, f"$KV.tenants.{MARK}")
        if not attacker.promise.allows("infer.token.0.x.y.z"):  # else ids of requests are its own
            found += api_calls.spoofing_headers(victim.request, f"infer.gone.{MARK}")
        await attacker.make(Call(subject, MARK.encode(), headers=each) for each in found)


async def ask_for_jobs(attacker: Attacker) -> None:
    """A producer's questions about batches, as oneself and as the victims, about theirs."""
    for names in attacker.victims():
        for tenant in (MALLORY, names.tenant):
            for call in api_calls.job_calls(tenant, names):
                if attacker.promise.allows(call.subject):
                    await attacker.ask(call, (names.batch, names.file))
                else:
                    await attacker.make([call])


ATTACKS: dict[str, Attack] = {
    "hear every subject": hear_everything,
    "publish on every subject": publish_everywhere,
    "ask JetStream's API": ask_jetstream,
    "copy streams": copy_streams,
    "have answers sent elsewhere": answer_elsewhere,
    "have work delivered elsewhere": deliver_elsewhere,
    "pull others' work": pull_others_work,
    "spoof headers": spoof_headers,
    "ask for others' batches": ask_for_jobs,
}
