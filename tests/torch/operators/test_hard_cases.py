"""Corner cases, many of them from random modules: virtual ranks against a single process, in float64."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from case_selection import select_grids  # noqa: E402
from test_operators import to_tokens  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import (  # noqa: E402
    DEVICE,
    FunctionModule,
    check_module,
    check_modules,
    find_difference,
    run_distributed,
    run_serial,
    split_into_groups,
)

import neondist as nd  # noqa: E402

IMAGES, GRIDS = (2, 4, 8, 6), ((1, 2, 2), (1, 1, 3), (2, 1, 2), (1, 5, 1))


def assign(x, *index):
    x = x * 1.0
    x[index] = 0.5
    return x * 2


def write_in_place(x):
    """Write in place, through one name and through two aliases of the same memory."""
    y = (x + 1).sub_(x * x)
    y.add_(y.gt(0))
    z = y.flatten()
    y.mul_(3)
    z.add_(2)
    return y * z.view_as(x)


def scale_by_constant(x):
    with torch.no_grad():
        mean = x.mean((2, 3), keepdim=True)
        activated = (x + 1).relu()
    return x * mean + activated * x


def apply_dynamic_weights(x):
    """Compute weights from cells of several ranks."""
    weights = x.flatten()[:4]
    y = F.conv2d(x, weights.reshape(4, 1, 1, 1), weights, groups=4) + F.conv_transpose2d(
        x, weights.reshape(4, 1, 1, 1), weights, groups=4
    )
    y = (
        y
        + F.group_norm(x, 2, weights, weights)
        + F.instance_norm(x, weight=weights, bias=weights)
        + F.prelu(x, weights)
    )
    return F.linear(F.layer_norm(y, (6,), x.flatten()[:6]), x.flatten()[:12].reshape(2, 6), weights[:2])


def unpool(x):
    y, index = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    return F.max_unpool2d(y, index, 3, 2, 1, output_size=x.shape[2:]) * x + y.sum() * (index % 3).sum()


def apply_masked_attention(x):
    """Attend with a mask that leaves some queries without keys."""
    scores = to_tokens(x) @ x.flatten(2)
    return F.scaled_dot_product_attention(to_tokens(x), to_tokens(x), to_tokens(x), scores > 3)


def apply_masked_softmax(x):
    """Apply softmax along a cut dimension with fully masked rows."""
    scores = x.masked_fill(x.amax(3, keepdim=True) > 1.5, -torch.inf)
    return torch.ops.aten._safe_softmax(scores, 3) + torch.ops.aten._safe_softmax(scores, 2)


FUNCTIONS = {
    "weights computed from cells": apply_dynamic_weights,
    "max-pool indices": unpool,
    "queries without keys": apply_masked_attention,
    "softmax of masked rows": apply_masked_softmax,
    "interpolated tokens, linear": lambda x: F.interpolate(x.flatten(2), size=10, mode="linear"),
    "interpolated tokens, nearest": lambda x: F.interpolate(x.flatten(2), size=9) * 2,
    "circular padding of a crop": lambda x: F.pad(x, (-1, 1, 2, -3), mode="circular"),
    "shared slope": lambda x: F.prelu(x, torch.tensor(0.3).double()),
    "all channels dropped": lambda x: F.dropout2d(x, 1.0) + x,
    "empty slice": lambda x: torch.cat([x[:, :, :0], x[:, :, 3:].sin(), x[:, :, :3]], 2) + x[:, :, 8:].sum(),
    "no known derivative": lambda x: torch.special.bessel_j0(x[:, :, :2]) * x[:, :, :2],
    "one index of a cut dimension": lambda x: x[:, :, 3] + x[:, :, -1],
    "all indices of a cut dimension": lambda x: torch.stack(x.unbind(2)[::-1], 2) * x,
    "indexed rows": lambda x: x[:, :, torch.tensor([1, 1, 7, 0])],
    "index_select": lambda x: x.index_select(3, torch.tensor([1, 5, 1])),
    "empty split": lambda x: x.amax((1, 2, 3)).split([2, 0])[0],
    "in-place write after a sum": lambda x: F.cosine_similarity(x, x.flip(1), 1),
    "an extent of one": lambda x: x[:, :, 2:3] * x[:, :, :, 1:2],
    "a cut extent of one, reshaped": lambda x: x[:, :, 2:3].reshape(2, 4, 6).reshape(2, 2, 1, 2, 1, 6),
    "a cut extent of one, squeezed": lambda x: F.max_pool2d(x, (8, 1)).squeeze() + 1,
    "a cut extent of one, flattened": lambda x: F.max_pool2d(x, (8, 6)).flatten(1),
    "a cut extent of one, expanded": lambda x: F.conv2d(x, torch.ones(4, 1, 8, 1).to(x), groups=4).expand(2, 4, 3, 6),
    "repeated cells": lambda x: x.repeat(1, 1, 2, 3).repeat_interleave(2, 3),
    "amax of a cut extent of one": lambda x: F.max_pool2d(x, (8, 6)).amax(3),
    "broadcast, one result used": lambda x: torch.broadcast_tensors(x.mean((2, 3), True).sigmoid(), x)[1] * 2,
    "a running sum": lambda x: x.cumsum(2) + x.cumsum(3),
    "sorted rows": lambda x: x.sort(2)[0] * x.argmax(3, keepdim=True),
    "reshape across cells": lambda x: x.reshape(2, 6, 8, 4) * 2,
    "a causal attention": lambda x: F.scaled_dot_product_attention(
        to_tokens(x), to_tokens(x), to_tokens(x), is_causal=True
    ),
    "a transposed sum": lambda x: x[:, :, :6] + x[:, :, :6].transpose(2, 3),
    "a transposed stack": lambda x: torch.cat([x[:, :, :6], x[:, :, :6].transpose(2, 3)], 2),
    "zero deviation": lambda x: x.std((2, 3), correction=0) + (x * 0).std(1, correction=0).sum(),
    "norms, including zero": lambda x: sum(
        torch.linalg.vector_norm(values, order, (2, 3)) for values in (x, x * (x > 9)) for order in (1, 1.5, 2, 3)
    ),
    "a written slice": lambda x: assign(x, slice(None), slice(0, 2), slice(None), slice(1, None, 2)),
    "a written index": lambda x: assign(x, 0) + assign(x, ..., -1),
    "aliased memory": write_in_place,
    "aminmax": lambda x: sum(x.aminmax(dim=2)),
    "a gradient stopped by no_grad": scale_by_constant,
    "a gradient stopped by detach": lambda x: x * x.detach()[:, :, :1],
    "a product with a vector": lambda x: (x @ torch.arange(6).to(x)) * (torch.arange(8).to(x) @ x).mean(),
    "channels that were samples and cells": lambda x: F.conv2d(x.reshape(1, 8, 8, 6), torch.ones(1, 8, 3, 3).to(x)),
    "a norm of channels that were samples": lambda x: F.group_norm(x.reshape(1, 8, 8, 6), 4),
    "rms norm of cells": lambda x: F.rms_norm(x, (8, 6)) + F.rms_norm(x, (6,)),
    "integer amax": lambda x: x * (x * 4).long().amax((2, 3), keepdim=True) - (x * 4).int().amin(3, True),
    "distances of tokens": lambda x: (
        torch.cdist(to_tokens(x), to_tokens(x)) + torch.cdist(to_tokens(x), x[:, :3, 0, :4]).sum()
    ),
    "products, including zeros": lambda x: (
        sum(
            product.sum()
            for z in (x, x * (x > -1), x * (x != x[0, 0, 2, 3]))
            for product in (
                z.prod(),
                z.prod(2),
                z.prod(3, True),
                z.flatten(2).prod(2),
                (z > 0).prod(2),
                z.mean(2).prod(0),
            )
        )
        * x
    ),
    "a filled diagonal": lambda x: (x.flatten(1) @ x.flatten(1).T).fill_diagonal_(-torch.inf).softmax(1).sum() * x,
    "combinations": lambda x: torch.combinations(x[0, 0, 0], 3) * torch.combinations(x[0, 0, :4, 0], 3, True)[0],
    "running maximum": lambda x: x.cummax(2)[0],
    "tokens pooled": lambda x: F.avg_pool1d(x.flatten(2), 3, 2, 1) * F.adaptive_max_pool1d(x.flatten(2), 1),
    "tokens sliced and rolled": lambda x: x.flatten(2).roll(7, -1)[..., 5:40].flip(-1),
}


if DEVICE.type == "cuda":
    del FUNCTIONS["aminmax"]  # PyTorch has no derivative of it there


@pytest.mark.parametrize("names", split_into_groups(FUNCTIONS), ids=lambda names: names[0])
@pytest.mark.long
def test_functions(names):
    check_modules({name: FunctionModule(FUNCTIONS[name]) for name in names}, IMAGES, grids=select_grids(GRIDS, 1))


class NoGradStatistics(nn.Module):
    """Statistics computed without gradients and kept in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("mean", torch.zeros(1, 4, 1, 1))

    def forward(self, x):
        y = x * self.weight
        with torch.no_grad():
            self.mean.add_(y.mean((0, 2, 3), keepdim=True))
        return y - self.mean


