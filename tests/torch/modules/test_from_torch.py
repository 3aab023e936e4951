"""Conversion of PyTorch modules to neondist models, in float64: equal results, or a rejection by name."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from case_selection import select_cases  # noqa: E402
from torch import nn  # noqa: E402
from torch_conversion import (  # noqa: E402
    assert_close,
    check_conversion,
    convert_module,
    draw_tensor,
    perturb_state,
    to_channels_last,
)
from torch_runs import share_captures  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402

IMAGES = (2, 3, 13, 10)
CHAINS = {
    "conv, even, asymmetric, strided": (nn.Conv2d(3, 4, (4, 3), stride=(2, 3), padding=(2, 1)), IMAGES),
    "conv, dilated, grouped": (nn.Conv2d(3, 6, (3, 2), padding=2, dilation=(2, 3), groups=3, bias=False), IMAGES),
    "conv, same": (nn.Conv2d(3, 4, (4, 3), dilation=(1, 2), padding="same"), IMAGES),
    "conv, valid": (nn.Conv2d(3, 4, 2, padding="valid"), IMAGES),
    "conv, reflect": (nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="reflect"), IMAGES),
    "conv, replicate": (nn.Conv2d(3, 4, (2, 5), padding=2, padding_mode="replicate"), IMAGES),
    "conv, circular, same": (nn.Conv2d(3, 4, 4, padding="same", padding_mode="circular"), IMAGES),
    "conv, lines": (nn.Conv1d(3, 4, 4, 3, 2), (2, 3, 17)),
    "conv, volumes": (nn.Conv3d(2, 4, (2, 3, 1), (1, 2, 3), (1, 0, 2), groups=2), (2, 2, 5, 6, 7)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), IMAGES),
    "transposed, gaps, grouped": (nn.ConvTranspose2d(3, 6, (2, 3), (3, 1), dilation=2, groups=3, bias=False), IMAGES),
    "transposed, lines": (nn.ConvTranspose1d(3, 4, 4, 2, 3), (2, 3, 8)),
    "transposed, volumes": (nn.ConvTranspose3d(2, 3, (2, 3, 1), (2, 1, 3), (0, 1, 0)), (2, 2, 3, 4, 2)),
    "batch norm": (nn.Sequential(nn.BatchNorm2d(3, eps=1e-2, momentum=0.3), nn.ReLU()), IMAGES),
    "batch norm of vectors": (nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), (6, 7)),
    "group norm": (nn.GroupNorm(2, 6, eps=1e-3), (2, 6, 5, 4)),
    "instance norm": (nn.InstanceNorm2d(3, affine=True), IMAGES),
    "layer norm of vectors": (nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5)), (6, 7)),
    "layer norm of images": (nn.LayerNorm(IMAGES[1:], elementwise_affine=False), IMAGES),
    "max pool": (nn.MaxPool2d((3, 2), (2, 3), (1, 0)), IMAGES),
    "max pool, ceil": (nn.MaxPool2d((3, 5), (4, 4), 1, ceil_mode=True), IMAGES),
    "max pool, gaps, ceil": (nn.MaxPool2d(2, 5, 1, ceil_mode=True), (2, 3, 10, 9)),
    "max pool, volumes": (nn.MaxPool3d((1, 2, 3)), (1, 2, 3, 5, 7)),
    "avg pool": (nn.AvgPool2d((3, 2), (2, 3), (1, 0)), IMAGES),
    "avg pool, ceil": (nn.AvgPool2d(3, 2, ceil_mode=True), (2, 3, 8, 13)),
    "avg pool, ceil, inside": (nn.AvgPool2d(4, 3, 1, ceil_mode=True, count_include_pad=False), (2, 3, 10, 9)),
    "avg pool, lines": (nn.AvgPool1d(4, 3, 2), (2, 3, 17)),
    "adaptive": (nn.AdaptiveAvgPool2d((4, 3)), (2, 3, 12, 9)),
    "adaptive, overlapping": (nn.AdaptiveAvgPool2d((6, 3)), (2, 3, 13, 7)),
    "adaptive, none": (nn.AdaptiveMaxPool2d((None, 1)), IMAGES),
    "global, still an image": (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 5, 1)), IMAGES),
    "nearest": (nn.Upsample(scale_factor=(2, 3)), IMAGES),
    "nearest, exact": (nn.Upsample(scale_factor=3, mode="nearest-exact"), (1, 2, 3, 4, 2)),
    "bilinear": (nn.Upsample(size=(26, 40), mode="bilinear"), IMAGES),
    "linear": (nn.Upsample(scale_factor=3, mode="linear"), (2, 3, 7)),
    "trilinear": (nn.Upsample(scale_factor=(1, 2, 3), mode="trilinear"), (1, 2, 3, 4, 3)),
    "pad and crop": (nn.ConstantPad2d((-1, 2, 3, -2), 1.5), IMAGES),
    "pad, reflect": (nn.ReflectionPad2d((1, 2, 3, 0)), IMAGES),
    "pad, replicate": (nn.ReplicationPad3d((1, 0, 2, 1, 0, 3)), (1, 2, 3, 4, 2)),
    "pad, circular": (nn.CircularPad2d((1, 2, 3, 0)), IMAGES),
    "functions": (nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Softmax(1), nn.ReLU()), IMAGES),
    "softmax of vectors": (nn.Sequential(nn.Linear(7, 5), nn.Softmax(-1)), (6, 7)),
    "no dropout": (nn.Sequential(nn.Dropout(0.0), nn.Identity(), nn.Conv2d(3, 2, 1)), IMAGES),
    "no dropout, in place": (nn.Sequential(nn.Conv2d(3, 2, 1), nn.Dropout(0.0, inplace=True), nn.ReLU(True)), IMAGES),
    "flattened": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.ReLU(), nn.Linear(4 * 11 * 8, 5)), IMAGES),
    "flattened volumes": (nn.Sequential(nn.MaxPool3d(2), nn.Flatten(), nn.Linear(36, 3, bias=False)), (2, 3, 4, 6, 5)),
    "one cell flattened": (nn.Sequential(nn.Conv2d(3, 4, (13, 10)), nn.Flatten(), nn.Linear(4, 2)), IMAGES),
    "one cell flattened at the end": (nn.Sequential(nn.Conv2d(3, 4, (13, 10)), nn.Flatten()), IMAGES),
    "vectors": (nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)), (4, 7)),
}


@pytest.mark.parametrize("name", select_cases(CHAINS))
@pytest.mark.long
def test_modules(name):
    module, shape = CHAINS[name]
    check_conversion(nn.Sequential(module), shape)


def test_equivalent_global_poolings():
    class PooledClassifier(nn.Module):
        def __init__(self, pool):
            super().__init__()
            self.conv, self.fc, self.pool = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), pool

        def forward(self, x):
            return self.fc(self.pool(self.conv(x)))

    pools = [
        lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
        lambda x: F.adaptive_avg_pool2d(x, (1, 1)).view(x.shape[0], -1),
        lambda x: x.mean((2, 3)),
        lambda x: x.mean([-1, -2], keepdim=True).squeeze(-1).squeeze(-1),
        lambda x: F.adaptive_avg_pool2d(x, 1)[:, :, 0:1].reshape(2, 4),
    ]
    for pool in pools:
        model, _ = check_conversion(PooledClassifier(pool), IMAGES)
        assert [type(layer).__name__ for layer in model.leaves] == ["ConvLayer", "GlobalAvgPoolingLayer", "FCLayer"]
        assert [layer.name for layer in model.leaves][::2] == ["conv", "fc"]


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.short = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if stride > 1 else None
        )

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.short is None else self.short(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4)
        self.layer1, self.layer2 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1)), Block(4, 6, 2)
        self.drop, self.fc = nn.Dropout(0.0), nn.Linear(6, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.stem(x))), 3, 2, 1)
        x = F.avg_pool2d(self.layer2(self.layer1(x)), (2, 3))
        return self.fc(self.drop(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.down(x).relu()
        y = torch.tanh(self.deep(F.max_pool2d(x, 2)))
        y = self.up(y)
        y = F.pad(y, (0, x.shape[3] - y.shape[3], 0, x.shape[2] - y.shape[2]))
        return self.out(torch.cat([y, x], dim=1))[..., 1:-1, 2:]


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(channels, 2, 3, padding=1) for channels in (3, 5, 7)])

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.relu(torch.cat(features, 1))))
        return torch.cat(features, 1)


@pytest.mark.parametrize(
    ("module", "shape"), [(ResNet, (2, 3, 37, 41)), (UNet, (2, 3, 13, 11)), (DenseNet, (2, 3, 5, 4))]
)
@pytest.mark.long
def test_networks(module, shape):
    torch.manual_seed(0)
    _, converted = check_conversion(module(), shape)
    check_conversion(converted, shape)


@pytest.mark.long
def test_on_several_ranks():
    torch.manual_seed(0)
    module, shape = perturb_state(ResNet()), (3, 3, 37, 41)

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.from_torch(copy.deepcopy(module), shape, grid)
            run = model.forward(model.scatter(to_channels_last(x)), training=True)
            dx = run.backward(model.scatter_output(dy.numpy()))
            return model.gather(run.output), model.gather_input(dx), model.state()

    x = draw_tensor(shape).requires_grad_()
    serial_module = copy.deepcopy(module)
    y = serial_module(x)
    dy = draw_tensor(y.shape, 9)
    y.backward(dy)
    expected = convert_module(serial_module, shape).state()
    with share_captures():
        results = nd.loopback.run(4, body)
    for output, dx, state in results:
        assert_close(output, y.detach().numpy())
        assert_close(dx, to_channels_last(x.grad))
        for name, array in state.items():
            assert_close(array, expected[name], name)


class FunctionModule(nn.Module):
    """Module that calls a function; it is defined here because error messages name its file."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, *inputs):
        return self.function(*inputs, *self.inner)


