"""Claims of a tenant's account are in order, whatever clocks say."""

from hypothesis import given
from hypothesis import strategies as st

from registry.credentials.tenant_accounts import TenantAccount
from streams.accounts.claims import EVERYONE

NEW = TenantAccount(tenant="acme", public="A")
STEPS = st.tuples(
    st.sampled_from(["issue", "rotate", "end", "withdraw"]),
    st.floats(0, 10_000),  # a clock that goes backwards, too
)


def test_the_claims_revoke_what_was_issued_before_a_withdrawal() -> None:
    """And nothing before one."""
    issued = NEW.enable(100, "keys")
    assert issued.state(("AS",)).revocations == {}
    cut = issued.disable(100)
    assert cut.state(("AS",)).revocations == {EVERYONE: cut.issued_at}
    assert cut.is_disabled
    again = cut.enable(50, "keys")
    assert not again.is_disabled
    assert again.issued_at > cut.revoked_until >= issued.issued_at


def test_what_is_withdrawn_already_stays_as_it_is() -> None:
    """Whoever repeats a command changes nothing, and tells nobody."""
    cut = NEW.enable(100, "keys").disable(200)
    assert cut.disable(300) == cut


def test_older_credentials_end_at_their_time_and_new_ones_stay() -> None:
    """Also where two rotations overlap."""
    first = NEW.enable(100, "keys")
    second = first.enable(200, "keys", overlap_seconds=1000)
    third = second.enable(300, "keys", overlap_seconds=10)
    assert not third.is_due(309)
    ended = third.end(310)
    assert second.issued_at <= ended.revoked_until < third.issued_at
    assert [each.at for each in ended.endings] == [1200]
    last = ended.end(1200)
    assert last.endings == ()
    assert last.revoked_until == ended.revoked_until


@given(st.lists(STEPS, max_size=12))
def test_only_what_was_issued_since_the_last_cut_is_good(steps: list[tuple[str, float]]) -> None:
    """However fast things happen, and whatever the clock says."""
    account, issued, good = NEW, set[int](), set[int]()
    for what, now in steps:
        before = account
        if what == "issue":
            account = account.enable(now, "keys")
            good |= {account.issued_at}
        elif what == "rotate":
            account = account.enable(now, "keys", overlap_seconds=0)
            good = {account.issued_at}
        elif what == "end":
            account = account.renew(now, "keys").end(now)
        else:
            account, good = account.disable(now), set()
        assert account == before or account.issued_at > before.issued_at
        issued |= good
        assert good == {each for each in issued if each > account.revoked_until}
