"""Backends and launchers that are installed, for tests that run on all of them."""

from __future__ import annotations

import importlib.util
import os

import pytest

from neondist.backends import Backend, Kernels, get_backend
from neondist.errors import LaunchError
from neondist.launcher.mpirun import find_mpirun

BACKENDS = ["numpy", *(["torch"] if importlib.util.find_spec("torch") else [])]
"""installed backends"""
KERNEL_VARIANTS = [*BACKENDS, "not compiled", *(["torch throughout"] if "torch" in BACKENDS else [])]
"""these, NumPy's kernels without the compiled ones, and torch's kernels for all sizes"""


def make_backend(name: str) -> Backend:
    """Return a backend by its name in KERNEL_VARIANTS."""
    if name == "not compiled":
        return Backend(name, Kernels())
    if name != "torch throughout":
        return get_backend(name)
    from neondist.backends.torch import TorchKernelMixin

    class TorchKernels(TorchKernelMixin):
        min_torch_elements = 0

        def _prefers_torch_conv(self, x, out, kernel=(), stride=(1,)):
            crashes = max(stride) > 1 and kernel != () and max(kernel) == 1
            return 0 not in (x.size, *out) and x.ndim > 3 and not crashes

        def _prefers_torch_pool(self, x, out):
            return 0 not in (x.size, *out) and x.ndim > 3

    return Backend(name, TorchKernels())


def has_mpirun() -> bool:
    """Return whether a working mpirun is installed."""
    try:
        return find_mpirun(os.environ) is not None
    except LaunchError:
        return False


needs_mpirun = pytest.mark.skipif(not has_mpirun(), reason="needs mpirun")
