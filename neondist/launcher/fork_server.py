"""Fork server: a copy of this process with a job's imports loaded, from which the job's processes are forked.

Importing PyTorch dominates the startup time of a worker. The server is forked before user code runs, while the
process has a single thread, so that locks, thread pools and devices are in the state of a new process.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NoReturn, Protocol

from ..safe_path import terminate_with_parent
from ..system.collector import exempt_new_objects_from_gc
from ..system.signals import SignalRecorder

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_MAX_REQUEST_BYTES = 1 << 20
_RUN_PERMISSION = b"go"
_FORK_TIMEOUT = 60.0
"""Time limit in seconds for the fork of a process, and for the exit of the fork server."""


class Process(Protocol):
    """Child process with the interface of `subprocess.Popen`."""

    pid: int
    stdout: IO[str] | None

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired after `timeout` seconds."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class ForkedProcess:
    """Process forked by a ForkServer; see `Process`."""

    def __init__(self, pid: int, stdout: IO[str] | None) -> None:
        self.pid, self.stdout = pid, stdout
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self._exit_code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the process was reaped by a signal handler or other code
                pid, status = self.pid, signal.SIGKILL
                if self._exit_code is not None:
                    return self._exit_code
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Client of the fork server; the server exits when the connection closes.

    Each request has its own channel: the new process sends its pid and waits for permission to run. A process that
    appears after its request was abandoned exits, and is never attributed to another request.

    Parameters
    ----------
    connection : socket
    timeout : float
        Seconds for a process to be forked. After a timeout the server is no longer used.
    """

    def __init__(self, connection: socket.socket, timeout: float = _FORK_TIMEOUT) -> None:
        self._connection, self._timeout = connection, timeout
        self._abandoned_channel: socket.socket | None = None
        connection.settimeout(timeout)

    def start(
        self, words: Sequence[str], env: Mapping[str, str], name: str, output: int | None = None
    ) -> ForkedProcess | None:
        """Fork a process that runs the `neondist` command; return None on failure.

        The new process is a child of this one and a session leader, and receives SIGTERM when this process is killed.

        Parameters
        ----------
        words : sequence of str
            Arguments after 'neondist'.
        env : mapping of str to str
        name : str
            Process name, as shown by `ps` and `top`.
        output : int, optional
            stdout of the process: subprocess.PIPE or subprocess.DEVNULL. Default: this process's stdout.
        """
        read_fd = None
        if output == subprocess.PIPE:
            read_fd, write_fd = os.pipe()
        else:
            write_fd = os.open(os.devnull, os.O_WRONLY) if output == subprocess.DEVNULL else os.dup(1)
        try:
            pid = self._request(json.dumps({"words": list(words), "env": dict(env), "name": name}).encode(), write_fd)
        finally:
            os.close(write_fd)
        if pid is not None:
            return ForkedProcess(pid, None if read_fd is None else open(read_fd, encoding="utf-8"))
        if read_fd is not None:
            os.close(read_fd)
        return None

    def kill_abandoned_process(self) -> None:
        """Kill and reap a process that was forked too late, if any; call this once the fork server has exited."""
        if self._abandoned_channel is None:
            return
        with self._abandoned_channel as channel, suppress(TimeoutError):
            if pid_answer := channel.recv(64):
                late_process = ForkedProcess(int(pid_answer), None)
                late_process.kill()  # exits by itself unless stopped
                late_process.wait()

    def _request(self, request: bytes, output: int) -> int | None:
        """Request a process; return the pid of the new child of this process, or None on failure."""
        channel, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(self._timeout)
        answer = b""
        try:
            with peer:
                socket.send_fds(self._connection, [request], [output, peer.fileno()])
            answer = channel.recv(64)
            if answer:
                channel.send(_RUN_PERMISSION)
        except TimeoutError:
            self._connection.close()
            channel.shutdown(socket.SHUT_WR)
            self._abandoned_channel = channel
        except OSError:  # the fork server or its child was killed
            pass
        finally:
            if channel is not self._abandoned_channel:
                channel.close()
        return int(answer) if answer else None


@contextmanager
def open_fork_server(
    import_modules: Callable[[], object], timeout: float = _FORK_TIMEOUT
) -> Iterator[ForkServer | None]:
    """Import modules with `import_modules`, and yield a fork server that has loaded them; None if this fails.

    Open it before this process runs user code or starts threads. `timeout` is passed to ForkServer.
    """
    if not _import_and_check_forking(import_modules):
        yield None
        return
    connection, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # buffered output would be written twice
        stream.flush()
    supervisor_pid = os.getpid()
    pid = os.fork()
    if not pid:
        connection.close()
        _run_command(*_serve_fork_requests(peer, supervisor_pid))
    peer.close()
    server, process = ForkServer(connection, timeout), ForkedProcess(pid, None)
    try:
        yield server
    finally:
        connection.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:  # the fork server is stopped
            process.kill()
            process.wait()
        server.kill_abandoned_process()


def _import_and_check_forking(import_modules: Callable[[], object]) -> bool:
    """Import the modules; return whether processes can be forked."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    try:
        with exempt_new_objects_from_gc():
            import_modules()
    except ImportError:  # the code that needs the module reports the error
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def _serve_fork_requests(connection: socket.socket, supervisor_pid: int) -> tuple[dict[str, Any], int]:
    """Fork processes until the supervisor exits; in each forked process, return its request and output."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"neondist-fork")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    while True:
        request, descriptors = b"", list[int]()
        with suppress(OSError):
            request, descriptors, *_ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 2)
        if not request or len(descriptors) < 2:
            os._exit(0)
        parent = os.fork()
        if not parent:  # the supervisor, a subreaper, adopts the child of this process
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            connection.close()
            _wait_for_adoption(descriptors[1], parent, supervisor_pid)
            return json.loads(request), descriptors[0]
        os.waitpid(parent, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_for_adoption(channel: int, parent: int, supervisor_pid: int) -> None:
    """Wait to be adopted by the supervisor, bind this process to it and answer; exit if the request was abandoned."""
    while os.getppid() == parent:
        time.sleep(0.001)
    terminate_with_parent(supervisor_pid)
    os.setsid()
    answer = b""
    with socket.socket(fileno=channel) as connection, suppress(OSError):
        connection.send(str(os.getpid()).encode())
        answer = connection.recv(len(_RUN_PERMISSION))
    if answer != _RUN_PERMISSION:
        os._exit(1)


def _run_command(request: Mapping[str, Any], output: int) -> NoReturn:
    """Run the `neondist` command and exit."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, request["name"].encode())
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(output, 1)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    SignalRecorder(owns_process=True).install_signal_handlers()
    sys.argv = ["neondist", *request["words"]]
    exit_code: Any = 0
    try:
        runpy.run_module("neondist", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        exit_code = end.code or 0
    if not isinstance(exit_code, int):
        sys.exit(exit_code)
    _exit_without_teardown(exit_code)


def _exit_without_teardown(code: int) -> NoReturn:
    """Exit as the interpreter does, but without the slow teardown of modules."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
