"""Cases that random modules have found, and others written by hand: virtual ranks against one process, in float64."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from test_operators import Function, tokens  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import DEVICE, check, check_beside, difference, distributed, groups, in_turn, serial  # noqa: E402

import neondist as nd  # noqa: E402

IMAGES, MANY = (2, 4, 8, 6), ((1, 2, 2), (1, 1, 3), (2, 1, 2), (1, 5, 1))


def assigned(x, *index):
    x = x * 1.0
    x[index] = 0.5
    return x * 2


def written(x):
    """Write in place: by one name after the other, and by two for the same memory."""
    y = (x + 1).sub_(x * x)
    y.add_(y.gt(0))
    z = y.flatten()
    y.mul_(3)
    z.add_(2)
    return y * z.view_as(x)


def stopped(x):
    with torch.no_grad():
        mean = x.mean((2, 3), keepdim=True)
        more = (x + 1).relu()
    return x * mean + more * x


def dynamic(x):
    """Compute weights from cells, which lie on several ranks."""
    few = x.flatten()[:4]
    y = F.conv2d(x, few.reshape(4, 1, 1, 1), few, groups=4) + F.conv_transpose2d(
        x, few.reshape(4, 1, 1, 1), few, groups=4
    )
    y = y + F.group_norm(x, 2, few, few) + F.instance_norm(x, weight=few, bias=few) + F.prelu(x, few)
    return F.linear(F.layer_norm(y, (6,), x.flatten()[:6]), x.flatten()[:12].reshape(2, 6), few[:2])


def unpooled(x):
    y, index = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    return F.max_unpool2d(y, index, 3, 2, 1, output_size=x.shape[2:]) * x + y.sum() * (index % 3).sum()


def masked_rows(x):
    """Attend, some queries to no key at all."""
    scores = tokens(x) @ x.flatten(2)
    return F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(x), scores > 3)


def scored(x):
    """Let softmax along cells that are cut find rows with nothing."""
    scores = x.masked_fill(x.amax(3, keepdim=True) > 1.5, -torch.inf)
    return torch.ops.aten._safe_softmax(scores, 3) + torch.ops.aten._safe_softmax(scores, 2)


FUNCTIONS = {
    "weights that are cells": dynamic,
    "places of the greatest": unpooled,
    "queries without keys": masked_rows,
    "softmax of nothing": scored,
    "tokens of rows and columns, made fewer": lambda x: F.interpolate(x.flatten(2), size=10, mode="linear"),
    "tokens of rows and columns, the nearest": lambda x: F.interpolate(x.flatten(2), size=9) * 2,
    "what is left goes around": lambda x: F.pad(x, (-1, 1, 2, -3), mode="circular"),
    "one slope for all": lambda x: F.prelu(x, torch.tensor(0.3).double()),
    "all channels dropped": lambda x: F.dropout2d(x, 1.0) + x,
    "a slice without cells": lambda x: torch.cat([x[:, :, :0], x[:, :, 3:].sin(), x[:, :, :3]], 2) + x[:, :, 8:].sum(),
    "no derivative is known": lambda x: torch.special.bessel_j0(x[:, :, :2]) * x[:, :, :2],
    "one index of a cut dimension": lambda x: x[:, :, 3] + x[:, :, -1],
    "all indices of a cut dimension": lambda x: torch.stack(x.unbind(2)[::-1], 2) * x,
    "picked rows": lambda x: x[:, :, torch.tensor([1, 1, 7, 0])],
    "index_select": lambda x: x.index_select(3, torch.tensor([1, 5, 1])),
    "a part without indices": lambda x: x.amax((1, 2, 3)).split([2, 0])[0],
    "written into after a sum": lambda x: F.cosine_similarity(x, x.flip(1), 1),
    "an extent of one": lambda x: x[:, :, 2:3] * x[:, :, :, 1:2],
    "a cut extent of one, reshaped": lambda x: x[:, :, 2:3].reshape(2, 4, 6).reshape(2, 2, 1, 2, 1, 6),
    "a cut extent of one, squeezed": lambda x: F.max_pool2d(x, (8, 1)).squeeze() + 1,
    "a cut extent of one, flattened": lambda x: F.max_pool2d(x, (8, 6)).flatten(1),
    "a cut extent of one, expanded": lambda x: F.conv2d(x, torch.ones(4, 1, 8, 1).to(x), groups=4).expand(2, 4, 3, 6),
    "repeated cells": lambda x: x.repeat(1, 1, 2, 3).repeat_interleave(2, 3),
    "the largest of a cut extent of one": lambda x: F.max_pool2d(x, (8, 6)).amax(3),
    "broadcast, and but one is used": lambda x: torch.broadcast_tensors(x.mean((2, 3), True).sigmoid(), x)[1] * 2,
    "a running sum": lambda x: x.cumsum(2) + x.cumsum(3),
    "sorted rows": lambda x: x.sort(2)[0] * x.argmax(3, keepdim=True),
    "a reshaping that takes cells apart": lambda x: x.reshape(2, 6, 8, 4) * 2,
    "a causal attention": lambda x: F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(x), is_causal=True),
    "a transposed sum": lambda x: x[:, :, :6] + x[:, :, :6].transpose(2, 3),
    "a transposed stack": lambda x: torch.cat([x[:, :, :6], x[:, :, :6].transpose(2, 3)], 2),
    "a deviation of nothing": lambda x: x.std((2, 3), correction=0) + (x * 0).std(1, correction=0).sum(),
    "norms, of nothing too": lambda x: sum(
        torch.linalg.vector_norm(values, order, (2, 3)) for values in (x, x * (x > 9)) for order in (1, 1.5, 2, 3)
    ),
    "a written slice": lambda x: assigned(x, slice(None), slice(0, 2), slice(None), slice(1, None, 2)),
    "a written index": lambda x: assigned(x, 0) + assigned(x, ..., -1),
    "memory of two names": written,
    "the least and the greatest": lambda x: sum(x.aminmax(dim=2)),
    "a gradient stopped by no_grad": stopped,
    "a gradient stopped by detach": lambda x: x * x.detach()[:, :, :1],
    "a product with a vector": lambda x: (x @ torch.arange(6).to(x)) * (torch.arange(8).to(x) @ x).mean(),
    "channels that were samples and cells": lambda x: F.conv2d(x.reshape(1, 8, 8, 6), torch.ones(1, 8, 3, 3).to(x)),
    "a norm of channels that were samples": lambda x: F.group_norm(x.reshape(1, 8, 8, 6), 4),
    "a root mean square of cells": lambda x: F.rms_norm(x, (8, 6)) + F.rms_norm(x, (6,)),
    "the greatest whole number": lambda x: x * (x * 4).long().amax((2, 3), keepdim=True) - (x * 4).int().amin(3, True),
    "distances of tokens": lambda x: torch.cdist(tokens(x), tokens(x)) + torch.cdist(tokens(x), x[:, :3, 0, :4]).sum(),
    "the greatest so far": lambda x: x.cummax(2)[0],
    "tokens pooled": lambda x: F.avg_pool1d(x.flatten(2), 3, 2, 1) * F.adaptive_max_pool1d(x.flatten(2), 1),
    "tokens cut and rolled": lambda x: x.flatten(2).roll(7, -1)[..., 5:40].flip(-1),
}


if DEVICE.type == "cuda":
    del FUNCTIONS["the least and the greatest"]  # PyTorch has no derivative of it there


@pytest.mark.parametrize("names", groups(FUNCTIONS), ids=lambda names: names[0])
@pytest.mark.long
def test_functions(names):
    check_beside({name: Function(FUNCTIONS[name]) for name in names}, IMAGES, grids=in_turn(MANY, 1))


class NoGrad(nn.Module):
    """Statistics that are taken without a gradient, and kept."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("mean", torch.zeros(1, 4, 1, 1))

    def forward(self, x):
        y = x * self.weight
        with torch.no_grad():
            self.mean.add_(y.mean((0, 2, 3), keepdim=True))
        return y - self.mean


