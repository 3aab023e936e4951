"""Launch graphs of a simulated device: captured launches run only at replay; see device.py."""

import numpy as np

from neondist.backends.cupy import CupyKernels

_IN_PLACE_FUNCTIONS = {"copyto", "fill"}
"""functions that write to an argument and return None"""


class RecordedLaunches:
    """Captured launches, which are replayed in order on the same memory.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device):
        self.device, self.calls = device, []

    def replay(self):
        """Replay all launches, which counts as one launch."""
        self.device.launches += 1
        with np.errstate(all="ignore"):
            for call in self.calls:
                call()

    def record(self, function, args, kwargs):
        """Record a call of a NumPy function on memory; return its result, of which only the shape is defined."""
        if "out" in kwargs or function.__name__ in _IN_PLACE_FUNCTIONS:
            self.calls.append(lambda: function(*args, **kwargs))
            return kwargs.get("out")
        with np.errstate(all="ignore"):
            result = function(*args, **kwargs)
        if not isinstance(result, (np.ndarray, np.generic, tuple, list)):
            return result
        buffers = [np.asarray(item) for item in (result if isinstance(result, (tuple, list)) else [result])]
        inputs = [item for item in (getattr(function, "__self__", None), *args) if isinstance(item, np.ndarray)]
        if not any(np.may_share_memory(buffer, item) for buffer in buffers for item in inputs):  # neither is a view

            def rerun():
                values = function(*args, **kwargs)
                for buffer, value in zip(buffers, values if len(buffers) > 1 else [values], strict=True):
                    np.copyto(buffer, value)

            self.calls.append(rerun)
        return result if isinstance(result, (tuple, list)) else buffers[0]


class CapturingKernels(CupyKernels):
    """Kernels of a simulated device whose launches can be captured."""

    supports_capture = True

    def _capture_launches(self, function, pool_graph):
        device = self.xp._device
        launches = device.capturing = RecordedLaunches(device)
        try:
            return function(), launches
        finally:
            device.capturing = None


def check_not_capturing(device, direction):
    """Raise CuPy's error for a transfer while launches are captured."""
    if device.capturing is not None:
        raise RuntimeError(f"the current stream is capturing, so {direction} transfers are disallowed")
