"""Conversion of neondist models to PyTorch modules, in float64: equal results, or a rejection by name."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import graphs.build  # noqa: E402
from graphs.case import list_leaves  # noqa: E402
from graphs.draw import draw_case  # noqa: E402
from graphs.execution import draw_state  # noqa: E402
from torch import nn  # noqa: E402
from torch_conversion import assert_all_close, assert_close, draw_tensor, run_model, run_module, to_channels_last  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402

IMAGE = (13, 10, 4)
LAYERS = {
    "conv": ([nd.ConvLayer(6, (4, 3), (2, 3), ((0, 2), (3, 1)), dilation=(1, 2), groups=2)], IMAGE),
    "conv, same": ([nd.ConvLayer(6, (4, 3), (2, 3), "same", bias=False, activation=nd.Tanh())], IMAGE),
    "conv, reflect": ([nd.ConvLayer(6, 3, 1, ((2, 1), (0, 2)), padding_mode="reflect")], IMAGE),
    "conv, replicate": ([nd.ConvLayer(6, 3, 1, 2, padding_mode="replicate")], IMAGE),
    "conv, wrap": ([nd.ConvLayer(6, 3, 2, ((2, 1), (0, 2)), padding_mode="wrap")], (9, 5, 4)),
    "conv, lines": ([nd.ConvLayer(6, 4, 3, ((1, 2),))], (17, 4)),
    "conv, volumes": ([nd.ConvLayer(6, (2, 3, 1), 1, ((1, 0), (0, 0), (2, 1)))], (4, 5, 3, 4)),
    "deconv": ([nd.DeconvLayer(6, (4, 3), (2, 3), 1, output_padding=(1, 2), groups=2)], (5, 4, 4)),
    "deconv, asymmetric": ([nd.DeconvLayer(6, 4, 2, ((0, 2), (3, 1)), bias=False, dilation=2)], (5, 4, 4)),
    "max pool": ([nd.MaxPoolingLayer((3, 2), 2, ((2, 0), (1, 1)))], IMAGE),
    "avg pool": ([nd.AvgPoolingLayer((3, 2), 2, ((2, 0), (1, 1)))], IMAGE),
    "avg pool, inside": ([nd.AvgPoolingLayer((3, 2), 2, ((2, 0), (1, 1)), count_include_pad=False)], IMAGE),
    "avg pool, inside, symmetric": ([nd.AvgPoolingLayer(3, 2, 1, count_include_pad=False)], IMAGE),
    "l2 pool": ([nd.ActivationLayer(nd.ReLU()), nd.L2PoolingLayer((2, 1), 1, ((1, 0), (0, 0)))], IMAGE),
    "l2 pool, volumes": ([nd.L2PoolingLayer(2)], (4, 5, 3, 4)),
    "global": ([nd.GlobalAvgPoolingLayer(), nd.FCLayer(3, activation=nd.Softmax())], IMAGE),
    "fc": ([nd.FCLayer(7, activation=nd.Logistic()), nd.FCLayer(3, bias=False)], IMAGE),
    "batch norm": ([nd.BatchNormLayer(momentum=0.3, eps=1e-2)], IMAGE),
    "batch norm of vectors": ([nd.FCLayer(7), nd.BatchNormLayer(), nd.DropoutLayer(0.0)], IMAGE),
    "group norm": ([nd.GroupNormLayer(2, eps=1e-2), nd.InstanceNormLayer(affine=True)], IMAGE),
    "group norm of vectors": ([nd.FCLayer(8), nd.GroupNormLayer(2, affine=False)], IMAGE),
    "lrn": ([nd.LRNLayer(4, alpha=0.3, beta=0.6, k=2.0)], IMAGE),
    "lrn of vectors": ([nd.FCLayer(7), nd.LRNLayer(3, alpha=0.3)], IMAGE),
    "lcn": ([nd.LCNLayer(3, min_deviation=0.3)], IMAGE),
    "conv, by axis": ([nd.ConvLayer(6, 3, 2, ((2, 1), (0, 2)), padding_mode=("replicate", "wrap"))], (9, 5, 4)),
    "lcn, mean": ([nd.LCNLayer((3, 5), window="uniform", padding_mode="reflect", min_deviation="mean")], IMAGE),
    "lcn, volumes": ([nd.LCNLayer((1, 3, 5), min_deviation=1e-3)], (4, 5, 6, 2)),
    "own filters": ([nd.LocalFilteringLayer(3, (3, 2), (2, 1), ((1, 0), (0, 1)), bias=True)], IMAGE),
    "own filters, blocks": ([nd.LocalFilteringLayer(3, 3, shared=(4, 1), activation=nd.Tanh())], IMAGE),
    "own filters, volumes": ([nd.LocalFilteringLayer(2, 2)], (3, 4, 2, 2)),
    "upsample": ([nd.UpsampleLayer((2, 3)), nd.UpsampleLayer(2, "bilinear")], (3, 4, 4)),
    "upsample, much": ([nd.UpsampleLayer(41)], (3, 4)),
    "upsample, volumes": ([nd.UpsampleLayer((1, 2, 3), "bilinear")], (3, 4, 2, 4)),
    "pad and crop": ([nd.PadLayer(((1, 2), (0, 3)), fill=0.5), nd.CropLayer(((0, 2), (3, 1)))], IMAGE),
    "pad, wrap": ([nd.PadLayer(((1, 2), (0, 3)), "wrap")], IMAGE),
    "pad, wrap several times": ([nd.PadLayer(((7, 2), (0, 9)), "wrap")], (3, 4, 2)),
    "containers": (
        [
            [nd.ConvLayer(4, 3, padding=1), []],
            nd.Sum([[], nd.ConvLayer(4, 1, activation=nd.Identity()), [nd.ActivationLayer(nd.Tanh())]]),
            nd.Concat([nd.MaxPoolingLayer(2), [nd.ConvLayer(3, 2, 2), nd.ActivationLayer(nd.ReLU())]]),
        ],
        IMAGE,
    ),
}


def build_model(layers, shape, batch=2):
    model = nd.Convnet(list(layers), dtype="float64", seed=4)
    model.build(shape, batch)
    rng = np.random.default_rng(0)
    model.load_state({name: rng.uniform(0.5, 1.5, array.shape) for name, array in model.state().items()})
    return model


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    layers, shape = LAYERS[name]
    model = build_model(layers, shape)
    module = ndt.to_torch(model)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    expected = run_model(model, (2, shape[-1], *shape[:-1]))
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())  # no memory is shared
    assert_all_close(run_module(module, (2, shape[-1], *shape[:-1])), expected)


@pytest.mark.long
def test_generated_networks():
    for number in range(40):
        case = draw_case(int(os.environ["NEONDIST_SEED"]), number).replace(dtype="float64")
        if any(kind.startswith(("Own", "Dropout")) for kind, _ in list_leaves(case.network)):
            continue
        model = graphs.build.build_model(case, dist=False)
        model.build(case.shape, 2)
        model.load_state(draw_state(case)[0])
        module, shape = ndt.to_torch(model), (2, case.shape[-1], *case.shape[:-1])
        expected = run_model(model, shape)
        if max(np.abs(array).max(initial=0) for array in expected) < 1e6:  # else badly conditioned
            for actual, array in zip(run_module(module, shape), expected, strict=True):
                scale = max(1.0, np.abs(array).max(initial=0))
                np.testing.assert_allclose(actual, array, rtol=0, atol=1e-8 * scale, err_msg=case.program())


def test_no_gradient_where_all_squares_are_zero():
    model = build_model([nd.L2PoolingLayer(2)], (4, 4, 1))
    x = torch.zeros(2, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    x.data[0, 0, 0, 0] = 3
    ndt.to_torch(model)(x).sum().backward()
    expected = torch.zeros_like(x)
    expected[0, 0, 0, 0] = 1
    assert torch.equal(x.grad, expected)


def test_conversion_draws_no_random_numbers():
    model = build_model([nd.ConvLayer(6, 3), nd.BatchNormLayer(), nd.FCLayer(3)], IMAGE)
    before = torch.get_rng_state()
    ndt.to_torch(model)
    assert torch.equal(before, torch.get_rng_state())


class Half(nd.Identity):
    def fprop(self, z):
        return z / 2

    def bprop(self, y, dy):
        return dy / 2


class MyConvLayer(nd.ConvLayer):
    """Subclass that may compute anything."""


@pytest.mark.parametrize(
    ("layer", "name"), [(nd.ConvLayer(2, 3, activation=Half()), "Half"), (MyConvLayer(2, 3), "My")]
)
def test_user_classes_are_rejected(layer, name):
    with pytest.raises(nd.ConfigError, match=f"has no equivalent of {name}"):
        ndt.to_torch(build_model([layer], IMAGE))


def test_unbuilt_models_are_rejected():
    with pytest.raises(nd.ConfigError, match="not built"):
        ndt.to_torch(nd.Convnet([nd.ConvLayer(2, 3)]))


def test_conversion_on_several_ranks():
    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = nd.distribute(build_model([nd.ConvLayer(3, 3), nd.BatchNormLayer(), nd.FCLayer(2)], IMAGE))
            model.build(IMAGE, 2, grid)
            run = model.forward(model.scatter(to_channels_last(x)), training=False)
            return model.gather(run.output), ndt.to_torch(model).eval()(x)

    x = draw_tensor((2, IMAGE[-1], *IMAGE[:-1]))
    for expected, actual in nd.loopback.run(3, body):
        assert_close(actual.detach().numpy(), expected)


def test_onnx(tmp_path):
    onnx = pytest.importorskip("onnx", reason="PyTorch's exporter needs onnx and onnxscript")
    pytest.importorskip("onnxscript", reason="PyTorch's exporter needs onnx and onnxscript")
    reference = pytest.importorskip("onnx.reference")
    layers, shape = LAYERS["containers"]
    module = ndt.to_torch(build_model([*layers, nd.BatchNormLayer(), nd.FCLayer(3)], shape)).float().eval()
    x = draw_tensor((2, shape[-1], *shape[:-1])).float()
    torch.onnx.export(module, (x,), tmp_path / "model.onnx")
    program = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(program)
    (actual,) = reference.ReferenceEvaluator(program).run(None, {program.graph.input[0].name: x.numpy()})
    np.testing.assert_allclose(actual, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_chains_become_sequential():
    module = ndt.to_torch(build_model([nd.ConvLayer(6, 3, activation=nd.ReLU()), nd.FCLayer(3)], IMAGE))
    assert [type(layer) for layer in module] == [nn.Conv2d, nn.ReLU, nn.Flatten, nn.Linear]