class SharedWeight(nn.Module):
    """Parameter used on tiles and on replicated values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        replicated = F.linear(x.mean((2, 3)), self.weight).relu()
        return F.conv2d(x, self.weight[..., None, None]) * replicated[
            ..., None, None
        ] + self.weight.sum(), replicated @ self.weight


class ContainedParameters(nn.Module):
    """Parameters read from a list and a dictionary attribute."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(4, 1, 1)) for _ in range(2))
        self.parameters_list, self.parameters_dict = [self.weight], {"other": self.other}

    def forward(self, x):
        return x * self.parameters_list[0] + self.parameters_dict["other"] * self.weight


def test_zeros_like_has_no_gradient():
    """Nor messages."""
    linear = nn.Linear(4, 4)
    check_module(
        FunctionModule(lambda x, m: torch.zeros_like(m(x.mean((2, 3)))) + x.amax((2, 3)), linear),
        IMAGES,
        grids=GRIDS[:1],
    )


def test_running_statistics_of_instances():
    for training in (True, False):
        norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        check_module(nn.Sequential(nn.Conv2d(4, 4, 3), norm).train(training), (3, 4, 8, 6), grids=GRIDS)


def test_unsupported_results_are_rejected_on_use():
    def compute_deviations(x):
        y, _, scale = torch.ops.aten.native_group_norm(x, None, None, 2, 4, 48, 2, 1e-5)
        return y * scale.sum()

    with pytest.raises(nd.UserError, match=r"native_group_norm.* its result 2 is used, but its rule does not compute"):
        check_module(FunctionModule(compute_deviations), IMAGES, grids=[(1, 1, 2)])


