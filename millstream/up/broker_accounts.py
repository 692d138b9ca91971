"""Accounts of the embedded nats-server: its keys, its users, and streams from before accounts.

All lies in the data directory, readable by its owner alone. Nothing has to be configured.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from millstream.broker import store_move
from millstream.broker.store_move import MoveRefused
from millstream.up.data_directory import DataDirectory
from streams.accounts.access import CONTROL_STREAMS, UserClass
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.minting import TooManyPins
from streams.accounts.rights import BrokerAccount, Pins
from streams.accounts.server_configuration import embedded_configuration
from streams.topology import Scale

log = structlog.get_logger()

OPERATOR, SYSTEM = "operator", "system"  # users of commands, and of the health check
_ACCOUNT_KEY = re.compile(r"A[A-Z2-7]{55}")


@dataclass(frozen=True)
class BrokerAccounts:
    """Keys of the embedded nats-server, and its configuration file."""

    cell: CellDirectory
    configuration: Path

    def add_user(self, name: str, user_class: UserClass) -> Path:
        """Return the file with the credentials of a process, made or made anew."""
        return self.cell.add_user(name, user_class)

    def add_worker(self, name: str, models: Iterable[str]) -> Path:
        """Return the file with a worker's credentials, which are for these models alone.

        They are for all models where so many would not fit into its token.
        """
        pools = tuple((model, "*") for model in models)
        try:
            return self.cell.add_user(name, UserClass.WORKER, Pins(name, pools))
        except TooManyPins:
            return self.cell.add_user(name, UserClass.WORKER)


def mint_accounts(directory: DataDirectory) -> BrokerAccounts:
    """Make the keys that are missing, and the server's configuration; it must not run yet.

    Streams of a release without accounts are moved to the accounts that own them. Raises
    `InvalidCellDirectory` for keys that cannot be used, and `MoveRefused` for streams that cannot
    be moved, or that belong to accounts of other keys.
    """
    cell = CellDirectory.create(directory.broker_keys, Scale().shards)
    keys = {name: account.public for name, account in cell.read().accounts.items()}
    store = directory.nats_store / "jetstream"
    if store.is_dir():
        _check_known(store, directory.broker_keys, keys.values())
        _move_streams(store, keys[BrokerAccount.CONTROL], keys[BrokerAccount.WORK])
    text = embedded_configuration(cell.accounts_block(), directory.nats_store / "accounts")
    return BrokerAccounts(cell, cell.write_node("nats", text))


def _check_known(store: Path, keys: Path, known: Iterable[str]) -> None:
    """With other keys the server would start with empty accounts, and say nothing."""
    found = {path.parent.name for path in store.glob("*/streams") if any(path.iterdir())}
    if strangers := {name for name in found if _ACCOUNT_KEY.fullmatch(name)} - set(known):
        raise MoveRefused(
            f"streams in {store} belong to the account {min(strangers)}, whose keys are not in "
            f"{keys}: bring that folder back from a copy, or name another --data-dir"
        )


def _move_streams(store: Path, control: str, work: str) -> None:
    owners = {"*": work, **dict.fromkeys(CONTROL_STREAMS, control)}
    if moves := store_move.plan_move(store, owners):
        store_move.check_stopped(store)
        store_move.apply_moves(store, moves)
        log.info("streams_moved_to_accounts", streams=[move.name for move in moves])
