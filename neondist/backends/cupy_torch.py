"""PyTorch's CUDA kernels, including cuDNN's, over CuPy's arrays, shared through DLPack without a copy.

Both libraries compute in the default stream of this rank's GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from ..arrays.precision import FLOAT32, ComputePrecision
from .cupy import CupyKernels
from .kernels import CapturedCudaGraph, Kernels
from .torch import HalfPrecisionTorchMixin, TorchKernelMixin

Ints = Sequence[int]


class CupyTorchKernels(TorchKernelMixin, CupyKernels):
    """PyTorch's convolutions and sums over windows; all other kernels are CuPy's.

    Max pooling is CuPy's, too: PyTorch's channels-last max pooling of float64 fails with a misaligned address for
    few channels (PyTorch 2.11), and its gradient is not deterministic.
    """

    min_torch_elements = 0
    max_pool, max_pool_backward = CupyKernels.max_pool, CupyKernels.max_pool_backward
    max_pool_backward_into = CupyKernels.max_pool_backward_into

    def in_precision(self, precision: ComputePrecision) -> Kernels:
        """Return kernels with operands of a precision; TF32 is replaced by float32."""
        return HalfPrecisionCupyTorchKernels(self.xp, precision) if precision.has_16_bit_operands else self

    def matmul(self, a: Any, b: Any) -> Any:
        """Return the product of two matrices, or stacks, by PyTorch: CuPy's call of cuBLAS cannot be captured."""
        return super().matmul(a, b) if self.torch_calls is None else self.torch_calls.matmul(a, b)

    def _reorder_weights_if_faster(self, x: Any, weights: Any) -> Any:
        """Return the weights unchanged: cuDNN does not need another order."""
        return weights

    def _prefers_torch_conv(self, x: Any, out_extent: Ints, kernel: Ints = (), stride: Ints = (1,)) -> bool:
        return x.ndim > 3 and 0 not in (x.size, *out_extent) and self.torch_calls is not None

    def _prefers_torch_pool(self, x: Any, out_extent: Ints) -> bool:
        return self._prefers_torch_conv(x, out_extent)


def is_torch_cuda_usable() -> bool:
    """Return whether PyTorch is built for CUDA and finds a GPU."""
    try:
        import torch
    except Exception:  # a broken installation may raise any exception
        return False
    return torch.version.cuda is not None and torch.cuda.is_available()


class CudaTorchKernels(CupyTorchKernels):
    """CuPy's and PyTorch's kernels on a GPU, with one memory pool shared by both libraries.

    Parameters
    ----------
    cupy : module
        CuPy, with this rank's GPU as the current device.
    precision : ComputePrecision
        'tf32' lets cuDNN use TF32 in convolutions.
    """

    tf32 = supports_capture = True

    def __init__(self, cupy: Any, precision: ComputePrecision = FLOAT32) -> None:
        import torch

        super().__init__(cupy, precision)
        device = cupy.cuda.Device().id
        torch.cuda.set_device(device)
        self.memory_errors = (MemoryError, torch.cuda.OutOfMemoryError)
        self._cuda = torch.cuda
        self._cudnn: Any = torch.backends.cudnn
        previous_allocator = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(torch_allocator(cupy, torch, device))
        self._cleanup.callback(cupy.cuda.set_allocator, previous_allocator)
        flags = torch.backends.cudnn.set_flags(_benchmark=True, _allow_tf32=precision.name == "tf32")
        self._cleanup.callback(torch.backends.cudnn.set_flags, *flags)

    def in_precision(self, precision: ComputePrecision) -> Kernels:
        """Return kernels with operands of a precision."""
        if precision == FLOAT32:
            return self
        self.close()
        return (HalfPrecisionCudaTorchKernels if precision.has_16_bit_operands else CudaTorchKernels)(
            self.xp, precision
        )

    def _capture_launches(self, function: Callable[[], Any], pool_graph: CapturedCudaGraph | None) -> tuple[Any, Any]:
        """Return a function's result and PyTorch's graph, which owns a part of the pool."""
        graph, pool = self._cuda.CUDAGraph(), None if pool_graph is None else pool_graph.library_graph.pool()
        with ExitStack() as during:
            during.enter_context(self._cuda.graph(graph, pool, capture_error_mode="relaxed"))  # permits all calls
            during.enter_context(self.xp.cuda.ExternalStream(self._cuda.current_stream().cuda_stream))
            return function(), graph

    def available_memory(self, ranks: int) -> int | None:
        """Return the bytes that each of `ranks` ranks on this machine may still allocate on its GPU."""
        cached_bytes = self._cuda.memory_reserved() - self._cuda.memory_allocated()
        return (super().available_memory(ranks) or 0) + int(cached_bytes)

    def release_cached_memory(self, byte_limit: int) -> None:
        """Free the cached blocks of the pool if it exceeds `byte_limit`."""
        if self._cuda.memory_reserved() > byte_limit:
            self._cuda.empty_cache()


class HalfPrecisionCupyTorchKernels(HalfPrecisionTorchMixin, CupyTorchKernels):
    """PyTorch's convolutions with 16-bit operands; matrix products are computed in float32."""

    def _has_fast_instructions(self, half_calls: Any) -> bool:
        return True  # on tensor cores since Volta, bfloat16 since Ampere


class HalfPrecisionCudaTorchKernels(HalfPrecisionCupyTorchKernels, CudaTorchKernels):
    """CuPy's and PyTorch's kernels with 16-bit operands on a GPU."""

    def conv_backward_weights(self, *args: Any) -> Any:
        """Return the gradient of the weights in float32, computed in TF32, which represents 16-bit operands exactly."""
        self._cudnn.allow_tf32 = self.precision.has_16_bit_operands
        try:
            return super().conv_backward_weights(*args)
        finally:
            self._cudnn.allow_tf32 = False


def torch_allocator(cupy: Any, torch: Any, device: int) -> Callable[[int], Any]:
    """Return an allocator for CuPy that takes memory from PyTorch's pool, with MemoryError if the pool is exhausted.

    Memory is freed with the tensor that owns it. CuPy's PythonFunctionAllocator would not free arrays that are deleted
    by the garbage collector, because the function that frees them no longer exists by then.
    """
    torch_device = torch.device("cuda", device)

    def allocate(size: int) -> Any:
        try:
            tensor = torch.empty(size, dtype=torch.uint8, device=torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error  # as CuPy's own pool would
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(tensor.data_ptr(), size, tensor, device), 0)

    return allocate
