"""Arrays and kernels, by library.

backend: the Backend class, and the choice of a backend. kernels: base class of kernels, with conv, pool and cells for
any array namespace; cells also compiled. host: compiled kernels over NumPy's arrays (rows, compiled_conv), on the
threads of gomp. torch: PyTorch's kernels, for operations that are not compiled. narrow: 16-bit operands. cupy: kernels
over CuPy's arrays, from device_kernels, which read device_tables; cupy_torch: CuPy's and PyTorch's kernels. gpus: GPUs
of this machine. allocator: reuse of freed memory.
"""

from .backend import Backend, BackendAvailability, available, backend_name, get_backend, memory_per_rank, precision_note
from .cells import Normalisation, load_compiled_kernels
from .kernels import Kernels

__all__ = [
    "Backend",
    "BackendAvailability",
    "Kernels",
    "Normalisation",
    "available",
    "backend_name",
    "get_backend",
    "load_compiled_kernels",
    "memory_per_rank",
    "precision_note",
]  # fmt: skip
