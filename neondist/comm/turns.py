"""Scheduling of virtual ranks, and each rank's states of the global random generators."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections import deque

import numpy as np


class ComputeTurns:
    """Semaphore that lets at most `max_running_ranks` virtual ranks compute at a time, first come, first served.

    If it is 1, the process's global random generators (Python's, NumPy's, PyTorch's) are in the states of the rank
    whose turn it is; all ranks begin with the caller's states.

    Attributes
    ----------
    lock : threading.Lock
        Held by callers of `open_gate_on_free_turn` and `pass_turn_to_next`, even while they decide whether to wait.
    """

    def __init__(self, ranks: int, max_running_ranks: int) -> None:
        self.lock = threading.Lock()
        self._free_turns, self._waiting_gates = max_running_ranks, deque[threading.Lock]()
        self._states_by_rank = [_GeneratorStates()] * ranks if max_running_ranks == 1 else []
        self._last_rank = 0

    def wait_for_turn(self, rank: int) -> None:
        """Wait until a rank has its turn."""
        gate = create_closed_gate()
        with self.lock:
            self.open_gate_on_free_turn(gate)
        gate.acquire()
        self.switch_random_generators(rank)

    def switch_random_generators(self, rank: int) -> None:
        """Switch the random generators to a rank whose turn has begun."""
        if self._states_by_rank and rank != self._last_rank:
            self._states_by_rank[self._last_rank] = current = self._states_by_rank[self._last_rank].read_current()
            self._states_by_rank[rank].restore(current)
            self._last_rank = rank

    def end_turn(self) -> None:
        """Pass the turn to another rank."""
        with self.lock:
            self.pass_turn_to_next()

    def open_gate_on_free_turn(self, gate: threading.Lock) -> None:
        """Queue a gate, which is a lock that a rank is waiting for; release it as soon as a turn is free."""
        self._waiting_gates.append(gate)
        if self._free_turns:
            self._free_turns -= 1
            self._waiting_gates.popleft().release()

    def pass_turn_to_next(self) -> None:
        """Give the turn to the next rank that waits at a gate, if any."""
        if self._waiting_gates:
            self._waiting_gates.popleft().release()
        else:
            self._free_turns += 1


def create_closed_gate() -> threading.Lock:
    """Return a locked lock, for another thread to release."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class _GeneratorStates:
    """The states of the process's global random generators."""

    def __init__(self) -> None:
        self.python_state = random.getstate()
        self.numpy_raw_state, self.numpy_state = _read_numpy_raw_state(), np.random.get_state(legacy=False)
        torch = sys.modules.get("torch")
        self.torch = None if torch is None else torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None

    def read_current(self) -> _GeneratorStates:
        """Return the current states, or self if they are unchanged."""
        torch = sys.modules.get("torch")
        is_unchanged = (
            self._is_raw_state_complete()
            and self.numpy_raw_state == _read_numpy_raw_state()
            and self.python_state == random.getstate()
        )
        if torch is not None:
            is_unchanged = is_unchanged and self.torch is not None and torch.equal(self.torch, torch.get_rng_state())
            is_unchanged = is_unchanged and not torch.cuda.is_initialized()
        return self if is_unchanged else _GeneratorStates()

    def restore(self, current_states: _GeneratorStates) -> None:
        """Restore these states, given the current states."""
        if current_states is self:
            return
        random.setstate(self.python_state)
        if not (
            self._is_raw_state_complete()
            and current_states._is_raw_state_complete()
            and self.numpy_raw_state == current_states.numpy_raw_state
        ):
            np.random.set_state(self.numpy_state)
        if self.torch is not None:
            sys.modules["torch"].set_rng_state(self.torch)
        if self.cuda is not None:
            sys.modules["torch"].cuda.set_rng_state_all(self.cuda)

    def _is_raw_state_complete(self) -> bool:
        """Return whether the raw memory of NumPy's generator is its whole state."""
        return self.numpy_raw_state is not None and not self.numpy_state["has_gauss"]


def _read_numpy_raw_state() -> bytes | None:
    """Return the raw memory of NumPy's generator, 100 times faster than `get_state`; None for other generators."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)
