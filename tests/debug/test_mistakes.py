"""Layers and schemes that do what they must not: each is caught, and named."""

import numpy as np
import pytest
from guarded import guard
from scheme_runs import build, noise, on_ranks, step

import neondist as nd
from neondist.errors import HaloError


class Right(nd.ConvLayerDist):
    """Convolution with a 3 x 3 window; the mistakes inherit from it."""

    def __init__(self, scheme=None, name="mine"):
        super().__init__(2, 3, padding=1, scheme=scheme, name=name)


class Beyond:
    """Sees one row more than its view has, through the memory behind it."""

    def forward(self, ctx, view):
        n, h, w, c = view.shape
        more = np.lib.stride_tricks.as_strided(view, (n, h + 1, w, c), view.strides)
        return super().forward(ctx, view) + more[:, -1:, :1].sum(axis=-1, keepdims=True)


class ReadsBeyond(Beyond, Right):
    """Does so with a halo."""


class WritesIntoView(Right):
    """Centres its view in place."""

    def forward(self, ctx, view):
        view -= view.mean()
        return super().forward(ctx, view)


class WritesLater(Right):
    """Does so in backward."""

    def backward(self, ctx, dy):
        dview = super().backward(ctx, dy)
        ctx.view *= 2
        return dview


class WritesIntoGradient(Right):
    """Changes dy, which branches may share."""

    def backward(self, ctx, dy):
        dy *= 2
        return super().backward(ctx, dy)


class ForgetsOutputs(Right):
    """Does not write the last row of its outputs."""

    def forward(self, ctx, view):
        y, whole = ctx.out, super().forward(ctx, view)
        y[:, :-1] = whole[:, :-1]
        return y


class ForgetsGradient(Right):
    """Does not write the first row of its view's gradient."""

    def backward(self, ctx, dy):
        dview, whole = ctx.out, super().backward(ctx, dy)
        dview[:, 1:] = whole[:, 1:]
        return dview


class FillsNothing(nd.schemes.ExchangePolicy):
    """Leaves the cells of other tiles as they are, in its second step."""

    def forward(self, halo):
        if halo.step != 1:
            halo.exchange()

    def backward(self, halo):
        halo.drop()

    def exchanges(self, direction):
        return 0, 0.5, 1


class Overlaps(nd.schemes.ExchangePolicy):
    """Works on cells that are on their way."""

    def forward(self, halo):
        packed = halo.memory.setdefault("packed", halo.packed())
        packed.start(halo.outgoing())
        if halo.step == 1:
            packed.outgoing += 1
        halo.unpack(packed.wait())

    def backward(self, halo):
        halo.exchange()


def caught(layer, ranks=2, guarded=True):
    def job(comm):
        model = build(
            comm, [nd.ConvLayerDist(3, 1, name="first"), layer(), nd.ConvLayerDist(2, 3, padding=1)], (8, 6, 2)
        )
        if guarded:
            guard(model)
        for number in range(2):
            step(model, number, *noise(model))

    on_ranks(ranks, job)


@pytest.mark.parametrize(
    ("layer", "where", "what"),
    [
        (
            ReadsBeyond,
            r"\(ReadsBeyond\), forward, step 0",
            r"\d+ of its outputs were computed from cells outside .* index",
        ),
        (WritesIntoView, r"\(WritesIntoView\), forward, step 0", "modified its view in place"),
        (WritesLater, r"\(WritesLater\), backward, step 0", "modified its view in place"),
        (
            WritesIntoGradient,
            r"\(WritesIntoGradient\), backward, step 0",
            "modified the gradient of its outputs in place",
        ),
        (ForgetsOutputs, r"\(ForgetsOutputs\), forward, step 0", "of its outputs were .* or never written"),
        (ForgetsGradient, r"\(ForgetsGradient\), backward, step 0", "of its gradients of its view .* never written"),
        (
            lambda: Right(FillsNothing()),
            r"\(Right\), forward, step 1",
            r"54 values of its view were never filled, the first for cell \((4, 0|3, 0)\); scheme FillsNothing",
        ),
        (
            lambda: Right(Overlaps()),
            r"\(Right\), forward, step 1",
            "rank [01] of 2: outgoing cells for rank [01] were modified",
        ),
    ],
)
def test_caught(layer, where, what):
    with pytest.raises(HaloError, match=rf"^layer 'mine' {where}: .*{what}"):
        caught(layer)
    caught(layer, guarded=False)  # nothing else notices


def test_right_layers_are_not_caught():
    caught(Right)


def test_numbers_that_are_not_finite_are_no_mistake():
    def job(comm):
        model = guard(build(comm, [Right(), nd.FCLayerDist(3)], (8, 6, 2)))
        x, dy = noise(model)
        x[0, 0, 0, 0], dy[0, 0] = np.nan, np.inf
        with np.errstate(all="ignore"):
            step(model, 0, x, dy)

    on_ranks(2, job)


def test_cells_beyond_are_found_where_the_view_is_the_tile_itself():
    """One process, no halo: what lies behind the array belongs to somebody else."""

    class Alone(Beyond, nd.ConvLayer):
        has_dist_twin = False

    model = nd.Convnet([Alone(2, 1, name="mine"), nd.FCLayer(3)], dtype="float32", backend="numpy")
    model.build((4, 4, 1), 2)
    guard(model)
    with pytest.raises(HaloError, match=r"^layer 'mine' \(Alone\), forward, step 0: "):
        model.fprop(model.scatter(np.ones((2, 4, 4, 1))))
