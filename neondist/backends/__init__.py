"""Arrays and kernels, by library.

base: the interface. numpy: the reference. torch: PyTorch's kernels over the same arrays. select: which there are, and
what `auto` takes.
"""

from .base import Backend
from .select import Availability, available, get_backend

__all__ = ["Availability", "Backend", "available", "get_backend"]
