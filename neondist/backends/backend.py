"""Backend: an array namespace, and kernels, possibly of another library, that work on its arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.namespace import as_real_numbers
from ..arrays.precision import ComputePrecision
from ..errors import ConfigError
from ..registry.arguments import type_checked
from ..registry.names import suggest_nearest
from ..version import find_module_spec
from . import gpus
from .host import HostKernels
from .kernels import Kernels


class Backend:
    """An array library and the kernels for its arrays.

    Parameters
    ----------
    name : str
        Value of the option `backend` that selects this backend.
    kernels : Kernels
        Kernels for the array namespace, such as `Kernels(cupy)`.

    Attributes
    ----------
    name, kernels
    xp : module
        The array namespace, with NumPy's functions.
    """

    def __init__(self, name: str, kernels: Kernels) -> None:
        self.name, self.kernels, self.xp = name, kernels, kernels.xp

    def __str__(self) -> str:
        return self.name

    def owns(self, array: Any) -> bool:
        """Return whether an array belongs to this namespace."""
        return isinstance(array, self.xp.ndarray)

    def from_host(self, array: Any, dtype: Any = None) -> Any:
        """Return a new contiguous array of this backend with the values of a NumPy array."""
        return self.xp.array(array, dtype, order="C")

    def as_real_array(self, name: str, array: Any, dtype: np.dtype, copy: bool = False) -> Any:
        """Return a caller's array as a contiguous array of this backend; copied only if necessary, or if `copy`.

        Raises
        ------
        ShapeError
            If its elements are not real numbers, or some are masked; `name` is the array's name.
        """
        real_array = as_real_numbers(name, array, self.xp)
        if copy or not self.owns(real_array):
            return self.from_host(real_array, dtype)
        return self.xp.ascontiguousarray(real_array, dtype)

    def in_precision(self, precision: ComputePrecision) -> Backend:
        """Return the backend with products in a precision; raise ConfigError if the precision is unsupported."""
        kernels = self.kernels.in_precision(precision)
        return self if kernels is self.kernels else Backend(self.name, kernels)

    def close(self) -> None:
        """Undo the backend's changes to this process, such as the number of threads."""
        self.kernels.close()


@dataclass(frozen=True)
class BackendAvailability:
    """Name of a backend, whether it is usable here, and the reason."""

    name: str
    usable: bool
    reason: str


def available() -> list[BackendAvailability]:
    """Return all backends in the order of preference of `auto`; imports PyTorch and CuPy, if installed."""
    return [_cupy_availability(), _torch_availability(), BackendAvailability("numpy", True, "always available")]


@type_checked
def get_backend(name: str | Backend = "auto") -> Backend:
    """Return the backend with a name; raise ConfigError if there is none, or it is unusable here.

    Parameters
    ----------
    name : str or Backend
        'auto': 'cupy' if a GPU is found, else 'torch' if installed, else 'numpy'. Any other name refers to a module
        with an attribute `backend`. The module must have been imported, by `import` or `--import`; its name in an
        experiment file does not import it.
    """
    if isinstance(name, Backend):
        return name
    name = _preferred_backend_name() if name == "auto" else name
    if name in _BACKEND_FACTORIES:
        return _BACKEND_FACTORIES[name]()
    backend = getattr(sys.modules.get(name), "backend", None)
    if isinstance(backend, Backend):
        return backend
    if name in sys.modules:
        raise ConfigError(f"backend '{name}': the module has no nd.Backend named `backend`; define one")
    if suggestion := suggest_nearest(name, names := ["auto", *_BACKEND_FACTORIES]):
        raise ConfigError(f"backend '{name}' is unknown{suggestion}")
    raise ConfigError(
        f"backend '{name}': no such module is imported; add --import {name}, or import it in Python, or choose from"
        f" {', '.join(names)}"
    )


def backend_name(name: str | Backend) -> str:
    """Return the name of a backend, without creating its kernels if possible."""
    name = _preferred_backend_name() if name == "auto" else name
    return name if isinstance(name, str) and name in _BACKEND_FACTORIES else get_backend(name).name


def memory_per_rank(name: str | Backend) -> Callable[[int], int | None]:
    """Return a function from the number of ranks on this machine to the bytes per rank for arrays (None: unknown).

    No GPU is initialised, because this would allocate memory for this process, which may not be one of the ranks.

    Raises
    ------
    ConfigError
        As in `get_backend`.
    """
    if name == "cupy" or (name == "auto" and _preferred_backend_name() == "cupy"):
        _require_cupy()
        return gpus.max_gpu_bytes_per_rank
    return get_backend(name).kernels.available_memory


def _preferred_backend_name() -> str:
    cpu_backend = "torch" if find_module_spec("torch") else "numpy"
    return cpu_backend if gpus.find_cupy_problem() else "cupy"


def precision_note(name: str | Backend, precision: ComputePrecision) -> str:
    """Return a note on a precision's limits with this backend on this machine; '' if there are none."""
    if precision.name == "float32":
        return ""
    backend = get_backend(name)
    if backend.xp is not np:
        lacks_tf32 = precision.name == "tf32" and not backend.kernels.tf32
        return "precision: layers compute in float32: tf32 needs a PyTorch for CUDA" * lacks_tf32
    if precision.name == "tf32":
        return "precision: tf32 requires a GPU; on a CPU it is the same as float32"
    if find_module_spec("torch") is not None:
        from . import torch_narrow

        if torch_narrow.has_fast_instructions(precision.name):
            return ""
    return (
        f"precision: this processor has no {precision.name} instructions, or PyTorch is missing: results are the"
        " same, but computed more slowly than in float32"
    )


def _torch_availability() -> BackendAvailability:
    if find_module_spec("torch") is None:
        return BackendAvailability("torch", False, "not installed; pip install 'neondist[torch]'")
    try:
        import torch
    except Exception as error:  # a broken installation may raise any exception
        return BackendAvailability("torch", False, f"cannot be imported: {type(error).__name__}: {error}")
    return BackendAvailability("torch", True, f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads")


def _make_torch_backend() -> Backend:
    if find_module_spec("torch") is None:
        raise ConfigError(f"backend 'torch' is {_torch_availability().reason}, or use backend 'numpy'")
    from .torch import TorchKernels

    return Backend("torch", TorchKernels())


def _cupy_availability() -> BackendAvailability:
    problem = gpus.find_cupy_problem()
    return BackendAvailability("cupy", not problem, problem or gpus.describe_gpus())


def _require_cupy() -> None:
    if problem := gpus.find_cupy_problem():
        raise ConfigError(f"backend 'cupy': {problem}, or use backend 'numpy'")


def _make_cupy_backend() -> Backend:
    _require_cupy()
    from . import cupy, cupy_torch

    kernels_class = cupy_torch.CudaTorchKernels if cupy_torch.is_torch_cuda_usable() else cupy.CupyKernels
    return Backend("cupy", kernels_class(gpus.load_cupy()))


_BACKEND_FACTORIES: dict[str, Callable[[], Backend]] = {
    "torch": _make_torch_backend,
    "numpy": lambda: Backend("numpy", HostKernels()),
    "cupy": _make_cupy_backend,
}
