"""Each class of users may do what the table says, and nothing else that anybody may."""

from collections.abc import Iterable
from itertools import product

import pytest

from streams import topology
from streams.accounts import access
from streams.accounts.access import ACCOUNT_OF, UserClass, rights_of
from streams.accounts.rights import Pins, Right, fill
from tests.support.accounts_cell import AccountsCell

PINS = Pins(id="p1", pools=(("mock", "v1"),))
OTHERS = Pins(id="p2", pools=(("other", "v2"),))
PROCESSES = [each for each in ACCOUNT_OF if each is not UserClass.SYSTEM]
CALLS = (
    *(f"STREAM.{call}" for call in ("CREATE", "UPDATE", "DELETE", "PURGE", "SNAPSHOT", "RESTORE")),
    *(f"STREAM.{call}" for call in ("INFO", "MSG.GET", "MSG.DELETE", "LEADER.STEPDOWN")),
    *(f"CONSUMER.{call}" for call in ("LIST", "NAMES", "CREATE")),
    "DIRECT.GET",
)
CONSUMER_CALLS = ("CREATE", "DURABLE.CREATE", "INFO", "DELETE", "MSG.NEXT", "PAUSE", "RESET")


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject is one of those that a pattern stands for."""
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, found = wanted[:-1], found[: len(wanted) - 1]
        if len(found) < len(wanted) or len(subject.split(".")) == len(wanted):
            return False
    return len(wanted) == len(found) and all(
        w in ("*", f) for w, f in zip(wanted, found, strict=True)
    )


def is_granted(granted: Iterable[str], subject: str) -> bool:
    return any(matches(each, subject) for each in granted)


def concrete(pattern: str) -> str:
    """One of the subjects that a pattern stands for."""
    return ".".join({"*": "x", ">": "x.y"}.get(token, token) for token in pattern.split("."))


def every_subject(action: str) -> set[str]:
    """Samples of everything that anybody may publish or hear, and of JetStream's whole API."""
    rights = [r for each in UserClass for r in rights_of(each) if r.action == action]
    values = [{**pins.values(), "tenant": ("acme",)} for pins in (PINS, OTHERS)]
    found = {concrete(s) for r, v in product(rights, values) for s in fill(r.local or r.subject, v)}
    return found | (api_subjects() if action == "publish" else {"infer.submit.acme.m.batch", "x"})


def api_subjects() -> set[str]:
    streams = [config.name for config in topology.stream_configs(topology.Scale(), 1)]
    streams += [*access.BUCKETS, "INGRESS_acme"]
    found = {f"$JS.API.{call}.{stream}" for call, stream in product(CALLS, streams)}
    found |= {
        f"$JS.API.CONSUMER.{call}.{stream}.c" for call, stream in product(CONSUMER_CALLS, streams)
    }
    return found | {"$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$SYS.REQ.CLAIMS.UPDATE"}


def permitted(user_class: UserClass, action: str) -> list[str]:
    rights: list[Right] = [r for r in rights_of(user_class) if r.action == action]
    return [s for right in rights for s in right.permitted(PINS)]


@pytest.mark.parametrize("user_class", PROCESSES)
async def test_a_class_publishes_what_its_rows_say_and_nothing_else(
    cell: AccountsCell, user_class: UserClass
) -> None:
    """What one row of the table forgets, a process misses; what it has too much, a thief has."""
    granted = permitted(user_class, "publish")
    everything = every_subject("publish")
    async with cell.client(user_class, "p1", PINS) as client:
        refused = await client.refused_to_publish(everything)
    assert everything - refused == {s for s in everything if is_granted(granted, s)}


@pytest.mark.parametrize("user_class", PROCESSES)
async def test_a_class_hears_what_its_rows_say_and_nothing_else(
    cell: AccountsCell, user_class: UserClass
) -> None:
    """Its own inboxes are its own: nobody else's answers are heard."""
    granted = [*permitted(user_class, "subscribe"), "_INBOX.p1.>"]
    inboxes = {"_INBOX.p1.a.b", "_INBOX.p2.a.b", "_INBOX.>", ">", "infer.>", "$JS.>", "_R_.>"}
    everything = every_subject("subscribe") | inboxes
    async with cell.client(user_class, "p1", PINS) as client:
        refused = await client.refused_to_hear(everything)
    assert everything - refused == {s for s in everything if is_granted(granted, s)}


async def test_a_user_of_any_process_is_pinned_to_nothing(cell: AccountsCell) -> None:
    """Replicas of a service share one file of credentials."""
    wanted = ["infer.fleet.mock.w1", "infer.fleet.other.w2", "infer.request.acme.mock.batch"]
    async with cell.client(UserClass.WORKER, "fleet", Pins()) as client:
        assert await client.refused_to_publish(wanted) == {wanted[2]}
