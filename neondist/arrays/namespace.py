"""The namespace of an array, and transfers of its values to and from the host."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np

from ..errors import ShapeError


def namespace(array: Any) -> Any:
    """Return the array's namespace: NumPy, or a namespace with the same functions.

    This is the array API's `__array_namespace__`, or for arrays without it, such as CuPy's, the package of their class.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return np
    get_namespace = getattr(array, "__array_namespace__", None)
    return sys.modules[type(array).__module__.partition(".")[0]] if get_namespace is None else get_namespace()


def to_host(array: Any) -> np.ndarray:
    """Return an array as a NumPy array: itself if on the host, else a copy, after synchronising with the device."""
    return np.asarray(array) if isinstance(array, (np.ndarray, np.generic)) else namespace(array).asnumpy(array)


def as_real_numbers(name: str, array: Any, xp: Any = np) -> Any:
    """Return a caller's array as an array of the namespace `xp`, or of NumPy; without a copy if possible.

    Raises
    ------
    ShapeError
        If its elements are not real numbers, or some are masked; `name` is the array's name.
    """
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise ShapeError(f"{name}: has masked elements; replace them, such as with array.filled(0)")
    try:
        source = array if isinstance(array, xp.ndarray) else np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:  # rows of unequal lengths, or tensors that NumPy cannot read
        raise ShapeError(f"{name}: {error}; convert it to a NumPy array of real numbers") from None
    if source.dtype.kind not in "biuf":
        raise ShapeError(f"{name}: has dtype {source.dtype}; convert it to real numbers")
    return source if source.itemsize <= 8 else source.astype(np.float64)  # longdouble: checksums would include padding


class HostStagingBuffer:
    """Host buffer for the values of a device array that are exchanged between ranks.

    For CuPy it is pinned memory with its own stream, so that copies overlap with computation on the device.
    """

    def __init__(self, array: Any) -> None:
        self.array, self._cuda = array, getattr(namespace(array), "cuda", None)
        if self._cuda is None or not array.size or not array.flags.c_contiguous:
            self._cuda, self.host = None, np.empty(array.shape, array.dtype)
            return
        pinned_memory = self._cuda.alloc_pinned_memory(array.nbytes)  # may be larger
        self.host = np.frombuffer(pinned_memory, array.dtype, array.size).reshape(array.shape)
        self._stream = self._cuda.Stream(non_blocking=True)
        # the memory may be reused by another buffer: wait for a copy in progress
        weakref.finalize(self, self._stream.synchronize).atexit = False

    def copy_to_host(self) -> np.ndarray:
        """Return the array's values on the host; waits until they are computed."""
        if self._cuda is None:
            self.host[...] = to_host(self.array)
        else:
            self._stream.wait_event(self._cuda.get_current_stream().record())
            self.array.get(stream=self._stream, out=self.host)
        return self.host

    def copy_to_device(self) -> None:
        """Copy the host's values to the array, ordered before later computation on the device; does not wait."""
        if self._cuda is None:
            self.array[...] = namespace(self.array).asarray(self.host)
            return
        current_stream = self._cuda.get_current_stream()
        self._stream.wait_event(current_stream.record())
        self.array.set(self.host, stream=self._stream)
        current_stream.wait_event(self._stream.record())

    def wait_until_reusable(self) -> None:
        """Wait until the host's values may be overwritten."""
        if self._cuda is not None:
            self._stream.synchronize()


def synchronize_stream(array: Any) -> None:
    """Wait for the current stream of a CuPy array, before its memory is accessed from outside the device."""
    namespace(array).cuda.get_current_stream().synchronize()
