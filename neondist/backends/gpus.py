"""GPUs of this machine, through CuPy: their availability, and the choice of this rank's GPU."""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..system.job import local_rank
from ..version import find_module_spec, installed_distributions

_INSTALL_COMMAND = "pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"
_CUDA_ERROR_INSUFFICIENT_DRIVER, _CUDA_ERROR_NO_DEVICE = 35, 100
"""Error codes of the CUDA runtime; the first is also returned if no driver is installed."""


def find_cupy_problem() -> str:
    """Return the reason why CuPy is not usable here, with the remedy; '' if it is usable."""
    if find_module_spec("cupy") is None:
        return f"not installed; {_INSTALL_COMMAND}"
    packages = installed_distributions("cupy")
    if len(packages) > 1:
        return f"{' and '.join(packages)} are installed together, but conflict; uninstall all but one of them"
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:  # a broken installation may raise any exception
        return f"cannot be imported: {type(error).__name__}: {error}"
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if error.status == _CUDA_ERROR_INSUFFICIENT_DRIVER:
            driver, needed = (_cuda_version(read()) for read in (runtime.driverGetVersion, runtime.runtimeGetVersion))
            if not driver:
                return f"there is no NVIDIA driver; install one for CUDA {needed} or later"
            problem = f"the NVIDIA driver supports CUDA {driver} at most, and this CuPy needs {needed}"
            return f"{problem}; install a newer driver, or a CuPy for an older CUDA"
        if error.status != _CUDA_ERROR_NO_DEVICE:
            return f"the CUDA runtime fails: {error}; see whether nvidia-smi works"
        count = 0
    return "" if count else "no GPU is visible; see nvidia-smi, and the variable CUDA_VISIBLE_DEVICES"


def describe_gpus() -> str:
    """Return CuPy's version and devices as text; CuPy must be usable."""
    cupy = importlib.import_module("cupy")
    runtime, gpu_names = cupy.cuda.runtime, []
    for device in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(device)
        gpu_names.append(f"{properties['name'].decode()} ({properties['totalGlobalMem'] / 2**30:.0f} GiB)")
    cuda_version, driver_version = _cuda_version(runtime.runtimeGetVersion()), _cuda_version(runtime.driverGetVersion())
    return f"CuPy {cupy.__version__}, CUDA {cuda_version}, driver for CUDA {driver_version}: {', '.join(gpu_names)}"


def max_gpu_bytes_per_rank(ranks: int) -> int:
    """Return the bytes that each of `ranks` ranks on this machine can use on the smallest GPU; initialises no GPU."""
    runtime = importlib.import_module("cupy").cuda.runtime
    num_gpus = runtime.getDeviceCount()
    min_gpu_bytes = min(runtime.getDeviceProperties(device)["totalGlobalMem"] for device in range(num_gpus))
    return int(min_gpu_bytes) // -(-ranks // num_gpus)


def load_cupy() -> Any:
    """Return CuPy, which must be usable, with this rank's GPU as the current device.

    GPUs are assigned round-robin by local rank, so several ranks may share a GPU.
    """
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(local_rank(os.environ) % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy


def _cuda_version(version_number: int) -> str:
    """Return CUDA's version number, such as 12090, as text, '12.9'; '' for 0."""
    return f"{version_number // 1000}.{version_number % 1000 // 10}" if version_number else ""