class Twice(nn.Module):
    """A parameter for tiles, and for whole values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        whole = F.linear(x.mean((2, 3)), self.weight).relu()
        return F.conv2d(x, self.weight[..., None, None]) * whole[
            ..., None, None
        ] + self.weight.sum(), whole @ self.weight


class InLists(nn.Module):
    """Parameters that are read from a list and a dictionary of the module's own."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(4, 1, 1)) for _ in range(2))
        self.listed, self.named = [self.weight], {"other": self.other}

    def forward(self, x):
        return x * self.listed[0] + self.named["other"] * self.weight


def test_what_is_like_another_has_no_gradient():
    """Nor a part in what ranks send."""
    linear = nn.Linear(4, 4)
    check(Function(lambda x, m: torch.zeros_like(m(x.mean((2, 3)))) + x.amax((2, 3)), linear), IMAGES, grids=MANY[:1])


def test_running_statistics_of_instances():
    for training in (True, False):
        norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        check(nn.Sequential(nn.Conv2d(4, 4, 3), norm).train(training), (3, 4, 8, 6), grids=MANY)


def test_a_result_without_a_rule_is_refused_where_it_is_read():
    def deviations(x):
        y, _, scale = torch.ops.aten.native_group_norm(x, None, None, 2, 4, 48, 2, 1e-5)
        return y * scale.sum()

    with pytest.raises(nd.UserError, match=r"native_group_norm.* its result 2 is used, and only others have"):
        check(Function(deviations), IMAGES, grids=[(1, 1, 2)])


