"""Connections and frames of each tenant and key: bounded, and forgotten when they are gone."""

from contextlib import ExitStack

import pytest

from gateway.guests import FRAME_BYTES, Guests, frames_in
from registry.tenants import KeyHolder, Tenant
from streams.errors import TooManyConnections


def tenant(name: str = "acme", key: KeyHolder | None = None, **bounds: int) -> Tenant:
    found = Tenant.model_validate({"name": name, **bounds})
    return found.model_copy(update={"key": key})


def test_one_connection_too_many_is_refused_and_counts_for_nothing() -> None:
    """When one of those that were let in leaves, the next one comes in."""
    guests, acme = Guests(), tenant(max_connections=2)
    with guests.admitted(acme):
        with guests.admitted(acme):
            for _ in range(3):
                with pytest.raises(TooManyConnections, match="tenant 'acme' is 2"):
                    guests.admitted(acme).__enter__()
        with guests.admitted(acme):
            pass
    assert len(guests) == 0


def test_a_key_is_bounded_within_its_tenant() -> None:
    """Another key of the tenant, and another tenant, come in all the same."""
    guests = Guests()
    ci = KeyHolder(tenant="acme", name="ci", max_connections=1)
    with ExitStack() as open_ones:
        open_ones.enter_context(guests.admitted(tenant(key=ci)))
        with pytest.raises(TooManyConnections, match="the key 'ci' of tenant 'acme' is 1"):
            guests.admitted(tenant(key=ci)).__enter__()
        open_ones.enter_context(guests.admitted(tenant()))
        open_ones.enter_context(guests.admitted(tenant("other", key=ci.model_copy())))
    assert len(guests) == 0


def test_connections_of_a_tenant_share_its_pace() -> None:
    """Many sockets may not send more than one does."""
    guests, acme = Guests(), tenant(frames_per_second=2)
    with guests.admitted(acme) as first, guests.admitted(acme) as second:
        assert [first.take(0.0), second.take(0.0)] == [0.0, 0.0]
        assert first.take(0.0) == 0.5
        assert second.take(0.0) == 1.0


def test_a_key_has_its_own_pace_too() -> None:
    """The slower one of both counts."""
    ci = KeyHolder(tenant="acme", name="ci", frames_per_second=1)
    guests = Guests()
    with guests.admitted(tenant(key=ci)) as guest, guests.admitted(tenant()) as other:
        assert [guest.take(0.0), guest.take(0.0)] == [0.0, 1.0]
        assert other.take(0.0) == 0.0


def test_a_frame_counts_by_its_bytes_too() -> None:
    """To read 1 MB takes a thousand times what a token's frame does."""
    assert [frames_in(size) for size in (0, FRAME_BYTES - 1, FRAME_BYTES)] == [1, 1, 2]
    guests, acme = Guests(), tenant(frames_per_second=100)
    with guests.admitted(acme) as guest:
        assert guest.take(0.0, frames_in(99 * FRAME_BYTES)) == 0.0
        assert guest.take(0.0, frames_in(99 * FRAME_BYTES)) == pytest.approx(1.0)
