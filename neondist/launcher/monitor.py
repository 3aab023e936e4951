"""The supervisor's ends of the ranks' connections: which ranks listen, how each has ended, and which was lost."""

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
from types import TracebackType

from ..system.heartbeat import BEAT, NONCE, PATIENCE, PROOF, SUPERVISOR, proof

LEASE = 15.0
"""seconds without a heartbeat after which a rank is lost"""
ENDED = "exited without reporting an error: killed, crashed, or os._exit was called"
LOOPBACK = "127.0.0.1"
_TICK = 0.5
_LONGEST = 512
"""bytes of a line"""
_MISSED = 3
"""heartbeats without which a rank is lost as well, when another's lease is over"""
_NAMED = 4
"""ranks that a message names"""
_SPARE = 64
"""connections that may be open besides those of the ranks"""


@dataclass
class Member:
    """A rank, as far as its connection tells.

    Attributes
    ----------
    rank : int
    node : str
    words : list of str
        What it has sent: 'listens', 'ignores', 'ended CODE', 'failed'.
    """

    rank: int
    node: str
    words: list[str] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        """Its exit code, None where it has not said how it ended."""
        last = self.words[-1].split() if self.words else [""]
        return {"ended": int(last[-1]) if last[-1].isdecimal() else 1, "failed": 1}.get(last[0])

    @property
    def listens(self) -> bool:
        """Whether SIGUSR1 stops it with a checkpoint."""
        return self.words.count("listens") > self.words.count("ignores")


