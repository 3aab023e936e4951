"""Signals of a process, received from its start to its end.

Imports next to nothing: a command listens before it imports what takes time, see `listen_in_command`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPING = ("SIGTERM", "SIGUSR1")
"""Ask a run to stop with a checkpoint."""
STOPPED = 75
"""Exit code of a run that was asked to stop, and has."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class Signals:
    """Takes note of SIGTERM and SIGUSR1, however often they come: nothing is cut off by them.

    Parameters
    ----------
    whole_process : bool
        This is the `neondist` command, from its first moment to its last. It hears Ctrl-C (SIGINT) too.

    Attributes
    ----------
    received : list of str
        Names of the signals that came, the first one first.
    listeners : list of callable
        Called with the name of each signal that comes, in the middle of whatever goes on.
    interrupted : bool
        Whether Ctrl-C came. It ends the process at once, or, where `cleans_up` is set, with a KeyboardInterrupt; and
        at once, if a few seconds later the process is still there.
    cleans_up : bool
        Whether there is something to put in order: a terminal, an unfinished file.
    """

    def __init__(self, whole_process: bool = False) -> None:
        self.whole_process = whole_process
        self.received: list[str] = []
        self.listeners: list[Callable[[str], None]] = []
        self.interrupted = self.cleans_up = self._lost = False
        self._before: dict[int, Any] = {}

    def listen(self) -> Signals:
        """Begin; where this is not the main thread, which alone can, do nothing. What is ignored stays so."""
        if threading.current_thread() is threading.main_thread():
            names = [*STOPPING, "SIGINT"] if self.whole_process else STOPPING
            for number in filter(None, (getattr(signal, name, None) for name in names)):  # not all on every system
                if signal.getsignal(number) != signal.SIG_IGN:
                    handler = self._interrupt if number == signal.SIGINT else self.handle
                    self._before[number] = signal.signal(number, handler)
        return self

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Take note of a signal."""
        name = signal.Signals(number).name
        self.received.append(name)
        for listener in list(self.listeners):
            listener(name)

    def join(self, listener: Callable[[str], None]) -> None:
        """Tell a listener what was heard, and what will be."""
        self.listeners.append(listener)  # first, so that no signal comes in between
        for name in list(self.received):
            listener(name)

    def restore(self) -> None:
        """Listen no longer: handlers are what they were before; a signal that came has had no effect."""
        while self._before:
            signal.signal(*self._before.popitem())

    def give_up(self) -> None:
        """Restore the default action of SIGTERM and SIGUSR1, also for a signal that has already arrived."""
        numbers = [number for number in self._before if number != signal.SIGINT]
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
            del self._before[number]
        for name in self.received:
            os.kill(os.getpid(), getattr(signal, name))

    def end(self) -> None:
        """The work is done, and its exit code is known: nothing shall change that while the process ends."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.cleans_up or (self.interrupted and not self._lost):
            os._exit(INTERRUPTED)
        self.interrupted, self._lost = True, False
        sys.unraisablehook = self._again
        last = threading.Timer(5, os._exit, [INTERRUPTED])  # code that calls back from C may swallow the exception
        last.daemon = True
        last.start()
        raise KeyboardInterrupt

    def _again(self, unraisable: Any) -> None:
        """Interrupt once more where Python could not pass the interruption on, as in a callback of a weak reference."""
        if unraisable.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(unraisable)
            return
        self._lost = True
        main = threading.main_thread().ident
        again = threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT])  # ends a system call there as well
        again.daemon = True
        again.start()


def signal_name(code: int) -> str:
    """Return the name of the signal that ended a process, such as 'SIGKILL'; of none that there is, the exit code.

    The code is a negative signal, as subprocess has it, or 128 and the signal, as shells have it.
    """
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {128 + number}"


def listen_in_command() -> None:
    """Begin to listen, if this process is the `neondist` command, which will ask for it with `listening`."""
    words, name = sys.orig_argv, os.path.basename(sys.argv[0])
    if name == "-m":  # `python -m neondist`, as long as its package is imported
        name = words[words.index("-m") + 1]
    if name == "neondist" and listening() is None:
        Signals(whole_process=True).listen()


def listening() -> Signals | None:
    """Return what this process listens with since its start, if it does."""
    return next(
        (found for name in (*STOPPING, "SIGINT") if (found := active_handler(name)) and found.whole_process), None
    )


def active_handler(name: str) -> Signals | None:
    """Return what hears a signal in this process, if a Signals does."""
    found = getattr(signal.getsignal(getattr(signal, name, signal.SIGINT)), "__self__", None)
    return found if isinstance(found, Signals) else None
