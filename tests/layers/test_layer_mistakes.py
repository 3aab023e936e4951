"""Error messages of layers, prefixed with the layer's name."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, ShapeError


def build_convnet(*layers, shape=(8, 8, 4)):
    nd.Convnet(layers).build(shape, batch_size=1)


MISTAKES = {
    "branches differ": (
        lambda: build_convnet(nd.Sum([[nd.ConvLayer(4, 3, name="narrow")], []], name="block")),
        ShapeError,
        r"layer 0 'block' \(Sum\).*'block.sequential1' \(ending with 'narrow'\)"
        r" outputs \(6, 6, 4\).*\(the identity\) outputs \(8, 8, 4\)",
    ),
    "extents differ": (
        lambda: build_convnet(nd.Concat([nd.ConvLayer(4, 3, name="a"), nd.ConvLayer(2, 1, name="b")])),
        ShapeError,
        r"'a' outputs \(6, 6, 4\), but branch 'b' outputs \(8, 8, 2\)",
    ),
    "inner layer": (
        lambda: build_convnet(nd.Sequential([nd.ConvLayer(4, 3), nd.ConvLayer(4, 9)])),
        ShapeError,
        r"layer 0 'sequential1.conv2' \(ConvLayer\): kernel_size",
    ),
    "deconv groups": (
        lambda: build_convnet(nd.DeconvLayer(6, 3, groups=3)),
        ConfigError,
        "groups 3 must divide the input's 4",
    ),
    "output_padding": (
        lambda: build_convnet(nd.DeconvLayer(4, 3, 2, output_padding=2)),
        ConfigError,
        "less than stride 2",
    ),
    "deconv padding": (lambda: build_convnet(nd.DeconvLayer(4, 1, padding=4)), ConfigError, "leaves no output"),
    "factor": (lambda: nd.UpsampleLayer(0), ConfigError, "factor 0"),
    "factors": (lambda: build_convnet(nd.UpsampleLayer((2, 2, 2))), ConfigError, "one for each of 2 axes"),
    "upsample mode": (lambda: nd.UpsampleLayer(2, "cubic"), ConfigError, "choose from nearest, bilinear"),
    "crop": (lambda: build_convnet(nd.CropLayer(4)), ShapeError, "layer 0 'crop1' .* leaves none; crop less"),
    "negative crop": (lambda: nd.CropLayer(-1), ConfigError, "use PadLayer"),
    "negative padding": (
        lambda: build_convnet(nd.ConvLayer(1, 3, padding=-1)),
        ConfigError,
        "only a kernel of 1 may crop",
    ),
    "reflect": (
        lambda: build_convnet(nd.PadLayer(8, mode="reflect")),
        ConfigError,
        "'reflect' must be less than the image's 8",
    ),
    "smooth": (lambda: nd.Dice(0), ConfigError, "smooth: expected a number above 0, got 0"),
}


@pytest.mark.parametrize(("make", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_mismatched_unshared_weights_are_rejected():
    model = nd.Convnet([nd.LocalFilteringLayer(2, 3)])
    model.build((6, 6, 1), 1)
    other = nd.Convnet([nd.LocalFilteringLayer(2, 3)])
    other.build((7, 6, 1), 1)
    with pytest.raises(ShapeError, match=r"'local_filtering1/weights' has shape \(5, 4, 3, 3, 1, 2\)"):
        model.load_state(other.state())


def test_ranks_hold_only_the_weights_of_their_tile():
    def body(comm):
        model = nd.ConvnetDist([nd.LocalFilteringLayerDist(2, 3, padding=1)], dtype="float64")
        model.build((8, 8, 1), 2, nd.ProcessGrid(comm))
        return model.layers[0].params["weights"].shape, model.state()["local_filtering1/weights"]

    serial = nd.Convnet([nd.LocalFilteringLayer(2, 3, padding=1)], dtype="float64")
    serial.build((8, 8, 1), 2)
    for shape, gathered in loopback.run(4, body):
        assert shape == (4, 4, 3, 3, 1, 2)
        np.testing.assert_array_equal(gathered, serial.layers[0].params["weights"])


def test_dice_gradient_matches_finite_differences():
    rng = np.random.default_rng(0)
    y, labels, cost = rng.normal(size=(2, 4, 5, 3)), rng.integers(0, 3, (2, 4, 5)), nd.Dice()
    gradient, step = cost.local_sum_gradient(y, labels), 1e-5
    for _ in range(5):
        direction = rng.normal(size=y.shape)
        slope = (cost.local_sum(y + step * direction, labels) - cost.local_sum(y - step * direction, labels)) / (
            2 * step
        )
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-7)
    perfect = 50.0 * np.eye(3)[labels]
    assert cost.local_sum(perfect, labels) < 0.1 < cost.local_sum(-perfect, labels)


WINDOWED_LAYERS = {
    "conv": lambda: nd.ConvLayer(4, 3, padding="same"),
    "deconv": lambda: nd.DeconvLayer(4, 3),
    "deconv of two axes": lambda: nd.DeconvLayer(4, (3, 3)),
    "local": lambda: nd.LocalFilteringLayer(4, 3),
    "max": lambda: nd.MaxPoolingLayer(2),
    "avg": lambda: nd.AvgPoolingLayer(2),
    "l2": lambda: nd.L2PoolingLayer(2),
    "lcn": lambda: nd.LCNLayer(5),
    "upsample": lambda: nd.UpsampleLayer(2),
    "pad": lambda: nd.PadLayer(1),
    "crop": lambda: nd.CropLayer(1),
    "gap": lambda: nd.GlobalAvgPoolingLayer(),
    "instance norm": lambda: nd.InstanceNormLayer(),
}


@pytest.mark.parametrize("make", WINDOWED_LAYERS.values(), ids=WINDOWED_LAYERS.keys())
@pytest.mark.parametrize("make_vectors", [nd.GlobalAvgPoolingLayer, lambda: nd.FCLayer(4)])
def test_windowed_layers_after_vectors_are_rejected(make, make_vectors):
    for layer in (make(), nd.Sum([[make()], []])):
        with pytest.raises(ShapeError, match=r"layer 1 '(sum1\..*)?\w+' \(\w+Layer\): .*needs an image, but its input"):
            build_convnet(make_vectors(), layer)
