"""Convolution and unfolding: operators on a bounded neighbourhood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...geometry import Cells, cells_used_by, clip_ranges, outputs_using
from ..ir.graph import Value
from ..ir.layout import Atom, Layout, local_shape, replaced
from ..ir.registry import rule
from ..ir.transfer import clipped
from ..kernels import volumes
from ..kernels.convolution import conv as convolved
from ..lowering.lower import Lowering

Ints = Sequence[int]
Size = int | Ints
"""One number for all spatial axes, or one for each."""
_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: volumes.conv_transpose3d}


class Sliding(NamedTuple):
    """Sliding window along one dimension."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    def sees(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the range of cells that the results [lo, hi) read, including padding."""
        first = lo * self.stride - self.padding
        return first, first + (hi - lo - 1) * self.stride + self.dilation * (self.kernel - 1) + 1

    def used_cells(self, lo: int, hi: int, n: int) -> Cells:
        """Return the cells, out of n, that the results [lo, hi) are computed from."""
        return tuple(clip_ranges(cells_used_by(lo, hi, *self), 0, n))

    def contributing(self, lo: int, hi: int, n: int) -> Cells:
        """Return the cells, out of n, that contribute to the results [lo, hi) of the transposed window."""
        return tuple(clip_ranges(outputs_using(lo, hi, *self), 0, n))

    def reached(self, lo: int, hi: int, n: int) -> tuple[int, int]:
        """Return the range from the first to the last of those cells."""
        cells = self.contributing(lo, hi, n)
        return (cells[0].start, cells[-1].stop) if cells else (0, 0)


def spatial_rank(lowering: Lowering) -> int:
    """Return the number of spatial dimensions of the current operator: 2 for aten.max_pool2d."""
    return next(n for n in (1, 2, 3) if f"{n}d" in str(lowering.target))


def spread_out(value: Size, n: int) -> list[int]:
    """Return one number for each of n spatial axes."""
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def windows_of(
    lowering: Lowering,
    x: Value,
    sliding: Sequence[Sliding],
    extents: Sequence[int],
    fill: float = 0.0,
    every: bool = False,
) -> tuple[Any, list[int], list[Atom]]:
    """Return the view for windows along the last dimensions, the remaining padding, and the atoms of the results.

    Parameters
    ----------
    sliding : for each of the last dimensions
    extents : of the results
    fill : float
        Of cells outside of the image.
    every : bool
        Whether dimensions that are not cut are padded, too.
    """
    first = len(x.shape) - len(sliding)
    for dim in range(first, len(x.shape)):
        x = lowering.single(x, dim)
    wants, pads, used, left, atoms = {}, {}, {}, [], []
    for dim, (slide, extent) in enumerate(zip(sliding, extents, strict=True), start=first):
        axis, n = lowering.cut(x, dim), x.shape[dim]
        out = lowering.mesh.atom(extent, axis)
        atoms.append(out)
        used[dim] = [slide.used_cells(lo, hi, n) for lo, hi in out.ranges]
        if axis is None and not every:
            left.append(slide.padding)
            continue
        left.append(0)
        seen = [clipped(*(slide.sees(lo, hi) if hi > lo else (0, 0)), n) for lo, hi in out.ranges]
        wants[dim], pads[dim] = (axis, [(inside,) for inside, _ in seen]), [around for _, around in seen]
    return lowering.view(x, wants, None, pads, fill, window=True, used=used), left, atoms


def images(x: Value, channels: int, atoms: Sequence[Atom]) -> Layout:
    """Return the layout of results: batch as in x, all channels, the given spatial atoms."""
    batch = x.layout[: len(x.layout) - len(atoms) - 1]
    return (*batch, (Atom(channels),), *((atom,) for atom in atoms))


def _whole_channels(lowering: Lowering, x: Value, n: int) -> Any:
    """Return x with channels gathered, and each spatial dimension partitioned by one mesh axis at most."""
    x = lowering.gathered(x, [-n - 1])
    for dim in range(-n, 0):
        x = lowering.single(x, dim)
    return x


@rule("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default",
      "aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding", whole=("weight", "bias"))  # fmt: skip
