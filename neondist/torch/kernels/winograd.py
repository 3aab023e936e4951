"""3 x 3 convolutions of many channels by Winograd's algorithm F(2 x 2, 3 x 3) (Lavin and Gray 2016).

It needs 2.25 times fewer multiplications. Each 2 x 2 output tile reads 4 x 4 inputs spaced `dilation` apart:
y = A^T [sum over channels of (G w G^T) (B^T x B)] A, 16 products of matrices (outputs, channels) and (channels, tiles).
Errors in float32 are comparable to those of direct summation: with 128 to 2048 channels, they are 0.1 to 1.6 times
oneDNN's errors for outputs and weight gradients, and 1.1 to 2.8 times for input gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ..ir.graph import is_eager_cpu_float
from ..ir.once_differentiable import once_differentiable

Pair = Sequence[int]
_WEIGHT_TRANSFORM = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=torch.float64)
_FLAT_WEIGHT_TRANSFORM = torch.kron(_WEIGHT_TRANSFORM, _WEIGHT_TRANSFORM)  # (16, 9)
_MIN_CHANNELS, _MIN_TILES = 128, 512  # measured: minimum sizes at which Winograd's algorithm is faster
_MANY_CHANNELS, _MIN_TILES_OF_MANY_CHANNELS = 512, 192
_MAX_COVERED_PER_OUTPUT = 1.25  # measured: largest ratio of covered to needed outputs at which it is faster
_MAX_BATCH_BYTES = 16 << 20  # maximum bytes of transformed cells at once


def conv2d_with_winograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> torch.Tensor:
    """Compute F.conv2d, by Winograd's algorithm where that is faster."""
    if _is_winograd_faster(x, weight, stride, padding, dilation, groups):
        y: torch.Tensor = _WinogradConvolution.apply(x, weight, tuple(padding), tuple(dilation))
        return y if bias is None else y.add_(bias.view(-1, 1, 1))
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _is_winograd_faster(
    x: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> bool:
    return (
        weight.shape[2:] == (3, 3)
        and min(weight.shape[:2]) >= _MIN_CHANNELS
        and groups == max(stride) == 1
        and all(p <= 2 * d for p, d in zip(padding, dilation, strict=True))
        and x.dim() == 4
        and _fills_winograd_tiles(len(x), min(weight.shape[:2]), _output_extents(x, padding, dilation), dilation)
        and x.stride(-1) == 1
        and is_eager_cpu_float(x, weight)
    )


def _fills_winograd_tiles(samples: int, channels: int, extents: Pair, dilation: Pair) -> bool:
    """Return whether there are enough outputs, and whether these fill most of their tiles."""
    covered_cells = prod(_round_up_to_winograd_tiles(n, d) for n, d in zip(extents, dilation, strict=True))
    min_tiles = _MIN_TILES_OF_MANY_CHANNELS if channels >= _MANY_CHANNELS else _MIN_TILES
    return samples * prod(extents) >= 4 * min_tiles and covered_cells <= _MAX_COVERED_PER_OUTPUT * prod(extents)


class _WinogradConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, padding: Pair, dilation: Pair) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = padding, dilation
        return _winograd_convolution(x, weight, padding, dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), (padding, dilation), needs_grad = ctx.saved_tensors, ctx.options, ctx.needs_input_grad[:2]
        pads = [2 * d - p for p, d in zip(padding, dilation, strict=True)]
        dx = _winograd_convolution(dy, weight.transpose(0, 1).flip(2, 3), pads, dilation) if needs_grad[0] else None
        return dx, _weight_gradient(x, dy, padding, dilation) if needs_grad[1] else None, None, None


def _winograd_convolution(x: torch.Tensor, weight: torch.Tensor, padding: Pair, dilation: Pair) -> torch.Tensor:
    extents = _output_extents(x, padding, dilation)
    c_out, c_in = weight.shape[:2]
    transformed = (_FLAT_WEIGHT_TRANSFORM.to(x.dtype) @ weight.reshape(-1, 9).t()).view(16, c_out, c_in)
    y = x.new_empty(len(x), c_out, *(_round_up_to_winograd_tiles(n, d) for n, d in zip(extents, dilation, strict=True)))
    tiles = _view_as_winograd_tiles(y, dilation)
    for rows, cells in _transformed_row_batches(x, padding, dilation, tiles.shape, max(c_out, c_in)):
        batch_tiles = tiles[:, :, rows]
        m = torch.bmm(transformed, cells).view(4, 4, *(batch_tiles.shape[at] for at in (0, 1, 2, 4, 5, 7)))
        halves = (m[1] + m[2]).add_(m[0]), (m[1] - m[2]).add_(m[3])
        for row, half in enumerate(halves):
            target = batch_tiles[:, :, :, row]
            torch.add(half[1] + half[2], half[0], out=target[..., 0, :])
            torch.add(half[1] - half[2], half[3], out=target[..., 1, :])
    if list(y.shape[2:]) == extents:  # a view of y, as the result of a Function, could not be modified in place
        return y
    return y[:, :, : extents[0], : extents[1]].clone(memory_format=torch.contiguous_format)


