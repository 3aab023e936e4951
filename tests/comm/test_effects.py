"""Effects of grids of several MPI ranks on their process: one owner, until the last is closed."""

import sys

import pytest

from neondist.comm.effects import Effects
from neondist.comm.transport import Transport
from neondist.errors import DataError


class Ranks(Transport):
    """Two ranks that share cores, in name."""

    rank, size = 0, 2

    def __init__(self):
        self.said = []

    def share_cores(self):
        self.said.append("shared")
        return lambda: self.said.append("taken back")

    def abort(self, code):
        self.said.append(code)

    split = exchange = allreduce = iallreduce = allgather_array = all_to_all = allgather = bcast = None


@pytest.fixture
def before(monkeypatch):
    """The hook that was there, which notes what reaches it."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", hook := lambda *error: seen.append(error))
    return hook, seen


def test_the_last_one_takes_back_what_the_first_changed(before, capsys):
    hook, seen = before
    one, two = Ranks(), Ranks()
    effects = Effects.enter(one)
    assert Effects.enter(two) is effects is sys.excepthook
    assert (one.said, two.said) == (["shared"], [])
    effects.leave(one)
    sys.excepthook(DataError, DataError("no such file"), None)
    assert two.said == [2]
    assert "rank 0 of 2 failed and ends the job:" in capsys.readouterr().err
    effects.leave(two)
    assert sys.excepthook is hook
    assert one.said == ["shared", "taken back"]
    assert not seen


def test_a_hook_that_came_later_stays(before):
    """It may call the one that was there when it came: nothing is left to end."""
    _, seen = before
    effects = Effects.enter(ranks := Ranks())
    sys.excepthook = later = lambda *error: effects(*error)
    effects.leave(ranks)
    assert sys.excepthook is later
    error = OSError("disk")
    sys.excepthook(OSError, error, None)
    assert seen == [(OSError, error, None)]
