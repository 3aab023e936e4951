"""The networks that `neondist bench suite` knows by name."""

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


class Case(NamedTuple):
    """A network and its training data.

    Attributes
    ----------
    batch : int
    shape : of a sample
    layers : function that returns new layers
    classes : int
    """

    batch: int
    shape: tuple[int, ...]
    layers: Callable[[], Nodes]
    classes: int = 10

    def model(self) -> ConvnetDist:
        """Return a new model."""
        return ConvnetDist(self.layers(), cost=CrossEntropy(), optimizer=SGD(learning_rate=1e-3))

    def experiment(self) -> FitExperiment:
        """Return a new experiment."""
        data = Synthetic(self.shape, classes=self.classes, train=max(self.batch, self.classes), test=1)
        return FitExperiment(data, self.model(), batch_size=self.batch, epochs=1)


def _conv(channels: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> ConvLayerDist:
    padding = dilation * (kernel // 2)
    return ConvLayerDist(channels, kernel, stride, padding, dilation=dilation, activation=ReLU())


def _normed(channels: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> Nodes:
    """Return a convolution and its batch norm."""
    conv = ConvLayerDist(channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, BatchNormLayerDist()]


def _relu() -> ActivationLayerDist:
    return ActivationLayerDist(ReLU())


def _head(classes: int = 10) -> Nodes:
    return [GlobalAvgPoolingLayerDist(), FCLayerDist(classes)]


def _block(inputs: int, channels: int, stride: int = 1) -> Nodes:
    """Return a basic block of a ResNet."""
    skip = [] if inputs == channels and stride == 1 else _normed(channels, 1, stride)
    return [Sum([[*_normed(channels, 3, stride), _relu(), *_normed(channels)], skip]), _relu()]


def _levels(channels: int, below: int) -> Nodes:
    """Return a level of a U-Net, and those below."""

    def twice() -> Nodes:
        conv = lambda: ConvLayerDist(channels, 3, padding=1)  # noqa: E731
        return [layer for _ in range(2) for layer in (conv(), InstanceNormLayerDist(affine=True), _relu())]

    if not below:
        return twice()
    down: Nodes = [MaxPoolingLayerDist(2), *_levels(2 * channels, below - 1), DeconvLayerDist(channels, 2, stride=2)]
    return [*twice(), Concat([[], down]), *twice()]


def _separable(widths: Iterable[tuple[int, int, int]]) -> Nodes:
    return [
        layer
        for inputs, channels, stride in widths
        for layer in (*_normed(inputs, 3, stride, inputs), _relu(), *_normed(channels, 1), _relu())
    ]


def _pool() -> MaxPoolingLayerDist:
    return MaxPoolingLayerDist(2)


MAIN = {
    "plain": Case(1, (2048, 2048, 3), lambda: [_conv(16), _conv(32, stride=2), _conv(64), _pool(), *_head()]),
    "vgg": Case(1, (512, 512, 3), lambda: [_conv(64), _conv(64), _pool(), _conv(128), _conv(128), _pool(), *_head()]),
    "mnist": Case(128, (28, 28, 1), lambda: [_conv(16, 5), _pool(), _conv(32, 5), _pool(), FCLayerDist(10)]),
    "resnet": Case(
        4,
        (512, 512, 3),
        lambda: [
            *(*_normed(64, 7, 2), _relu(), MaxPoolingLayerDist(3, 2, 1)),
            *(*_block(64, 64), *_block(64, 64), *_block(64, 128, 2), *_block(128, 128), *_head()),
        ],
    ),
    "unet": Case(1, (1024, 1024, 3), lambda: [*_levels(16, 2), ConvLayerDist(2, 1)], classes=2),
    "vol": Case(1, (96, 96, 96, 4), lambda: [_conv(16), _conv(32, stride=2), _conv(32), _pool(), *_head()]),
}
"""the networks of the tables in docs/measured.md"""
OTHERS = {
    "wide": Case(1, (512, 512, 8), lambda: [_conv(32, 5), _conv(64, 5, 2), _conv(64, 5), _pool(), *_head()]),
    "dilated": Case(
        1, (512, 512, 3), lambda: [_conv(32), *(_conv(32, dilation=d) for d in (2, 4, 8)), ConvLayerDist(2, 1)], 2
    ),
    "separable": Case(
        4,
        (256, 256, 3),
        lambda: [*_normed(32, 3, 2), _relu(), *_separable([(32, 64, 1), (64, 128, 2), (128, 128, 1)]), *_head()],
    ),
    "unet3d": Case(1, (64, 64, 64, 1), lambda: [*_levels(8, 2), ConvLayerDist(2, 1)], 2),
    "lcn": Case(
        16,
        (128, 128, 3),
        lambda: [LCNLayerDist(9), LocalFilteringLayerDist(8, 8, 4), L2PoolingLayerDist(3, 1), FCLayerDist(10)],
    ),
    "deep": Case(1, (512, 512, 3), lambda: [*(_conv(8) for _ in range(24)), *_head()]),
}
"""networks of other kinds"""
NETWORKS = MAIN | OTHERS
GROUPS = {"main": tuple(MAIN), "others": tuple(OTHERS)}