def _weight_gradient(x: torch.Tensor, dy: torch.Tensor, padding: Pair, dilation: Pair) -> torch.Tensor:
    c_in, c_out = x.shape[1], dy.shape[1]
    pads = [_round_up_to_winograd_tiles(n, d) - n for n, d in zip(dy.shape[2:], dilation, strict=True)]
    tiles = _view_as_winograd_tiles(F.pad(dy, [0, pads[1], 0, pads[0]]), dilation)
    gradient_sum = x.new_zeros(16, c_out, c_in)
    for rows, cells in _transformed_row_batches(x, padding, dilation, tiles.shape, max(c_out, c_in)):
        y = tiles[:, :, rows]
        transformed = y.new_empty(4, 4, *(y.shape[at] for at in (0, 1, 2, 4, 5, 7)))
        top, bottom = y[:, :, :, 0], y[:, :, :, 1]
        for target, row in zip(transformed, (top, top + bottom, top - bottom, bottom), strict=True):
            a, b = row[..., 0, :], row[..., 1, :]
            target[0], target[3] = a, b
            torch.add(a, b, out=target[1])
            torch.sub(a, b, out=target[2])
        gradient_sum.baddbmm_(transformed.view(16, c_out, -1), cells.transpose(1, 2))
    return (gradient_sum.view(16, -1).t() @ _FLAT_WEIGHT_TRANSFORM.to(x.dtype)).view(c_out, c_in, 3, 3)


def _output_extents(x: torch.Tensor, padding: Pair, dilation: Pair) -> list[int]:
    return [n + 2 * p - 2 * d for n, p, d in zip(x.shape[2:], padding, dilation, strict=True)]


def _round_up_to_winograd_tiles(n: int, dilation: int) -> int:
    """Return the extent covered by whole tiles; cells of a tile are `dilation` apart, so `dilation` tiles interlock."""
    return -(-n // (2 * dilation)) * 2 * dilation


def _view_as_winograd_tiles(y: torch.Tensor, dilation: Pair) -> torch.Tensor:
    """Return y (N, C, H, W) as (C, N, rows, 2, dilation, columns, 2, dilation)."""
    return y.transpose(0, 1).unflatten(3, (-1, 2, dilation[1])).unflatten(2, (-1, 2, dilation[0]))


def _transformed_row_batches(
    x: torch.Tensor, padding: Pair, dilation: Pair, tiles_shape: Sequence[int], channels: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield batches of tile rows, as in `_view_as_winograd_tiles`, and transformed cells B^T x B (16, C, tiles)."""
    (row_dilation, column_dilation), (rows, columns) = dilation, (tiles_shape[2], tiles_shape[5])
    covered = 2 * row_dilation * rows, 2 * column_dilation * columns
    pads = [side for n, p, d, all_ in zip(x.shape[2:], padding, dilation, covered, strict=True)
              for side in (p, all_ + 3 * d - n - p)]  # fmt: skip
    padded_x = F.pad(x, [*pads[2:], *pads[:2]]).transpose(0, 1)
    bytes_per_row = 16 * channels * len(x) * columns * row_dilation * column_dilation * x.element_size()
    rows_per_batch = max(1, _MAX_BATCH_BYTES // bytes_per_row)
    for first in range(0, rows, rows_per_batch):
        last = min(first + rows_per_batch, rows)
        cells = padded_x[:, :, 2 * row_dilation * first : 2 * row_dilation * last + 3 * row_dilation]
        half_transformed = cells.new_empty(*cells.shape[:2], last - first, row_dilation, cells.shape[3])
        transformed = cells.new_empty(4, 4, *half_transformed.shape[:4], columns, column_dilation)
        for i, rows_out in enumerate(transformed):
            _transform_row(_split_winograd_tiles(cells, 2, row_dilation), i, half_transformed)
            for j, target in enumerate(rows_out):
                _transform_row(_split_winograd_tiles(half_transformed, 4, column_dilation), j, target)
        yield slice(first, last), transformed.view(16, x.shape[1], -1)


def _split_winograd_tiles(x: torch.Tensor, dim: int, dilation: int) -> list[torch.Tensor]:
    """Return the first to fourth cells of all tiles along a dimension."""
    n = x.shape[dim] - 3 * dilation
    shifted = (x.narrow(dim, dilation * i, n).unflatten(dim, (-1, 2 * dilation)) for i in range(4))
    return [part.narrow(dim + 1, 0, dilation) for part in shifted]


def _transform_row(x: Sequence[torch.Tensor], row: int, out: torch.Tensor) -> None:
    """Write a row of B^T x."""
    a, b, subtracts = ((0, 2, True), (1, 2, False), (2, 1, True), (3, 1, True))[row]
    (torch.sub if subtracts else torch.add)(x[a], x[b], out=out)
