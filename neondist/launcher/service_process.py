"""Servers and master of an asynchronous job: processes that are restarted at their addresses when they are killed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ..errors import LaunchError
from ..terminal.console import say
from .fork_server import Process
from .job_nodes import JobNode, NodeLostError
from .remote import UNREACHABLE, cause_of

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
    node : JobNode
        The machine that it runs on.
    start : callable
        From the words of a command to its process, whose first line ends with the address.

    Attributes
    ----------
    address : str
        'HOST:PORT'; the port is 0 until one is chosen.
    restarts : int
    """

    def __init__(
        self, name: str, words: Sequence[str], node: JobNode, start: Callable[[Sequence[str]], Process]
    ) -> None:
        self.name, self.address, self.restarts = name, node.any_port, 0
        self._words, self._node, self._start = list(words), node, start
        self._process = self._begin()

    def wait(self) -> None:
        """Wait until it listens; restart it if it is killed before.

        Raises
        ------
        NodeLostError
            Its machine cannot be reached.
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
        if code == UNREACHABLE and not self._node.answers():
            raise NodeLostError(self._node.name)
        if self.restarts == MOST_RESTARTS:
            raise LaunchError(f"{self.name} was killed {MOST_RESTARTS + 1} times; continue with --resume auto")
        self.restarts += 1
        cause = cause_of(code, self._node.name)
        say(f"{self.name} was killed ({cause}); restarted", sys.stderr)
        self._process = self._begin()
        self.wait()

    def _begin(self) -> Process:
        return self._start([*self._words, "--address", self.address])
