"""Effects of grids of several MPI ranks on their process: one owner, until the last grid is closed."""

import sys

import pytest

from neondist.comm.process_hooks import ExceptionAndExitHooks
from neondist.comm.transport import Transport
from neondist.errors import DataError


class FakeRanks(Transport):
    """Transport of two nominal ranks that share cores."""

    rank, size = 0, 2

    def __init__(self):
        self.events = []

    def share_cores(self):
        self.events.append("shared")
        return lambda: self.events.append("reverted")

    def abort(self, code):
        self.events.append(code)

    split = create_exchange = allreduce = iallreduce = allgather_array = all_to_all = allgather = bcast = None


@pytest.fixture
def previous_hook(monkeypatch):
    """Install an exception hook; return it with the list of its calls."""
    calls = []
    monkeypatch.setattr(sys, "excepthook", hook := lambda *error: calls.append(error))
    return hook, calls


def test_last_grid_reverts_the_effects(previous_hook, capsys):
    hook, calls = previous_hook
    first, second = FakeRanks(), FakeRanks()
    effects = ExceptionAndExitHooks.add_grid(first)
    assert ExceptionAndExitHooks.add_grid(second) is effects is sys.excepthook
    assert (first.events, second.events) == (["shared"], [])
    effects.remove_grid(first)
    sys.excepthook(DataError, DataError("no such file"), None)
    assert second.events == [2]
    assert "rank 0 of 2 failed and ends the job:" in capsys.readouterr().err
    effects.remove_grid(second)
    assert sys.excepthook is hook
    assert first.events == ["shared", "reverted"]
    assert not calls


def test_later_hooks_are_kept(previous_hook):
    """Keep a hook that calls the previous one, which then has no job to end."""
    _, calls = previous_hook
    effects = ExceptionAndExitHooks.add_grid(ranks := FakeRanks())
    sys.excepthook = later_hook = lambda *error: effects(*error)
    effects.remove_grid(ranks)
    assert sys.excepthook is later_hook
    error = OSError("disk")
    sys.excepthook(OSError, error, None)
    assert calls == [(OSError, error, None)]
