"""Layers and grids for tests of all border schemes."""

import numpy as np

import neondist as nd
from neondist.comm import loopback

SCHEMES = [
    "halo", "halo(backward=auto)", "tower", "tower(fill=reflect)", "tower(fill=replicate)",
    "tower(merge=true)",
    "halo_oneway", "stale",
    "every(j=2)", "every(j=2, between=zeros)", "quantised", "quantised(bits=8, feedback=true)",
]  # fmt: skip

# input shape and layers: halos wider than a tile, strides not aligned with tile borders, one to three spatial axes
LAYERS = {
    "conv": ((9, 8, 4), lambda **s: [nd.ConvLayerDist(2, 5, 2, "same", groups=2, **s)]),
    "narrowing": ((10, 9, 6), lambda **s: [nd.ConvLayerDist(1, 4, 2, ((1, 2), (0, 1)), dilation=2, **s)]),
    "strided": ((11, 9, 2), lambda **s: [nd.ConvLayerDist(2, 2, 3, **s)]),
    "dilated": ((9, 8, 2), lambda **s: [nd.ConvLayerDist(2, 3, padding=3, dilation=3, padding_mode="reflect", **s)]),
    "wrap": ((7, 6, 1), lambda **s: [nd.ConvLayerDist(2, 3, padding=2, padding_mode="wrap", **s)]),
    "max": ((11, 7, 2), lambda **s: [nd.MaxPoolingLayerDist(3, 2, 1, **s)]),
    "mean": ((11, 7, 2), lambda **s: [nd.AvgPoolingLayerDist(3, 2, 1, count_include_pad=False, **s)]),
    "root": ((8, 9, 1), lambda **s: [nd.L2PoolingLayerDist(3, 1, **s)]),
    "lcn": ((9, 9, 2), lambda **s: [nd.LCNLayerDist(3, halo="twice", **s)]),
    "lcn wide": ((9, 9, 2), lambda **s: [nd.LCNLayerDist(3, halo="wide", **s)]),
    "unshared": ((7, 8, 2), lambda **s: [nd.LocalFilteringLayerDist(2, 3, 2, padding=1, **s)]),
    "deconv": ((5, 6, 2), lambda **s: [nd.DeconvLayerDist(2, 4, 2, 1, **s)]),
    "bilinear": ((5, 6, 2), lambda **s: [nd.UpsampleLayerDist(3, "bilinear", **s)]),
    "pad": ((6, 7, 2), lambda **s: [nd.PadLayerDist(((3, 1), (0, 2)), mode="replicate", **s)]),
    "crop": ((9, 8, 2), lambda **s: [nd.CropLayerDist(((3, 0), (1, 2)), **s)]),
    "series": ((13, 2), lambda **s: [nd.ConvLayerDist(3, 5, padding=2, **s)]),
    "volume": ((4, 5, 6, 1), lambda **s: [nd.ConvLayerDist(2, 3, padding=1, **s)]),
}
GRIDS = [(1, 1), (2, 1), (4, 2), (6, 3), (9, 9), (12, 2)]  # ranks, rows; the last ones have empty tiles


def build_model(comm, layers, shape, rows=None, batch=3, planes=1, **options):
    """Return a built model with perturbed parameters."""
    model = nd.ConvnetDist(layers, seed=2, dtype="float64", **options)
    model.build(shape, batch, nd.ProcessGrid(comm, rows=rows, planes=planes))
    rng = np.random.default_rng(4)
    model.load_state({name: array + rng.normal(size=array.shape) for name, array in model.state().items()})
    return model


def run_step(model, step, x, dy):
    """Run a forward and a backward pass; return the output and the input gradient as full arrays."""
    model.step = step
    y = model.gather(model.fprop(model.scatter(x)))
    return y, model.gather_input(model.bprop(model.scatter_output(dy)))


def draw_inputs(model, batch=3, seed=1):
    """Return random images and output gradients."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batch, *model.input_shape)), rng.normal(size=(batch, *model.output_shape))


def run_on_ranks(ranks, job):
    return loopback.run(ranks, job)
