"""A copy of this process that has imported what a job needs, and from which the processes of the job are forked.

Importing PyTorch takes longer than all else before a worker's first step. The copy is made before any code of the user
runs, and while no other thread does, so that locks, pools of threads and devices are as in a new process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
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

from ..safe_path import end_with
from ..system.signals import Signals

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_MOST_BYTES = 1 << 20
_GO = b"go"
_PATIENCE = 60.0
"""Seconds for a process to be forked, and for the copy to end."""


class Process(Protocol):
    """A child of this process, as `subprocess.Popen` has it."""

    pid: int
    stdout: IO[str] | None

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired after `timeout` seconds."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class ForkedProcess:
    """A process that a ForkServer has forked; see `Process`."""

    def __init__(self, pid: int, stdout: IO[str] | None) -> None:
        self.pid, self.stdout = pid, stdout
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # a signal's handler, or other code, has waited for it
                pid, status = self.pid, signal.SIGKILL
                if self._code is not None:
                    return self._code
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """This process's end of the copy, which ends with the connection.

    Each request has a channel of its own: the new process sends its pid, and waits for permission to run. One that
    appears after its request was given up exits, and is never taken for that of another request.

    Parameters
    ----------
    connection : socket
    patience : float
        Seconds for a process to be forked. After that there are no more: the next ones would be as late.
    """

    def __init__(self, connection: socket.socket, patience: float = _PATIENCE) -> None:
        self._connection, self._patience = connection, patience
        self._given_up: socket.socket | None = None
        connection.settimeout(patience)

    def start(
        self, words: Sequence[str], env: Mapping[str, str], name: str, output: int | None = None
    ) -> ForkedProcess | None:
        """Fork a process that runs the `neondist` command; None if that is not possible, or no more.

        It is a child of this process and leads a session. It gets a SIGTERM when this process is killed.

        Parameters
        ----------
        words : sequence of str
            After 'neondist'.
        env : mapping of str to str
            Its environment.
        name : str
            That `ps` and `top` show.
        output : int, optional
            Its stdout: subprocess.PIPE or subprocess.DEVNULL. Default: that of this process.
        """
        reading = None
        if output == subprocess.PIPE:
            reading, writing = os.pipe()
        else:
            writing = os.open(os.devnull, os.O_WRONLY) if output == subprocess.DEVNULL else os.dup(1)
        try:
            pid = self._ask(json.dumps({"words": list(words), "env": dict(env), "name": name}).encode(), writing)
        finally:
            os.close(writing)
        if pid is not None:
            return ForkedProcess(pid, None if reading is None else open(reading, encoding="utf-8"))
        if reading is not None:
            os.close(reading)
        return None

    def reap(self) -> None:
        """Once the copy has ended, wait for what it forked too late."""
        if self._given_up is None:
            return
        with self._given_up as channel, suppress(TimeoutError):
            if answer := channel.recv(64):
                late = ForkedProcess(int(answer), None)
                late.kill()  # it ends by itself, unless it is stopped
                late.wait()

    def _ask(self, request: bytes, output: int) -> int | None:
        """Return the number of a new process, which is a child of this one now; None if there is none."""
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(self._patience)
        answer = b""
        try:
            with theirs:
                socket.send_fds(self._connection, [request], [output, theirs.fileno()])
            answer = channel.recv(64)
            if answer:
                channel.send(_GO)
        except TimeoutError:
            self._connection.close()
            channel.shutdown(socket.SHUT_WR)
            self._given_up = channel
        except OSError:  # the copy was killed, or what it has forked
            pass
        finally:
            if channel is not self._given_up:
                channel.close()
        return int(answer) if answer else None


@contextmanager
def open_fork_server(load: Callable[[], object], patience: float = _PATIENCE) -> Iterator[ForkServer | None]:
    """Let `load` import modules, and yield a server that has them; None where there can be none.

    Open it while this process has neither run code of the user nor started threads. `patience` is that of ForkServer.
    """
    if not _can_fork(load):
        yield None
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # what they hold would be written twice
        stream.flush()
    supervisor = os.getpid()
    server = os.fork()
    if not server:
        ours.close()
        _run(*_serve(theirs, supervisor))
    theirs.close()
    forks, copy = ForkServer(ours, patience), ForkedProcess(server, None)
    try:
        yield forks
    finally:
        ours.close()
        try:
            copy.wait(patience)
        except subprocess.TimeoutExpired:  # it is stopped
            copy.kill()
            copy.wait()
        forks.reap()


def load_permanently(load: Callable[[], object]) -> None:
    """Let `load` import modules, which the garbage collector leaves out from then on.

    It would look at a million objects of PyTorch's again and again while they are imported, and in each forked process
    once more, which copies the pages that it writes to.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        load()
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def _can_fork(load: Callable[[], object]) -> bool:
    """Import what is needed, and tell whether processes can be forked."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    try:
        load_permanently(load)
    except ImportError:  # what needs it says so
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def _serve(connection: socket.socket, supervisor: int) -> tuple[dict[str, Any], int]:
    """Fork processes until the supervisor ends; return, in each of these, what it shall run and its output."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"neondist-fork")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    while True:
        text, passed = b"", list[int]()
        with suppress(OSError):
            text, passed, *_ = socket.recv_fds(connection, _MOST_BYTES, 2)
        if not text or len(passed) < 2:
            os._exit(0)
        between = os.fork()
        if not between:  # its child becomes one of the supervisor, which is to be its parent
            between = os.getpid()
            if os.fork():
                os._exit(0)
            connection.close()
            _settle(passed[1], between, supervisor)
            return json.loads(text), passed[0]
        os.waitpid(between, 0)
        for one in passed:
            os.close(one)


def _settle(channel: int, between: int, supervisor: int) -> None:
    """Wait for the supervisor to be the parent, bind this process to it, answer; exit if the request was given up."""
    while os.getppid() == between:
        time.sleep(0.001)
    end_with(supervisor)
    os.setsid()
    told = b""
    with socket.socket(fileno=channel) as made, suppress(OSError):
        made.send(str(os.getpid()).encode())
        told = made.recv(len(_GO))
    if told != _GO:
        os._exit(1)


def _run(request: Mapping[str, Any], output: int) -> NoReturn:
    """Be the `neondist` command, and leave the interpreter."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, request["name"].encode())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    Signals(whole_process=True).listen()
    sys.argv = ["neondist", *request["words"]]
    code: Any = 0
    try:
        runpy.run_module("neondist", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    if not isinstance(code, int):
        sys.exit(code)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End this process as the interpreter does, but leave its modules to the system: clearing them takes a while."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
