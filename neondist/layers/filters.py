"""Assignment of filters to cells: one per output cell, or one per block of cells."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ..arrays.namespace import namespace
from ..backends import Kernels
from ..geometry import Box, Window
from .layout import Shape


class FilterOperator(ABC):
    """The linear map of a window's filters over one tile: z = W x, its adjoint Wᵀ z, and the gradient of the weights.

    `view` is (n, *need, C) and z is (n, *tile, out_channels), both local; `weights` are this rank's part.
    """

    def __init__(self, kernels: Kernels, window: Window) -> None:
        self.kernels, self.window = kernels, window

    @abstractmethod
    def correlate(self, view: Any, weights: Any) -> Any:
        """Return W x: every cell's filter, applied to its window."""

    @abstractmethod
    def correlate_adjoint(self, z: Any, weights: Any, extent: Shape) -> Any:
        """Return Wᵀ z, (n, *extent, C): every cell's filter times its value, summed over overlapping windows."""

    @abstractmethod
    def weights_gradient(self, view: Any, dz: Any, weights: Any) -> Any:
        """Return the gradient of the weights, given the gradient of z."""


class PerCellFilters(FilterOperator):
    """A filter for every output cell: weights (*tile, *kernel, C, out_channels)."""

    def correlate(self, view: Any, weights: Any) -> Any:
        """Return W x."""
        return self.kernels.locally_connected_forward(view, weights, self.window.stride)

    def correlate_adjoint(self, z: Any, weights: Any, extent: Shape) -> Any:
        """Return Wᵀ z."""
        return self.kernels.locally_connected_backward_input(z, weights, extent, self.window.stride)

    def weights_gradient(self, view: Any, dz: Any, weights: Any) -> Any:
        """Return the gradient of the weights."""
        return self.kernels.locally_connected_backward_weights(view, dz, weights, self.window.stride)


class PerBlockFilters(FilterOperator):
    """A filter for every block of output cells: weights (*blocks, *kernel, C, out_channels), whole on every rank.

    Parameters
    ----------
    tile : Box
        This rank's output cells.
    block : tuple of int
        Cells of a block on every axis; blocks start at the image's first cell, independently of the tiles.
    """

    def __init__(self, kernels: Kernels, window: Window, tile: Box, block: Shape) -> None:
        super().__init__(kernels, window)
        self.tile_extent, self.block_slices = tile.shape, []
        view_box = window.needs(tile)
        first = [lo // b for lo, b in zip(tile.lo, block, strict=True)]
        counts = [-(-hi // b) - a if hi > lo else 0 for (lo, hi), a, b in zip(tile.axes(), first, block, strict=True)]
        for at in product(*map(range, counts)):
            block_index = tuple(a + i for a, i in zip(first, at, strict=True))
            block_lo = tuple(p * b for p, b in zip(block_index, block, strict=True))
            cells = Box(block_lo, tuple(c + b for c, b in zip(block_lo, block, strict=True))).intersect(tile)
            view_slices = _batch_index_within(window.needs(cells), view_box)
            self.block_slices.append((block_index, _batch_index_within(cells, tile), view_slices))

    def correlate(self, view: Any, weights: Any) -> Any:
        """Return W x."""
        z = self.kernels.xp.empty((len(view), *self.tile_extent, weights.shape[-1]), view.dtype)
        for block_index, cells, view_slices in self.block_slices:
            z[cells] = self.kernels.conv_forward(view[view_slices], weights[block_index], *self._stride_dilation_groups)
        return z

    def correlate_adjoint(self, z: Any, weights: Any, extent: Shape) -> Any:
        """Return Wᵀ z."""
        dview = self.kernels.xp.zeros((len(z), *extent, weights.shape[-2]), z.dtype)
        for block_index, cells, view_slices in self.block_slices:
            view_part = dview[view_slices]
            view_part += self.kernels.conv_backward_input(
                _contiguous(z[cells]), weights[block_index], view_part.shape[1:-1], *self._stride_dilation_groups
            )
        return dview

    def weights_gradient(self, view: Any, dz: Any, weights: Any) -> Any:
        """Return this rank's share of the gradient of the weights."""
        gradient = self.kernels.xp.zeros_like(weights)
        for block_index, cells, view_slices in self.block_slices:
            block_gradient = self.kernels.conv_backward_weights(
                view[view_slices], _contiguous(dz[cells]), self.window.kernel, *self._stride_dilation_groups
            )
            gradient[block_index] = block_gradient
        return gradient

    @property
    def _stride_dilation_groups(self) -> tuple[Shape, Shape, int]:
        return self.window.stride, (1,) * len(self.window.kernel), 1


def orthonormalise(weights: Any, spatial_ndim: int, scale: float) -> Any:
    """Return the nearest filters that are orthonormal up to the factor `scale`.

    The filters of one cell (or block) are the columns of a matrix M (kernel · C, out_channels); this is the symmetric
    orthonormalisation M (MᵀM)^(-1/2) (Hyvärinen and Oja 2000), or (MMᵀ)^(-1/2) M where there are more filters than
    inputs. The first `spatial_ndim` axes of `weights` are those of the cells.
    """
    cells = weights.shape[:spatial_ndim]
    if not weights.size:
        return weights
    xp = namespace(weights)
    matrix = weights.reshape(prod(cells), -1, weights.shape[-1]).astype(np.float64)
    is_wide = matrix.shape[1] < matrix.shape[2]
    if is_wide:
        matrix = matrix.swapaxes(1, 2)
    eigenvalues, eigenvectors = xp.linalg.eigh(matrix.swapaxes(1, 2) @ matrix)
    min_eigenvalue = np.finfo(weights.dtype).eps * eigenvalues[:, -1:]
    root_eigenvalues = xp.sqrt(xp.maximum(eigenvalues, xp.maximum(min_eigenvalue, np.finfo(np.float64).tiny)))
    filters = matrix @ (eigenvectors / root_eigenvalues[:, None, :]) @ eigenvectors.swapaxes(1, 2)
    return scale * (filters.swapaxes(1, 2) if is_wide else filters).reshape(weights.shape)


def _batch_index_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of the cells of a box in a batch (n, *outer, C)."""
    return (slice(None), *box.relative_to(outer).slices)


def _contiguous(array: Any) -> Any:
    return namespace(array).ascontiguousarray(array)