class Inner(nn.Module):
    """Operators computed whole between others that are not."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x):
        y = self.first(x)
        z = self.inner(y * self.scale)
        return self.last(z + y) + self.inner(y).mean((2, 3), keepdim=True)[:, :2], z.amax((1, 2, 3))


class Transformer(nn.Module):
    """Images to tokens, through layers, and back to images."""

    def __init__(self):
        super().__init__()
        self.patches, self.back = nn.Conv2d(4, 8, 2, 2), nn.ConvTranspose2d(8, 3, 2, 2)
        self.place = nn.Parameter(torch.randn(1, 12, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y = self.patches(x)
        found = self.norm(self.layer(tokens(y) + self.place))
        return self.back(found.transpose(1, 2).reshape(y.shape)), found[:, 0]


class Latents(nn.Module):
    """Whole queries look at tokens, tokens at what they have found, and a parameter is returned."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 5, 4))
        self.read = nn.MultiheadAttention(4, 2, batch_first=True)
        self.write = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        found, _ = self.read(self.latents.expand(x.shape[0], -1, -1), tokens(x), tokens(x))
        written, _ = self.write(tokens(x), found, found)
        return written.transpose(1, 2).reshape(x.shape), found, self.latents


class Codes(nn.Module):
    """Each cell takes the nearest of a few codes, with the gradient of what it was."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        cells = x.permute(0, 2, 3, 1).reshape(-1, 4)
        index = (cells.square().sum(1, keepdim=True) - 2 * cells @ self.codes.t() + self.codes.square().sum(1)).argmin(
            1
        )
        found = F.embedding(index, self.codes).reshape(x.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        return x + (found - x).detach(), F.mse_loss(found, x.detach()) + F.mse_loss(x, found.detach()), index


MODULES = {
    "latents": (Latents, {}),
    "codes": (Codes, {}),
    "buffers changed without a gradient": (NoGrad, {}),
    "parameters in lists": (InLists, {}),
    "a parameter used on tiles and on whole values": (Twice, {}),
    "an inner module that is computed whole": (Inner, {"gather_at": ["inner"]}),
    "a part of an inner module that is computed whole": (Inner, {"gather_at": ["inner.1", "last"]}),
    "all of it computed whole": (Inner, {"gather_at": [""]}),
    "tokens": (Transformer, {}),
    "tokens, a layer of which is computed whole": (Transformer, {"gather_at": ["layer.self_attn"]}),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.long
def test_a_module(name):
    torch.manual_seed(1)
    module, given = MODULES[name]
    check(module(), IMAGES, grids=in_turn(MANY, 1), **given)


class Tokens(nn.Sequential):
    """The gradient of the norm lies in memory as that of tokens does."""

    def forward(self, x):
        return super().forward(x).flatten(2).transpose(1, 2).contiguous()


@pytest.mark.parametrize("training", [True, False])
def test_one_sample_of_a_norm_in_any_memory_order(training):
    """PyTorch 2.13 has wrong gradients then, in evaluation."""
    check(Tokens(nn.BatchNorm2d(3)).train(training), (2, 3, 5, 4), grids=((2, 1, 1), (2, 2, 1)))


def test_statistics_of_float32_with_a_large_mean():
    torch.manual_seed(3)
    norms = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4))
    x = torch.randn(IMAGES) + 100
    expected = serial(norms.double(), [x.double()])
    gradients = [gradient.float() for gradient in expected["gradients"]]
    for found in distributed(norms.float(), [x], gradients, (2, 1, 2)):
        worst, where = difference(found, expected)
        assert worst < 1e-3, where


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.long
def test_a_batch_over_three_replicas(batch):
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)
    )
    check(nn.Sequential(module, nn.Flatten(), nn.Linear(4, 3)), (batch, 4, 5, 6), grids=((3, 1, 1), (3, 2, 1)))
    check(nn.Sequential(nn.InstanceNorm2d(4), nn.LayerNorm([4, 5, 6])), (batch, 4, 5, 6), grids=((3, 1, 2),))


def test_volumes_on_planes():
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.MaxPool3d(2), nn.Upsample(scale_factor=2, mode="trilinear")
    )
    for planes in (2, 3):
        check(module, (1, 2, 6, 5, 4), grids=((1, 1, 2), (1, 2, 1)), planes=planes)


def test_signals():
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv1d(3, 6, 5, 2, 2), nn.GroupNorm(3, 6), nn.GLU(1), nn.Upsample(scale_factor=3), nn.Conv1d(3, 1, 4)
    )
    check(module, (2, 3, 17), grids=((1, 1, 3), (2, 1, 2), (1, 5, 1)))