def conv(
    lowering: Lowering,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Size,
    padding: Size,
    dilation: Size,
    groups: int,
) -> Any:
    """Window; kernels of any size, stride, dilation, padding and groups."""
    n = len(weight.shape) - 2
    kernel, stride, dilation = weight.shape[2:], spread_out(stride, n), spread_out(dilation, n)
    extents = lowering.out.shape[-n:]
    x = _whole_channels(lowering, x, n)
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
        before, even = [t // 2 for t in total], all(t % 2 == 0 for t in total)
    else:
        before, even = spread_out(padding, n), True
    slides = [Sliding(*of) for of in zip(kernel, stride, before, dilation, strict=True)]
    view, left, atoms = windows_of(lowering, x, slides, extents, every=not even)
    run = _one_cell(convolved) if max(stride) > prod(kernel) == 1 else convolved
    how = stride, left, dilation, groups
    layout = images(x, weight.shape[0], atoms)
    return lowering.local(lambda a, w, b: run(a, w, b, *how), [view, weight, bias], layout, lowering.out.dtype)


def _one_cell(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a strided 1 x 1 convolution as one without stride on every s-th cell.

    The backward of PyTorch's own (2.13) crashes for some shapes in channels-last, on some processors.
    """

    def sparse(a: torch.Tensor, w: torch.Tensor, b: Any, stride: Ints, pads: Ints, dilation: Ints, groups: int) -> Any:
        padded = F.pad(a, [pad for pad in reversed(pads) for _ in range(2)]) if any(pads) else a
        ones = [1] * len(stride)
        cells: Any = (..., *(slice(None, None, s) for s in stride))
        return run(padded[cells], w, b, ones, [0] * len(stride), ones, groups)

    return sparse


def _one_cell_transposed(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the transposed counterpart of `_one_cell`: results are s cells apart, with zeros between them."""

    def sparse(
        a: torch.Tensor, w: torch.Tensor, b: Any, stride: Ints, pads: Ints, extras: Ints, groups: int, dilation: Ints
    ) -> torch.Tensor:
        ones, none = [1] * len(stride), [0] * len(stride)
        y = run(a, w, None, ones, none, none, groups, ones)
        ends = [(n - 1) * s + 1 for n, s in zip(y.shape[-len(stride) :], stride, strict=True)]
        sizes = [end + extra for end, extra in zip(ends, extras, strict=True)]
        result = y.new_zeros((*y.shape[: -len(stride)], *sizes))
        cells: Any = (..., *(slice(None, end, s) for end, s in zip(ends, stride, strict=True)))
        inside: Any = (..., *(slice(p, n - p) for p, n in zip(pads, sizes, strict=True)))
        result[cells] = y
        return result[inside] if b is None else result[inside] + b.view(-1, *ones)

    return sparse


@rule("aten.convolution.default", whole=("weight", "bias"))
def convolution(
    lowering: Lowering, x: Value, weight: Value, bias: Value | None, stride: Size, padding: Size, dilation: Size,
    transposed: bool,
    output_padding: Size, groups: int,
) -> Any:  # fmt: skip
    """Window; convolution or transposed convolution."""
    if transposed:
        return conv_transpose(lowering, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(lowering, x, weight, bias, stride, padding, dilation, groups)


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
      whole=("weight", "bias"))  # fmt: skip
def conv_transpose(
    lowering: Lowering, x: Value, weight: Value, bias: Value | None, stride: Size, padding: Size,
    output_padding: Size, groups: int,
    dilation: Size,
) -> Any:  # fmt: skip
    """Window; each rank computes its own results from all contributing inputs."""
    n = len(weight.shape) - 2
    x = _whole_channels(lowering, x, n)
    strides, paddings, extras, dilations = (spread_out(v, n) for v in (stride, padding, output_padding, dilation))
    slides = [Sliding(*of) for of in zip(weight.shape[2:], strides, paddings, dilations, strict=True)]
    view, pads, atoms, crops = _reaching(lowering, x, slides, lowering.out.shape[-n:])
    extras = [0 if lowering.cut(x, at - n) is not None else extra for at, extra in enumerate(extras)]
    run = _one_cell_transposed(_TRANSPOSED[n]) if max(strides) > prod(weight.shape[2:]) == 1 else _TRANSPOSED[n]
    layout = images(x, weight.shape[1] * groups, atoms)
    local = local_shape(layout, lowering.place)

    def transposed(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        if all(full for *_, full in crops):
            y = _cropped(run(a, w, None, strides, pads, extras, groups, dilations), crops)
        else:  # nothing reaches here: the result is the bias
            y = a.sum() * 0 + w.sum() * 0 + a.new_zeros(local)
        return y if b is None else y + b.view(-1, *[1] * n)

    return lowering.local(transposed, [view, weight, bias], layout, lowering.out.dtype)


_Crop = tuple[int, int, int, bool]
"""Crop of a transposed result: dimension, first index, length, and whether any input contributes."""


def _reaching(
    lowering: Lowering, x: Value, sliding: Sequence[Sliding], extents: Sequence[int]
) -> tuple[Any, list[int], list[Atom], list[_Crop]]:
    """Return the view of the cells that contribute to this rank's results of transposed windows.

    Then the padding to take away along dimensions that are not cut, the results' atoms, and what to keep along others.
    """
    wants, used, left, atoms, crops = {}, {}, [], [], list[_Crop]()
    for at, (slide, extent) in enumerate(zip(sliding, extents, strict=True), start=-len(sliding)):
        dim = len(x.shape) + at
        axis = lowering.cut(x, dim)
        out = lowering.mesh.atom(extent, axis)
        atoms.append(out)
        used[dim] = [slide.contributing(lo, hi, x.shape[dim]) for lo, hi in out.ranges]
        left.append(slide.padding if axis is None else 0)
        if axis is None:
            continue
        ranges = [(slide.reached(lo, hi, x.shape[dim]) if lo < hi else (0, 0),) for lo, hi in out.ranges]
        wants[dim] = axis, ranges
        (here,) = ranges[lowering.place[axis]]
        lo, hi = out.range(lowering.place)
        crops.append((at, lo - (here[0] * slide.stride - slide.padding), hi - lo, here[0] < here[1]))
    return lowering.view(x, wants, window=True, used=used), left, atoms, crops


def _cropped(y: torch.Tensor, crops: Sequence[_Crop]) -> torch.Tensor:
    for dim, start, length, _ in crops:
        before, after = max(0, -start), max(0, start + length - y.shape[dim])
        if before or after:
            y = F.pad(y, [0, 0] * (-dim - 1) + [before, after])
        y = y.narrow(dim, start + before, length)
    return y


def _windows(n: int, slide: Sliding) -> int:
    """Return the number of windows along n cells."""
    return (n + 2 * slide.padding - slide.dilation * (slide.kernel - 1) - 1) // slide.stride + 1


@rule("aten.im2col.default")
def im2col(lowering: Lowering, x: Value, kernel_size: Size, dilation: Size, padding: Size, stride: Size) -> Any:
    """Window; rows and columns are merged into the last dimension."""
    kernel, dilated, pads, steps = (spread_out(v, 2) for v in (kernel_size, dilation, padding, stride))
    x = _whole_channels(lowering, x, 2)
    slides = [Sliding(*of) for of in zip(kernel, steps, pads, dilated, strict=True)]
    extents = [_windows(x.shape[dim - 2], slide) for dim, slide in enumerate(slides)]
    view, left, atoms = windows_of(lowering, x, slides, extents)
    how = [tuple(each) for each in (kernel, dilated, left, steps)]
    layout = (*x.layout[:-3], (Atom(lowering.out.shape[-2]),), tuple(atoms))
    return lowering.local(lambda a: F.unfold(a, *how), [view], layout, lowering.out.dtype)


@rule("aten.col2im.default")
def col2im(
    lowering: Lowering, x: Value, output_size: Any, kernel_size: Size, dilation: Size, padding: Size, stride: Size
) -> Any:  # fmt: skip
    """Window; each rank sums the contributions to its own cells."""
    kernel, dilated, pads, steps = (spread_out(v, 2) for v in (kernel_size, dilation, padding, stride))
    slides = [Sliding(*of) for of in zip(kernel, steps, pads, dilated, strict=True)]
    extents = spread_out(output_size, 2)
    rows, columns = (_windows(n, slide) for n, slide in zip(extents, slides, strict=True))
    x = _whole_channels(lowering, lowering.reshape(x, (*x.shape[:-1], rows, columns)), 2)
    view, left, atoms, crops = _reaching(lowering, x, slides, extents)
    layout = images(x, x.shape[-3] // (kernel[0] * kernel[1]), atoms)
    local = local_shape(layout, lowering.place)

    cut = [lowering.cut(x, dim) is not None for dim in (-2, -1)]
    how = [tuple(each) for each in (kernel, dilated, left, steps)]

    def run(a: torch.Tensor) -> torch.Tensor:
        if not all(full for *_, full in crops):  # nothing reaches here
            return a.sum() * 0 + a.new_zeros(local)
        covered = (
            (n - 1) * s.stride + s.dilation * (s.kernel - 1) + 1 for n, s in zip(a.shape[-2:], slides, strict=True)
        )
        size = tuple(here if there else extent for here, there, extent in zip(covered, cut, extents, strict=True))
        return _cropped(F.fold(a.flatten(-2), size, *how), crops)

    return lowering.local(run, [view], layout, lowering.out.dtype)


@rule("aten.unfold.default")
def unfold(lowering: Lowering, x: Value, dimension: int, size: int, step: int) -> Any:
    """Window; windows of one dimension, their cells in a new last dimension."""
    dim = dimension % len(x.shape)
    x = lowering.single(x, dim)
    axis = lowering.cut(x, dim)
    out = lowering.mesh.atom(lowering.out.shape[dim], axis)
    slide = Sliding(size, step, 0, 1)
    ranges = [((lo, hi) if b > a else (0, 0),) for a, b in out.ranges for lo, hi in [slide.sees(a, b)]]
    used = {dim: [slide.used_cells(lo, hi, x.shape[dim]) for lo, hi in out.ranges]}
    view = lowering.view(x, {dim: (axis, ranges)} if axis is not None else {}, used=used)
    layout = (*replaced(x.layout, dim, out), (Atom(size),))
    return lowering.local(lambda a: a.unfold(dim, size, step).clone(), [view], layout)
