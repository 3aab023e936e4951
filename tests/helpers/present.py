"""Backends that are installed, for tests that run on all of them, and mpirun."""

from __future__ import annotations

import importlib.util
import os

import pytest

from neondist.backends import Backend, Kernels, get_backend
from neondist.errors import LaunchError
from neondist.launcher.mpirun import find_mpirun

NAMES = ["numpy", *(["torch"] if importlib.util.find_spec("torch") else [])]
"""usable backends"""
KERNELS = [*NAMES, "not compiled", *(["torch throughout"] if "torch" in NAMES else [])]
"""the same; NumPy's table where no C compiler was; torch's kernels also where others are faster"""


def backend_of(name: str) -> Backend:
    """Return the backend of a name in KERNELS."""
    if name == "not compiled":
        return Backend(name, Kernels())
    if name != "torch throughout":
        return get_backend(name)
    from neondist.backends.torch import TorchTable

    class Throughout(TorchTable):
        small = 0

        def _convolves(self, x, out, kernel=(), stride=(1,)):
            crashes = max(stride) > 1 and kernel != () and max(kernel) == 1
            return 0 not in (x.size, *out) and x.ndim > 3 and not crashes

        def _pools(self, x, out):
            return 0 not in (x.size, *out) and x.ndim > 3

    return Backend(name, Throughout())


def have_mpirun() -> bool:
    """Whether there is an mpirun that runs."""
    try:
        return find_mpirun(os.environ) is not None
    except LaunchError:
        return False


needs_mpirun = pytest.mark.skipif(not have_mpirun(), reason="needs mpirun")
