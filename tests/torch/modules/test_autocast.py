"""Autocast around modules on several ranks and inside of them: dtypes and results of one process."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import random_modules  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import FunctionModule, share_captures  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.errors import UserError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:an output of a distributed module", "ignore:Mismatch dtype")


def run_under_autocast(module, x, scatter=lambda tile: tile):
    """Return the outputs, and the dtype of the input's gradient."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = torch.utils._pytree.tree_leaves(module(scatter(x)))
    sum(y.float().square().sum() for y in outputs if y.requires_grad).backward()
    return outputs, x.grad.dtype


def check_dtypes(module, x, grid=(1, 2, 1), *, compare_values=True, **options):
    """Check the dtypes of outputs and gradients, and the values, for an input in float32 and in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        image = x.to(dtype)
        expected, of_gradient = run_under_autocast(copy.deepcopy(module), image)

        def body(world, image=image):
            with ProcessGrid(world, replicas=grid[0], rows=grid[1], cols=grid[2]) as ranks:
                model = ndt.distribute(copy.deepcopy(module), image.shape, ranks, dtype=torch.float32, **options)
                outputs, gradient = run_under_autocast(model, image, model.scatter)
                return [model.gather(y.detach()) for y in outputs], [y.dtype for y in outputs], gradient

        with share_captures():
            for outputs, dtypes, gradient in loopback.run(grid[0] * grid[1] * grid[2], body):
                assert dtypes == [y.dtype for y in expected]
                assert gradient == of_gradient
                for y, one_process in zip(outputs, expected, strict=True) if compare_values else ():
                    torch.testing.assert_close(y.float(), one_process.float(), rtol=0.05, atol=0.05)


def draw_modules(seed, count):
    """Return random modules of one image that compute in float32."""
    drawn = [random_modules.draw_module(seed, number) for number in range(count)]
    return [case for case in drawn if len(case.shapes) == 1 and case.spatial == 2 and ".double()" not in case.program()]


@pytest.mark.long
def test_dtypes_of_random_modules():
    checked = 0
    for case in draw_modules("autocast", 40):
        module, (x,) = case.module().float(), case.inputs()
        try:
            (
                run_under_autocast(copy.deepcopy(module), x.float()),
                run_under_autocast(copy.deepcopy(module), x.bfloat16()),
            )
        except Exception:  # no kernel for bfloat16, or no gradient
            continue
        try:
            check_dtypes(module, x, compare_values=False)  # modules may select elements by values after rounding
        except UserError:
            continue
        checked += 1
    assert checked >= 10


CASES = {
    "linear": ([nn.Linear(4 * 8 * 6, 5)], lambda x, linear: linear(x.flatten(1))),
    "layer norm": ([nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm([4, 8, 6])], lambda x, conv, norm: norm(conv(x))),
    "rms norm": ([nn.Conv2d(4, 4, 1), nn.RMSNorm([4, 8, 6])], lambda x, conv, norm: norm(conv(x))),
    "transposed": ([nn.ConvTranspose2d(4, 3, 3, stride=2)], lambda x, conv: conv(x)),
    "mean": ([], lambda x: (x.mean(), x.mean((2, 3)), x.var((2, 3)), x.softmax(2))),
    "product": ([], lambda x: (x @ x.mT, x.flatten(2) @ x.flatten(2).mT)),
    "spectrum": ([], lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=2), n=8, dim=2)),
    "complex": ([], lambda x: torch.view_as_complex(torch.stack([x @ x.mT, x @ x.mT], -1)).abs()),
    "conversion": ([nn.Conv2d(4, 4, 3)], lambda x, conv: (conv(x).float().mean((2, 3)), conv(x).float().mul_(2))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"scheme": "deep_halo"}], ids=str)
def test_dtypes_of_operators(name, options):
    modules, function = CASES[name]
    torch.manual_seed(0)
    check_dtypes(FunctionModule(function, *copy.deepcopy(modules)), torch.randn(2, 4, 8, 6), **options)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("grid", [(1, 1, 2), (2, 1, 3)])
def test_values_of_single_windows(transposed, grid):
    """Also with ranks without cells; the result of `detach` is recognised on them."""
    torch.manual_seed(0)
    if transposed:
        module = nn.ConvTranspose2d(4, 8, (3, 2), stride=(1, 3), padding=(1, 0))
    else:
        module = nn.Conv2d(4, 8, 3, stride=(1, 3), padding=(1, 3), dilation=(1, 3))
    x = torch.randn(2, 4, 5, 2, requires_grad=True)
    expected = module(x)
    target = torch.ones_like(expected)
    expected_gradients = torch.autograd.grad(nn.MSELoss()(expected, target), [x, module.weight])

    def body(world):
        with ProcessGrid(world, replicas=grid[0], rows=grid[1], cols=grid[2]) as ranks:
            local_module = copy.deepcopy(module)
            model = ndt.distribute(local_module, x.shape, ranks)
            with torch.autocast("cpu", torch.bfloat16):
                tile = model.scatter(x.detach()).requires_grad_()
                y = model(tile)
                model.loss(nn.MSELoss(), y, model.scatter_target(target)).backward()
            return model.gather(y.detach()), model.gather(tile.grad), local_module.weight.grad

    for results in loopback.run(grid[0] * grid[1] * grid[2], body):
        for y, y_expected in zip(results, (expected.detach(), *expected_gradients), strict=True):
            torch.testing.assert_close(y.float(), y_expected, rtol=0.05, atol=0.05 * y_expected.abs().max().item())


class SingleNorm(nn.Module):
    """Norm in float32, as in many public models; the dtype of the result is read from the argument."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm(4)

    def forward(self, x):
        y = self.conv(x).movedim(1, -1)
        with torch.autocast(y.device.type, enabled=False):
            z = self.norm(y.float()).to(y.dtype)
        return y, z, self.norm(y.float()).to(y.dtype)


def test_dtypes_that_modules_read():
    torch.manual_seed(0)
    check_dtypes(SingleNorm(), torch.randn(2, 4, 8, 6))


class Regions(nn.Module):
    """Module that sets autocast itself."""

    def __init__(self, device, *region):
        super().__init__()
        self.first, self.second, self.region = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), region
        self.device = device

    def forward(self, x):
        y = self.first(x)
        with torch.autocast(self.device, *self.region[:1], enabled=len(self.region) > 0):
            z = self.second(y.float() if self.device == "cpu" else y)
        return z, self.first(z.to(x.dtype))


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("region", [("cpu",), ("cpu", torch.float16), ("cuda",)], ids=str)
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"scheme": "deep_halo"}], ids=str)
def test_autocast_regions_of_modules(region, options):
    """Autocast around the pass has no effect in these regions."""
    torch.manual_seed(0)
    check_dtypes(Regions(*region), torch.randn(2, 4, 8, 6), grid=(1, 2, 2), **options)
