"""Connections and frames of each tenant and key: bounded, and forgotten when they are gone."""

from contextlib import ExitStack

import pytest

from gateway.server.connection_limits import FRAME_BYTES, ConnectionLimits, frame_cost
from registry.tenant_records import ApiKey, Tenant
from streams.errors import TooManyConnections


def tenant(name: str = "acme", key: ApiKey | None = None, **bounds: int) -> Tenant:
    found = Tenant.model_validate({"name": name, **bounds})
    return found.model_copy(update={"key": key})


def test_one_connection_too_many_is_refused_and_counts_for_nothing() -> None:
    """When one of those that were let in leaves, the next one comes in."""
    guests, acme = ConnectionLimits(), tenant(max_connections=2)
    with guests.admit(acme):
        with guests.admit(acme):
            for _ in range(3):
                with pytest.raises(TooManyConnections, match="tenant 'acme' is 2"):
                    guests.admit(acme).__enter__()
        with guests.admit(acme):
            pass
    assert len(guests) == 0


def test_a_key_is_bounded_within_its_tenant() -> None:
    """Another key of the tenant, and another tenant, come in all the same."""
    guests = ConnectionLimits()
    ci = ApiKey(tenant="acme", name="ci", max_connections=1)
    with ExitStack() as open_ones:
        open_ones.enter_context(guests.admit(tenant(key=ci)))
        with pytest.raises(TooManyConnections, match="the key 'ci' of tenant 'acme' is 1"):
            guests.admit(tenant(key=ci)).__enter__()
        open_ones.enter_context(guests.admit(tenant()))
        open_ones.enter_context(guests.admit(tenant("other", key=ci.model_copy())))
    assert len(guests) == 0


def test_connections_of_a_tenant_share_its_pace() -> None:
    """Many sockets may not send more than one does."""
    guests, acme = ConnectionLimits(), tenant(frames_per_second=2)
    with guests.admit(acme) as first, guests.admit(acme) as second:
        assert [first.reserve(0.0), second.reserve(0.0)] == [0.0, 0.0]
        assert first.reserve(0.0) == 0.5
        assert second.reserve(0.0) == 1.0


def test_a_key_has_its_own_pace_too() -> None:
    """The slower one of both counts."""
    ci = ApiKey(tenant="acme", name="ci", frames_per_second=1)
    guests = ConnectionLimits()
    with guests.admit(tenant(key=ci)) as guest, guests.admit(tenant()) as other:
        assert [guest.reserve(0.0), guest.reserve(0.0)] == [0.0, 1.0]
        assert other.reserve(0.0) == 0.0


def test_a_frame_counts_by_its_bytes_too() -> None:
    """To read 1 MB takes a thousand times what a token's frame does."""
    assert [frame_cost(size) for size in (0, FRAME_BYTES - 1, FRAME_BYTES)] == [1, 1, 2]
    guests, acme = ConnectionLimits(), tenant(frames_per_second=100)
    with guests.admit(acme) as guest:
        assert guest.reserve(0.0, frame_cost(99 * FRAME_BYTES)) == 0.0
        assert guest.reserve(0.0, frame_cost(99 * FRAME_BYTES)) == pytest.approx(1.0)


def test_limits_that_change_reach_open_connections() -> None:
    """The tenant's and the key's; while nothing has changed, nothing is done."""
    key = ApiKey(tenant="acme", name="ci")
    guests, acme = ConnectionLimits(), tenant(key=key, frames_per_second=1000)
    with guests.admit(acme) as guest:
        guest.update_limits(acme)
        assert guest.reserve(0.0, 100) == 0.0
        limited = key.model_copy(update={"frames_per_second": 1})
        guest.update_limits(tenant(key=limited, frames_per_second=1000))
        assert [guest.reserve(1.0), guest.reserve(1.0)] == [0.0, 1.0]
        guest.update_limits(acme)
        assert guest.reserve(1.0) == 0.0
