"""From an array to the functions that work on it, and to its values on the host."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np


def namespace(array: Any) -> Any:
    """Return the array's namespace: NumPy, or one that offers the same functions.

    It is that of the array API standard, or, for arrays that do not name it, as CuPy's, the package of their class.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return np
    named = getattr(array, "__array_namespace__", None)
    return sys.modules[type(array).__module__.partition(".")[0]] if named is None else named()


def to_host(array: Any) -> np.ndarray:
    """Return an array's values as a NumPy array: itself, where it is one; of a device's a copy, which waits for it."""
    return np.asarray(array) if isinstance(array, (np.ndarray, np.generic)) else namespace(array).asnumpy(array)


class HostTwin:
    """Memory of the host for the values of a device's array that travel between ranks.

    CuPy's arrays have pinned memory, and a stream for their copies: what is computed on the device goes on meanwhile.

    Parameters
    ----------
    array : array of a device

    Attributes
    ----------
    host : np.ndarray
    """

    def __init__(self, array: Any) -> None:
        self.array, self._cuda = array, getattr(namespace(array), "cuda", None)
        if self._cuda is None or not array.size or not array.flags.c_contiguous:
            self._cuda, self.host = None, np.empty(array.shape, array.dtype)
            return
        memory = self._cuda.alloc_pinned_memory(array.nbytes)  # as much, or more
        self.host = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
        self._stream = self._cuda.Stream(non_blocking=True)
        # the memory may be another twin's next: not before a copy from it that is under way has been made
        weakref.finalize(self, self._stream.synchronize).atexit = False

    def fetch(self) -> np.ndarray:
        """Return the array's values on the host, once what computes them is done; waits."""
        if self._cuda is None:
            self.host[...] = to_host(self.array)
        else:
            self._stream.wait_event(self._cuda.get_current_stream().record())
            self.array.get(stream=self._stream, out=self.host)
        return self.host

    def put(self) -> None:
        """Give the array the host's values: whatever is computed on the device from now on sees them; does not wait."""
        if self._cuda is None:
            self.array[...] = namespace(self.array).asarray(self.host)
            return
        current = self._cuda.get_current_stream()
        self._stream.wait_event(current.record())
        self.array.set(self.host, stream=self._stream)
        current.wait_event(self._stream.record())

    def settle(self) -> None:
        """Wait until the host's values may be overwritten."""
        if self._cuda is not None:
            self._stream.synchronize()


def wait_for(array: Any) -> None:
    """Wait for what computes an array of CuPy's: others than the device are about to read or write its memory."""
    namespace(array).cuda.get_current_stream().synchronize()
