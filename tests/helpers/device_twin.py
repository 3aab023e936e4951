"""Kernels of a GPU on the CPU: a C compiler makes a function of the same text, which is called for each thread."""

import ctypes
import shutil
import subprocess
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np

HEADER = """
#include <math.h>
#define KERNEL
typedef struct { int x, y, z; } Place;
Place gridDim, blockDim, blockIdx, threadIdx;
"""
GRID, BLOCK = 2, 3
"""kernels go through all numbers whatever the launch is; few threads are enough"""


class Place(ctypes.Structure):
    """Position of a thread or a block, as in CUDA."""

    _fields_ = [(axis, ctypes.c_int) for axis in "xyz"]


def compiler():
    """Return the compiler that Python itself was made with, or another; None where there is none."""
    named = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return shutil.which(named) or shutil.which("cc")


@lru_cache
def library(source):
    """Return the compiled text of a kernel, and what lets one thread of this process call it at a time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.c")
        path.write_text(HEADER + source)
        words = [compiler(), "-std=c11", "-Wall", "-Werror", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.run([*words, "-o", path.with_suffix(".so"), path, "-lm"], check=True)
        return ctypes.CDLL(path.with_suffix(".so")), Lock()


class RawKernel:
    """CuPy's, on the memory of a strict device.

    Parameters
    ----------
    device : Device
        Counts launches.
    """

    def __init__(self, device, source, name):
        self.device, (self.library, self.lock) = device, library(source)
        self.function = self.library[name]
        self.function.restype = None

    def __call__(self, grid, block, arguments):
        """Run all threads, one after the other, of a small launch instead of the one that is asked for."""
        self.device.launches += 1
        assert 1 <= grid[0] <= 2**31 - 1
        assert 1 <= block[0] <= 1024
        if self.device.capturing is None:
            self._run(arguments)
        else:
            self.device.capturing.each.append(lambda: self._run(arguments))

    def _run(self, arguments):
        given = [_as_c(argument) for argument in arguments]
        places = {name: Place.in_dll(self.library, name) for name in ("gridDim", "blockDim", "blockIdx", "threadIdx")}
        with self.lock:
            places["gridDim"].x, places["blockDim"].x = GRID, BLOCK
            for at in range(GRID * BLOCK):
                places["blockIdx"].x, places["threadIdx"].x = divmod(at, BLOCK)
                self.function(*given)


def _as_c(argument):
    if isinstance(argument, np.int64):
        return ctypes.c_longlong(argument)
    if isinstance(argument, np.float32):
        return ctypes.c_float(argument)
    if isinstance(argument, np.float64):
        return ctypes.c_double(argument)
    return ctypes.c_void_p(argument.data.ptr)
