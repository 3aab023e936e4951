"""Cell-wise kernels, and sums over cells: with the functions of any array namespace, and compiled (_cells.c).

Compiled kernels read and write memory once, with any strides, whereas NumPy creates an array for every operation. They
exist if a C compiler was available when neondist was installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

_MIN_THREADED_COPY_ELEMENTS = 1 << 15  # smaller copies are faster on one thread


class Normalisation(NamedTuple):
    """Normalisation of cells: (x - mean) * scale + shift, at least 0 if `fused_relu`.

    Attributes
    ----------
    mean, scale, shift : array (groups, C)
        One group for all samples, or one group for each sample.
    fused_relu : bool
    """

    mean: Any
    scale: Any
    shift: Any
    fused_relu: bool = False


class CellKernels:
    """Kernels over the cells of arrays (N, *spatial, C) of one shape, in any array namespace."""

    xp: Any
    #: Number of cells per partial sum
    sum_block_elements = 1 << 13

    def matmul(self, a: Any, b: Any) -> Any:
        """Return the product of two matrices, or stacks of them."""
        return a @ b

    def copy(self, source: Any, target: Any) -> None:
        """Copy the values of `source` into `target`, both of any strides."""
        self.xp.copyto(target, source)

    def copy_each(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Copy the values of each source into its target, of any strides; on a device, all in one launch."""
        for source, target in zip(sources, targets, strict=True):
            target[...] = source

    def add_boxes(self, array: Any, boxes: Sequence[tuple[slice, ...]], addends: Sequence[Any]) -> None:
        """Add each addend to its box of an array, in this order; boxes may overlap. On a device, all in one launch."""
        for box, addend in zip(boxes, addends, strict=True):
            array[box] += addend

    def contiguous(self, x: Any) -> Any:
        """Return x if it is contiguous, else a contiguous copy."""
        return self.xp.ascontiguousarray(x)

    def relu(self, z: Any, y: Any) -> None:
        """Write max(z, 0) into y, both of any strides."""
        self.xp.maximum(z, 0, out=y)

    def relu_backward(self, y: Any, dy: Any, dz: Any = None) -> Any:
        """Return dy where y is positive and 0 elsewhere, in dz; default: a new, contiguous array."""
        dz = self.xp.empty(dy.shape, dy.dtype) if dz is None else dz
        self.xp.multiply(dy, y > 0, out=dz)
        return dz

    def add(self, parts: Sequence[Any], y: Any, fused_relu: bool = False) -> None:
        """Write the sum of all parts, at least 0 if `fused_relu`, into y, all of any strides."""
        if parts[0] is not y:
            self.copy(parts[0], y)
        for part in parts[1:]:
            y += part
        if fused_relu:
            self.relu(y, y)

    def channel_sum(self, x: Any) -> Any:
        """Return the sum over all axes but the channels, (C,), by GEMM, whose blocked sums are more accurate."""
        cells, total = x.reshape(-1, x.shape[-1]), self.xp.zeros(x.shape[-1:], x.dtype)
        ones = self.xp.ones((1, min(self.sum_block_elements, len(cells))), x.dtype)
        for start in range(0, len(cells), self.sum_block_elements):
            block = cells[start : start + self.sum_block_elements]
            total += self.matmul(ones[:, : len(block)], block)[0]
        return total

    def sample_sum(self, x: Any) -> Any:
        """Return each sample's sum over its cells, (N, C), by GEMM as in `channel_sum`."""
        cells, channels = prod(x.shape[1:-1]), x.shape[-1]
        rows, total = x.reshape(len(x), cells, channels), self.xp.zeros((len(x), 1, channels), x.dtype)
        ones = self.xp.ones((1, min(self.sum_block_elements, cells)), x.dtype)
        for start in range(0, cells, self.sum_block_elements):
            part = rows[:, start : start + self.sum_block_elements]
            total += self.matmul(ones[:, : part.shape[1]], part)
        return total[:, 0]

    def moments(self, x: Any, by_sample: bool = False) -> tuple[Any, Any]:
        """Return means, and sums of squared differences from the means, both (1, C), or (N, C) if `by_sample`.

        Large means cause no cancellation. Both results are 0 if there are no cells.
        """
        count = max(1, prod(x.shape[1:-1] if by_sample else x.shape[:-1]))
        mean = self._group_sums(x, by_sample) / count
        deviations = x - self._broadcast_over_cells(mean, x.ndim)
        return mean, self._group_sums(deviations * deviations, by_sample)

    def normalise(self, x: Any, norm: Normalisation, y: Any) -> None:
        """Write the normalised cells into y; x and y of any strides."""
        mean, scale, shift = (self._broadcast_over_cells(values, x.ndim) for values in norm[:3])
        self.xp.subtract(x, mean, out=y)
        y *= scale
        y += shift
        if norm.fused_relu:
            self.relu(y, y)

    def normalise_backward_sums(self, x: Any, dy: Any, norm: Normalisation) -> tuple[Any, Any]:
        """Return the sums of dz and of dz * (x - mean) for each group, (groups, C).

        dz is the gradient of the normalised cells before the fused ReLU, if any.
        """
        dz, by_sample = self._gradient_before_relu(x, dy, norm), len(norm.mean) != 1
        products = dz * (x - self._broadcast_over_cells(norm.mean, x.ndim))
        return self._group_sums(dz, by_sample), self._group_sums(products, by_sample)

    def normalise_backward(self, x: Any, dy: Any, norm: Normalisation, coefficients: Sequence[Any], dx: Any) -> None:
        """Write a * dz + b * (x - mean) + c into dx, given a, b and c (groups, C)."""
        dz_factor, x_factor, offset = (self._broadcast_over_cells(values, x.ndim) for values in coefficients)
        x_term = (x - self._broadcast_over_cells(norm.mean, x.ndim)) * x_factor + offset
        self.xp.add(self._gradient_before_relu(x, dy, norm) * dz_factor, x_term, out=dx)

    def scale_and_shift(self, mean: Any, var: Any, affine: tuple[Any, Any], eps: float) -> tuple[Any, Any, Any, Any]:
        """Return mean, scale and shift of each channel, and the scale without gamma, all (C,).

        Parameters
        ----------
        affine : pair of array (C,)
            Factor gamma and offset beta of each channel.
        """
        inverse_std = 1 / self.xp.sqrt(var + var.dtype.type(eps))
        return mean, affine[0] * inverse_std, affine[1].copy(), inverse_std

    def batch_scale_and_shift(
        self, moments: Any, running_stats: tuple[Any, Any], affine: tuple[Any, Any], momentum: float, eps: float
    ) -> tuple[Any, Any, Any, Any]:
        """Return the `scale_and_shift` of a batch, and update the running mean and variance.

        Parameters
        ----------
        moments : array (1 + 2 C,)
            Number of cells, means, and sums of squared differences from the means.
        """
        count, (mean, square_sums) = moments[0], moments[1:].reshape(2, -1)
        for kept, new in zip(running_stats, (mean, square_sums / self.xp.maximum(count - 1, 1)), strict=True):
            kept += momentum * (new - kept)
        return self.scale_and_shift(mean.copy(), square_sums / count, affine, eps)

    def batch_gradient_factors(self, sums: Any, count: Any, gamma: Any, inverse_std: Any) -> tuple[Any, Any, Any]:
        """Return the coefficients of `normalise_backward`, (C,) each, from the gradients of gamma and beta (2 C,)."""
        gamma_gradient, beta_gradient = (sums / count).reshape(2, -1)
        dz_factor = gamma * inverse_std
        return dz_factor, -dz_factor * inverse_std * gamma_gradient, -dz_factor * beta_gradient

    def _gradient_before_relu(self, x: Any, dy: Any, norm: Normalisation) -> Any:
        if not norm.fused_relu:
            return dy
        z = self.xp.empty(x.shape, x.dtype)
        self.normalise(x, norm._replace(fused_relu=False), z)
        return dy * (z > 0)

    def _group_sums(self, x: Any, by_sample: bool) -> Any:
        return self.sample_sum(x) if by_sample else self.channel_sum(x)[None]

    def _broadcast_over_cells(self, values: Any, ndim: int) -> Any:
        """Return (groups, C) in a shape that broadcasts with cells (N, *spatial, C)."""
        return values.reshape(len(values), *(1,) * (ndim - 2), values.shape[-1])


