"""Connection of a rank to the supervisor of its job: heartbeats, and coupled lifetimes.

For ranks on any node, the supervisor learns whether a rank handles signals, how it ended, and whether it was killed
(end of file without a message), is stopped or cannot be reached (no heartbeats). If the supervisor dies or closes the
connection, the rank is killed. A guard process beside the rank sends the heartbeats and kills the rank, since its
threads do not run while an extension holds the GIL or while the rank is stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from hashlib import blake2b
from typing import NoReturn

from .job import detect_job

SUPERVISOR_VARIABLE = "NEONDIST_SUPERVISOR"
"""'KEY HOST:PORT ...': key and addresses of the supervisor; set in the environment of the ranks."""
CONNECTION_VARIABLE = "NEONDIST_HEARTBEAT"
"""'FILE DESCRIPTOR:PROCESS' of this rank's connection; ignored by other processes, such as children of the rank."""
NONCE_BYTES, PROOF_BYTES = 16, 32
"""Lengths of the supervisor's nonce, and of the proof by which each end shows that it has the key."""
HEARTBEAT_SECONDS = 1.0
CONNECT_TIMEOUT_SECONDS = 10.0
"""Timeout in seconds per address."""
_SIGNALS_IGNORED_BY_GUARD = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTSTP")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def compute_proof(key: str, nonce: bytes, role: str) -> bytes:
    """Return the proof by which the 'rank' or the 'supervisor' shows, for a nonce, that it has the key."""
    return blake2b(nonce + role.encode(), key=key.encode(), digest_size=PROOF_BYTES).digest()


def connect_to_supervisor(env: MutableMapping[str, str]) -> None:
    """Connect a rank to the supervisor of its job; do nothing if there is none.

    Child processes of the rank do not connect. If the supervisor cannot be reached, the process exits with code 2.
    """
    job = detect_job(env)
    if SUPERVISOR_VARIABLE not in env or job is None or job.rank is None:
        return
    supervisor = env.pop(SUPERVISOR_VARIABLE)
    key, *addresses = supervisor.split()
    node = os.uname().nodename if hasattr(os, "uname") else socket.gethostname()
    connection = connect_to_first_address(key, addresses)
    if connection is None:
        sys.stderr.write(
            f"error: rank {job.rank} on {node} cannot reach the process that started it, at {', '.join(addresses)};"
            " allow TCP connections between the nodes, and list the nodes in a host file or resource file\n"
        )
        os._exit(2)
    connection.sendall(f"{job.rank} {os.getpid()} {node}\n".encode())
    if hasattr(os, "fork"):
        _fork_heartbeat_process(connection)
    env[CONNECTION_VARIABLE] = f"{connection.detach()}:{os.getpid()}"


def send_to_supervisor(env: Mapping[str, str], message: str) -> None:
    """Send a message to the supervisor, if this process is a supervised rank.

    'listens': SIGUSR1 stops the rank with a checkpoint; 'ignores': SIGUSR1 no longer does; 'ended CODE' or 'failed'.
    """
    descriptor = supervisor_descriptor(env)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.write(descriptor, f"{message}\n".encode())


def supervisor_descriptor(env: Mapping[str, str]) -> int | None:
    """Return the file descriptor of this process's connection; None if it has none."""
    descriptor, _, pid = env.get(CONNECTION_VARIABLE, "").partition(":")
    return int(descriptor) if pid == str(os.getpid()) else None


def has_port(address: str) -> bool:
    """Return whether an address is HOST:PORT, or [IPV6]:PORT, with a valid port."""
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    return bool(host) and (is_bracketed or ":" not in host) and port.isdecimal() and int(port) < 1 << 16


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of 'HOST:PORT' or '[IPV6]:PORT'."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def receive_bytes(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or fewer if the connection ends."""
    received = b""
    while len(received) < size and (chunk := connection.recv(size - len(received))):
        received += chunk
    return received


def connect_to_first_address(key: str, addresses: Sequence[str]) -> socket.socket | None:
    """Return a connection to the first address at which the supervisor proves that it has the key, or None."""
    return next(filter(None, (_try_connect(address, key) for address in addresses)), None)


def _try_connect(address: str, key: str) -> socket.socket | None:
    """Return a connection to the supervisor; None if another service or nothing answers."""
    try:
        connection = socket.create_connection(split_address(address), timeout=CONNECT_TIMEOUT_SECONDS)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        nonce = receive_bytes(connection, NONCE_BYTES)
        connection.sendall(compute_proof(key, nonce, "rank"))
        if receive_bytes(connection, PROOF_BYTES) == compute_proof(key, nonce, "supervisor"):
            connection.settimeout(None)
            return connection
    connection.close()
    return None


def _fork_heartbeat_process(connection: socket.socket) -> None:
    rank_pid = os.getpid()
    if os.fork() == 0:
        try:
            _run_heartbeat_process(connection, rank_pid)
        finally:
            os._exit(0)


def _run_heartbeat_process(connection: socket.socket, rank_pid: int) -> NoReturn:
    """Send heartbeats while the rank lives and is not stopped; kill it when the supervisor closes the connection."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"heartbeat")
    for name in _SIGNALS_IGNORED_BY_GUARD:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # the launcher waits until its pipes are closed
        os.dup2(null, descriptor)
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, 1 << 16)
    while os.getppid() == rank_pid:
        if select.select([connection], [], [], HEARTBEAT_SECONDS)[0]:
            with contextlib.suppress(OSError):
                if connection.recv(64):
                    continue
            os.kill(rank_pid, signal.SIGKILL)
            os._exit(0)
        if not _is_stopped(rank_pid):
            with contextlib.suppress(OSError):  # the buffer of a stopped supervisor may be full
                connection.send(b"\n", socket.MSG_DONTWAIT)
    os._exit(0)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP, not by a debugger (Linux)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
    return False
