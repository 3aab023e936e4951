"""Connection of a rank to the process that supervises its job: heartbeats, and the end of both with one another.

The supervisor learns from it that a rank listens, how it has ended, that it was killed (the connection ends without a
word) and that it is stopped or unreachable (no heartbeats), on any node. When the supervisor is gone, or closes the
connection, the rank is killed, whatever it computes. A process beside the rank does both, since threads of the rank
itself run neither while an extension holds Python's lock nor while the rank is stopped.
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

from .job import detect

SUPERVISOR = "NEONDIST_SUPERVISOR"
"""'KEY HOST:PORT ...', where the supervisor listens; set for the ranks."""
CONNECTION = "NEONDIST_HEARTBEAT"
"""'FILE DESCRIPTOR:PROCESS' of this rank's connection, which is of no use to other processes."""
NONCE, PROOF = 16, 32
"""bytes that the supervisor sends first, and of the proof that each end gives of the key"""
BEAT = 1.0
PATIENCE = 10.0
"""seconds for each address"""
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTSTP")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def proof(key: str, nonce: bytes, whose: str) -> bytes:
    """Return what the 'rank' or the 'supervisor' answers to a nonce."""
    return blake2b(nonce + whose.encode(), key=key.encode(), digest_size=PROOF).digest()


def connect(env: MutableMapping[str, str]) -> None:
    """Connect to the supervisor of the job that this process is a rank of, if there is one; else do nothing.

    Processes that the rank starts do not. Where the supervisor cannot be reached, the process ends with exit code 2.
    """
    job = detect(env)
    if SUPERVISOR not in env or job is None or job.rank is None:
        return
    given = env.pop(SUPERVISOR)
    key, *addresses = given.split()
    node = os.uname().nodename if hasattr(os, "uname") else socket.gethostname()
    found = reach(key, addresses)
    if found is None:
        sys.stderr.write(
            f"error: rank {job.rank} on {node} cannot reach the process that started it, at {', '.join(addresses)};"
            " allow TCP connections between the nodes, and list the nodes in a host file or resource file\n"
        )
        os._exit(2)
    found.sendall(f"{job.rank} {os.getpid()} {node}\n".encode())
    if hasattr(os, "fork"):
        _fork_guard(found)
    env[CONNECTION] = f"{found.detach()}:{os.getpid()}"


def send(env: Mapping[str, str], word: str) -> None:
    """Send a word to the supervisor, if this process is a rank that has one.

    'listens': SIGUSR1 stops it with a checkpoint; 'ignores': no longer; 'ended CODE' or 'failed'.
    """
    number = descriptor(env)
    if number is not None:
        with contextlib.suppress(OSError):
            os.write(number, f"{word}\n".encode())


def descriptor(env: Mapping[str, str]) -> int | None:
    """Return the file descriptor of this process's connection."""
    number, _, process = env.get(CONNECTION, "").partition(":")
    return int(number) if process == str(os.getpid()) else None


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of 'HOST:PORT' or '[IPV6]:PORT'."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def receive(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes, fewer where the connection ends."""
    found = b""
    while len(found) < size and (more := connection.recv(size - len(found))):
        found += more
    return found


def reach(key: str, addresses: Sequence[str]) -> socket.socket | None:
    """Return a connection to the supervisor at the first address where it answers and proves the key, None if none."""
    return next(filter(None, (_reached(address, key) for address in addresses)), None)


def _reached(address: str, key: str) -> socket.socket | None:
    """Return a connection to the supervisor; None: nothing answers there, or something else does."""
    try:
        made = socket.create_connection(split_address(address), timeout=PATIENCE)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        nonce = receive(made, NONCE)
        made.sendall(proof(key, nonce, "rank"))
        if receive(made, PROOF) == proof(key, nonce, "supervisor"):
            made.settimeout(None)
            return made
    made.close()
    return None


def _fork_guard(connection: socket.socket) -> None:
    rank = os.getpid()
    if os.fork() == 0:
        try:
            _guard(connection, rank)
        finally:
            os._exit(0)


def _guard(connection: socket.socket, rank: int) -> NoReturn:
    """Send heartbeats while the rank is there and not stopped; kill it when the supervisor ends the connection."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"heartbeat")
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # the launcher waits until nothing writes into its pipes
        os.dup2(nowhere, number)
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, 1 << 16)
    while os.getppid() == rank:
        if select.select([connection], [], [], BEAT)[0]:
            with contextlib.suppress(OSError):
                if connection.recv(64):
                    continue
            os.kill(rank, signal.SIGKILL)
            os._exit(0)
        if not _is_stopped(rank):
            with contextlib.suppress(OSError):  # a supervisor that is stopped reads later
                connection.send(b"\n", socket.MSG_DONTWAIT)
    os._exit(0)


def _is_stopped(process: int) -> bool:
    """Whether SIGSTOP holds a process (Linux); a debugger may."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
    return False
