"""Streams, pinned memory and runtime calls of a simulated device; see device.py."""

import weakref
from types import SimpleNamespace

import numpy as np


class Stream:
    """Stream whose operations run at synchronisation, so that a missing synchronisation shows as missing results."""

    def __init__(self, device):
        self.device, self.pending = device, []

    def record(self):
        """Return an event, which is the stream itself."""
        return self

    def wait_event(self, event):
        """Run the operations before the event, in the order of the device."""
        event.run_pending()

    def run_pending(self):
        """Run all pending operations."""
        pending, self.pending = self.pending, []
        for call in pending:
            call()

    def synchronize(self):
        """Let the host wait for pending operations, if any."""
        self.device.synchronisations += bool(self.pending)
        self.run_pending()


class Cuda:
    """Streams and pinned memory of a device."""

    def __init__(self, device):
        self._device, self._current, self._pinned = device, Stream(device), {}
        self.runtime = SimpleNamespace(getDeviceCount=lambda: 1)
        self.runtime.memGetInfo = lambda: (device.capacity - device.used, device.capacity)

    def Stream(self, non_blocking):
        """Return a new stream."""
        assert non_blocking
        return Stream(self._device)

    def get_current_stream(self):
        """Return the current stream."""
        return self._current

    def alloc_pinned_memory(self, nbytes):
        """Return host memory, which may be larger than requested, as in CuPy."""
        memory = PinnedMemory(nbytes + 512)
        self._pinned[np.frombuffer(memory, np.uint8).ctypes.data] = weakref.ref(memory)
        return memory

    def defer(self, values):
        """Return a function that reads host values later if their memory still exists, their shape and their dtype."""
        return self._pinned.get(values.ctypes.data, lambda: values), values.shape, values.dtype

    @staticmethod
    def copy_pinned(target, read, shape, dtype):
        """Copy the current contents of host memory."""
        assert read() is not None, "host memory was released before it was copied"
        np.copyto(target, np.frombuffer(read(), dtype, target.size).reshape(shape))


class PinnedMemory(bytearray):
    """Host memory that supports weak references."""


class CudaError(RuntimeError):
    """Error of the CUDA runtime."""

    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class CudaDevice:
    """GPU with a number; `used` lists the selected GPUs in order."""

    used = ()

    def __init__(self, number):
        self.number = number

    def use(self):
        """Record the selection of this GPU."""
        CudaDevice.used = (*CudaDevice.used, self.number)


class Pool:
    """Memory pool that caches nothing."""

    def free_bytes(self):
        """Return the number of cached bytes."""
        return 0

    total_bytes = free_bytes