class GatheredModules(nn.Module):
    """Operators computed on whole arrays between others on tiles."""

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
    """Transformer over image patches, with an image and a token as outputs."""

    def __init__(self):
        super().__init__()
        self.patches, self.unpatch = nn.Conv2d(4, 8, 2, 2), nn.ConvTranspose2d(8, 3, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 12, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y = self.patches(x)
        encoded = self.norm(self.layer(to_tokens(y) + self.position))
        return self.unpatch(encoded.transpose(1, 2).reshape(y.shape)), encoded[:, 0]


class Latents(nn.Module):
    """Cross-attention of latents to tokens and back; a parameter is one of the outputs."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 5, 4))
        self.read = nn.MultiheadAttention(4, 2, batch_first=True)
        self.write = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        latents, _ = self.read(self.latents.expand(x.shape[0], -1, -1), to_tokens(x), to_tokens(x))
        image, _ = self.write(to_tokens(x), latents, latents)
        return image.transpose(1, 2).reshape(x.shape), latents, self.latents


class Codes(nn.Module):
    """Vector quantisation of each cell with a straight-through gradient."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        cells = x.permute(0, 2, 3, 1).reshape(-1, 4)
        index = (cells.square().sum(1, keepdim=True) - 2 * cells @ self.codes.t() + self.codes.square().sum(1)).argmin(
            1
        )
        codes = F.embedding(index, self.codes).reshape(x.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        return x + (codes - x).detach(), F.mse_loss(codes, x.detach()) + F.mse_loss(x, codes.detach()), index


MODULES = {
    "latents": (Latents, {}),
    "codes": (Codes, {}),
    "buffers changed without a gradient": (NoGradStatistics, {}),
    "parameters in lists": (ContainedParameters, {}),
    "a parameter used on tiles and on replicated values": (SharedWeight, {}),
    "an inner module that is computed whole": (GatheredModules, {"gather_at": ["inner"]}),
    "a part of an inner module that is computed whole": (GatheredModules, {"gather_at": ["inner.1", "last"]}),
    "all of it computed whole": (GatheredModules, {"gather_at": [""]}),
    "tokens": (Transformer, {}),
    "tokens, a layer of which is computed whole": (Transformer, {"gather_at": ["layer.self_attn"]}),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.long
def test_modules(name):
    torch.manual_seed(1)
    module, options = MODULES[name]
    check_module(module(), IMAGES, grids=select_grids(GRIDS, 1), **options)


class Tokens(nn.Sequential):
    """Norm whose gradient has the memory format of tokens."""

    def forward(self, x):
        return super().forward(x).flatten(2).transpose(1, 2).contiguous()


@pytest.mark.parametrize("training", [True, False])
def test_norm_of_one_sample_in_any_memory_format(training):
    """In evaluation, PyTorch 2.13 computes wrong gradients for some of them."""
    check_module(Tokens(nn.BatchNorm2d(3)).train(training), (2, 3, 5, 4), grids=((2, 1, 1), (2, 2, 1)))


def test_statistics_of_float32_with_a_large_mean():
    torch.manual_seed(3)
    norms = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4))
    x = torch.randn(IMAGES) + 100
    expected = run_serial(norms.double(), [x.double()])
    gradients = [gradient.float() for gradient in expected["gradients"]]
    for actual in run_distributed(norms.float(), [x], gradients, (2, 1, 2)):
        worst, location = find_difference(actual, expected)
        assert worst < 1e-3, location


class PermutedNorm(nn.Module):
    """Batch norm of a row of cells with the strides of a permuted tensor, or of its copy."""

    def __init__(self, copied):
        super().__init__()
        self.copied, self.norm = copied, nn.BatchNorm2d(4)

    def forward(self, x):
        x = x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
        return self.norm(x.contiguous() if self.copied else x)


@pytest.mark.parametrize("grid", [(1, 1, 2), (1, 1, 3), (2, 1, 2)])
def test_batch_norm_of_permuted_rows(grid):
    """Compare with a copy: PyTorch's own gradients are wrong for these strides."""
    torch.manual_seed(3)
    module, inputs = PermutedNorm(copied=False).double(), [torch.randn(2, 4, 1, 8, dtype=torch.float64)]
    copied = PermutedNorm(copied=True).double()
    copied.load_state_dict(module.state_dict())
    expected = run_serial(copied, inputs)
    for actual in run_distributed(module, inputs, expected["gradients"], grid):
        worst, location = find_difference(actual, expected)
        assert worst < 1e-12, location


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.long
def test_batch_over_three_replicas(batch):
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)
    )
    check_module(nn.Sequential(module, nn.Flatten(), nn.Linear(4, 3)), (batch, 4, 5, 6), grids=((3, 1, 1), (3, 2, 1)))
    check_module(nn.Sequential(nn.InstanceNorm2d(4), nn.LayerNorm([4, 5, 6])), (batch, 4, 5, 6), grids=((3, 1, 2),))


