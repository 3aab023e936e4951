"""Arrays and kernels, by library.

backend: what a backend is, and which there are. kernels: the table, with conv and pool in any array namespace. torch:
PyTorch's kernels over NumPy's arrays.
"""

from .backend import Availability, Backend, available, get_backend
from .kernels import Kernels

__all__ = ["Availability", "Backend", "Kernels", "available", "get_backend"]
