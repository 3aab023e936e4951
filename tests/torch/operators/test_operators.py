"""Each kind of operator on virtual ranks against a single process, in float64."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from case_selection import select_grids  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import (  # noqa: E402
    COMBINED_GRIDS,
    OTHER_GRIDS,
    FunctionModule,
    check_modules,
    gather_input_gradient,
    split_into_groups,
)  # fmt: skip

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402

IMAGES = (2, 3, 13, 11)


def to_tokens(x):
    return x.flatten(2).transpose(1, 2)


def attend_in_windows(x, attend=lambda q, k: F.scaled_dot_product_attention(q, k, k)):
    """Attend from tokens of a pooled image to the cells of 3 x 2 windows."""
    k = x[..., :12, :10].unflatten(2, (4, 3)).unflatten(4, (5, 2)).permute(0, 2, 4, 3, 5, 1).reshape(-1, 6, 3)
    q = to_tokens(F.avg_pool2d(x, 4)).repeat_interleave(20, 0)
    return attend(q, k)


MODULES = {
    "conv": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "conv, even, strided": lambda: nn.Conv2d(3, 4, (4, 3), stride=(2, 3), padding=(2, 1)),
    "conv, dilated, grouped": lambda: nn.Conv2d(3, 6, 3, padding=2, dilation=2, groups=3),
    "conv, same": lambda: nn.Conv2d(3, 4, 4, padding="same"),
    "conv, reflect": lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    "conv, circular": lambda: nn.Conv2d(3, 4, 5, padding=2, padding_mode="circular"),
    "conv transposed": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
    "conv transposed, gaps": lambda: nn.ConvTranspose2d(3, 4, 2, stride=3),
    "conv, volume without a batch": lambda: nn.Conv3d(2, 8, 3, padding=1),
    "pointwise conv, volume without a batch": lambda: nn.Sequential(
        FunctionModule(lambda x: x.contiguous(memory_format=torch.channels_last)), nn.Conv3d(2, 8, 1)
    ),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
    "relu6": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(inplace=True)),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True),
    "group norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
    "layer norm": lambda: nn.LayerNorm([3, 13, 11]),
    "max pool": lambda: nn.MaxPool2d(3, 2, 1),
    "max pool, ceil": lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "max pool, indices": lambda: FunctionModule(unpool),
    "avg pool": lambda: nn.AvgPool2d(3, 2, 1),
    "avg pool, ceil, no padding": lambda: nn.AvgPool2d(2, ceil_mode=True),
    "avg pool, ceil, inside": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "lp pool": lambda: nn.LPPool2d(2, 3, 2),
    "adaptive avg, few": lambda: nn.AdaptiveAvgPool2d((3, 2)),
    "adaptive avg, many": lambda: nn.AdaptiveAvgPool2d((9, 8)),
    "adaptive max": lambda: nn.AdaptiveMaxPool2d((5, 3)),
    "global pool, linear": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    ),
    "flatten, linear": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 11 * 9, 5)),
    "mean": lambda: FunctionModule(lambda x: x.mean((2, 3))),
    "mean of rows": lambda: FunctionModule(lambda x: x - x.mean(3, keepdim=True)),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "bilinear": lambda: nn.Upsample(scale_factor=2.3, mode="bilinear"),
    "bicubic": lambda: FunctionModule(lambda x: F.interpolate(x, size=(17, 23), mode="bicubic", align_corners=True)),
    "bilinear, smaller": lambda: FunctionModule(lambda x: F.interpolate(x, size=(7, 5), mode="bilinear")),
    "bilinear, antialias": lambda: FunctionModule(
        lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True)
    ),
    "bicubic, antialias": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        FunctionModule(lambda x: F.interpolate(x, scale_factor=0.37, mode="bicubic", antialias=True)),
    ),
    "bicubic, antialias, larger": lambda: FunctionModule(
        lambda x: F.interpolate(x, scale_factor=(1.7, 0.2), mode="bicubic", antialias=True, align_corners=True)
    ),
    "pixel shuffle": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.Conv2d(2, 2, 3)),
    "pixel unshuffle": lambda: nn.Sequential(nn.ConstantPad2d((0, 1, 0, 1), 0.0), nn.PixelUnshuffle(2)),
    "flip": lambda: FunctionModule(lambda x: x.flip(2)),
    "roll": lambda: FunctionModule(lambda x: x.roll((3, -2), (2, 3))),
    "slice": lambda: FunctionModule(lambda x: x[:, :, 1:-2:2, 3:]),
    "cat of cells": lambda: FunctionModule(lambda x: torch.cat([x, x.flip(2)], 2)),
    "cat of channels": lambda: FunctionModule(lambda x: torch.cat([x, x * 2], 1)),
    "sum with transposed": lambda: FunctionModule(lambda x: x[..., :11, :11] + x[..., :11, :11].transpose(2, 3)),
    "amax": lambda: FunctionModule(lambda x: x.amax((2, 3))),
    "var": lambda: FunctionModule(lambda x: x.var((2, 3))),
    "sums without NaN": lambda: FunctionModule(
        lambda x: insert_nan(x).nansum(2) + insert_nan(x).nanmean((2, 3))[..., None]
    ),
    "medians": lambda: FunctionModule(
        lambda x: x.median() + x.nanmedian(2)[0] + x.median(2)[0] + insert_nan(x).nanmedian()
    ),
    "quantiles": lambda: FunctionModule(
        lambda x: (
            x.quantile(0.3, 2) + insert_nan(x).nanquantile(torch.tensor([0.2, 0.7]).to(x), 3).mean((0, 3))[..., None]
        )
    ),
    "quantiles without a gradient of q": lambda: FunctionModule(
        lambda x: x.quantile(x[0, 0, 0, 3:7].sigmoid(), 2, interpolation="midpoint")
    ),
    "number without a gradient": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        FunctionModule(lambda x, conv: x + torch.special.hermite_polynomial_h(conv.bias, 2).sum(), nn.Conv2d(1, 2, 1)),
    ),
    "statistics of batch norm": lambda: FunctionModule(
        lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    ),
    "mode": lambda: FunctionModule(lambda x: (x * 2).round().mode(2)[0] + x.sort(dim=3, stable=True)[0].mean(2)),
    "mesh of means": lambda: FunctionModule(
        lambda x: torch.stack(torch.meshgrid(x.mean((0, 1, 2)), x.mean((0, 1, 3)), indexing="xy"))
    ),
    "labels, margins": lambda: FunctionModule(
        lambda x: F.multilabel_margin_loss(x.mean((2, 3)), torch.tensor([[0, 2, -1], [1, -1, 0]]))
    ),
    "classes in a cut dimension": lambda: FunctionModule(lambda x: sum_label_losses(x)),
    "quantised": lambda: FunctionModule(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -20, 20)),
    "distances of pairs": lambda: FunctionModule(lambda x: F.pdist(x[0, 0]) + F.pdist(x.flatten(1)).sum()),
    "softmax of cells": lambda: FunctionModule(lambda x: x.flatten(2).softmax(-1)),
    "attention": lambda: FunctionModule(
        lambda x: F.scaled_dot_product_attention(to_tokens(x), to_tokens(x), to_tokens(x))
    ),
    "attention of grouped queries": lambda: FunctionModule(
        lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, 2:], enable_gqa=True)
    ),
    "choice of two numbers": lambda: FunctionModule(lambda x: x * torch.where(x > 0, 2.0, 0.5)),
    "histogram": lambda: FunctionModule(lambda x: torch.histc(x, 5, -1, 1) * x.mean()),
    "attention by hand": lambda: FunctionModule(lambda x: (to_tokens(x) @ x.flatten(2)).softmax(-1) @ to_tokens(x)),
    "channel attention": lambda: FunctionModule(lambda x: (x.flatten(2) @ to_tokens(x)).softmax(-1) @ x.flatten(2)),
    "einsum": lambda: FunctionModule(lambda x: torch.einsum("nchw,ndhw->ncd", x, x)),
    "unfold": lambda: nn.Unfold(3, padding=1, stride=2),
    "fold": lambda: FunctionModule(lambda x: F.fold(F.unfold(x, 3, 1, 1, 2), (13, 12), 3, 1, 1, 2)),
    "fold, gaps": lambda: FunctionModule(lambda x: F.fold(x[:, :2].flatten(2), (26, 32), (1, 2), 1, (0, 1), (2, 3))),
    "global queries of windows": lambda: FunctionModule(attend_in_windows),
    "global queries of windows, by hand": lambda: FunctionModule(
        lambda x: attend_in_windows(x, lambda q, k: q @ k.mT @ k)
    ),
    "view in another memory format": lambda: FunctionModule(
        lambda x: F.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last), 2).permute(0, 2, 3, 1).view(2, -1)
    ),
    "windows of a dimension": lambda: FunctionModule(lambda x: x.unfold(2, 3, 2)),
    "dtype of another tensor": lambda: FunctionModule(
        lambda x: F.max_pool2d(x, 2).float().type_as(x) + x[0, 0, 0, 0].float().to(x)
    ),
    "in place": lambda: FunctionModule(lambda x: F.silu(x * 2, inplace=True).add_(1)),
    "written slice": lambda: FunctionModule(lambda x: add_to_slice(x * 1.0)),
    "prelu": lambda: nn.PReLU(3),
    "pad and crop": lambda: FunctionModule(lambda x: F.pad(x, (-1, 2, 3, -2), value=1.5)),
    "pad, replicate": lambda: FunctionModule(lambda x: F.pad(x, (4, 2, 3, 5), mode="replicate")),
    "squeeze-excite": lambda: FunctionModule(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
}


def sum_label_losses(x):
    ignored = F.cross_entropy(x[0, 0], torch.arange(13) % 9, ignore_index=2)
    return ignored + F.nll_loss(x[:, 0, 0].log_softmax(1), torch.tensor([3, 9]))


def unpool(x):
    return F.max_unpool2d(*F.max_pool2d(x, 2, 2, 1, return_indices=True), 2, 2, 1, x.shape[2:])


def insert_nan(x):
    return torch.where((x > 0.7) & (x < 1), torch.nan, x)


def add_to_slice(x):
    x[:, :, 1:-1, 2:] += 1
    return x


@pytest.mark.parametrize("names", split_into_groups(MODULES), ids=lambda names: names[0])
@pytest.mark.long
def test_operators_match_single_process(names):
    torch.manual_seed(0)
    grids = *COMBINED_GRIDS, *select_grids(OTHER_GRIDS, 1)
    check_modules({name: MODULES[name]() for name in names}, IMAGES, grids=grids)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"strips": 4}, {"memory": "2GiB"}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_assertions_raise_on_all_ranks(ranks, options):
    def forward(x, conv):
        torch._assert_async((x < 10).all(), "x must be below 10")
        return conv(x)

    def criterion(y, target):
        torch._assert_async((target >= 0).all(), "targets must not be negative")
        return (y - target).square().mean()

    shape = 1, 2, 12, 8

    def run(world, largest, smallest_target):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(FunctionModule(forward, nn.Conv2d(2, 2, 3, padding=1)), shape, grid, **options)
            x, target = torch.ones(shape), torch.ones(shape)
            x[0, 0, 0, 0], target[0, 1, 11, 7] = largest, smallest_target
            try:
                return model.loss(criterion, model(model.scatter(x)), model.scatter_target(target)).backward()
            except RuntimeError as error:
                return str(error)

    for largest, smallest_target, expected in (
        (9, 0, None), (10, 0, "x must be below 10"), (9, -1, "targets must not be negative")
    ):  # fmt: skip
        assert (
            nd.loopback.run(ranks, partial(run, largest=largest, smallest_target=smallest_target)) == [expected] * ranks
        )


HALF_PRECISION_FUNCTIONS = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:], torch.linspace(1, 2, x[0].numel()).to(x).view(x.shape[1:])),
    "rms norm": lambda x: F.rms_norm(x, x.shape[1:], eps=1e-5),
    "group norm": lambda x: F.group_norm(x, 2),
    "softmax": lambda x: x.flatten(2).softmax(2) * 100,
    "log softmax": lambda x: x.log_softmax(2),
    "variance": lambda x: x.var((2, 3)),
    "deviation": lambda x: x.std((0, 2, 3)),
    "mean": lambda x: x.mean((2, 3)),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, (2, 3)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HALF_PRECISION_FUNCTIONS)
def test_rounding_errors_of_16_bit_reductions_are_as_in_pytorch(name, dtype):
    """Kernels compute in float32 and round the result, so reductions over ranks must not round on the way."""
    torch.manual_seed(0)
    function, x = HALF_PRECISION_FUNCTIONS[name], (torch.randn(1, 4, 32, 24) + 3).to(dtype)
    dy = torch.randn(function(x.double()).shape).to(dtype)

    def errors(y, dx):
        return [((actual.double() - true).norm() / true.norm()).item() for actual, true in ((y, true_y), (dx, true_dx))]

    def run(world):
        with nd.ProcessGrid(world, rows=2, cols=2) as grid:
            model = ndt.distribute(FunctionModule(function), x.shape, grid, dtype=dtype)
            tile = model.scatter(x).requires_grad_()
            y = model(tile)
            y.backward(model.scatter_target(dy).to(dtype))
            return errors(model.gather(y.detach()), gather_input_gradient(model, 0, tile.grad))

    leaves = x.double().requires_grad_(), x.clone().requires_grad_()
    true_y, true_dx = function(leaves[0]), None
    true_y.backward(dy.double())
    true_y, true_dx = true_y.detach(), leaves[0].grad
    y = function(leaves[1])
    y.backward(dy)
    expected = errors(y.detach(), leaves[1].grad)
    for actual, limit in zip(nd.loopback.run(4, run)[0], expected, strict=True):
        assert actual <= 1.25 * limit + torch.finfo(dtype).eps / 8, (actual, limit)
