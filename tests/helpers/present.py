"""What is here: the backends, for tests that run on all of them, and mpirun."""

from __future__ import annotations

import importlib.util
import os

import pytest

from neondist.backends import Backend, get_backend
from neondist.errors import LaunchError
from neondist.launcher.mpirun import find_mpirun

NAMES = ["numpy", *(["torch"] if importlib.util.find_spec("torch") else [])]
"""usable backends"""
KERNELS = [*NAMES, *(["torch throughout"] if "torch" in NAMES else [])]
"""the same, and torch's kernels also where the backend prefers NumPy's, such as convolution in float64"""


def backend_of(name: str) -> Backend:
    """Return the backend of a name in KERNELS."""
    if name != "torch throughout":
        return get_backend(name)
    from neondist.backends.torch import TorchKernels

    class Throughout(TorchKernels):
        small = 0

        def _convolves(self, x, out):
            return 0 not in (x.size, *out)

        def _pools(self, x, out):
            return 0 not in (x.size, *out) and x.ndim > 2

    return Backend(name, Throughout())


def have_mpirun() -> bool:
    """Whether there is an mpirun that runs."""
    try:
        return find_mpirun(os.environ) is not None
    except LaunchError:
        return False


needs_mpirun = pytest.mark.skipif(not have_mpirun(), reason="needs mpirun")
