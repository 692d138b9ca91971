"""Tokens of a real identity provider at a gateway, also while that is away."""

import asyncio
import base64
import json
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from registry.credentials.key_records import Denial
from tests.integration.gateway.test_managed_keys import code_of
from tests.integration.gateway.test_revoked_keys import closing
from tests.support.eventually import eventually
from tests.support.gateways import KEY, cell
from tests.support.keys import operator
from tests.support.ports import free_port

PROVIDER = str(Path(sys.executable).parent / "oidc-provider-mock")
USERS = (
    {"sub": "ada", "org": "org-17", "permissions": ["llm"]},
    {"sub": "eve", "org": "org-99", "permissions": ["llm"]},
    {"sub": "bob", "org": "org-17", "permissions": []},
)
CALLBACK = "http://localhost/callback"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


class Provider:
    """A running identity provider and the tokens that it gives."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.issuer = process, f"http://localhost:{port}"

    async def token(self, user: str) -> str:
        """An ID token by the authorization code flow."""
        return await asyncio.to_thread(self._token, user)

    def _token(self, user: str) -> str:
        query = {
            "client_id": "millstream",
            "redirect_uri": CALLBACK,
            "response_type": "code",
            "scope": "openid",
        }
        url = f"{self.issuer}/oauth2/authorize?{urllib.parse.urlencode(query)}"
        opener = urllib.request.build_opener(_NoRedirects)
        try:
            opener.open(url, data=f"sub={user}".encode())
        except urllib.error.HTTPError as redirect:
            location = redirect.headers["Location"]
            redirect.close()
        (code,) = urllib.parse.parse_qs(urllib.parse.urlsplit(location).query)["code"]
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": CALLBACK}
        asked = urllib.request.Request(
            f"{self.issuer}/oauth2/token", urllib.parse.urlencode(form).encode()
        )
        basic = base64.b64encode(b"millstream:secret").decode()
        asked.add_header("Authorization", f"Basic {basic}")
        with urllib.request.urlopen(asked) as response:
            return str(json.load(response)["id_token"])

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def answers(self) -> bool:
        try:
            await self.token("ada")
        except OSError:
            return False
        return True


@asynccontextmanager
async def provider() -> AsyncIterator[Provider]:
    port = free_port()
    users = [word for user in USERS for word in ("--user-claims", json.dumps(user))]
    process = await asyncio.create_subprocess_exec(
        *(PROVIDER, "--port", str(port), *users),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": ""},
    )
    found = Provider(process, port)
    try:
        await eventually(found.answers)
        yield found
    finally:
        if process.returncode is None:
            await found.kill()


def settings_for(found: Provider, **settings: Any) -> dict[str, Any]:
    return {
        "corp": {
            "issuer": found.issuer,
            "audience": "millstream",
            "token_type": "JWT",
            "tenant_claim": "org",
            "tenants": {"org-17": "acme"},
            "scope_claim": "permissions",
            "scopes": {"llm": ("infer", "models:read")},
            **settings,
        }
    }


async def test_a_token_opens_every_door_that_its_claims_map_to(nats_url: str) -> None:
    """Over HTTP and the WebSocket; keys work beside it, and so it does while the issuer is dead."""
    async with provider() as found, cell(nats_url, oidc=settings_for(found)) as (gateway,):
        ada, again = await found.token("ada"), await found.token("ada")
        eve, bob = await found.token("eve"), await found.token("bob")
        assert (await gateway.complete(key=ada, max_tokens=1)).status == 200
        assert (await gateway.request("GET", "/v1/models", key=ada)).status == 200
        assert (await gateway.complete(key=KEY, max_tokens=1)).status == 200
        await found.kill()
        async with gateway.socket(key=again) as socket:
            await socket.generate("1", max_tokens=1)
            assert (await socket.receive_rest("1"))[-1]["type"] == "done"
        unmapped = await gateway.complete(key=eve)
        assert code_of(unmapped) == (401, "invalid_token")
        assert "no tenant" in unmapped.error["message"]
        assert code_of(await gateway.complete(key=bob)) == (403, "insufficient_scope")
        header, claims, signature = ada.split(".")
        forged = ".".join([header, eve.split(".")[1], signature])
        assert code_of(await gateway.complete(key=forged)) == (401, "invalid_token")
        with pytest.raises(InvalidStatus) as raised:
            async with gateway.socket(key=f"{header}.{claims}.AAAA"):
                pass
        assert raised.value.response.status_code == 401


async def test_a_token_of_an_issuer_that_is_away_is_neither_right_nor_wrong(nats_url: str) -> None:
    """503 until its keys were had once; nothing else is held up."""
    async with provider() as found:
        ada = await found.token("ada")
        await found.kill()
        async with cell(nats_url, oidc=settings_for(found)) as (gateway,):
            away = await gateway.complete(key=ada)
            assert code_of(away) == (503, "issuer_unreachable")
            assert "retry-after" in away.headers
            assert (await gateway.complete(key=KEY, max_tokens=1)).status == 200


async def test_the_deny_list_reaches_open_sockets(nats_url: str) -> None:
    """Of the subject, and not of others; later tokens are not covered by `not_before`."""
    slow = {"itl_ms": 20}
    async with (
        provider() as found,
        cell(nats_url, mock=slow, oidc=settings_for(found)) as (gateway,),
        operator(nats_url) as op,
    ):
        ada = await found.token("ada")
        async with gateway.socket(key=ada) as socket, gateway.socket() as other:
            await socket.generate("1", max_tokens=8000)
            await socket.receive_until("1", "chunk")
            issued_at = json.loads(base64.urlsafe_b64decode(ada.split(".")[1] + "=="))["iat"]
            spares = Denial(issuer=found.issuer, not_before=issued_at, created_at=op.now)
            await op.keys.deny(spares)
            denial = Denial(issuer=found.issuer, subject="ada", created_at=op.now)
            await op.keys.deny(denial)
            assert await closing(socket) == (1008, "key_revoked")
            assert code_of(await gateway.complete(key=ada)) == (401, "key_revoked")
            await other.generate("1", max_tokens=1)
            assert (await other.receive_rest("1"))[-1]["type"] == "done"
        await op.keys.remove_denial(denial.id)

        async def is_served() -> bool:
            return (await gateway.complete(key=ada, max_tokens=1)).status == 200

        await eventually(is_served)
