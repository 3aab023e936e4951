"""Signal handling of a process, from its start to its end.

Few imports: a command installs its handlers before slow imports, see `install_command_handlers`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = ("SIGTERM", "SIGUSR1")
"""Signals that request a stop with a checkpoint."""
STOPPED_EXIT_CODE = 75
"""Exit code of a run that stopped on request."""
INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C."""


class SignalRecorder:
    """Recorder of SIGTERM and SIGUSR1, which do not interrupt the process.

    Parameters
    ----------
    owns_process : bool
        Whether this is the `neondist` command; it also handles Ctrl-C (SIGINT).

    Attributes
    ----------
    received_signals : list of str
        Names of the received signals, in order.
    listeners : list of callable
        Functions called with the name of each signal, from within the handler.
    interrupted : bool
        Whether Ctrl-C was received. Ctrl-C ends the process immediately, or, if `needs_cleanup` is set, raises
        KeyboardInterrupt and ends the process if it still runs a few seconds later.
    needs_cleanup : bool
        Whether there is something to clean up: a terminal, an unfinished file.
    """

    def __init__(self, owns_process: bool = False) -> None:
        self.owns_process = owns_process
        self.received_signals: list[str] = []
        self.listeners: list[Callable[[str], None]] = []
        self.interrupted = self.needs_cleanup = self._exception_lost = False
        self._previous_handlers: dict[int, Any] = {}

    def install_signal_handlers(self) -> SignalRecorder:
        """Install the handlers, except for ignored signals; do nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            names = [*STOP_SIGNALS, "SIGINT"] if self.owns_process else STOP_SIGNALS
            for number in filter(None, (getattr(signal, name, None) for name in names)):  # not every system has all
                if signal.getsignal(number) != signal.SIG_IGN:
                    handler = self._interrupt if number == signal.SIGINT else self.handle
                    self._previous_handlers[number] = signal.signal(number, handler)
        return self

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Record a signal and call the listeners."""
        name = signal.Signals(number).name
        self.received_signals.append(name)
        for listener in list(self.listeners):
            listener(name)

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call a listener for signals received so far and for future ones."""
        self.listeners.append(listener)  # first, so that no signal is missed
        for name in list(self.received_signals):
            listener(name)

    def restore_signal_handlers(self) -> None:
        """Restore the previous handlers; signals received so far are discarded."""
        while self._previous_handlers:
            signal.signal(*self._previous_handlers.popitem())

    def restore_signal_defaults(self) -> None:
        """Restore the default action of SIGTERM and SIGUSR1, even for a signal that has already arrived."""
        signal_numbers = [number for number in self._previous_handlers if number != signal.SIGINT]
        for number in signal_numbers:
            signal.signal(number, signal.SIG_DFL)
            del self._previous_handlers[number]
        for name in self.received_signals:
            os.kill(os.getpid(), getattr(signal, name))

    def ignore_further_signals(self) -> None:
        """Ignore further stop signals during exit, when the exit code is known; Ctrl-C ends the process at once."""
        for number in self._previous_handlers:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.needs_cleanup or (self.interrupted and not self._exception_lost):
            os._exit(INTERRUPTED_EXIT_CODE)
        self.interrupted, self._exception_lost = True, False
        sys.unraisablehook = self._interrupt_again
        timer = threading.Timer(5, os._exit, [INTERRUPTED_EXIT_CODE])  # a callback from C may swallow the exception
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    def _interrupt_again(self, unraisable: Any) -> None:
        """Interrupt again if Python could not propagate the exception, as in a weakref callback."""
        if unraisable.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(unraisable)
            return
        self._exception_lost = True
        main_id = threading.main_thread().ident
        timer = threading.Timer(0.05, signal.pthread_kill, [main_id, signal.SIGINT])  # also interrupts a system call
        timer.daemon = True
        timer.start()


def describe_exit_code(code: int) -> str:
    """Return the name of the signal that ended a process, such as 'SIGKILL', or else the exit code.

    The code is the negative signal number, as in subprocess, or 128 plus the signal number, as in shells.
    """
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {128 + number}"


def install_command_handlers() -> None:
    """Install handlers if this process is the `neondist` command; see `find_command_signal_recorder`."""
    if is_neondist_command() and find_command_signal_recorder() is None:
        SignalRecorder(owns_process=True).install_signal_handlers()


def is_neondist_command() -> bool:
    """Return whether this process is the `neondist` command."""
    words, name = sys.orig_argv, os.path.basename(sys.argv[0])
    if name == "-m":  # `python -m neondist`, `-um neondist` or `-mneondist`, while its package is being imported
        options = (word.partition("W")[0].partition("X")[0] if word[:1] == "-" else "" for word in words)
        index = next(number for number, option in enumerate(options) if "m" in option)
        name = words[index].partition("m")[2] or words[index + 1]
    return name == "neondist"


def find_command_signal_recorder() -> SignalRecorder | None:
    """Return the SignalRecorder installed at the start of this process, if any."""
    recorders = map(find_active_signal_recorder, (*STOP_SIGNALS, "SIGINT"))
    return next((recorder for recorder in recorders if recorder and recorder.owns_process), None)


def find_active_signal_recorder(name: str) -> SignalRecorder | None:
    """Return the SignalRecorder that handles a signal in this process, if any."""
    handler = getattr(signal.getsignal(getattr(signal, name, signal.SIGINT)), "__self__", None)
    return handler if isinstance(handler, SignalRecorder) else None