def apply_relu_in_place(x, f, g):
    y = f(x)
    F.relu_(y)
    z = g(y)
    z += y
    return z


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.Identity()], ids=["norm", "none"])
def test_aliases_of_in_place_results(norm):
    convs = nn.Conv2d(3, 4, 3, padding=1), nn.Sequential(norm, nn.Conv2d(4, 4, 3, padding=1))
    model, _ = check_conversion(FunctionModule(apply_relu_in_place, *convs), IMAGES)
    kinds = [type(layer).__name__ for layer in model.leaves]
    assert kinds.count("ActivationLayer") == 1


def cross_branches(x, f, g, h):
    y = f(x)
    z = g(y)
    return torch.cat([h(z + x), y], 1)


def make_frozen():
    module = nn.Conv2d(3, 4, 3)
    module.weight.requires_grad_(False)
    return module


def make_weight_norm():
    return torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))


class BufferWriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(x.amax())
        return self.conv(x)


class ShiftedInput(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        if persistent is None:
            self.shift = torch.ones(IMAGES)
        else:
            self.register_buffer("shift", torch.ones(IMAGES), persistent=persistent)

    def forward(self, x):
        return self.conv(x + self.shift)


def make_tied():
    module = nn.Sequential(make_conv(), make_conv())
    module[1].weight = module[0].weight
    return module


def switch_by_mode(x, f, g):
    return f(x) if f.training else g(x)


def make_conv():
    return nn.Conv2d(3, 3, 3, padding=1)


REJECTED = {
    "an operator": (
        lambda: nn.Sequential(make_conv(), nn.GELU()),
        "aten.gelu.default in module '1' cannot become a layer",
    ),
    "leaky": (
        lambda: FunctionModule(lambda x, f: F.leaky_relu(f(x)), make_conv()),
        r"test_from_torch.py:\d+: aten.leaky_relu",
    ),
    "dilation": (lambda: nn.MaxPool2d(2, dilation=2), "dilation"),
    "divisor": (lambda: nn.AvgPool2d(2, divisor_override=3), "divisor_override 3"),
    "padding beyond the input": (lambda: nn.AvgPool2d(4, 3, 1, ceil_mode=True), "ceil_mode"),
    "uneven": (lambda: nn.AdaptiveAvgPool2d(4), "windows of different sizes"),
    "corners": (lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), "align_corners"),
    "no factor": (lambda: nn.Upsample(scale_factor=2.05), "not an integer factor"),
    "smaller": (lambda: FunctionModule(lambda x: F.interpolate(x, (6, 5))), "not an integer factor"),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False), "lacks a weight or a bias"),
    "no statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), "cannot become a layer"),
    "instances' statistics": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), "cannot become a layer"),
    "scale for each cell": (lambda: nn.LayerNorm(IMAGES[1:]), "has a weight for each cell"),
    "frozen": (make_frozen, "'weight' is not trained"),
    "tied": (make_tied, "used twice"),
    "a constant tensor": (lambda: ShiftedInput(None), "a constant or a tensor of another shape"),
    "a constant buffer": (lambda: ShiftedInput(True), "a constant or a tensor of another shape"),
    "a non-persistent buffer": (lambda: ShiftedInput(False), "a constant or a tensor of another shape"),
    "indices": (lambda: nn.Sequential(make_conv(), nn.AdaptiveMaxPool2d(1, return_indices=True)), "2 outputs"),
    "indices only": (
        lambda: FunctionModule(lambda x: F.adaptive_max_pool2d(x, 1, True)[1]),
        "not computed from its input",
    ),
    "a parameter": (
        lambda: FunctionModule(lambda x, f: f.weight.relu(), make_conv()),
        "only values computed from the input",
    ),
    "batch and channels": (lambda: FunctionModule(lambda x, f: f(x.view(6, 130)), nn.Linear(130, 2)), "vectors"),
    "computed": (make_weight_norm, "cannot become a layer"),
    "a buffer": (BufferWriting, "cannot become a layer"),
    "shared": (lambda: nn.Sequential(*[make_conv()] * 2), "used twice"),
    "crossing": (
        lambda: FunctionModule(cross_branches, make_conv(), make_conv(), make_conv()),
        "branches that are not nested",
    ),
    "broadcast": (lambda: FunctionModule(lambda x: x + x.mean((2, 3), keepdim=True)), "of another shape"),
    "constant": (lambda: FunctionModule(lambda x: x + 1), "a constant or a tensor of another shape"),
    "alpha": (lambda: FunctionModule(lambda x: torch.add(x, x, alpha=2)), "it has alpha=2"),
    "cat of cells": (lambda: FunctionModule(lambda x: torch.cat([x, x], 2)), "is not the channel dimension"),
    "flattened end": (nn.Flatten, "its output has shape"),
    "rows": (lambda: nn.Linear(10, 2), "vectors"),
    "softmax of cells": (lambda: nn.Softmax(3), "is not the channel dimension"),
    "always dropped": (lambda: FunctionModule(lambda x: F.dropout(x, 0.5, True)), "also drops values in evaluation"),
    "dropped channels": (lambda: nn.Dropout2d(), "cannot become a layer"),
    "steps": (lambda: FunctionModule(lambda x: x[..., ::2]), "dimension -?[13]"),
    "channels": (lambda: FunctionModule(lambda x: x[:, 1:]), "dimension 1"),
    "two modes": (
        lambda: FunctionModule(switch_by_mode, make_conv(), make_conv()),
        "differs between training and evaluation",
    ),
    "two outputs": (lambda: FunctionModule(lambda x: (x, x)), "2 outputs"),
    "no gradient": (lambda: FunctionModule(lambda x, f: f(x).detach(), make_conv()), "aten.detach"),
    "half": (lambda: make_conv().to(torch.bfloat16), "bfloat16"),
    "unpooling": (
        lambda: FunctionModule(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
        "with_indices",
    ),
    "some in eval()": (lambda: nn.Sequential(make_conv(), nn.BatchNorm2d(3).eval()), "in eval"),
}


