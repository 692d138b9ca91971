"""nats-servers with accounts, and credentials of the processes that a test starts.

All servers of a test run share one cell's keys; each has a store of its own. A test's own
connection is an observer's: a user of an account that no cell of our users has, which may do what
any process may, and what the admin service may.
"""

import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import nats
from nats.aio.client import Client

from streams.accounts.access import UserClass, rights_of
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.claims import EVERYTHING, AccountState, account_claims
from streams.accounts.claims_token import encode
from streams.accounts.credentials_file import UserCredentials, write_credentials
from streams.accounts.minting import Mint, NewUser, sign_tenant_user
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.accounts.rights import JETSTREAM_API, Pins, Right
from streams.accounts.server_configuration import AccountsBlock, node_configuration
from streams.broker import broker_client
from streams.broker.broker_client import Broker
from streams.connection_files import NO_FILES, ConnectionFiles
from streams.subjects import token
from tests.support.nats_server import NatsServer

_VIOLATION = re.compile(r".*(?:Publish|Subscription) Violation.*")
_OBSERVERS = "OBSERVERS"
PRODUCER = "acme"  # the tenant that publishes to NATS itself
_guarded_ports: set[int | None] = set()
_home = tempfile.TemporaryDirectory(prefix="millstream-cell-")  # gone when the tests end


class AccountsServer(NatsServer):
    """A nats-server of one test's own, with a user for each process."""

    def __init__(self, store: Path) -> None:
        text = node_configuration(_shared_accounts(), "nats", ["nats"], str(store))
        configuration = store / "nats.conf"
        configuration.write_text(text)
        super().__init__(store, configuration=configuration)
        guard(self.url)

    def violations(self) -> list[str]:
        """Violations of users: lines of the log with who and on what."""
        return find_violations(self.store / "server.log")


def find_violations(log: Path) -> list[str]:
    """Lines of the log of a server with accounts that tell of what users may not."""
    return _VIOLATION.findall(log.read_text(errors="replace"))


def guard(url: str) -> None:
    """Note that an address, as that of a proxy, leads to a server with accounts."""
    _guarded_ports.add(urlsplit(url).port)


def unguard(url: str) -> None:
    """Forget an address, at which a later test may have a server without accounts."""
    _guarded_ports.discard(urlsplit(url).port)


def _is_guarded(urls: str) -> bool:
    """Whether the first of these addresses leads to a server with accounts."""
    return urlsplit(urls.partition(",")[0]).port in _guarded_ports


def process_files(
    url: str, user_class: UserClass, name: str, pins: Pins | None = None
) -> ConnectionFiles:
    """Credentials of a process, pinned to its name; none for a server without accounts."""
    if not _is_guarded(url):
        return NO_FILES
    user = f"{user_class}-{token(name)}"
    return ConnectionFiles(creds=_cell().add_user(user, user_class, pins or Pins(id=name)))


def worker_pins(worker: str, models: Iterable[str]) -> Pins:
    """Pins of a worker of these models, each NAME or NAME@VERSION as in its settings."""
    parts = (model.partition("@") for model in models)
    return Pins(worker, tuple((name, version or "*") for name, _, version in parts))


def observer_files(url: str) -> ConnectionFiles:
    """Credentials of a test itself; none for a server without accounts."""
    if not _is_guarded(url):
        return NO_FILES
    return ConnectionFiles(creds=_observer_credentials())


def process_settings(
    url: str, user_class: UserClass, name: str, pins: Pins | None = None
) -> dict[str, Path]:
    """The setting by which a process of a test finds its credentials, if it needs any."""
    files = process_files(url, user_class, name, pins)
    return {"nats_creds": files.creds} if files.creds else {}


def connect(
    url: str, name: str = "test", files: ConnectionFiles | None = None
) -> AbstractAsyncContextManager[Broker]:
    """A connection of the test itself, or with the files of a process."""
    return broker_client.connect(url, name, files or observer_files(url))


@asynccontextmanager
async def producer_client(url: str) -> AsyncIterator[Client]:
    """A program of the tenant that publishes to NATS itself."""
    user = _producer_credentials()
    client = await nats.connect(url, user_jwt_cb=user.user_jwt, signature_cb=user.sign_nonce)
    try:
        yield client
    finally:
        await client.close()


@cache
def _cell() -> CellDirectory:
    return CellDirectory.create(Path(_home.name), shards=1)


@cache
def _account(name: str) -> tuple[AccountState, KeyPair]:
    """An account that the cell's own keys know nothing of."""
    key = KeyPair.generate(KeyKind.ACCOUNT)
    return AccountState(name, key.public, issued_at=int(time.time())), key


@cache
def _shared_accounts() -> AccountsBlock:
    return observed_accounts(_cell())


def observed_accounts(cell: CellDirectory) -> AccountsBlock:
    """Accounts as a cell's servers are told of them, with the observer's and the producer's."""
    block, (observer, _) = cell.accounts_block(), _account(_OBSERVERS)
    producer, _ = _account(PRODUCER)
    claims = {
        observer.public: observer_token(cell),
        producer.public: cell.mint().tenant_token(PRODUCER, producer),
    }
    return replace(block, accounts={**block.accounts, **claims})


def observer_token(cell: CellDirectory) -> str:
    """The claims of the observers' account in a cell, made now with the cell's keys."""
    mint, (known, _) = cell.mint(), _account(_OBSERVERS)
    state = replace(known, issued_at=int(time.time()))
    imports = [mint.import_right(right, state) for right in _observed(mint)]
    return encode(account_claims(state, (), imports), mint.operator)


def _observed(mint: Mint) -> Iterator[Right]:
    """Imports of all processes, no subject twice: a store would hear what is sent twice."""
    found = dict.fromkeys(r for each in UserClass for r in rights_of(each, mint.shards))
    for right in found:
        if right.local and "{tenant}" in right.local:
            continue  # by a name of its own, and of a tenant
        is_repeated = right.local is None and _names_stream(right.subject)
        if not is_repeated and not any(_covers(other, right) for other in found):
            yield right


def _names_stream(subject: str) -> bool:
    """Whether it is a call that the admin service makes by a name of its own."""
    return subject.startswith(JETSTREAM_API) and subject.count(".") > JETSTREAM_API.count(".")


def _covers(other: Right, right: Right) -> bool:
    """Whether another right of the same kind is wider."""
    if (other.action, other.owner) != (right.action, right.owner) or other.local != right.local:
        return False
    wide, narrow = other.imported().split("."), right.imported().split(".")
    if wide == narrow:
        return other != right and id(other) < id(right)
    for number, each in enumerate(wide):
        if each == ">":
            return True
        if number >= len(narrow) or each not in ("*", narrow[number]):
            return False
    return len(wide) == len(narrow)


@cache
def _observer_credentials() -> Path:
    state, key = _account(_OBSERVERS)
    user = NewUser(UserClass.ADMIN, "observer", KeyPair.generate(KeyKind.USER))
    made = user.sign(state.public, key, time.time(), permissions=EVERYTHING)
    file = Path(_home.name) / "observer.creds"
    write_credentials(file, made)
    return file


@cache
def _producer_credentials() -> UserCredentials:
    state, key = _account(PRODUCER)
    user = NewUser(UserClass.TENANT, PRODUCER, KeyPair.generate(KeyKind.USER))
    return sign_tenant_user(user, state.public, key, time.time())
