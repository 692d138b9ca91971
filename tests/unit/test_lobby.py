"""The lobby: bounded, and the one that waits longest gives way."""

from gateway.lobby import Lobby


class Waiting:
    def __init__(self) -> None:
        self.gave_way = False

    def give_way(self) -> None:
        self.gave_way = True


def test_the_longest_waiting_one_gives_way() -> None:
    """A flood displaces itself; who has just come has time to speak."""
    lobby, all_of_them = Lobby(2), [Waiting() for _ in range(4)]
    for each in all_of_them:
        lobby.enter(each)
    assert [each.gave_way for each in all_of_them] == [True, True, False, False]
    assert len(lobby) == 2


def test_who_has_asked_is_not_in_the_way() -> None:
    """Leaving is idempotent: a connection that is lost leaves once more."""
    lobby, first, second = Lobby(1), Waiting(), Waiting()
    lobby.enter(first)
    lobby.leave(first)
    lobby.leave(first)
    lobby.enter(second)
    assert not first.gave_way
    assert not second.gave_way


def test_an_empty_lobby_can_make_no_room() -> None:
    lobby = Lobby(1)
    assert not lobby.make_room()
    waiting = Waiting()
    lobby.enter(waiting)
    assert lobby.make_room()
    assert waiting.gave_way