class CompiledCells(CellKernels):
    """Kernels over the cells of NumPy's arrays of float32 and float64, compiled where possible.

    Attributes
    ----------
    compiled : module or None
    threads, gomp_address : int
        Number of threads, and the address of GOMP_parallel, which starts them; 0 if there is no libgomp.
    """

    threads, gomp_address = 1, 0

    def __init__(self) -> None:
        super().__init__()
        self.compiled = load_compiled_kernels()

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the values of `source` into `target`."""
        if source.size < _MIN_THREADED_COPY_ELEMENTS or not self._try_compiled_kernel("clip", source, target):
            super().copy(source, target)

    def relu(self, z: np.ndarray, y: np.ndarray) -> None:
        """Write max(z, 0) into y."""
        if not self._try_compiled_kernel("clip", z, y, minimum=0):
            super().relu(z, y)

    def relu_backward(self, y: np.ndarray, dy: np.ndarray, dz: np.ndarray | None = None) -> np.ndarray:
        """Return dy where y is positive, in dz."""
        dz = np.empty(dy.shape, dy.dtype) if dz is None else dz
        return dz if self._try_compiled_kernel("clip_back", y, dy, dz, minimum=0) else super().relu_backward(y, dy, dz)

    def add(self, parts: Sequence[np.ndarray], y: np.ndarray, fused_relu: bool = False) -> None:
        """Write the sum of all parts into y."""
        first_addend, *other_addends = parts
        for at, part in enumerate(other_addends, start=1):
            if not self._try_compiled_kernel(
                "add", first_addend, part, y, minimum=0 if fused_relu and at == len(other_addends) else -inf
            ):
                super().add(parts, y, fused_relu)
                return
            first_addend = y
        if not other_addends:
            super().add(parts, y, fused_relu)

    def channel_sum(self, x: np.ndarray) -> np.ndarray:
        """Return the sum over all axes but the channels."""
        sums = np.empty((1, 1, x.shape[-1]))
        return (
            sums[0, 0].astype(x.dtype) if self._try_compiled_kernel("total", x, sums=sums) else super().channel_sum(x)
        )

    def sample_sum(self, x: np.ndarray) -> np.ndarray:
        """Return each sample's sum over its cells."""
        sums = np.empty((len(x), 1, x.shape[-1]))
        return sums[:, 0].astype(x.dtype) if self._try_compiled_kernel("total", x, sums=sums) else super().sample_sum(x)

    def moments(self, x: np.ndarray, by_sample: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return means, and sums of squared differences from the means."""
        sums = np.empty((len(x) if by_sample else 1, 2, x.shape[-1]))
        if not self._try_compiled_kernel("moments", x, sums=sums):
            return super().moments(x, by_sample)
        return sums[:, 0].astype(x.dtype), sums[:, 1].astype(x.dtype)

    def normalise(self, x: np.ndarray, norm: Normalisation, y: np.ndarray) -> None:
        """Write the normalised cells into y."""
        if not self._try_compiled_kernel("normalise", x, y, group_values=norm[:3], minimum=_output_lower_bound(norm)):
            super().normalise(x, norm, y)

    def normalise_backward_sums(
        self, x: np.ndarray, dy: np.ndarray, norm: Normalisation
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums of dz and of dz * (x - mean)."""
        sums = np.empty((len(norm.mean), 2, x.shape[-1]))
        if not self._try_compiled_kernel(
            "normalise_sums", x, dy, group_values=norm[:3], sums=sums, minimum=_output_lower_bound(norm)
        ):
            return super().normalise_backward_sums(x, dy, norm)
        return sums[:, 0].astype(x.dtype), sums[:, 1].astype(x.dtype)

    def normalise_backward(
        self, x: np.ndarray, dy: np.ndarray, norm: Normalisation, coefficients: Sequence[np.ndarray], dx: np.ndarray
    ) -> None:
        """Write a * dz + b * (x - mean) + c into dx."""
        if not self._try_compiled_kernel(
            "normalise_back", x, dy, dx, group_values=(*norm[:3], *coefficients), minimum=_output_lower_bound(norm)
        ):
            super().normalise_backward(x, dy, norm, coefficients, dx)

    def _try_compiled_kernel(
        self, kernel: str, *arrays: np.ndarray, group_values: Any = None, sums: Any = None, minimum: float = -inf
    ) -> bool:
        if self.compiled is None:
            return False
        group_values = None if group_values is None else np.array(group_values, arrays[0].dtype)
        done: bool = self.compiled.run(kernel, arrays, group_values, sums, minimum, self.threads, self.gomp_address)
        return done


def _output_lower_bound(norm: Normalisation) -> float:
    return 0 if norm.fused_relu else -inf


@cache
def load_compiled_kernels() -> Any:
    """Return the compiled kernels; None if neondist was installed without a C compiler."""
    try:
        return import_module("neondist.backends._cells")
    except ImportError:
        return None
