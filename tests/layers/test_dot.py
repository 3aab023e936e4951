"""Dot test of linear layers and graphs: <F x, y> = <x, F' y> to 1e-12, on every rank count."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback

LINEAR_LAYERS = {
    "conv": lambda: [nd.ConvLayerDist(4, 3, 2, "same", groups=2, bias=False, padding_mode="replicate")],
    "deconv": lambda: [nd.DeconvLayerDist(6, 4, 3, 1, output_padding=2, groups=2, bias=False)],
    "unshared": lambda: [nd.LocalFilteringLayerDist(3, (3, 2), 2, padding=1)],
    "mean": lambda: [nd.AvgPoolingLayerDist(3, 2, 1, count_include_pad=False)],
    "nearest": lambda: [nd.UpsampleLayerDist((2, 3))],
    "bilinear": lambda: [nd.UpsampleLayerDist(3, "bilinear")],
    "pad": lambda: [nd.PadLayerDist(((3, 1), (0, 2)), mode="reflect")],
    "crop": lambda: [nd.CropLayerDist(((3, 0), (1, 2)))],
    "global mean": lambda: [nd.GlobalAvgPoolingLayerDist()],
    "fc": lambda: [nd.FCLayerDist(5, bias=False), nd.FCLayerDist(7, bias=False)],
    "graph": lambda: [
        nd.Sum([[nd.ConvLayerDist(4, 5, padding=2, bias=False, padding_mode="wrap")], []]),
        nd.Concat([[], [nd.AvgPoolingLayerDist(2), nd.UpsampleLayerDist(2), nd.PadLayerDist(((0, 1), (0, 0)))]]),
        nd.DeconvLayerDist(2, 3, padding=1, bias=False),
    ],
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", LINEAR_LAYERS)
@pytest.mark.long
def test_dot_product_identity(name, ranks):
    def compute_products(comm):
        model = nd.ConvnetDist(LINEAR_LAYERS[name](), seed=2, dtype="float64")
        model.build((11, 8, 4), 3, nd.ProcessGrid(comm))
        rng = np.random.default_rng(1)
        x = rng.normal(size=(3, 11, 8, 4))
        fx = model.gather(model.fprop(model.scatter(x)))
        y = rng.normal(size=fx.shape)
        return (
            np.sum(fx * y),
            np.sum(x * model.gather_input(model.bprop(model.scatter_output(y)))),
            np.abs(fx * y).sum(),
        )

    for left, right, scale in loopback.run(ranks, compute_products):
        assert abs(left - right) <= 1e-12 * scale
