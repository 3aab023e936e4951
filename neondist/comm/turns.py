"""Turns of virtual ranks, and the global random generators of each."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections import deque

import numpy as np


class Turns:
    """Turns to compute, which at most `at_once` ranks have at a time, in first-come order.

    With at_once=1 the process's global random generators (Python's, NumPy's, PyTorch's) are in the states of the rank
    whose turn it is; all ranks begin with the caller's states.

    Attributes
    ----------
    lock : threading.Lock
        Held by callers of `offer` and `pass_on`, and around their decisions to wait.
    """

    def __init__(self, ranks: int, at_once: int) -> None:
        self.lock = threading.Lock()
        self._free, self._gates = at_once, deque[threading.Lock]()
        self._states = [_Generators()] * ranks if at_once == 1 else []
        self._last = 0

    def begin(self, rank: int) -> None:
        """Wait for the turn of a rank."""
        gate = closed_gate()
        with self.lock:
            self.offer(gate)
        gate.acquire()
        self.begun(rank)

    def begun(self, rank: int) -> None:
        """Switch the random generators to a rank whose turn has begun."""
        if self._states and rank != self._last:
            self._states[self._last] = current = self._states[self._last].read()
            self._states[rank].restore(current)
            self._last = rank

    def end(self) -> None:
        """Pass the turn to another rank."""
        with self.lock:
            self.pass_on()

    def offer(self, gate: threading.Lock) -> None:
        """Open a gate as soon as a turn is free for the rank that waits at it."""
        self._gates.append(gate)
        if self._free:
            self._free -= 1
            self._gates.popleft().release()

    def pass_on(self) -> None:
        """Open the next gate."""
        if self._gates:
            self._gates.popleft().release()
        else:
            self._free += 1


def closed_gate() -> threading.Lock:
    """Return a lock that another thread is to release."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Generators:
    """The states of the process's global random generators."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.words, self.numpy = _numpy_words(), np.random.get_state(legacy=False)
        torch = sys.modules.get("torch")
        self.torch = None if torch is None else torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None

    def read(self) -> _Generators:
        """Return the current states; self, if unchanged."""
        torch = sys.modules.get("torch")
        same = self._words_suffice() and self.words == _numpy_words() and self.python == random.getstate()
        if torch is not None:
            same = same and self.torch is not None and torch.equal(self.torch, torch.get_rng_state())
            same = same and not torch.cuda.is_initialized()
        return self if same else _Generators()

    def restore(self, current: _Generators) -> None:
        """Restore these states, given the current ones."""
        if current is self:
            return
        random.setstate(self.python)
        if not (self._words_suffice() and current._words_suffice() and self.words == current.words):
            np.random.set_state(self.numpy)
        if self.torch is not None:
            sys.modules["torch"].set_rng_state(self.torch)
        if self.cuda is not None:
            sys.modules["torch"].cuda.set_rng_state_all(self.cuda)

    def _words_suffice(self) -> bool:
        """Return whether the words of NumPy's generator are its whole state."""
        return self.words is not None and not self.numpy["has_gauss"]


def _numpy_words() -> bytes | None:
    """Return the memory of NumPy's generator, 100 times faster than its state; None: not the default generator."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)