def test_volumes_on_planes():
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.MaxPool3d(2), nn.Upsample(scale_factor=2, mode="trilinear")
    )
    for planes in (2, 3):
        check_module(module, (1, 2, 6, 5, 4), grids=((1, 1, 2), (1, 2, 1)), planes=planes)


def test_signals():
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv1d(3, 6, 5, 2, 2), nn.GroupNorm(3, 6), nn.GLU(1), nn.Upsample(scale_factor=3), nn.Conv1d(3, 1, 4)
    )
    check_module(module, (2, 3, 17), grids=((1, 1, 3), (2, 1, 2), (1, 5, 1)))


def test_conversions_to_integers_and_to_the_same_dtype():
    """Only the former has no gradient."""

    def function(x):
        mean = x.mean((2, 3), keepdim=True)
        return F.avg_pool2d((x * (3 * x).long()).double(), 3, 1, 1) + x * mean.double()

    check_module(FunctionModule(function), (1, 2, 7, 6), grids=((1, 2, 1), (1, 1, 3)))


def test_features_of_one_row_on_several_ranks():
    """Ranks without cells have an empty part of the weights."""
    module = FunctionModule(lambda x, linear: linear(x.flatten()), nn.Linear(8, 8))
    check_module(module, (1, 1, 1, 8), grids=((1, 3, 2), (1, 3, 1)))