@pytest.mark.parametrize("name", REJECTED)
@pytest.mark.long
def test_rejected_modules(name):
    make, message = REJECTED[name]
    with pytest.raises(nd.UserError, match=message) as caught:
        ndt.from_torch(make(), IMAGES, model=nd.Convnet)
    if isinstance(caught.value, ndt.UnsupportedOperator):
        assert "use neondist.torch.distribute, without layers" in str(caught.value)
        assert caught.value.operator.startswith("aten.")


def test_modules_in_either_mode():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.4))
    from_training, from_evaluation = (
        ndt.from_torch(module.train(mode), IMAGES, model=nd.Convnet) for mode in (True, False)
    )
    assert module.training is False
    assert [type(layer).__name__ for layer in from_training.leaves] == ["ConvLayer", "BatchNormLayer", "DropoutLayer"]
    assert from_training.leaves[2].arguments() == from_evaluation.leaves[2].arguments()
    x = np.zeros((2, 13, 10, 3), np.float32)
    assert np.mean(from_training.forward(x, training=True).output == 0) > 0.3


def test_another_dtype():
    module = nn.Sequential(make_conv(), nn.BatchNorm2d(3))
    model = ndt.from_torch(module, IMAGES, model=nd.Convnet, dtype="float64")
    x = draw_tensor(IMAGES)
    assert_close(model.forward(to_channels_last(x), training=False).output, to_channels_last(module.double().eval()(x)))


def test_different_weights_on_ranks_are_rejected():
    def body(world):
        with nd.ProcessGrid(world) as grid:
            module = nn.Conv2d(1, 1, 1)
            nn.init.constant_(module.weight, world.rank)
            with pytest.raises(nd.UserError, match="conv2d/weights"):
                ndt.from_torch(module, (1, 1, 4, 4), grid)

    nd.loopback.run(2, body)
