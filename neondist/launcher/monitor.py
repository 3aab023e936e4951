"""Supervisor's side of the ranks' connections: heartbeats, exit codes, and lost ranks."""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..system.heartbeat import (
    CONNECT_TIMEOUT_SECONDS,
    HEARTBEAT_SECONDS,
    NONCE_BYTES,
    PROOF_BYTES,
    SUPERVISOR_VARIABLE,
    compute_proof,
)

LEASE_SECONDS = 15.0
"""seconds without a heartbeat after which a rank is lost"""
STALL_TIMEOUT = 600.0
"""seconds without progress, or from the start of the job to the first heartbeat, after which a rank has stalled"""
UNREPORTED_EXIT_TEXT = "exited without reporting an error: it was killed, crashed, or called os._exit"
LOOPBACK_ADDRESS = "127.0.0.1"
_SELECT_TIMEOUT = 0.5
_MAX_LINE_BYTES = 512
_LOST_TOGETHER_AFTER_MISSED_BEATS = 3
"""missed heartbeats after which a rank counts as lost too, once another rank's lease has expired"""
_MAX_RANKS_IN_MESSAGE = 4
_SPARE_CONNECTIONS = 64


@dataclass
class RankState:
    """State of a rank, as reported over its connection.

    Attributes
    ----------
    rank : int
    node : str
    messages : list of str
        Messages received from the rank: 'listens', 'ignores', 'ended CODE', 'failed'.
    """

    rank: int
    node: str
    messages: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the rank; None if the rank has not reported one."""
        last_words = self.messages[-1].split() if self.messages else [""]
        return {"ended": int(last_words[-1]) if last_words[-1].isdecimal() else 1, "failed": 1}.get(last_words[0])

    @property
    def handles_stop(self) -> bool:
        """Whether SIGUSR1 stops the rank with a checkpoint."""
        return self.messages.count("listens") > self.messages.count("ignores")


class Monitor:
    """Server to which the ranks of a job connect; a context manager that kills the remaining ranks on exit.

    Parameters
    ----------
    ranks : int
    addresses : list of str
        Addresses of this machine to listen on.
    lease : float
        Seconds without a heartbeat after which a rank is lost.
    start_timeout : float
        Seconds from the start of the job after which a rank without a connection is lost.

    Attributes
    ----------
    environment : dict of str to str
        Environment variables required by the ranks.
    rank_states : dict of int to RankState
        Connected ranks, by rank.
    lost_rank : int
        First rank lost before any other failed; -1 if none.
    failure_message : str
        Description of the loss; '' if none.
    silent_ranks : tuple of int
        Ranks without a heartbeat, including the lost one; they may still be running.
    job_end_time : float or None
        time.monotonic() at which a rank failed or the last rank ended.
    """

    def __init__(
        self,
        ranks: int,
        addresses: Sequence[str] = (LOOPBACK_ADDRESS,),
        lease: float = LEASE_SECONDS,
        start_timeout: float = STALL_TIMEOUT,
    ) -> None:
        self.ranks, self.lease, self.start_timeout = ranks, lease, start_timeout
        self.rank_states: dict[int, RankState] = {}
        self.lost_rank, self.failure_message = -1, ""
        self.silent_ranks: tuple[int, ...] = ()
        self.job_end_time: float | None = None
        self._key = secrets.token_hex(16)
        self._connections: list[_Connection] = []
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._listeners = [listen(address, ranks + _SPARE_CONNECTIONS) for address in addresses]
        self.environment = {SUPERVISOR_VARIABLE: " ".join([self._key, *map(format_address, self._listeners)])}
        self._thread = threading.Thread(target=self._serve, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_remaining_ranks()

    def kill_remaining_ranks(self) -> None:
        """Close all connections, which kills the remaining ranks on every node."""
        self._wake_sender.close()
        self._thread.join(10)

    def all_ranks_handle_sigusr1(self) -> bool:
        """Whether SIGUSR1 stops every rank with a checkpoint."""
        return sum(rank_state.handles_stop for rank_state in list(self.rank_states.values())) == self.ranks

    def drain_connections(self, seconds: float = 5.0) -> None:
        """Wait up to `seconds` until the messages of all ranks have been received and their connections are closed."""
        deadline = time.monotonic() + seconds
        while self._connections and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def ranks_without_exit_code(self) -> list[int]:
        """Return the ranks that have not reported an exit code."""
        states = self.rank_states
        return [rank for rank in range(self.ranks) if rank not in states or states[rank].exit_code is None]

    @property
    def exit_code(self) -> int:
        """The highest exit code of the ranks."""
        return max((member.exit_code or 0 for member in self.rank_states.values()), default=0)

    def describe_rank(self, rank: int) -> str:
        """Return a description of a rank and its node, such as 'rank 1 of 3 on node-a'."""
        rank_state = self.rank_states.get(rank)
        return f"rank {rank} of {self.ranks}" + (f" on {rank_state.node}" if rank_state else "")

    def _serve(self) -> None:
        last_check, seconds = time.monotonic(), 0.0
        with selectors.DefaultSelector() as selector:
            for listener in (self._wake_receiver, *self._listeners):
                selector.register(listener, selectors.EVENT_READ, listener)
            while True:
                ready = [key for key, _ in selector.select(_SELECT_TIMEOUT)]
                if any(key.fileobj is self._wake_receiver for key in ready):
                    break
                for key in ready:
                    if isinstance(key.data, _Connection):
                        key.data.read(self)
                    else:
                        self._accept(key.data, selector)
                now = time.monotonic()
                elapsed = min(now - last_check, 2 * _SELECT_TIMEOUT)  # exclude time when this process was stopped
                last_check, seconds = now, seconds + elapsed
                for connection in self._connections:
                    connection.idle_seconds += elapsed
                self._remove_dead_connections(selector)
                any_absent = len(self.rank_states) < self.ranks
                if any_absent and seconds > self.start_timeout and not self.failure_message and not self.exit_code:
                    absent_ranks = [rank for rank in range(self.ranks) if rank not in self.rank_states]
                    self.lost_rank = absent_ranks[0]
                    self._record_silent_ranks(absent_ranks, self.start_timeout)
        for listener in (self._wake_receiver, *self._listeners, *(one.socket for one in self._connections)):
            listener.close()

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection = _Connection(listener.accept()[0])
            if len(self._connections) >= self.ranks + _SPARE_CONNECTIONS:
                connection.socket.close()
                return
            connection.socket.setblocking(False)
            connection.socket.sendall(connection.nonce)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._connections.append(connection)

    def register_rank(self, greeting: str) -> RankState | None:
        """Register the rank of a greeting 'RANK PROCESS NODE'; None if invalid or if the rank connected before."""
        rank, _, remainder = greeting.partition(" ")
        node = remainder.partition(" ")[2]
        if not rank.isdecimal() or int(rank) >= self.ranks or int(rank) in self.rank_states or not node.isprintable():
            return None
        return self.rank_states.setdefault(int(rank), RankState(int(rank), node))

    def verify_proof(self, connection: _Connection, data: bytes) -> bool:
        """Whether the first bytes prove knowledge of the key; if so, send the supervisor's proof in return."""
        if not hmac.compare_digest(data[:PROOF_BYTES], compute_proof(self._key, connection.nonce, "rank")):
            return False
        connection.socket.sendall(compute_proof(self._key, connection.nonce, "supervisor"))
        return True

    def _remove_dead_connections(self, selector: selectors.BaseSelector) -> None:
        """Remove closed and expired connections, and record a loss, if any."""
        dead_connections = [one for one in self._connections if one.closed or one.idle_seconds > self._timeout_of(one)]
        for connection in self._connections if dead_connections else ():
            connection.read(self)  # a failing rank reports before the launcher ends the other ranks
        any_failed = any(rank_state.exit_code for rank_state in self.rank_states.values())
        for connection in dead_connections:
            selector.unregister(connection.socket)
            connection.socket.close()
            self._connections.remove(connection)
            rank_state = connection.rank_state
            if rank_state is not None and rank_state.exit_code is None and not any_failed and not self.failure_message:
                self.lost_rank = rank_state.rank
                self.failure_message = f"{self.describe_rank(rank_state.rank)} {UNREPORTED_EXIT_TEXT}"
                if not connection.closed:
                    silent = [connection, *filter(self._is_quiet, self._connections)]
                    self._record_silent_ranks([one.rank_state.rank for one in silent if one.rank_state], self.lease)
        if self.job_end_time is None and (any_failed or not self.ranks_without_exit_code()):
            self.job_end_time = time.monotonic()

    def _record_silent_ranks(self, ranks: Sequence[int], seconds: float) -> None:
        """Record all ranks lost at about the same time."""
        self.silent_ranks = tuple(sorted(ranks))
        names = [self.describe_rank(rank) for rank in self.silent_ranks[:_MAX_RANKS_IN_MESSAGE]]
        num_unnamed = len(self.silent_ranks) - _MAX_RANKS_IN_MESSAGE
        names += [f"{num_unnamed} more"] if num_unnamed > 0 else []
        noun = "node" if len(names) == 1 else "nodes"
        self.failure_message = f"no heartbeat from {', '.join(names)} for {seconds:g} s: stopped, or {noun} unreachable"

    def _is_quiet(self, connection: _Connection) -> bool:
        """Whether a rank has missed several heartbeats, even if its lease has not expired."""
        rank_state = connection.rank_state
        max_idle_seconds = min(self.lease, max(_LOST_TOGETHER_AFTER_MISSED_BEATS * HEARTBEAT_SECONDS, self.lease / 2))
        return (
            rank_state is not None
            and rank_state.exit_code is None
            and not connection.closed
            and connection.idle_seconds > max_idle_seconds
        )

    def _timeout_of(self, connection: _Connection) -> float:
        return CONNECT_TIMEOUT_SECONDS if connection.rank_state is None else self.lease


