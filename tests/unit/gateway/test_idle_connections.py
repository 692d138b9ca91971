"""The lobby: bounded, and the one that waits longest gives way."""

from gateway.server.idle_connections import IdleConnections


class Waiting:
    def __init__(self) -> None:
        self.gave_way = False

    def evict(self) -> None:
        self.gave_way = True


def test_the_longest_waiting_one_gives_way() -> None:
    """A flood displaces itself; who has just come has time to speak."""
    lobby, all_of_them = IdleConnections(2), [Waiting() for _ in range(4)]
    for each in all_of_them:
        lobby.add(each)
    assert [each.gave_way for each in all_of_them] == [True, True, False, False]
    assert len(lobby) == 2


def test_who_has_asked_is_not_in_the_way() -> None:
    """Leaving is idempotent: a connection that is lost leaves once more."""
    lobby, first, second = IdleConnections(1), Waiting(), Waiting()
    lobby.add(first)
    lobby.discard(first)
    lobby.discard(first)
    lobby.add(second)
    assert not first.gave_way
    assert not second.gave_way


def test_an_empty_lobby_can_make_no_room() -> None:
    lobby = IdleConnections(1)
    assert not lobby.evict_longest_idle()
    waiting = Waiting()
    lobby.add(waiting)
    assert lobby.evict_longest_idle()
    assert waiting.gave_way
