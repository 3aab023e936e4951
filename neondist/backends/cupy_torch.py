"""PyTorch's CUDA kernels, cuDNN's among them, over CuPy's arrays: by DLPack, without a copy.

Both compute in the default stream of this rank's GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .cupy import CupyKernels
from .torch import TorchTable

Ints = Sequence[int]


class CupyTorchKernels(TorchTable, CupyKernels):
    """PyTorch's convolutions and pooling, CuPy's everything else."""

    small, many = 0, 1 << 62  # matrix products go to cuBLAS either way

    def _arranged(self, x: Any, weights: Any) -> Any:
        return weights

    def _convolves(self, x: Any, out: Ints, kernel: Ints = (), stride: Ints = (1,)) -> bool:
        return x.ndim > 3 and 0 not in (x.size, *out) and self.torch is not None

    def _pools(self, x: Any, out: Ints) -> bool:
        return self._convolves(x, out)


def usable() -> bool:
    """Tell whether there is a PyTorch for CUDA that finds a GPU."""
    try:
        import torch
    except Exception:  # a broken installation fails in many ways
        return False
    return torch.version.cuda is not None and torch.cuda.is_available()


class CudaTorchKernels(CupyTorchKernels):
    """The same on a GPU, with one pool of memory for both libraries: what one has freed, the other can have.

    Parameters
    ----------
    cupy : module
        On this rank's GPU.
    """

    def __init__(self, cupy: Any) -> None:
        import torch

        super().__init__(cupy)
        device = cupy.cuda.Device().id
        torch.cuda.set_device(device)
        self.memory_errors = (MemoryError, torch.cuda.OutOfMemoryError)
        self._cuda = torch.cuda
        free = torch.cuda.caching_allocator_delete
        pool = cupy.cuda.PythonFunctionAllocator(allocating(torch.cuda), lambda address, device: free(address))
        before = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(pool.malloc)
        self._closing.callback(cupy.cuda.set_allocator, before)
        flags = torch.backends.cudnn.set_flags(_benchmark=True, _allow_tf32=False)
        self._closing.callback(torch.backends.cudnn.set_flags, *flags)

    def room(self, ranks: int) -> int | None:
        """Return the bytes of its GPU that each of so many ranks on this machine may still take."""
        kept = self._cuda.memory_reserved() - self._cuda.memory_allocated()
        return (super().room(ranks) or 0) + int(kept)

    def give_back_freed(self, above: int) -> None:
        """Give back what the pool keeps."""
        if self._cuda.memory_reserved() > above:
            self._cuda.empty_cache()


def allocating(cuda: Any) -> Callable[[int, int], int]:
    """Return what takes memory of PyTorch's pool for CuPy, given torch.cuda; MemoryError where there is none."""

    def allocate(size: int, device: int) -> int:
        try:
            address: int = cuda.caching_allocator_alloc(size, device)
        except cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error  # as CuPy's own pool would
        return address

    return allocate
