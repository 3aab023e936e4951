"""Graphs of a strict device: while launches are captured none is done, and nothing is read; see device.py."""

import numpy as np

from neondist.backends.cupy import CupyKernels

_IN_PLACE = {"copyto", "fill"}
"""write into an argument, and return nothing"""


class Launches:
    """Launches that the device repeats in their order, on the same memory.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device):
        self.device, self.each = device, []

    def replay(self):
        """Do all of them, which is one launch of the host's."""
        self.device.launches += 1
        with np.errstate(all="ignore"):
            for work in self.each:
                work()

    def called(self, function, args, kwargs):
        """Note a call of a function of NumPy's on memory; return what it gives, in which only the shape is right."""
        if "out" in kwargs or function.__name__ in _IN_PLACE:
            self.each.append(lambda: function(*args, **kwargs))
            return kwargs.get("out")
        with np.errstate(all="ignore"):
            found = function(*args, **kwargs)
        if not isinstance(found, (np.ndarray, np.generic, tuple, list)):
            return found
        places = [np.asarray(one) for one in (found if isinstance(found, (tuple, list)) else [found])]
        given = [one for one in (getattr(function, "__self__", None), *args) if isinstance(one, np.ndarray)]
        if not any(np.may_share_memory(place, one) for place in places for one in given):  # others are views

            def again():
                once_more = function(*args, **kwargs)
                for place, value in zip(places, once_more if len(places) > 1 else [once_more], strict=True):
                    np.copyto(place, value)

            self.each.append(again)
        return found if isinstance(found, (tuple, list)) else places[0]


class CapturingKernels(CupyKernels):
    """Those of a strict device, whose launches can be captured."""

    captures = True

    def _captured(self, function, after):
        device = self.xp._device
        launches = device.capturing = Launches(device)
        try:
            return function(), launches
        finally:
            device.capturing = None


def not_now(device, what):
    """Raise CuPy's error where launches are being captured, and something asks for numbers."""
    if device.capturing is not None:
        raise RuntimeError(f"the current stream is capturing, so {what} transfers are disallowed")
