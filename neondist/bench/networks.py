"""Built-in networks of `neondist bench suite`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..costs import CrossEntropy
from ..data import Synthetic
from ..layers import (
    ActivationLayerDist,
    BatchNormLayerDist,
    Concat,
    ConvLayerDist,
    DeconvLayerDist,
    FCLayerDist,
    GlobalAvgPoolingLayerDist,
    InstanceNormLayerDist,
    L2PoolingLayerDist,
    LCNLayerDist,
    LocalFilteringLayerDist,
    MaxPoolingLayerDist,
    Node,
    ReLU,
    Sum,
)
from ..models import ConvnetDist
from ..optim import SGD
from ..train import FitExperiment

Nodes = list[Node]


class BenchmarkNetwork(NamedTuple):
    """A network and its training data.

    Attributes
    ----------
    batch_size : int
    sample_shape : shape of a sample
    layers : function that returns new layers
    classes : int
    per_cell : bool
        Whether the network classifies cells instead of images.
    """

    batch_size: int
    sample_shape: tuple[int, ...]
    layers: Callable[[], Nodes]
    classes: int = 10
    per_cell: bool = False

    def model(self) -> ConvnetDist:
        """Return a new model."""
        return ConvnetDist(self.layers(), cost=CrossEntropy(), optimizer=SGD(learning_rate=1e-3))

    def experiment(self) -> FitExperiment:
        """Return a new experiment."""
        train = max(self.batch_size, self.classes)
        data = Synthetic(self.sample_shape, classes=self.classes, train=train, test=1, per_cell=self.per_cell)
        return FitExperiment(data, self.model(), batch_size=self.batch_size, epochs=1)


def _conv(channels: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> ConvLayerDist:
    padding = dilation * (kernel // 2)
    return ConvLayerDist(channels, kernel, stride, padding, dilation=dilation, activation=ReLU())


def _conv_norm(channels: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> Nodes:
    return [ConvLayerDist(channels, kernel, stride, kernel // 2, groups=groups, bias=False), BatchNormLayerDist()]


def _relu() -> ActivationLayerDist:
    return ActivationLayerDist(ReLU())


def _classifier(classes: int = 10) -> Nodes:
    return [GlobalAvgPoolingLayerDist(), FCLayerDist(classes)]


def _residual(inputs: int, channels: int, stride: int = 1) -> Nodes:
    """Return a basic block of a ResNet."""
    skip = [] if inputs == channels and stride == 1 else _conv_norm(channels, 1, stride)
    return [Sum([[*_conv_norm(channels, 3, stride), _relu(), *_conv_norm(channels)], skip]), _relu()]


def _unet_levels(channels: int, levels_below: int) -> Nodes:
    """Return a level of a U-Net, and the levels below it."""

    def two_convolutions() -> Nodes:
        conv = lambda: ConvLayerDist(channels, 3, padding=1)  # noqa: E731
        return [layer for _ in range(2) for layer in (conv(), InstanceNormLayerDist(affine=True), _relu())]

    if not levels_below:
        return two_convolutions()
    down: Nodes = [
        MaxPoolingLayerDist(2), *_unet_levels(2 * channels, levels_below - 1), DeconvLayerDist(channels, 2, stride=2),
    ]  # fmt: skip
    return [*two_convolutions(), Concat([[], down]), *two_convolutions()]


def _separable_convs(inputs_channels_strides: Iterable[tuple[int, int, int]]) -> Nodes:
    return [
        layer
        for inputs, channels, stride in inputs_channels_strides
        for layer in (*_conv_norm(inputs, 3, stride, inputs), _relu(), *_conv_norm(channels, 1), _relu())
    ]


def _pool() -> MaxPoolingLayerDist:
    return MaxPoolingLayerDist(2)


MAIN_NETWORKS = {
    "plain": BenchmarkNetwork(
        1, (2048, 2048, 3), lambda: [_conv(16), _conv(32, stride=2), _conv(64), _pool(), *_classifier()]
    ),
    "vgg": BenchmarkNetwork(
        1, (512, 512, 3), lambda: [_conv(64), _conv(64), _pool(), _conv(128), _conv(128), _pool(), *_classifier()]
    ),
    "mnist": BenchmarkNetwork(
        128, (28, 28, 1), lambda: [_conv(16, 5), _pool(), _conv(32, 5), _pool(), FCLayerDist(10)]
    ),
    "resnet": BenchmarkNetwork(
        4,
        (512, 512, 3),
        lambda: [
            *(*_conv_norm(64, 7, 2), _relu(), MaxPoolingLayerDist(3, 2, 1)),
            *(*_residual(64, 64), *_residual(64, 64), *_residual(64, 128, 2), *_residual(128, 128), *_classifier()),
        ],
    ),
    "unet": BenchmarkNetwork(1, (1024, 1024, 3), lambda: [*_unet_levels(16, 2), ConvLayerDist(2, 1)], 2, per_cell=True),
    "vol": BenchmarkNetwork(
        1, (96, 96, 96, 4), lambda: [_conv(16), _conv(32, stride=2), _conv(32), _pool(), *_classifier()]
    ),
}
"""the networks of the tables in docs/measured.md"""
OTHER_NETWORKS = {
    "wide": BenchmarkNetwork(
        1, (512, 512, 8), lambda: [_conv(32, 5), _conv(64, 5, 2), _conv(64, 5), _pool(), *_classifier()]
    ),
    "dilated": BenchmarkNetwork(
        1,
        (512, 512, 3),
        lambda: [_conv(32), *(_conv(32, dilation=d) for d in (2, 4, 8)), ConvLayerDist(2, 1)],
        2,
        per_cell=True,
    ),
    "separable": BenchmarkNetwork(
        4,
        (256, 256, 3),
        lambda: [
            *_conv_norm(32, 3, 2),
            _relu(),
            *_separable_convs([(32, 64, 1), (64, 128, 2), (128, 128, 1)]),
            *_classifier(),
        ],
    ),
    "unet3d": BenchmarkNetwork(
        1, (64, 64, 64, 1), lambda: [*_unet_levels(8, 2), ConvLayerDist(2, 1)], 2, per_cell=True
    ),
    "lcn": BenchmarkNetwork(
        16,
        (128, 128, 3),
        lambda: [LCNLayerDist(9), LocalFilteringLayerDist(8, 8, 4), L2PoolingLayerDist(3, 1), FCLayerDist(10)],
    ),
    "deep": BenchmarkNetwork(1, (512, 512, 3), lambda: [*(_conv(8) for _ in range(24)), *_classifier()]),
}
"""networks with other architectures"""
NETWORKS = MAIN_NETWORKS | OTHER_NETWORKS
NETWORK_GROUPS = {"main": tuple(MAIN_NETWORKS), "others": tuple(OTHER_NETWORKS)}
