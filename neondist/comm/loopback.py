"""P virtual ranks in one process, one thread each, to run plans, layers and schemes without mpirun.

All communication uses mailboxes, one per ordered pair of ranks in a group. Messages are copied, as between processes:
arrays directly, all other values by pickle.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from ..errors import ConfigError, RemoteError
from ..registry.arguments import type_checked
from .transport import CLOSED, Exchange, Message, ReduceOp, Request, Transport
from .turns import ComputeTurns, create_closed_gate

_JOIN_TIMEOUT = 0.2
"""Seconds after which the caller of virtual ranks wakes to run signal handlers, which need the main thread."""


@dataclass(eq=False)
class _Mailbox:
    """Queue of messages from one rank to another, with a gate at which the receiver waits."""

    values: deque[Any] = field(default_factory=deque)
    gate: threading.Lock | None = None


class _SharedState:
    """State shared by the threads: turns, current calls, and whether a rank has failed."""

    def __init__(self, timeout: float, turns: ComputeTurns) -> None:
        self.timeout, self.turns, self.failed = timeout, turns, False
        self.call_by_rank: dict[int, str] = {}  # current call of each rank
        self._ended_ranks: set[int] = set()
        self._sender_by_waiting_mailbox: dict[_Mailbox, int] = {}  # sender of each awaited mailbox

    def put(self, mailbox: _Mailbox, value: Any) -> None:
        """Put a value into a mailbox, and queue its waiting receiver for the next free turn."""
        with self.turns.lock:
            mailbox.values.append(value)
            self._wake_receiver(mailbox)

    def receive(self, mailbox: _Mailbox, sender_and_receiver: tuple[int, int]) -> Any:
        """Take the next value of a mailbox; `sender_and_receiver` are world ranks."""
        sender, rank = sender_and_receiver
        with self.turns.lock:
            if mailbox.values:
                return mailbox.values.popleft()
            if self.failed or sender in self._ended_ranks:
                raise self._receive_error(sender, rank)
            mailbox.gate = gate = create_closed_gate()
            self._sender_by_waiting_mailbox[mailbox] = sender
            self.turns.pass_turn_to_next()  # other ranks compute while this one waits
        if not gate.acquire(timeout=self.timeout):
            with self.turns.lock:
                self._wake_receiver(mailbox)
            gate.acquire()
        self.turns.switch_random_generators(rank)
        with self.turns.lock:
            if mailbox.values:
                return mailbox.values.popleft()
            raise self._receive_error(sender, rank)

    def end_rank(self, rank: int) -> None:
        """Record that a rank has ended, and release the ranks that wait for it."""
        with self.turns.lock:
            self._ended_ranks.add(rank)
            for mailbox in [box for box, sender in self._sender_by_waiting_mailbox.items() if sender == rank]:
                self._wake_receiver(mailbox)

    def fail_waiting_ranks(self) -> None:
        """Record that a rank has failed, and wake the ranks that wait, which then raise RemoteError."""
        with self.turns.lock:
            self.failed = True
            for mailbox in list(self._sender_by_waiting_mailbox):
                self._wake_receiver(mailbox)

    def _wake_receiver(self, mailbox: _Mailbox) -> None:
        if mailbox.gate is not None:
            del self._sender_by_waiting_mailbox[mailbox]
            self.turns.open_gate_on_free_turn(mailbox.gate)
            mailbox.gate = None

    def _receive_error(self, sender: int, rank: int) -> Exception:
        if self.failed:
            return RemoteError("another virtual rank failed")
        if sender in self._ended_ranks:
            call_suffix = f", in {self.call_by_rank[rank]}" if rank in self.call_by_rank else ""
            problem = f"rank {sender} has ended, but rank {rank} waits for it{call_suffix}"
            return RemoteError(f"{problem}; make the same calls on all ranks")
        current_calls = "; ".join(f"rank {at}: the call is {call}" for at, call in sorted(self.call_by_rank.items()))
        message = f"no message within {self.timeout} s: the virtual ranks wait for each other ({current_calls})"
        return TimeoutError(f"{message}; make the same calls on all ranks")


class _MailboxGroup:
    """Mailboxes of a group of ranks, which live as long as any member."""

    def __init__(self, parent_ranks: Sequence[int], world_ranks: Sequence[int]) -> None:
        self.parent_ranks, self.world_ranks = parent_ranks, world_ranks
        self._lock = threading.Lock()
        self._mailboxes: defaultdict[tuple, _Mailbox] = defaultdict(_Mailbox)

    def mailbox(self, *address: int) -> _Mailbox:
        with self._lock:
            return self._mailboxes[address]


class LoopbackTransport(Transport):
    """One virtual rank's view of its group."""

    shares_process = True

    def __init__(self, world: _SharedState, group: _MailboxGroup, rank: int, size: int) -> None:
        self.world, self.group, self.rank, self.size = world, group, rank, size
        self._mailbox_counts: Counter[tuple[int, int]] = Counter()

    def send(self, peer: int, value: Any) -> None:
        """Send a copy of a value to `peer`."""
        self._send(peer, pickle.dumps(value))

    def receive(self, peer: int) -> Any:
        """Receive the next value from `peer`."""
        return pickle.loads(self._receive(peer))

    def _send(self, peer: int, value: Any) -> None:
        """Send `peer` a value that will not be modified later, without copying it."""
        self.world.put(self.group.mailbox(self.rank, peer), value)

    def _receive(self, peer: int) -> Any:
        return self.world.receive(self.group.mailbox(peer, self.rank), self.world_rank_pair(peer))

    def world_rank_pair(self, peer: int) -> tuple[int, int]:
        """Return the world ranks of `peer` and of this rank."""
        return self.group.world_ranks[peer], self.group.world_ranks[self.rank]

    def begin_call(self, call: str) -> None:
        """Record the call that begins."""
        if call and not self.closed:
            self.world.call_by_rank[self.group.world_ranks[self.rank]] = call

    def open_mailboxes(self, peers: Iterable[int], is_outgoing: bool) -> dict[int, _Mailbox]:
        """Return a new mailbox to, or from, every peer; both ranks of a pair open their mailboxes in the same order."""
        mailboxes = {}
        for peer in peers:
            sender_and_receiver = (self.rank, peer) if is_outgoing else (peer, self.rank)
            self._mailbox_counts[sender_and_receiver] += 1
            mailboxes[peer] = self.group.mailbox(*sender_and_receiver, self._mailbox_counts[sender_and_receiver])
        return mailboxes

    def split(self, color: int, key: int) -> Transport:
        """Return the group of the ranks with the same colour, ordered by key."""
        group = self._allreduce_via_root((color, key, self.rank, self.group.world_ranks[self.rank]), _make_groups)[
            color
        ]
        return LoopbackTransport(self.world, group, group.parent_ranks.index(self.rank), len(group.parent_ranks))

    def close(self) -> None:
        """Release the mailboxes."""
        super().close()
        self.world = self.group = CLOSED

    def create_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Return an exchange over fixed arrays."""
        return _LoopbackExchange(self, sends, receives)

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum") -> None:
        """Replace the array by its sum, or maximum, over all ranks, computed in rank order."""
        combine = {"sum": np.add, "max": np.maximum}[op]
        array[...] = self._allreduce_via_root(array.copy(), lambda arrays: reduce(combine, arrays))

    def iallreduce(self, array: np.ndarray) -> Request:
        """Begin to replace the array by its sum over all ranks, computed in rank order."""
        send_copy = array.copy()
        for peer in range(self.size):
            self.world.put(self.group.mailbox(self.rank, peer, 0), send_copy)
        return _LoopbackRequest(self, array)

    def allgather_array(self, array: np.ndarray) -> np.ndarray:
        """Return every rank's array, stacked."""
        return self._allreduce_via_root(array.copy(), lambda arrays: np.stack(list(arrays))).copy()

    def all_to_all(self, sends: Sequence[np.ndarray], receive_shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Send an array to every rank, and return the arrays received from all ranks."""
        for peer, array in enumerate(sends):
            self._send(peer, np.array(array, order="C"))
        received: list[np.ndarray] = [self._receive(peer) for peer in range(self.size)]
        for peer, (array, shape) in enumerate(zip(received, receive_shapes, strict=True)):
            if array.shape != tuple(shape):  # MPI would mix up the data
                raise ValueError(f"rank {peer} sent an array of shape {array.shape}; expected {tuple(shape)}")
        return received

    def allgather(self, value: Any) -> list[Any]:
        """Return copies of every rank's value, in rank order."""
        return [pickle.loads(data) for data in self._allreduce_via_root(pickle.dumps(value), list)]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return a copy of the value of rank `root`."""
        pickled = pickle.dumps(value) if self.rank == root else None
        return pickle.loads(self._allreduce_via_root(pickled, lambda values: list(values)[root]))

    def _allreduce_via_root(self, value: Any, combine: Callable[[Iterator[Any]], Any]) -> Any:
        """Return the values of all ranks, combined on rank 0 with 2 P messages instead of P².

        All ranks receive the same object, and must modify neither that object nor their own value.
        """
        if self.rank:
            self._send(0, value)
            return self._receive(0)
        result = combine(value if peer == 0 else self._receive(peer) for peer in range(self.size))
        for peer in range(1, self.size):
            self._send(peer, result)
        return result

    def abort(self, code: int) -> None:
        """End all virtual ranks."""
        self.world.fail_waiting_ranks()
        raise SystemExit(code)


def _make_groups(split_entries: Iterable[tuple[int, int, int, int]]) -> dict[int, _MailboxGroup]:
    """Return a group for each colour, given (colour, key, rank, world rank) of all ranks."""
    members_by_color: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for color, _, rank, world_rank in sorted(split_entries):
        members_by_color[color].append((rank, world_rank))
    return {color: _MailboxGroup(*zip(*ranks, strict=True)) for color, ranks in members_by_color.items()}


class _LoopbackRequest(Request):
    def __init__(self, transport: LoopbackTransport, array: np.ndarray) -> None:
        self.transport, self.array = transport, array

    def wait(self) -> None:
        transport = self.transport
        peers = range(transport.size)
        # mailbox 0: exchanges number their mailboxes from 1
        boxes = (transport.group.mailbox(peer, transport.rank, 0) for peer in peers)
        self.array[...] = reduce(np.add, map(transport.world.receive, boxes, map(transport.world_rank_pair, peers)))


class _LoopbackExchange(Exchange):
    transport: LoopbackTransport

    def __init__(self, transport: LoopbackTransport, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        super().__init__(transport, sends, receives)
        # separate mailboxes: several exchanges may be in progress, as with MPI
        self.outboxes = transport.open_mailboxes({m.peer for m in self.sends}, is_outgoing=True)
        self.inboxes = transport.open_mailboxes({m.peer for m in self.receives}, is_outgoing=False)

    def _start(self) -> None:
        for message in self.sends:
            self.transport.world.put(self.outboxes[message.peer], message.cells.copy())

    def _finish(self) -> None:
        for message in self.receives:
            sender_and_receiver = self.transport.world_rank_pair(message.peer)
            message.cells[...] = self.transport.world.receive(self.inboxes[message.peer], sender_and_receiver)


@type_checked
def run(ranks: int, function: Callable[[LoopbackTransport], Any], timeout: float = 60.0, at_once: int = 1) -> list[Any]:
    """Call `function(transport)` on every virtual rank and return the results in rank order.

    With `at_once=1`, every rank has its own global random generators (Python's, NumPy's, PyTorch's), as in separate
    processes. They start in the caller's states; afterwards, the caller's generators have the states of rank 0.

    Parameters
    ----------
    timeout : float
        Seconds that a rank waits for a message before it reports a deadlock.
    at_once : int
        Number of ranks that may compute while the others wait for a message or their turn. Unless `at_once` is the
        number of ranks, the function must wait for other ranks only through its transport. With `at_once` > 1, ranks
        share the global random generators, and must not share PyTorch modules, which are not thread-safe.

    Raises
    ------
    Exception
        The error of the first rank that failed; other ranks are stopped.
    """
    if at_once < 1:
        raise ConfigError(f"at_once: {at_once}; expected a number of ranks > 0")
    turns = ComputeTurns(ranks, at_once)
    world, group = _SharedState(timeout, turns), _MailboxGroup(range(ranks), range(ranks))
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run_rank(rank: int) -> None:
        turns.wait_for_turn(rank)
        try:
            results[rank] = function(LoopbackTransport(world, group, rank, ranks))
            world.end_rank(rank)
        except BaseException as error:
            errors.append(error)
            world.fail_waiting_ranks()
        finally:
            turns.end_turn()

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(_JOIN_TIMEOUT)  # wakes to handle a signal that arrived just before the wait
    turns.wait_for_turn(0)
    if errors:
        raise errors[0]
    return results