SPECIAL_VALUES = {
    "inf": [torch.inf],
    "-inf": [-torch.inf],
    "NaN": [torch.nan],
    "zero": [0.0],
    "two zeros": [0.0, 0.0],
    "inf and zero": [torch.inf, 0.0],
    "infinities": [torch.inf, -torch.inf],
}
OPERATIONS = {
    **{name: lambda x, name=name: getattr(x, name)() for name in ("prod", "max", "min", "amax", "amin", "var", "std")},
    **{
        f"{name} of rows": lambda x, name=name: getattr(x, name)(2)
        for name in ("prod", "amax", "amin", "var", "cumsum", "cumprod")
    },
    "prod of columns": lambda x: x.prod(3, keepdim=True),
    "slopes of channels": lambda x: F.prelu(x, torch.tensor([0.2, -0.3, 0.4]).to(x)),
    "means of bins": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "means of small bins": lambda x: F.interpolate(x, size=(5, 4), mode="area"),
    "filters of different lengths": lambda x: F.interpolate(x, size=(7, 5), mode="bicubic", antialias=True),
    "maximum norm": lambda x: torch.linalg.vector_norm(x, torch.inf, 2),
    **{
        f"renorm {p} {dim}": lambda x, p=p, dim=dim: torch.renorm(x, p, dim, 3.0)
        for p in (0.5, 1, 2, torch.inf)
        for dim in range(-1, 3)
    },
    "minimum norm": lambda x: torch.linalg.vector_norm(x, -torch.inf, (2, 3)),
}


@pytest.mark.parametrize("name", SPECIAL_VALUES)
def test_operations_on_special_values(name):
    """Give PyTorch's results and gradients, finite or not, in all tiles."""
    x = torch.linspace(-1.1, 1.7, 2 * 3 * 8 * 6, dtype=torch.float64).reshape(2, 3, 8, 6)
    for at, value in enumerate(SPECIAL_VALUES[name]):
        x[0, 1, 3 + at, 2] = value
    check_modules({key: FunctionModule(run) for key, run in OPERATIONS.items()}, x, grids=GRIDS[:2])
