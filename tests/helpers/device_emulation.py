"""GPU kernels on the CPU: their source is compiled as C and called once for each thread."""

import ctypes
import shutil
import subprocess
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np

CUDA_HEADER = """
#include <math.h>
#define KERNEL
typedef struct { int x, y, z; } Dim3;
Dim3 gridDim, blockDim, blockIdx, threadIdx;
"""
GRID, BLOCK = 2, 3
"""a few threads suffice, because kernels loop over all elements for any launch size"""


class Dim3(ctypes.Structure):
    """Position of a thread or a block, as in CUDA."""

    _fields_ = [(axis, ctypes.c_int) for axis in "xyz"]


def find_compiler():
    """Return the compiler that Python was built with, or another one; None if there is none."""
    name = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return shutil.which(name) or shutil.which("cc")


@lru_cache
def compile_kernel(source):
    """Return the compiled source of a kernel and a lock for its calls."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.c")
        path.write_text(CUDA_HEADER + source)
        command = [find_compiler(), "-std=c11", "-Wall", "-Werror", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.run([*command, "-o", path.with_suffix(".so"), path, "-lm"], check=True)
        return ctypes.CDLL(path.with_suffix(".so")), Lock()


class RawKernel:
    """CuPy's RawKernel on the memory of a simulated device.

    Parameters
    ----------
    device : Device
        Counts launches.
    """

    def __init__(self, device, source, name):
        self.device, (self.library, self.lock) = device, compile_kernel(source)
        self.function = self.library[name]
        self.function.restype = None

    def __call__(self, grid, block, arguments):
        """Run the threads of a small launch, instead of the requested one, sequentially."""
        self.device.launches += 1
        assert 1 <= grid[0] <= 2**31 - 1
        assert 1 <= block[0] <= 1024
        if self.device.capturing is None:
            self._run(arguments)
        else:
            self.device.capturing.calls.append(lambda: self._run(arguments))

    def _run(self, arguments):
        values = [_to_ctypes(argument) for argument in arguments]
        variables = {name: Dim3.in_dll(self.library, name) for name in ("gridDim", "blockDim", "blockIdx", "threadIdx")}
        with self.lock:
            variables["gridDim"].x, variables["blockDim"].x = GRID, BLOCK
            for thread in range(GRID * BLOCK):
                variables["blockIdx"].x, variables["threadIdx"].x = divmod(thread, BLOCK)
                self.function(*values)


def _to_ctypes(argument):
    if isinstance(argument, np.int64):
        return ctypes.c_longlong(argument)
    if isinstance(argument, np.float32):
        return ctypes.c_float(argument)
    if isinstance(argument, np.float64):
        return ctypes.c_double(argument)
    return ctypes.c_void_p(argument.data.ptr)
