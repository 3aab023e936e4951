"""A `neondist` command on another machine: what starts it there over ssh, hands signals on, and ends it.

`python safe_path.py neondist.launcher.remote` is the other end. It reads a line of JSON with the command, then a signal
number in each line; when its input ends, because this machine or the connection is gone, it ends the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from .. import safe_path
from ..system.signals import signal_name
from ..version import __version__
from .parent_watch import end_process

MODULE = "neondist.launcher.remote"
"""This one, to be run at the other end."""
UNREACHABLE = 255
"""Exit code of ssh when there is no connection, or no longer."""
_GRACE = 10.0
"""Seconds that the command has to end after a signal, before it is killed."""
_PATIENCE = 2.0
"""Seconds after which the connection of a command that is killed is closed."""
_MOST_CHARACTERS = 1 << 20
_START = """[ -x "$1" ] && [ -f "$2" ] && exec "$@"
echo "error: $0: has no $1 with $2; install neondist there in the same folders, or give the node its python_venv in a \
resource file, for neondist launch" >&2
exit 2"""


def program(host: str) -> list[str]:
    """Return the words that run this module's other end on a host with the same files, or say that it has none."""
    return ["sh", "-c", _START, host, *safe_path.command(MODULE)]


class RemoteProcess:
    """A command on another machine, as `fork_server.Process` has it; its exit code is UNREACHABLE if that is lost.

    Parameters
    ----------
    connection : sequence of str
        Words that run this module's other end there.
    words : sequence of str
        After 'neondist'.
    variables : mapping of str to str
        Environment variables beside those of the other machine. They are not on the command line, which others see.
    output : int, optional
        Its stdout, as `subprocess.Popen` has it.
    """

    def __init__(
        self, connection: Sequence[str], words: Sequence[str], variables: Mapping[str, str], output: int | None
    ) -> None:
        self._process = subprocess.Popen(
            list(connection), stdin=subprocess.PIPE, stdout=output, text=True, start_new_session=True
        )
        self.pid, self.stdout = self._process.pid, self._process.stdout
        request = {"folder": os.getcwd(), "words": list(words), "variables": dict(variables), "version": __version__}
        self._send(json.dumps(request))

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired after `timeout` seconds."""
        return self._process.wait(timeout)

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        self._send(str(int(sig)))

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, and close the connection if it does not end."""
        self.send_signal(signal.SIGKILL)
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


def cause_of(code: int, host: str) -> str:
    """Return in words what has ended a process of a host that was killed."""
    return f"connection to {host} lost" if code == UNREACHABLE else signal_name(code)


def _run(requests: IO[str]) -> int:
    """Run the command of the first line, and return its exit code, that of a shell if it was killed."""
    request, host = json.loads(requests.readline(_MOST_CHARACTERS)), os.uname().nodename
    if request["version"] != __version__:
        difference = f"neondist {__version__} there, {request['version']} where the job was started"
        sys.stderr.write(f"error: {host}: {difference}; install the same version\n")
        return 2
    try:
        os.chdir(request["folder"])
    except OSError as error:
        where = f"{host}: the folder {request['folder']}"
        sys.stderr.write(f"error: {where}: {error.strerror}; share it, or copy it to the same path\n")
        return 2
    child = subprocess.Popen(
        safe_path.command("neondist", *request["words"], bound=True),
        stdin=subprocess.DEVNULL,
        env={**os.environ, **request["variables"]},
        start_new_session=True,
    )
    threading.Thread(target=_forward, args=(requests, child), name="signals", daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _forward(requests: IO[str], child: subprocess.Popen[bytes]) -> None:
    """Hand signals on; end the command when the connection ends."""
    for line in requests:
        child.send_signal(int(line))
    end_process(child, _GRACE)


if __name__ == "__main__":
    sys.exit(_run(sys.stdin))
