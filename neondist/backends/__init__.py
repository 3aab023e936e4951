"""Arrays and kernels, by library.

backend: what a backend is, and which there are. kernels: the table, with conv, pool and cells in any array namespace;
of cells there are compiled ones. host: compiled kernels over NumPy's arrays (rows, compiled_conv), by the threads of
gomp. torch: PyTorch's, for what is not compiled. cupy: those over CuPy's arrays, by device_kernels, which read
device_tables; cupy_torch: and PyTorch's. gpus: of this machine.
"""

from .backend import Availability, Backend, available, check_backend, get_backend, precision_note
from .cells import Normal, compiled
from .kernels import Kernels

__all__ = [
    "Availability", "Backend", "Kernels", "Normal", "available", "check_backend", "compiled", "get_backend",
    "precision_note",
]  # fmt: skip
