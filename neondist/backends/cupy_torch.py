"""PyTorch's CUDA kernels, cuDNN's among them, over CuPy's arrays: by DLPack, without a copy.

Both compute in the default stream of this rank's GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..precision import FLOAT32, ComputePrecision
from .cupy import CupyKernels
from .kernels import Kernels
from .torch import NarrowTorchTable, TorchTable

Ints = Sequence[int]


class CupyTorchKernels(TorchTable, CupyKernels):
    """PyTorch's convolutions and pooling, CuPy's everything else."""

    small, many = 0, 1 << 62  # matrix products go to cuBLAS either way

    def in_precision(self, precision: ComputePrecision) -> Kernels:
        """Return kernels with operands of a precision; TF32 needs a GPU."""
        return NarrowCupyTorchKernels(self.xp, precision) if precision.narrow else self

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
    precision : ComputePrecision
        With tf32 convolutions have such operands.
    """

    tf32 = True

    def __init__(self, cupy: Any, precision: ComputePrecision = FLOAT32) -> None:
        import torch

        super().__init__(cupy, precision)
        device = cupy.cuda.Device().id
        torch.cuda.set_device(device)
        self.memory_errors = (MemoryError, torch.cuda.OutOfMemoryError)
        self._cuda = torch.cuda
        free = torch.cuda.caching_allocator_delete
        pool = cupy.cuda.PythonFunctionAllocator(allocating(torch.cuda), lambda address, device: free(address))
        before = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(pool.malloc)
        self._closing.callback(cupy.cuda.set_allocator, before)
        flags = torch.backends.cudnn.set_flags(_benchmark=True, _allow_tf32=precision.name == "tf32")
        self._closing.callback(torch.backends.cudnn.set_flags, *flags)

    def in_precision(self, precision: ComputePrecision) -> Kernels:
        """Return kernels with operands of a precision."""
        if precision == FLOAT32:
            return self
        self.close()
        kind = NarrowCudaTorchKernels if precision.narrow else CudaTorchKernels
        return kind(self.xp, precision)

    def room(self, ranks: int) -> int | None:
        """Return the bytes of its GPU that each of so many ranks on this machine may still take."""
        kept = self._cuda.memory_reserved() - self._cuda.memory_allocated()
        return (super().room(ranks) or 0) + int(kept)

    def give_back_freed(self, above: int) -> None:
        """Give back what the pool keeps."""
        if self._cuda.memory_reserved() > above:
            self._cuda.empty_cache()


class NarrowCupyTorchKernels(NarrowTorchTable, CupyTorchKernels):
    """PyTorch's convolutions of 16 bits; matrix products are those of float32."""

    def _is_fast(self, calls: Any) -> bool:
        return True  # on tensor cores since Volta, bfloat16 since Ampere


class NarrowCudaTorchKernels(NarrowCupyTorchKernels, CudaTorchKernels):
    """The same on a GPU."""


def allocating(cuda: Any) -> Callable[[int, int], int]:
    """Return what takes memory of PyTorch's pool for CuPy, given torch.cuda; MemoryError where there is none."""

    def allocate(size: int, device: int) -> int:
        try:
            address: int = cuda.caching_allocator_alloc(size, device)
        except cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error  # as CuPy's own pool would
        return address

    return allocate
