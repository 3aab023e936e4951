"""Effects of grids of several MPI ranks on their process: one owner, until the last grid is closed."""

import io
import sys
from contextlib import nullcontext

import pytest

from neondist.comm.process_hooks import ExceptionAndExitHooks, abort_with_error
from neondist.comm.transport import Transport
from neondist.errors import DataError
from neondist.terminal.script_errors import ScriptErrorHook, install_script_error_hook


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


@pytest.mark.parametrize("script_first", [True, False])
def test_script_error_is_one_message_on_several_ranks(script_first, monkeypatch, capsys):
    """Report invalid input without a traceback, whether the hook of scripts or the first grid comes first."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    if script_first:
        install_script_error_hook()
    effects = ExceptionAndExitHooks.add_grid(ranks := FakeRanks())
    install_script_error_hook()
    try:
        raise DataError("no such file")
    except DataError as error:
        sys.excepthook(DataError, error, error.__traceback__)
        line = error.__traceback__.tb_lineno
    assert ranks.events == ["shared", 2]
    assert capsys.readouterr().err == f"error: {__file__}:{line}: no such file\n"
    sys.excepthook(KeyError, KeyError("x"), None)
    assert ranks.events == ["shared", 2, 1]
    assert "failed and ends the job:\nKeyError: 'x'" in capsys.readouterr().err
    effects.remove_grid(ranks)


@pytest.mark.parametrize("on_ranks", [False, True])
def test_message_in_the_hook_of_torch_distributed(on_ranks, monkeypatch):
    """PyTorch's hook replaces stderr by a StringIO, and prints its text only if the previous hook returns."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "__stderr__", io.StringIO())
    with pytest.raises(SystemExit) if not on_ranks else nullcontext():
        if on_ranks:
            abort_with_error(FakeRanks(), DataError("no such file"))
        else:
            ScriptErrorHook("script.py")(DataError, DataError("no such file"), None)
    assert sys.__stderr__.getvalue().endswith("no such file\n")


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
