"""A nats-server with accounts: an operator, an account with JetStream, and users as needed."""

import json
import signal
import time
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from streams.accounts import claims_token
from streams.accounts.credentials_file import UserCredentials, credentials_of, write_credentials
from streams.accounts.nkeys import KeyKind, KeyPair
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer

_RELOADED = "Reloaded server configuration"
_UNLIMITED = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
_JETSTREAM = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)


class OperatorServer:
    """Lets in who has credentials of its account; `tls` is a block of its configuration."""

    def __init__(self, store: Path, tls: str = "") -> None:
        self._operator = KeyPair.generate(KeyKind.OPERATOR)
        self._system = KeyPair.generate(KeyKind.ACCOUNT)
        self.account = KeyPair.generate(KeyKind.ACCOUNT)
        self.signers = [KeyPair.generate(KeyKind.ACCOUNT)]  # the last one signs new users
        self._revocations: dict[str, int] = {}
        self._issued_at = 0
        self._tls, self._log = tls, store / "server.log"
        configuration = store / "server.conf"
        configuration.write_text(self._configuration(store))
        self.nats = NatsServer(store, configuration=configuration)
        self.url = self.nats.url

    def _configuration(self, store: Path) -> str:
        system, account = self._system.public, self.account.public
        operator = {"sub": self._operator.public, "name": "test"}
        token = self._sign({**operator, "nats": _claims("operator", system_account=system)})
        return f"""
            jetstream {{ store_dir: "{store}" }}
            operator: "{token}"
            system_account: {system}
            resolver: {{ type: full, dir: "{store}/jwt", interval: "2s", timeout: "200ms" }}
            resolver_preload: {{
              {system}: "{self._account_token(self._system, {})}"
              {account}: "{self._account_token(self.account, _JETSTREAM)}"
            }}
            {self._tls}
            """

    def _sign(self, claims: dict[str, Any]) -> str:
        return claims_token.encode({"iat": int(time.time()), **claims}, self._operator)

    def _account_token(self, key: KeyPair, jetstream: dict[str, int]) -> str:
        self._issued_at = max(int(time.time()), self._issued_at + 1)  # the newer one wins
        account = _claims(
            "account",
            limits={**_UNLIMITED, "wildcards": True, **jetstream},
            signing_keys=[signer.public for signer in self.signers],
            revocations=self._revocations,
        )
        claims = {"sub": key.public, "name": "test", "iat": self._issued_at, "nats": account}
        return self._sign(claims)

    def issue(
        self, name: str = "test", seconds: float | None = None, **rights: Any
    ) -> UserCredentials:
        """Make a user of the account, whose token lives for `seconds`, or for ever."""
        return self._issue(self.signers[-1], self.account, name, seconds, rights)

    def _issue(
        self,
        signer: KeyPair,
        account: KeyPair,
        name: str,
        seconds: float | None,
        rights: dict[str, Any],
    ) -> UserCredentials:
        key, now = KeyPair.generate(KeyKind.USER), int(time.time())
        user = _claims("user", subs=-1, data=-1, payload=-1, **rights)
        if signer is not account:
            user["issuer_account"] = account.public
        claims: dict[str, Any] = {"sub": key.public, "name": name, "iat": now, "nats": user}
        if seconds is not None:
            claims["exp"] = int(now + seconds)
        token = claims_token.encode(claims, signer)
        return credentials_of(token, claims_token.decode(token), key)

    def write(self, path: Path, credentials: UserCredentials | None = None) -> Path:
        """Write credentials to a file, those of a new user if none are given."""
        write_credentials(path, credentials or self.issue())
        return path

    async def reload(self) -> None:
        """Have the server read its files of certificates again; returns when it has."""
        reloads = self._log.read_text().count(_RELOADED)
        self.nats.process.send_signal(signal.SIGHUP)
        await eventually(lambda: self._log.read_text().count(_RELOADED) > reloads)

    async def add_signer(self, **tls: Any) -> None:
        """Have new users signed by a new key; users signed by those before stay."""
        self.signers.append(KeyPair.generate(KeyKind.ACCOUNT))
        await self._update(**tls)

    async def drop_signers(self, **tls: Any) -> None:
        """Cut all users but those that the newest key has signed."""
        self.signers = self.signers[-1:]
        await self._update(**tls)

    async def revoke(self, user: UserCredentials, **tls: Any) -> None:
        """Cut a user's connections, and let it in no more."""
        self._revocations[user.user] = int(time.time()) + 1
        await self._update(**tls)

    async def _update(self, **tls: Any) -> None:
        token = self._account_token(self.account, _JETSTREAM)
        admin = self._issue(self._system, self._system, "admin", None, {})
        client = Client()
        await client.connect(
            self.url, user_jwt_cb=admin.user_jwt, signature_cb=admin.sign_nonce, **tls
        )
        answer = await client.request("$SYS.REQ.CLAIMS.UPDATE", token.encode(), timeout=10)
        assert json.loads(answer.data).get("data", {}).get("code") == 200, answer.data
        await client.close()


def _claims(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "version": 2, **fields}