@dataclass
class _Connection:
    """Connection of a rank, authenticated or not."""

    socket: socket.socket
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    rank_state: RankState | None = None
    closed: bool = False
    idle_seconds: float = 0.0
    _received_bytes: bytes = b""
    _authenticated: bool = False

    def read(self, monitor: Monitor) -> None:
        try:
            while not self.closed:
                chunk = self.socket.recv(1 << 12)
                self._received_bytes += chunk
                self.closed = not chunk or not self._handle_received_lines(monitor)
                self.idle_seconds = 0.0
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def _handle_received_lines(self, monitor: Monitor) -> bool:
        """Process complete lines; return False if they do not come from a rank."""
        if not self._authenticated:
            if len(self._received_bytes) < PROOF_BYTES:
                return True
            if not monitor.verify_proof(self, self._received_bytes):
                return False
            self._authenticated, self._received_bytes = True, self._received_bytes[PROOF_BYTES:]
        *lines, self._received_bytes = self._received_bytes.split(b"\n")
        for line in lines:
            if self.rank_state is None:
                self.rank_state = monitor.register_rank(line.decode(errors="replace"))
                if self.rank_state is None:
                    return False
            elif line:
                self.rank_state.messages.append(line.decode(errors="replace")[:_MAX_LINE_BYTES])
        return len(self._received_bytes) < _MAX_LINE_BYTES


def listen(address: str, backlog: int) -> socket.socket:
    """Return a socket listening on an address, at a port chosen by the system."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=backlog)
    listener.setblocking(False)
    return listener


def format_address(listener: socket.socket) -> str:
    """Return 'HOST:PORT' or '[IPV6]:PORT' of a socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
