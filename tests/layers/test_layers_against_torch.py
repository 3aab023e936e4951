"""Individual layers against PyTorch in float64, in one, two and three dimensions."""

import numpy as np
import pytest
from layer_runs import check_on_grids, make_factory

import neondist as nd

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
F = torch.nn.functional


def to_channels_first(x):
    return torch.tensor(np.moveaxis(x, -1, 1).copy())


def to_channels_last(t):
    return np.moveaxis(t.detach().numpy(), 1, -1)


def compare_with_torch(layer, shape, reference, tolerance=1e-10):
    """Compare the outputs, input gradient and parameter gradients of a layer with reference(x, params)."""
    model = nd.Convnet([layer], seed=4, dtype="float64")
    model.build(shape, batch_size=3)
    rng = np.random.default_rng(1)
    for array in layer.params.values():
        array[...] = rng.normal(size=array.shape)
    x = rng.normal(size=(3, *shape))
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in layer.params.items()}
    xt = to_channels_first(x).requires_grad_()
    yt = reference(xt, tensors)
    y = model.fprop(x)
    np.testing.assert_allclose(y, to_channels_last(yt), rtol=0, atol=tolerance)
    dy = rng.normal(size=y.shape)
    yt.backward(to_channels_first(dy))
    np.testing.assert_allclose(model.bprop(dy), to_channels_last(xt.grad), rtol=0, atol=tolerance)
    for name, gradient in layer.grads.items():
        np.testing.assert_allclose(gradient, tensors[name].grad.numpy(), rtol=0, atol=10 * tolerance)


TORCH_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TORCH_TRANSPOSED_CONVOLUTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
EXTENTS_BY_NDIM = {1: (9,), 2: (7, 6), 3: (5, 4, 6)}


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution(ndim, groups):
    def reference(x, p):
        weights = p["weights"].movedim((-1, -2), (0, 1))
        return TORCH_CONVOLUTIONS[ndim](x, weights, p["bias"], stride=2, padding=1, groups=groups)

    compare_with_torch(nd.ConvLayer(6, 3, 2, 1, groups=groups), (*EXTENTS_BY_NDIM[ndim], 4), reference)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize(
    ("stride", "padding", "output_padding", "dilation"), [(1, 0, 0, 1), (2, 1, 1, 1), (3, 2, 2, 2), (2, 0, 0, 1)]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution(ndim, stride, padding, output_padding, dilation, groups):
    def reference(x, p):
        # neondist stores (*kernel, C / groups, out), PyTorch (C, out / groups, *kernel)
        weights = p["weights"].movedim((-2, -1), (0, 1))
        weights = (
            weights.reshape(weights.shape[0], groups, -1, *weights.shape[2:])
            .transpose(0, 1)
            .reshape(-1, weights.shape[1] // groups, *weights.shape[2:])
        )
        return TORCH_TRANSPOSED_CONVOLUTIONS[ndim](
            x, weights, p["bias"], stride, padding, output_padding, groups, dilation
        )

    layer = nd.DeconvLayer(6, 3, stride, padding, output_padding=output_padding, dilation=dilation, groups=groups)
    compare_with_torch(layer, (*EXTENTS_BY_NDIM[ndim], 4), reference)


@pytest.mark.parametrize("padding", [0, ((1, 0), (0, 2), (2, 1))])
def test_output_padding_per_axis(padding):
    """Crop PyTorch's unpadded output, since it supports no padding per side."""

    def reference(x, p):
        full = F.conv_transpose3d(x, p["weights"].movedim((-2, -1), (0, 1)), p["bias"], (4, 3, 2), 0, (3, 1, 0))
        crops = [(before, n - after) for (before, after), n in zip(sides, full.shape[2:], strict=True)]
        return full[(..., *(slice(*crop) for crop in crops))]

    sides = padding or ((0, 0),) * 3
    compare_with_torch(nd.DeconvLayer(2, 3, (4, 3, 2), padding, output_padding=(3, 1, 0)), (2, 3, 4, 3), reference)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_same_padding(ndim, kernel):
    def reference(x, p):
        return TORCH_CONVOLUTIONS[ndim](
            x, p["weights"].movedim((-1, -2), (0, 1)), p["bias"], padding="same", dilation=dilation
        )

    dilation = (1, 2, 3)[:ndim]
    compare_with_torch(nd.ConvLayer(2, kernel, 1, "same", dilation=dilation), (*EXTENTS_BY_NDIM[ndim], 3), reference)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("factor", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_upsampling(ndim, factor, mode):
    torch_mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[ndim] if mode == "bilinear" else "nearest"
    compare_with_torch(
        nd.UpsampleLayer(factor, mode),
        (*EXTENTS_BY_NDIM[ndim], 2),
        lambda x, p: F.interpolate(x, scale_factor=factor, mode=torch_mode),
    )


def test_upsampling_factor_per_axis():
    for factor in (3, 2), (5, 8):
        reference = lambda x, p, f=factor: F.interpolate(x, scale_factor=f, mode="bilinear")  # noqa: E731
        compare_with_torch(nd.UpsampleLayer(factor, "bilinear"), (5, 4, 2), reference)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("factor", [4, (5, 7)])
@pytest.mark.long
def test_large_upsampling_factors_on_tiles(factor, mode):
    """Tiles may start inside an upsampled cell, and may cover only part of one."""
    check_on_grids(
        make_factory("Upsample", factor, mode), (3, 2, 2), [(2, 1, 2, 1), (3, 1, 1, 1), (9, 1, 3, 1), (8, 1, 8, 1)]
    )


@pytest.mark.parametrize(
    ("mode", "torch_mode"),
    [("zeros", "constant"), ("reflect", "reflect"), ("replicate", "replicate"), ("wrap", "circular")],
)
def test_padding(mode, torch_mode):
    compare_with_torch(
        nd.PadLayer(((1, 2), (3, 0)), mode=mode), (5, 6, 2), lambda x, p: F.pad(x, (3, 0, 1, 2), mode=torch_mode)
    )


def test_cropping():
    compare_with_torch(nd.CropLayer(((1, 2), (0, 3))), (7, 6, 2), lambda x, p: x[:, :, 1:-2, :-3])
    compare_with_torch(nd.CropLayer(1), (7, 6, 2), lambda x, p: x[:, :, 1:-1, 1:-1])
    for side in (None, "a", 1.5, -1):
        with pytest.raises(nd.ConfigError, match=f"cropping {side}: expected integers of at least 0"):
            nd.CropLayer([(side, 1), 0])


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1)])
def test_unshared_convolution(stride, padding):
    def reference(x, p):
        columns = F.unfold(x, (3, 2), stride=stride, padding=padding)  # (n, C * kernel, cells)
        w = p["weights"]  # (h, w, 3, 2, C, out)
        per_cell = w.permute(0, 1, 4, 2, 3, 5).reshape(w.shape[0] * w.shape[1], -1, w.shape[-1])
        y = torch.einsum("nkl,lko->nol", columns, per_cell).reshape(len(x), -1, *w.shape[:2])
        return y + p["bias"].permute(2, 0, 1)

    compare_with_torch(nd.LocalFilteringLayer(5, (3, 2), stride, padding, bias=True), (7, 6, 3), reference)


