"""Remote execution of `neondist` commands over ssh, with forwarding of signals.

`python safe_path.py neondist.launcher.remote` is the remote side. It reads the command as a line of JSON, then one
signal number per line. When the input ends, because the caller or the connection was lost, it ends the command.
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
from ..system.signals import describe_exit_code
from ..version import __version__
from .parent_watch import end_process

REMOTE_MODULE = "neondist.launcher.remote"
UNREACHABLE_EXIT_CODE = 255
"""Exit code of ssh if the connection fails or is lost."""
_SIGKILL_AFTER_SECONDS = 10.0
_CLOSE_AFTER_KILL_SECONDS = 2.0
_MAX_REQUEST_CHARACTERS = 1 << 20
_REMOTE_SHELL_SCRIPT = (  # in one line: csh accepts no quoted newlines
    '[ -x "$1" ] && [ -f "$2" ] && exec "$@"; echo "error: $0: has no $1 with $2; install neondist there in the same'
    ' folders, or set python_venv of the node in a resource file, for neondist launch" >&2; exit 2'
)


def remote_side_command(host: str) -> list[str]:
    """Return the command that runs the remote side on a host with the same files; it reports missing files."""
    return ["sh", "-c", _REMOTE_SHELL_SCRIPT, host, *safe_path.python_command(REMOTE_MODULE)]


class RemoteProcess:
    """`fork_server.Process` on another machine; its exit code is UNREACHABLE_EXIT_CODE if the machine is lost.

    Parameters
    ----------
    remote_command : sequence of str
        Command that runs the remote side of this module.
    words : sequence of str
        Arguments after 'neondist'.
    variables : mapping of str to str
        Additional environment variables. They are not on the command line, which is visible to other users.
    output : int, optional
        stdout, as for `subprocess.Popen`.
    """

    def __init__(
        self, remote_command: Sequence[str], words: Sequence[str], variables: Mapping[str, str], output: int | None
    ) -> None:
        self._process = subprocess.Popen(
            list(remote_command),
            stdin=subprocess.PIPE,
            stdout=output,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.pid, self.stdout = self._process.pid, self._process.stdout
        request = {"folder": os.getcwd(), "words": list(words), "variables": dict(variables), "version": __version__}
        self._send_line(json.dumps(request))

    def poll(self) -> int | None:
        """Return the exit code; None while the command runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired after `timeout` seconds."""
        return self._process.wait(timeout)

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the command has ended."""
        self._send_line(str(int(sig)))

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, and close the connection if the command does not end."""
        self.send_signal(signal.SIGKILL)
        try:
            self._process.wait(_CLOSE_AFTER_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _send_line(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


def describe_exit_cause(code: int, host: str) -> str:
    """Describe why a process on a host was killed."""
    return f"connection to {host} lost" if code == UNREACHABLE_EXIT_CODE else describe_exit_code(code)


def _run_requested_command(requests: IO[str]) -> int:
    """Run the command in the first line; return its exit code, or 128 + n if signal n killed it."""
    request, host = json.loads(requests.readline(_MAX_REQUEST_CHARACTERS)), os.uname().nodename
    if request["version"] != __version__:
        difference = f"neondist {__version__} there, {request['version']} where the job was started"
        sys.stderr.write(f"error: {host}: {difference}; install the same version\n")
        return 2
    try:
        os.chdir(request["folder"])
    except OSError as error:
        subject = f"{host}: the folder {request['folder']}"
        sys.stderr.write(f"error: {subject}: {error.strerror}; share it, or copy it to the same path\n")
        return 2
    child = subprocess.Popen(
        safe_path.python_command("neondist", *request["words"], ends_with_parent=True),
        stdin=subprocess.DEVNULL,
        env={**os.environ, **request["variables"]},
        start_new_session=True,
    )
    threading.Thread(target=_forward_signals, args=(requests, child), name="signals", daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _forward_signals(requests: IO[str], child: subprocess.Popen[bytes]) -> None:
    """Forward signals; end the command when the connection ends."""
    for line in requests:
        child.send_signal(int(line))
    end_process(child, _SIGKILL_AFTER_SECONDS)


if __name__ == "__main__":
    sys.exit(_run_requested_command(sys.stdin))
