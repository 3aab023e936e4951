"""Cells that windows of modules look at, and that reach them where they are transposed: by trying each.

And by PyTorch's gradients: messages have the cells on which results of other ranks depend, and no more.
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
from neondist.geometry import GridShape  # noqa: E402
from neondist.torch.rules.window import Sliding  # noqa: E402

SLIDINGS = st.builds(
    Sliding, kernel=st.integers(1, 4), stride=st.integers(1, 4), padding=st.integers(0, 6), dilation=st.integers(1, 5)
)


def ends(cells):
    return (min(cells), max(cells) + 1) if cells else (0, 0)


@given(SLIDINGS, st.integers(0, 6), st.integers(1, 5))
def test_cells_that_windows_look_at(slide, lo, length):
    offsets = [slide.dilation * at - slide.padding for at in range(slide.kernel)]
    looked = {out * slide.stride + offset for out in range(lo, lo + length) for offset in offsets}
    assert slide.sees(lo, lo + length) == ends(looked)
    assert listed(slide.used_cells(lo, lo + length, 12)) == sorted(cell for cell in looked if 0 <= cell < 12)


@given(SLIDINGS, st.integers(0, 12), st.integers(1, 5), st.integers(0, 12))
def test_cells_that_reach_results_of_transposed_windows(slide, lo, length, n):
    offsets = [slide.dilation * at - slide.padding for at in range(slide.kernel)]
    reaching = {cell for cell in range(n) if any(lo <= cell * slide.stride + o < lo + length for o in offsets)}
    assert slide.reached(lo, lo + length, n) == ends(reaching)
    assert listed(slide.contributing(lo, lo + length, n)) == sorted(reaching)


def listed(ranges):
    return sorted(cell for cells in ranges for cell in cells)


class Slid(nn.Module):
    """A window over an image of one channel; its results depend on all cells at which it looks."""

    def __init__(self, kind, kernel, stride, padding, dilation):
        super().__init__()
        self.kind, self.how = kind, (kernel, stride, padding, dilation)
        layers = {"conv": nn.Conv2d, "transposed": nn.ConvTranspose2d}
        if kind in layers:
            more = {"dilation": dilation, "bias": False}
            self.layer = layers[kind](1, 1, kernel, stride, padding, **more).double()
            nn.init.ones_(self.layer.weight)

    def forward(self, x):
        kernel, stride, padding, dilation = self.how
        if self.kind == "mean":
            return F.avg_pool2d(x, kernel, stride, [min(p, k // 2) for p, k in zip(padding, kernel, strict=True)])
        if self.kind == "columns":
            return F.unfold(x, kernel, dilation, padding, stride)
        if self.kind == "nearest":
            return F.interpolate(x, scale_factor=[1 / s for s in stride], mode="nearest")
        return self.layer(x)


PAIRS = [st.tuples(*[st.integers(least, most)] * 2) for least, most in ((1, 3), (1, 4), (0, 3), (1, 6))]


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
def test_messages_have_what_results_of_others_depend_on(kind, kernel, stride, padding, dilation, extent, parts):
    module, shape = Slid(kind, kernel, stride, padding, dilation), (1, 1, *extent)
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    try:
        y = module(x)
    except (RuntimeError, ValueError):  # the window does not fit
        assume(False)
    assume(y.numel())
    if kind == "columns":  # ranks have columns of images
        axes = zip(extent, kernel, stride, padding, dilation, strict=True)
        y = y.unflatten(-1, [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes])
    grid, needed = GridShape(1, *parts), 0
    for mine, own in zip(*(grid.partition(tuple(of.shape[2:])).boxes() for of in (y, x)), strict=True):
        (gradient,) = torch.autograd.grad(y[(..., *mine.slices)].sum(), x, retain_graph=True)
        gradient[(..., *own.slices)] = 0
        needed += int(gradient.count_nonzero())

    def halos(world):
        with ProcessGrid(world, rows=parts[0], cols=parts[1]) as ranks:
            plan = ndt.distribute(module, shape, ranks, dtype=torch.float64).plan
            return sum(
                n for (kind, _, way), n in plan.traffic(ranks.rank).items() if (kind, way) == ("halo", "forward")
            )

    assert sum(loopback.run(parts[0] * parts[1], halos)) == 8 * needed