def test_padded_max_pooling_of_negative_values():
    model = nd.Convnet([nd.MaxPoolingLayer(3, 2, 1)], dtype="float64")
    model.build((5, 5, 1), batch_size=1)
    x = -1.0 - np.random.default_rng(0).random((1, 5, 5, 1))
    np.testing.assert_array_equal(model.fprop(x), to_channels_last(F.max_pool2d(to_channels_first(x), 3, 2, 1)))


@pytest.mark.parametrize("ndim", [1, 3])
def test_pooling_in_other_dimensions(ndim):
    max_pool = {1: F.max_pool1d, 3: F.max_pool3d}[ndim]
    avg_pool = {1: F.avg_pool1d, 3: F.avg_pool3d}[ndim]
    compare_with_torch(nd.MaxPoolingLayer(3, 2, 1), (*EXTENTS_BY_NDIM[ndim], 2), lambda x, p: max_pool(x, 3, 2, 1))
    compare_with_torch(nd.AvgPoolingLayer(2, 2, 1), (*EXTENTS_BY_NDIM[ndim], 2), lambda x, p: avg_pool(x, 2, 2, 1))
    compare_with_torch(
        nd.AvgPoolingLayer(2, 2, 1, count_include_pad=False),
        (*EXTENTS_BY_NDIM[ndim], 2),
        lambda x, p: avg_pool(x, 2, 2, 1, count_include_pad=False),
    )


def test_containers():
    """Residual block and skip connection."""
    conv = nd.ConvLayer(3, 3, padding=1, name="inner")

    def read_weights(model):
        kernel, bias = model.layers[0].leaves[0].params["weights"], model.layers[0].leaves[0].params["bias"]
        return torch.tensor(kernel).permute(3, 2, 0, 1), torch.tensor(bias)

    for container, join in (
        (nd.Sum([[conv], []]), lambda a, bias: a + bias),
        (nd.Concat([conv, []]), lambda a, bias: torch.cat((a, bias), 1)),
    ):
        model = nd.Convnet([container], dtype="float64")
        model.build((6, 5, 3), batch_size=2)
        x = np.random.default_rng(2).normal(size=(2, 6, 5, 3))
        xt = to_channels_first(x).requires_grad_()
        yt = join(F.conv2d(xt, *read_weights(model), padding=1), xt)
        y = model.fprop(x)
        np.testing.assert_allclose(y, to_channels_last(yt), atol=1e-12)
        dy = np.random.default_rng(3).normal(size=y.shape)
        yt.backward(to_channels_first(dy))
        np.testing.assert_allclose(model.bprop(dy), to_channels_last(xt.grad), atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 5, 3), (6,)])
def test_batch_norm_backward_uses_forward_statistics(shape):
    """Differentiate through batch statistics in training; running statistics are constants."""
    layer = nd.BatchNormLayer()
    model = nd.Convnet([nd.ActivationLayer(nd.Identity()), layer], dtype="float64")
    if len(shape) == 1:
        model = nd.MLP([nd.ActivationLayer(nd.Identity()), layer], dtype="float64")
    model.build(shape, batch_size=3)
    rng = np.random.default_rng(5)
    for array in (*layer.params.values(), *layer.state.values()):
        array[...] = rng.uniform(0.5, 2, size=array.shape)
    for training in (False, True):
        x, dy = rng.normal(size=(2, 3, *shape))
        model.last_pass = None
        parameters = {name: torch.tensor(array.copy(), requires_grad=True) for name, array in layer.params.items()}
        mean, var = (torch.tensor(layer.state[name].copy()) for name in ("mean", "var"))
        xt = to_channels_first(x).requires_grad_()
        yt = F.batch_norm(xt, mean, var, parameters["gamma"], parameters["beta"], training)
        np.testing.assert_allclose(model.fprop(x, training), to_channels_last(yt), atol=1e-12)
        yt.backward(to_channels_first(dy))
        np.testing.assert_allclose(model.bprop(dy), to_channels_last(xt.grad), atol=1e-12)
        for name, tensor in parameters.items():
            np.testing.assert_allclose(layer.grads[name], tensor.grad.numpy(), atol=1e-12)
