"""Input cells of windows and transposed windows against enumeration.

Against PyTorch's gradients: messages contain exactly the cells that results of other ranks depend on.
"""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import assume, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.geometry import (  # noqa: E402
    Atom,
    Box,
    GradientWindow,
    GridShape,
    IndexMap,
    Window,
    fold_index,
)
from neondist.torch.ir.reach import Reach, dim_request_of  # noqa: E402

WINDOWS = st.builds(
    Window,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.integers(0, 6),
    dilation=st.integers(1, 5),
    ndim=st.just(1),
)
CELLS = Atom(12)


def compute_bounds(cells):
    return (min(cells), max(cells) + 1) if cells else (0, 0)


def compute_offsets(window):
    return [window.dilation[0] * at - window.padding[0][0] for at in range(window.kernel[0])]


@given(WINDOWS, st.integers(0, 6), st.integers(1, 5))
def test_cells_in_windows(window, lo, length):
    cells_read = {out * window.stride[0] + o for out in range(lo, lo + length) for o in compute_offsets(window)}
    inside = sorted(cell for cell in cells_read if 0 <= cell < 12)
    reach = Reach(Atom(lo + length, 1, (lo, lo + length)), window, with_padding=True)
    ((first, last),), used, (before, after) = reach.view(lo, lo + length, 12)
    assert dim_request_of(reach, 0, CELLS)[1] == ((before, after),)
    assert sort_cells(used) == inside
    assert before + last - first + after == max(cells_read) + 1 - min(cells_read)
    if inside:
        assert (first - before, last + after) == compute_bounds(cells_read)
    assert reach._replace(with_padding=False).view(lo, lo + length, 12) == ((compute_bounds(inside),), used, (0, 0))


@given(WINDOWS, st.integers(0, 12), st.integers(1, 5), st.integers(0, 12))
def test_cells_of_transposed_windows(window, lo, length, n):
    stride, offsets = window.stride[0], compute_offsets(window)
    reaching = {cell for cell in range(n) if any(lo <= cell * stride + o < lo + length for o in offsets)}
    reach = Reach(Atom(40, 1, (0, 40)), GradientWindow(window, (40,)))
    view, used, _ = reach.view(lo, lo + length, n)
    assert view == (compute_bounds(reaching),)
    assert sort_cells(used) == sorted(reaching)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "wrap"])
@given(st.integers(-9, 9), st.integers(0, 20), st.integers(1, 9))
def test_cells_of_copied_padding(mode, before, lo, length):
    reach = Reach(Atom(40, 1, (0, 40)), Window(1, padding=((before, 30),), mode=mode))
    copied = [fold_index(i - before, 31, mode) for i in range(lo, lo + length)]
    view, used, _ = reach.view(lo, lo + length, 31)
    assert [cell for bounds in view for cell in range(*bounds)] == copied
    assert sort_cells(used) == sorted(copied)


@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=4), min_size=1, max_size=9), st.data())
def test_cells_of_an_index_map(cells, data):
    lo = data.draw(st.integers(0, len(cells) - 1))
    hi = data.draw(st.integers(lo + 1, len(cells)))
    window = IndexMap(lambda a, b: [cell for each in cells[a:b] for cell in each])
    cells_read = sorted({cell for each in cells[lo:hi] for cell in each})
    assert window.needs(Box((lo,), (hi,))) == Box((cells_read[0],), (cells_read[-1] + 1,))
    used = window.used_cells(lo, hi)
    assert Reach(Atom(len(cells)), window).view(lo, hi, 12) == ((compute_bounds(cells_read),), used, (0, 0))
    assert sort_cells(used) == cells_read


def sort_cells(ranges):
    return sorted(cell for cells in ranges for cell in cells)


class WindowModule(nn.Module):
    """Window over an image of one channel whose results depend on all cells in it."""

    def __init__(self, kind, kernel, stride, padding, dilation):
        super().__init__()
        self.kind, self.window = kind, (kernel, stride, padding, dilation)
        layers = {"conv": nn.Conv2d, "transposed": nn.ConvTranspose2d}
        if kind in layers:
            options = {"dilation": dilation, "bias": False}
            self.layer = layers[kind](1, 1, kernel, stride, padding, **options).double()
            nn.init.ones_(self.layer.weight)

    def forward(self, x):
        kernel, stride, padding, dilation = self.window
        if self.kind == "mean":
            return F.avg_pool2d(x, kernel, stride, [min(p, k // 2) for p, k in zip(padding, kernel, strict=True)])
        if self.kind == "columns":
            return F.unfold(x, kernel, dilation, padding, stride)
        if self.kind == "nearest":
            return F.interpolate(x, scale_factor=[1 / s for s in stride], mode="nearest")
        return self.layer(x)


PAIRS = [st.tuples(*[st.integers(low, high)] * 2) for low, high in ((1, 3), (1, 4), (0, 3), (1, 6))]


@settings(max_examples=40)
@example("conv", (1, 3), (2, 1), (0, 1), (1, 1), (8, 8), (1, 2))
@example("conv", (1, 3), (2, 1), (0, 1), (1, 1), (8, 8), (2, 2))
@example("conv", (3, 3), (1, 1), (5, 5), (5, 5), (12, 12), (4, 2))
@example("transposed", (3, 3), (1, 1), (0, 0), (5, 5), (12, 12), (4, 2))
@example("nearest", (1, 1), (3, 3), (0, 0), (1, 1), (10, 10), (2, 3))
@given(
    st.sampled_from(["conv", "transposed", "mean", "columns", "nearest"]),
    *PAIRS,
    st.tuples(*[st.integers(1, 13)] * 2),
    st.tuples(*[st.integers(1, 4)] * 2),
)
@pytest.mark.long
def test_messages_contain_exactly_the_cells_needed(kind, kernel, stride, padding, dilation, extent, parts):
    module, shape = WindowModule(kind, kernel, stride, padding, dilation), (1, 1, *extent)
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    try:
        y = module(x)
    except (RuntimeError, ValueError):  # the window does not fit
        assume(False)
    assume(y.numel())
    if kind == "columns":  # ranks have columns of images
        axes = zip(extent, kernel, stride, padding, dilation, strict=True)
        y = y.unflatten(-1, [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes])
    grid, cells_needed = GridShape(1, *parts), 0
    for output_box, input_box in zip(
        *(grid.partition(tuple(tensor.shape[2:])).boxes() for tensor in (y, x)), strict=True
    ):
        (gradient,) = torch.autograd.grad(y[(..., *output_box.slices)].sum(), x, retain_graph=True)
        gradient[(..., *input_box.slices)] = 0
        cells_needed += int(gradient.count_nonzero())

    def count_halo_bytes(world):
        with ProcessGrid(world, rows=parts[0], cols=parts[1]) as ranks:
            plan = ndt.distribute(module, shape, ranks, dtype=torch.float64).plan
            return sum(
                n
                for (kind, _, direction), n in plan.traffic(ranks.rank).items()
                if (kind, direction) == ("halo", "forward")
            )

    assert sum(loopback.run(parts[0] * parts[1], count_halo_bytes)) == 8 * cells_needed
