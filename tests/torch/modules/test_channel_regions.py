"""Regions of modules that are partitioned by channels: results as in one process, and fewer messages."""

import pytest

torch = pytest.importorskip("torch")

from channel_regions import partition_by_channels  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import check_module  # noqa: E402

from neondist.torch.capture.capture import capture_module  # noqa: E402
from neondist.torch.capture.channel_regions import find_channel_regions  # noqa: E402
from neondist.torch.exchange import functions  # noqa: E402
from neondist.torch.ir.layout import Mesh  # noqa: E402


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        return (self.body(x) + self.shortcut(x)).relu()


class Inverted(nn.Module):
    """An inverted bottleneck with squeeze and excitation, which reduces many channels to few."""

    def __init__(self, channels, inner, kernel=3):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, inner, 1), nn.BatchNorm2d(inner), nn.SiLU())
        self.depthwise = nn.Conv2d(inner, inner, kernel, padding="same", groups=inner)
        self.squeeze = nn.Sequential(nn.Conv2d(inner, 4, 1), nn.ReLU(), nn.Conv2d(4, inner, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(inner, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        return x + self.project(y * self.squeeze(y.mean((2, 3), keepdim=True)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 24, 3, padding=1)
        self.deep = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
            nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.up = nn.ConvTranspose2d(48, 24, 2, 2)
        self.last = nn.Conv2d(48, 2, 3, padding=1)

    def forward(self, x):
        left = self.down(x).relu()
        deep = self.deep(left)
        return self.last(torch.cat([left, self.up(deep)], 1)), deep


def classifier():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Residual(16, 36, 2), Residual(36, 36),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(36, 40), nn.ReLU(), nn.Linear(40, 5),
    )  # fmt: skip


def grouped():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, 2, 1), nn.Conv2d(24, 72, 3, padding=1), nn.Conv2d(72, 36, 3, groups=12, padding=1),
        nn.BatchNorm2d(36, track_running_stats=False), nn.MaxPool2d(3, 1, 1), nn.Conv2d(36, 48, 3),
    )  # fmt: skip


def flattened():
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, 2, 1), nn.Conv2d(40, 40, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(80, 60)
    )


def inverted():
    return nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 32, 3), Inverted(32, 48), Inverted(32, 48, 5))


def volumes():
    return nn.Sequential(nn.Conv3d(2, 24, 3, 2), nn.Conv3d(24, 24, 3, padding=1), nn.BatchNorm3d(24))


def series():
    return nn.Sequential(nn.Conv1d(2, 40, 3, 2), nn.Conv1d(40, 40, 3, padding=1), nn.ReLU())


MODELS = {
    "residual": (classifier, (2, 3, 8, 8)),
    "inverted": (inverted, (2, 3, 9, 8)),
    "U-Net": (UNet, (2, 3, 8, 10)),
    "grouped": (grouped, (2, 3, 8, 8)),
    "flattened": (flattened, (2, 3, 10, 12)),
    "volumes": (volumes, (2, 2, 7, 7, 5)),
    "series": (series, (2, 2, 17)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.long
def test_any_region_is_exact(name, training):
    build, shape = MODELS[name]
    torch.manual_seed(3)
    for share in (1.0, 0.7):
        with partition_by_channels(share, f"{name} {training}") as counts:
            check_module(build().train(training), shape)
        assert min(counts) > 0


def count_partitioned_nodes(module, shape, parts=(1, 2, 1)):
    """Return the number of convolutions and of other nodes that are partitioned by channels."""
    program = capture_module(module, [(shape, torch.float32)])
    is_convolution = ["conv2d" in str(node.target) for node in find_channel_regions(program, Mesh(parts))]
    return sum(is_convolution), len(is_convolution) - sum(is_convolution)


def test_regions_have_more_weights_than_cells():
    deep = nn.Sequential(nn.Conv2d(3, 256, 3), nn.ReLU(), *(nn.Conv2d(256, 256, 3) for _ in range(3)))
    assert count_partitioned_nodes(deep, (1, 3, 14, 14)) == (4, 1)
    assert count_partitioned_nodes(deep, (1, 3, 64, 64)) == (0, 0)
    assert count_partitioned_nodes(deep, (1, 3, 14, 14), (2, 1, 1)) == (0, 0)


def test_regions_end_before_operators_that_need_all_channels():
    norms = nn.Sequential(nn.Conv2d(256, 256, 3), nn.BatchNorm2d(256), nn.GroupNorm(4, 256), nn.Conv2d(256, 256, 3))
    assert count_partitioned_nodes(norms, (1, 256, 9, 9)) == (2, 1)


def test_gradient_buckets_do_not_depend_on_uneven_parts(monkeypatch):
    """The larger of two uneven parts of the weights exceeds the bucket's limit, the smaller does not."""
    module = nn.Sequential(nn.Conv2d(8, 5, 3), nn.Conv2d(5, 5, 3), nn.Conv2d(5, 5, 3))
    monkeypatch.setattr(functions, "MIN_UNBUCKETED_BYTES", 5 // 2 * 5 * 9 * 8 + 1)
    with partition_by_channels():
        check_module(module, (1, 8, 8, 8), grids=[(1, 2, 1)])


def test_regions_are_recomputed():
    build, shape = MODELS["residual"]
    torch.manual_seed(3)
    with partition_by_channels():
        check_module(build(), shape, recompute=True)
