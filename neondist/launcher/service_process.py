"""Servers and master of an asynchronous job: processes that are restarted at their addresses when they are killed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ..console import say
from ..errors import LaunchError
from ..signals import signal_name
from .fork_server import Process

MOST_RESTARTS = 5
"""Of a service that is killed."""


class ServiceProcess:
    """A service of a job.

    Parameters
    ----------
    name : str
        In messages.
    words : sequence of str
        Of its command, without its address.
    start : callable
        From the words of a command to its process, whose first line ends with the address.

    Attributes
    ----------
    address : str
    restarts : int
    """

    def __init__(self, name: str, words: Sequence[str], start: Callable[[Sequence[str]], Process]) -> None:
        self.name, self.restarts = name, 0
        self._words, self._start = list(words), start
        self._process = start(self._words)
        self.address = ""

    def wait(self) -> None:
        """Wait until it listens; restart it if it is killed before.

        Raises
        ------
        LaunchError
            It has ended by itself, or was killed too often.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            self.address = line.split()[-1]
        else:
            self._restart(self._process.wait())

    def keep(self) -> None:
        """Restart it if it has been killed; raises as `wait` does."""
        code = self._process.poll()
        if code is not None:
            self._restart(code)

    def _restart(self, code: int) -> None:
        if 0 <= code <= 128:
            raise LaunchError(f"{self.name} has ended with exit code {code}; its message is above")
        if self.restarts == MOST_RESTARTS:
            raise LaunchError(f"{self.name} was killed {MOST_RESTARTS + 1} times; go on with --resume auto")
        self.restarts += 1
        cause = signal_name(code)
        say(f"{self.name} was killed ({cause}); restarted", sys.stderr)
        self._process = self._start([*self._words, *(["--address", self.address] if self.address else [])])
        self.wait()
