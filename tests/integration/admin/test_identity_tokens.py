"""Tokens of a real identity provider at the admin API."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from millstream.admin.admin_client import AdminRefused, HttpAdminClient
from tests.integration.gateway.test_identity_tokens import Provider, provider, settings_for
from tests.support.admins import running_admin
from tests.support.gateways import tenants


def told(found: Provider, scope: str) -> dict[str, Any]:
    """Settings of an admin service, where what permits `llm` at the provider means a scope."""
    return {"tenants": tenants(), "oidc": settings_for(found, scopes={"llm": (scope,)})}


async def test_a_token_may_do_what_its_claims_map_to(nats_url: str) -> None:
    """And the log says whose it is; what is not mapped, or not signed so, opens nothing."""
    async with provider() as found:
        ada, bob, eve = [await found.token(user) for user in ("ada", "bob", "eve")]
        async with running_admin(nats_url, **told(found, "operator")) as client:
            operator = HttpAdminClient(client.url, ada)
            assert (await operator.call("tenants.list"))["data"]
            for token, code in (
                (ada, "insufficient_scope"),
                (bob, "insufficient_scope"),
                (eve, "invalid_token"),
                (f"{ada[:-9]}AAAAAAAAA", "invalid_token"),
            ):
                with pytest.raises(AdminRefused) as refused:
                    await HttpAdminClient(client.url, token).call("tenants.add", name="new")
                assert refused.value.code == code
        async with running_admin(nats_url, **told(found, "admin")) as client:
            with capture_logs() as events:
                await HttpAdminClient(client.url, ada).call("tenants.add", name="new")
            [change] = [each for each in events if each["event"] == "admin_change"]
            assert change["caller"] == "oidc-corp:ada"
            await client.call("denials.add", issuer=found.issuer, subject="ada")
            with pytest.raises(AdminRefused) as refused:
                await HttpAdminClient(client.url, ada).call("tenants.list")
            assert refused.value.code == "key_revoked"