class Monitor:
    """Listens for the ranks of one job; a context manager, which kills the ranks that are left at its end.

    Parameters
    ----------
    ranks : int
    addresses : list of str
        Addresses of this machine to listen on.
    lease : float
        Seconds without a heartbeat after which a rank is lost.

    Attributes
    ----------
    environment : dict of str to str
        Variables that the ranks need.
    members : dict of int to Member
        By rank; those that have connected.
    lost : int
        The first rank that was lost before any other has failed; -1 while there is none.
    loss : str
        The same in words, '' while there is none.
    silent : tuple of int
        Ranks without a heartbeat, including that one; they may still be running.
    ending : float or None
        time.monotonic() when a rank has failed, or the last one ended.
    """

    def __init__(self, ranks: int, addresses: Sequence[str] = (LOOPBACK,), lease: float = LEASE) -> None:
        self.ranks, self.lease = ranks, lease
        self.members: dict[int, Member] = {}
        self.lost, self.loss = -1, ""
        self.silent: tuple[int, ...] = ()
        self.ending: float | None = None
        self._key = secrets.token_hex(16)
        self._connections: list[_Connection] = []
        self._wake, self._woken = socket.socketpair()
        self._listening = [listen(address, ranks + _SPARE) for address in addresses]
        self.environment = {SUPERVISOR: " ".join([self._key, *map(format_address, self._listening)])}
        self._thread = threading.Thread(target=self._serve, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_ranks()

    def end_ranks(self) -> None:
        """Close all connections, which kills the ranks that are left, on every node."""
        self._wake.close()
        self._thread.join(10)

    def all_listen(self) -> bool:
        """Whether SIGUSR1 stops every rank with a checkpoint."""
        return sum(member.listens for member in list(self.members.values())) == self.ranks

    def settle(self, seconds: float = 5.0) -> None:
        """Wait until the connections of ranks that have ended are read to their ends."""
        end = time.monotonic() + seconds
        while self._connections and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)

    def without_word(self) -> list[int]:
        """Return the ranks that have not said how they ended."""
        return [rank for rank in range(self.ranks) if rank not in self.members or self.members[rank].code is None]

    @property
    def code(self) -> int:
        """The highest exit code of the ranks."""
        return max((member.code or 0 for member in self.members.values()), default=0)

    def describe(self, rank: int) -> str:
        """Return 'rank 1 of 3 on node A'."""
        member = self.members.get(rank)
        return f"rank {rank} of {self.ranks}" + (f" on {member.node}" if member else "")

    def _serve(self) -> None:
        looked = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for one in (self._woken, *self._listening):
                selector.register(one, selectors.EVENT_READ, one)
            while True:
                ready = [key for key, _ in selector.select(_TICK)]
                if any(key.fileobj is self._woken for key in ready):
                    break
                for key in ready:
                    if isinstance(key.data, _Connection):
                        key.data.read(self)
                    else:
                        self._accept(key.data, selector)
                now = time.monotonic()
                for each in self._connections:
                    each.idle += min(now - looked, 2 * _TICK)  # time in which this process was stopped does not count
                looked = now
                self._judge(selector)
        for one in (self._woken, *self._listening, *(each.socket for each in self._connections)):
            one.close()

    def _accept(self, listening: socket.socket, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            made = _Connection(listening.accept()[0])
            if len(self._connections) >= self.ranks + _SPARE:
                made.socket.close()
                return
            made.socket.setblocking(False)
            made.socket.sendall(made.nonce)
            selector.register(made.socket, selectors.EVENT_READ, made)
            self._connections.append(made)

    def greet(self, greeting: str) -> Member | None:
        """Return the rank that has sent 'RANK PROCESS NODE'; None if it can be none, or is there already."""
        rank, _, rest = greeting.partition(" ")
        node = rest.partition(" ")[2]
        if not rank.isdecimal() or int(rank) >= self.ranks or int(rank) in self.members or not node.isprintable():
            return None
        return self.members.setdefault(int(rank), Member(int(rank), node))

    def proves(self, connection: _Connection, data: bytes) -> bool:
        """Whether the first bytes prove the key; the supervisor then proves it, too."""
        if not hmac.compare_digest(data[:PROOF], proof(self._key, connection.nonce, "rank")):
            return False
        connection.socket.sendall(proof(self._key, connection.nonce, "supervisor"))
        return True

    def _judge(self, selector: selectors.BaseSelector) -> None:
        """Take connections away that have ended, and note what that says of the job."""
        gone = [each for each in self._connections if each.closed or each.idle > self._patience(each)]
        if not gone:
            return
        for each in self._connections:  # a rank that fails has said so before the launcher ended the others
            each.read(self)
        failed = any(member.code for member in self.members.values())
        for each in gone:
            selector.unregister(each.socket)
            each.socket.close()
            self._connections.remove(each)
            if each.member is not None and each.member.code is None and not failed and not self.loss:
                self.lost, self.loss = each.member.rank, f"{self.describe(each.member.rank)} {ENDED}"
                if not each.closed:
                    self._lose_silent([each, *(one for one in self._connections if self._is_quiet(one))])
        if self.ending is None and (failed or not self.without_word()):
            self.ending = time.monotonic()

    def _lose_silent(self, connections: Sequence[_Connection]) -> None:
        """Note all ranks whose nodes were lost at about the same time."""
        self.silent = tuple(sorted(one.member.rank for one in connections if one.member is not None))
        names = [self.describe(rank) for rank in self.silent[:_NAMED]]
        names += [f"{len(self.silent) - _NAMED} more"] if len(self.silent) > _NAMED else []
        what = "node" if len(names) == 1 else "nodes"
        self.loss = f"no heartbeat from {', '.join(names)} for {self.lease:g} s: stopped, or {what} unreachable"

    def _is_quiet(self, connection: _Connection) -> bool:
        """Whether a rank has missed several heartbeats, though its lease may not be over."""
        member = connection.member
        most = min(self.lease, max(_MISSED * BEAT, self.lease / 2))
        return member is not None and member.code is None and not connection.closed and connection.idle > most

    def _patience(self, connection: _Connection) -> float:
        return PATIENCE if connection.member is None else self.lease


@dataclass
class _Connection:
    """A connection of a rank, or of a stranger until it fails to prove the key."""

    socket: socket.socket
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE))
    member: Member | None = None
    closed: bool = False
    idle: float = 0.0
    _data: bytes = b""
    _proven: bool = False

    def read(self, monitor: Monitor) -> None:
        """Take what has come."""
        try:
            while not self.closed:
                more = self.socket.recv(1 << 12)
                self._data += more
                self.closed = not more or not self._take(monitor)
                self.idle = 0.0
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def _take(self, monitor: Monitor) -> bool:
        """Take whole lines; False: these are none that a rank sends."""
        if not self._proven:
            if len(self._data) < PROOF:
                return True
            if not monitor.proves(self, self._data):
                return False
            self._proven, self._data = True, self._data[PROOF:]
        *lines, self._data = self._data.split(b"\n")
        for line in lines:
            if self.member is None:
                self.member = monitor.greet(line.decode(errors="replace"))
                if self.member is None:
                    return False
            elif line:
                self.member.words.append(line.decode(errors="replace")[:_LONGEST])
        return len(self._data) < _LONGEST


def listen(address: str, backlog: int) -> socket.socket:
    """Return a socket that listens on an address, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.create_server((address, 0), family=family, backlog=backlog)
    made.setblocking(False)
    return made


def format_address(listening: socket.socket) -> str:
    """Return 'HOST:PORT' or '[IPV6]:PORT' of a socket."""
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
