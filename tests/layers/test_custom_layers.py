"""Custom layers, as in docs/adding_a_layer.md, under schemes, strips and blocks."""

import re
from math import prod

import numpy as np
import pytest
from scheme_runs import run_on_ranks

import neondist as nd
from neondist.errors import ConfigError
from neondist.plan.blocks import BlockPlan, find_blockwise_obstacles
from neondist.runtime.blocks import BlockwiseExecutor


class CellGainLayerDist(nd.Dist, nd.Layer):
    """Factor for each cell, stored by the rank that owns the cell."""

    def parameters_for(self, input_shape):
        return {"gain": nd.Parameter(input_shape, nd.Gaussian(), layout=nd.Tiled(len(input_shape) - 1))}

    def forward(self, ctx, view):
        ctx.save(view=view)
        return view * ctx.params["gain"]

    def backward(self, ctx, dy):
        ctx.grads["gain"] = (dy * ctx.view).sum(axis=0)
        return dy * ctx.params["gain"]


class CellStateLayerDist(nd.Dist, nd.Layer):
    """Untrained factor for each cell."""

    def state_for(self, input_shape):
        return {"gain": nd.Parameter(input_shape, nd.Constant(2.0), layout=nd.Tiled(len(input_shape) - 1))}

    def forward(self, ctx, view):
        return view * ctx.state["gain"]

    def backward(self, ctx, dy):
        return dy * ctx.state["gain"]


class RampLayer(nd.Layer):
    """Factor given by the row."""

    def ramp(self, ctx):
        box = ctx.output_box
        return np.arange(box.lo[0], box.hi[0], dtype=float)[:, None, None]

    def forward(self, ctx, view):
        return view * self.ramp(ctx)

    def backward(self, ctx, dy):
        return dy * self.ramp(ctx)


class DoublingLayer(nd.Layer):
    """Factor 2, declared as independent of the position."""

    position_dependent = False

    def forward(self, ctx, view):
        return 2 * view

    def backward(self, ctx, dy):
        return 2 * dy


class CenterLayerDist(nd.Dist, nd.Layer):
    """Mean of a window of three rows, minus the mean of the image."""

    def __init__(self, kernel=3, stride=1, *, name=None):
        super().__init__(name=name)
        self.kernel, self.stride = kernel, stride
        self.window = nd.Window((kernel, 1), (stride, 1), (kernel // 2, 0), mode="reflect")

    def reductions_for(self, input_shape):
        return [
            nd.Reduction(way, "tiles", result_elements_per_sample=input_shape[-1]) for way in ("forward", "backward")
        ]

    def reduce(self, ctx, view):
        return ctx.kernels.sample_sum(ctx.owned(view))

    def rows(self, ctx):
        h = ctx.output_box.shape[0]
        return [(slice(None), slice(i, i + (h - 1) * self.stride + 1, self.stride)) for i in range(self.kernel)]

    def forward(self, ctx, view):
        ctx.save(shape=view.shape)
        return sum(view[rows] for rows in self.rows(ctx)) / self.kernel - self.means(ctx.reduced)

    def reduce_backward(self, ctx, dy):
        return ctx.kernels.sample_sum(dy)

    def backward(self, ctx, dy):
        dview = np.zeros(ctx.shape, dy.dtype)
        for rows in self.rows(ctx):
            dview[rows] += dy / self.kernel
        owned = ctx.owned(dview)
        owned -= self.means(ctx.reduced)
        return dview

    def means(self, sums):
        return (sums / prod(self.input_shape[:-1])).reshape(len(sums), 1, 1, -1)


def conv(*args, **options):
    return nd.ConvLayerDist(2, *args, **options)


def train(comm, layers, **options):
    """Return the parameters after two steps, and the output."""
    shape = (23, 9, 2)
    model = nd.ConvnetDist(
        layers, cost=nd.MSE(), optimizer=nd.SGD(0.1), dtype="float64", backend="numpy", seed=1, **options
    )
    model.build(shape, 2, nd.ProcessGrid(comm))
    rng = np.random.default_rng(0)
    for _ in range(2):
        targets = model.scatter_output(rng.normal(size=(2, *model.output_shape)))
        model.train_batch(model.scatter(rng.normal(size=(2, *shape))), targets)
    y = model.gather(model.fprop(model.scatter(rng.normal(size=(2, *shape)))))
    return np.concatenate([y.ravel(), *(array.ravel() for array in model.state().values())])


NETWORKS = {
    "parameters of cells": lambda: [conv(3, padding=1), CellGainLayerDist(), conv(3, padding=1), conv(3)],
    "state of cells": lambda: [conv(3, padding=1), CellStateLayerDist(), conv(3, padding=1), conv(3)],
    "reduction with a window": lambda: [conv(3), CenterLayerDist(), conv((3, 1)), CenterLayerDist()],
    "reduction of cells that no window reads": lambda: [
        conv(1),
        nd.ActivationLayerDist(nd.Tanh()),
        CenterLayerDist(1),
        conv(1, stride=3),
        conv(3),
    ],
}


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_equals_one_process(name, ranks):
    (expected,) = run_on_ranks(1, lambda comm: train(comm, NETWORKS[name]()))
    for options in ({}, {"scheme": "auto"}, {"strips": 2, "memory": "1TiB"}):
        for actual in run_on_ranks(ranks, lambda comm, o=options: train(comm, NETWORKS[name](), **o)):
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", [CellGainLayerDist, CellStateLayerDist])
def test_layers_with_partitioned_arrays_are_in_no_segment(layer):
    message = "cannot do so: each tile stores only the weights of its own outputs; set 'scheme: halo'"
    model = nd.ConvnetDist([conv(3), layer(), conv(3)], scheme="deep_halo")
    with pytest.raises(ConfigError, match=re.escape(message)):
        model.plan((20, 20, 2), nd.GridShape(1, 2))
    graph = nd.Convnet([nd.ConvLayer(2, 3)]).plan((20, 20, 2)).graph
    assert not list(find_blockwise_obstacles(graph))
    graph = nd.ConvnetDist([layer()]).plan((20, 20, 2), nd.GridShape(1, 1)).graph
    assert [reason for _, reason in find_blockwise_obstacles(graph)] == [message.split(": ")[1].split(";")[0]]


@pytest.mark.parametrize(("layer", "kinds"), [(RampLayer, 24), (DoublingLayer, 9)])
def test_blocks_of_layers_that_may_depend_on_the_position(layer, kinds):
    model = nd.Convnet([nd.ConvLayer(2, 3, padding=1), layer(), nd.ConvLayer(2, 3, padding=1)], dtype="float64")
    model.build((60, 40, 1), 1)
    x = np.random.default_rng(0).normal(size=(1, 60, 40, 1))
    expected, plan = model.fprop(x, training=False), BlockPlan(model.compiled.graph, (10, 10))
    blockwise = BlockwiseExecutor(plan, model.context)
    for number in range(len(plan)):
        cells, image = plan.output_box(number).slices, plan.input_box(number).slices
        block = blockwise.run(number, x[(slice(None), *image)])
        np.testing.assert_allclose(block, expected[(slice(None), *cells)], rtol=1e-12, atol=1e-12)
    assert len({plan.position_independent_key(number) for number in range(len(plan))}) == kinds


def test_owned_cells_outside_the_view_are_an_error():
    """With stride 2, no window reads row 11, the first one of the second tile, whose sum the layer needs."""
    with pytest.raises(ConfigError, match=r"'center1': its view lacks cells of this rank's tile.*without a window"):
        run_on_ranks(2, lambda comm: train(comm, [conv((2, 1)), CenterLayerDist(1, 2, name="center1")]))
