"""Configuration of nats-servers that know users by signed claims: one alone, or one of a cluster.

The text is that of `streams/nats/`, with the accounts. Claims are signed, not encrypted; the one
secret is the password by which the servers of a cluster know each other: whoever joins them hears
every message.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

# Servers ask each other for what they miss this often; the default of a minute would let a user in
# for so long who was cut off while the server was down.
_INTERVAL = "2s"
_MONITORING = re.compile(r"^http: [^\n]*\n", re.MULTILINE)
_CLUSTER = re.compile(r"^cluster \{.*?^\}\n\n", re.MULTILINE | re.DOTALL)
_ACCOUNTS = re.compile(r"^operator: .*\Z", re.MULTILINE | re.DOTALL)
_RESOLVER_DIRECTORY = re.compile(r"^  dir: (\".*\")$", re.MULTILINE)
_HEADER = re.compile(r"\A(?:#[^\n]*\n)+\n")
_LISTEN = re.compile(r"^listen: [^\n]*\n", re.MULTILINE)
NODE_STORE, NODE_TLS = "/data", "/etc/nats/tls"
ROUTES_USER = "node"  # the name by which servers of a cluster connect to each other


@dataclass(frozen=True)
class AccountsBlock:
    """Configuration of every server of a cell: its operator, and the accounts that all know.

    `routes_password` is known to the servers of a cluster alone.

    `accounts` has their signed claims by public key. Tenants' accounts are not among them: servers
    are told of those while they run, and keep them in their resolver's directory.
    """

    operator: str
    system: str
    accounts: Mapping[str, str]
    routes_password: str = field(repr=False)

    def text(self, resolver_directory: str) -> str:
        """The block; `resolver_directory` is the server's own, and is to outlive it."""
        preload = "\n".join(f'  {key}: "{token}"' for key, token in self.accounts.items())
        directory = json.dumps(resolver_directory, ensure_ascii=False)
        return (
            f'operator: "{self.operator}"\n'
            f"system_account: {self.system}\n"
            f"resolver {{\n  type: full\n  dir: {directory}\n  allow_delete: true\n"
            f'  interval: "{_INTERVAL}"\n  timeout: "1.9s"\n}}\n'
            f"resolver_preload {{\n{preload}\n}}\n"
        )


def embedded_configuration(accounts: AccountsBlock, resolver_directory: Path) -> str:
    """Return the configuration of the server inside `millstream up`.

    As that of `streams/nats/embedded.conf`, it takes `NATS_PORT` and `NATS_STORE_DIR` from the
    environment.
    """
    return _complete(_base("embedded.conf"), accounts, str(resolver_directory))


def node_configuration(
    accounts: AccountsBlock,
    name: str,
    nodes: Sequence[str],
    store: str = NODE_STORE,
    *,
    is_monitored: bool = False,
) -> str:
    """Return the configuration of the server `name`, one of `nodes`, which are also host names.

    It stores everything in the directory `store`. If it `is_monitored`, it tells its health on port
    8222 of its own loopback.
    """
    text = _base("cluster.conf").replace("$NATS_NAME", json.dumps(name))
    password = accounts.routes_password
    routes = [f"nats://{ROUTES_USER}:{password}@{node}:6222" for node in nodes if node != name]
    secret = f"  authorization {{ user: {ROUTES_USER}, password: {json.dumps(password)} }}\n"
    text = text.replace("  routes: ", f"{secret}  routes: ")
    text = text.replace("$NATS_ROUTES", json.dumps(routes))
    text = text.replace('"/data/jetstream"', json.dumps(f"{store}/jetstream"))
    if len(nodes) == 1:
        text = _CLUSTER.sub("", text)
    if not is_monitored:
        text = _MONITORING.sub("", text)
    return _complete(text, accounts, f"{store}/accounts")


def with_tls(configuration: str, name: str, directory: str = NODE_TLS) -> str:
    """Return a configuration of the server `name` in which all connections are encrypted.

    A client begins with the TLS handshake, so that it sends nothing to a server that has none; the
    servers of a cluster show each other their certificates. In `directory` of the server's machine
    are `NAME.pem`, `NAME-key.pem` and `ca.pem`.
    """
    paths = {"cert_file": f"{name}.pem", "key_file": f"{name}-key.pem", "ca_file": "ca.pem"}
    files = "; ".join(f"{key}: {json.dumps(f'{directory}/{file}')}" for key, file in paths.items())
    for_routes = f"cluster {{\n  tls {{ {files}; verify: true; timeout: 5 }}\n"
    for_clients = f"tls {{ {files}; handshake_first: true; timeout: 5 }}\n"
    text = configuration.replace("cluster {\n", for_routes)
    return _LISTEN.sub(lambda found: found[0] + for_clients, text)


def with_accounts(configuration: str, accounts: AccountsBlock) -> str:
    """Return a configuration that was made here, with other accounts and all else as it is."""
    directory = _RESOLVER_DIRECTORY.search(configuration)
    assert directory, "a configuration with accounts has the directory of its resolver"
    return _ACCOUNTS.sub("", configuration) + accounts.text(json.loads(directory[1]))


def _base(name: str) -> str:
    return (files("streams") / "nats" / name).read_text()


def _complete(base: str, accounts: AccountsBlock, resolver_directory: str) -> str:
    return f"{_HEADER.sub('', base)}\n{accounts.text(resolver_directory)}"
