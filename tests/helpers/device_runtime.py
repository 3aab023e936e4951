"""Streams, pinned memory and calls of the runtime of a strict device; see device.py."""

import weakref
from types import SimpleNamespace

import numpy as np


class Stream:
    """A stream of the device, whose work is done when somebody waits for it: what nobody has waited for is missing."""

    def __init__(self, device):
        self.device, self.pending = device, []

    def record(self):
        """Return what can be waited for."""
        return self

    def wait_event(self, event):
        """Do what the event stands for, in the order in which the device would."""
        event.do()

    def do(self):
        """Do all that is to be done."""
        pending, self.pending = self.pending, []
        for work in pending:
            work()

    def synchronize(self):
        """Let the host wait, if there is anything to wait for."""
        self.device.synchronisations += bool(self.pending)
        self.do()


class Cuda:
    """The streams, and the pinned memory, of a device."""

    def __init__(self, device):
        self._device, self._current, self._pinned = device, Stream(device), {}
        self.runtime = SimpleNamespace(getDeviceCount=lambda: 1)
        self.runtime.memGetInfo = lambda: (device.most - device.used, device.most)

    def Stream(self, non_blocking):
        """Return a new stream."""
        assert non_blocking
        return Stream(self._device)

    def get_current_stream(self):
        """Return the stream in which functions work."""
        return self._current

    def alloc_pinned_memory(self, nbytes):
        """Return memory of the host; CuPy's may be larger."""
        memory = Pinned(nbytes + 512)
        self._pinned[np.frombuffer(memory, np.uint8).ctypes.data] = weakref.ref(memory)
        return memory

    def pinned(self, values):
        """Return what gives values of the host later, in so far as somebody keeps their memory, shape and dtype."""
        return self._pinned.get(values.ctypes.data, lambda: values), values.shape, values.dtype

    @staticmethod
    def copy_pinned(target, kept, shape, dtype):
        """Copy what the memory holds by now."""
        assert kept() is not None, "memory of the host was given back before it was copied"
        np.copyto(target, np.frombuffer(kept(), dtype, target.size).reshape(shape))


class Pinned(bytearray):
    """Memory of the host, of which one may know whether it is still there."""


class CudaError(RuntimeError):
    """An error of the CUDA runtime."""

    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class CudaDevice:
    """A GPU by its number; `used` has those that a thread was moved to."""

    used = ()

    def __init__(self, number):
        self.number = number

    def use(self):
        """Remember that it is used."""
        CudaDevice.used = (*CudaDevice.used, self.number)


class Pool:
    """CuPy's, which keeps nothing here."""

    def free_bytes(self):
        """Return what it keeps."""
        return 0

    total_bytes = free_bytes
