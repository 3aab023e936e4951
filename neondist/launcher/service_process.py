"""Servers and master of an asynchronous job: processes restarted at the same address when killed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

from ..errors import LaunchError
from ..terminal.console import say
from .fork_server import Process
from .job_nodes import JobNode, NodeLostError
from .remote import UNREACHABLE_EXIT_CODE, describe_exit_cause

MAX_SERVICE_RESTARTS = 5
"""Maximum number of restarts of a killed service."""
_ADDRESS_PATTERN = re.compile(r"(?:PServer|Master) at (\S+:\d+)$")


class ServiceProcess:
    """Service of a job.

    Parameters
    ----------
    name : str
        Name in messages.
    words : sequence of str
        Arguments of the service's command, without the address.
    node : JobNode
        Machine on which the service runs.
    start : callable
        Starts a process from the arguments of a command; it prints its address, after any output of a login shell,
        which may lack a line break.

    Attributes
    ----------
    address : str
        'HOST:PORT'; port 0 until the service listens.
    restarts : int
    """

    def __init__(
        self, name: str, words: Sequence[str], node: JobNode, start: Callable[[Sequence[str]], Process]
    ) -> None:
        self.name, self.address, self.restarts = name, node.any_port_address, 0
        self._words, self._node, self._start = list(words), node, start
        self._process = self._start_process()

    def wait_until_listening(self) -> None:
        """Wait until the service listens; restart it if it is killed before then.

        Raises
        ------
        NodeLostError
            The machine of the service cannot be reached.
        LaunchError
            The service exited by itself, or was killed too often.
        """
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, ""):
            if match := _ADDRESS_PATTERN.search(line.rstrip()):
                self.address = match[1]
                return
        self._handle_exit(self._process.wait())

    def restart_if_killed(self) -> None:
        """Restart the service if it was killed; raises as `wait_until_listening` does."""
        code = self._process.poll()
        if code is not None:
            self._handle_exit(code)

    def _handle_exit(self, code: int) -> None:
        if 0 <= code <= 128:
            raise LaunchError(f"{self.name} has ended with exit code {code}; correct the error reported above")
        if code == UNREACHABLE_EXIT_CODE and not self._node.is_reachable():
            raise NodeLostError(self._node.name)
        if self.restarts == MAX_SERVICE_RESTARTS:
            raise LaunchError(f"{self.name} was killed {MAX_SERVICE_RESTARTS + 1} times; continue with --resume auto")
        self.restarts += 1
        cause = describe_exit_cause(code, self._node.name)
        say(f"{self.name} was killed ({cause}); restarted", sys.stderr)
        self._process = self._start_process()
        self.wait_until_listening()

    def _start_process(self) -> Process:
        return self._start([*self._words, "--address", self.address])
