"""User-defined gradients, which torch.export does not record: exact, or rejected on all ranks."""

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from case_selection import select_grids  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_runs import FunctionModule, check_module  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402

IMAGES, GRIDS = (2, 3, 9, 7), ((1, 1, 2), (1, 3, 1), (1, 2, 2), (2, 1, 2), (1, 5, 2))


class StraightThrough(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x, steps):
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class ReversedGradient(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, dy):
        return -ctx.scale * dy, None


class BoundedMaximum(torch.autograd.Function):
    """Maximum of two tensors, with a non-differentiable second result."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x, bound)
        above = x > bound
        ctx.mark_non_differentiable(above)
        return torch.maximum(x, bound), above

    @staticmethod
    def backward(ctx, dy, _):
        x, bound = ctx.saved_tensors
        return dy * ((x >= bound) | (dy < 0)), dy * (x < bound)


class MeanGradient(torch.autograd.Function):
    """Elementwise function, except for a number of elements that differs on a tile."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy / dy.numel()


class CentredImage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean((2, 3), keepdim=True)

    @staticmethod
    def backward(ctx, dy):
        return dy


class InPlaceDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return dy


class NestedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return StraightThrough.apply(x, 2) + 1

    @staticmethod
    def backward(ctx, dy):
        return dy.sign()


def call_bounded(x):
    larger, above = BoundedMaximum.apply(x, x.flip(3))
    return larger * (1 + above)


EXACT = {
    "rounded": lambda x: StraightThrough.apply(x * 1.5, 4.0),
    "reversed": lambda x: ReversedGradient.apply(x.sin(), 0.3),
    "two tensors, two results": call_bounded,
    "nested, under another name": NestedFunction.apply,
    "of replicated values": lambda x: x * MeanGradient.apply(x.mean((0, 2, 3), keepdim=True)),
    "checkpoint, reentrant": lambda x: checkpoint(
        lambda a: (a * a.mean((2, 3), keepdim=True)).sin(), x, use_reentrant=True
    ),
    "vmap": lambda x: torch.vmap(lambda a: a * a.sum())(x),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.long
def test_custom_gradients(name):
    conv = nn.Conv2d(3, 3, 3, padding=1)
    check_module(FunctionModule(lambda x, conv: conv(EXACT[name](conv(x))), conv), IMAGES, grids=select_grids(GRIDS))


def test_function_in_a_loss():
    def criterion(y, target):
        return F.mse_loss(StraightThrough.apply(y, 3.0), target)

    torch.manual_seed(0)
    image, target = torch.randn(IMAGES, dtype=torch.float64), torch.randn(IMAGES, dtype=torch.float64)

    original = nn.Conv2d(3, 3, 3, padding=1).double()

    def body(world):
        with nd.ProcessGrid(world) as grid:
            module = copy.deepcopy(original)
            model = ndt.distribute(module, IMAGES, grid)
            loss = model.loss(criterion, model(model.scatter(image)), model.scatter_target(target))
            loss.backward()
            return loss.detach(), module.weight.grad

    ((loss, gradient),) = loopback.run(1, body)
    for actual_loss, actual_gradient in loopback.run(4, body):
        torch.testing.assert_close(actual_loss, loss, rtol=1e-10, atol=0)
        torch.testing.assert_close(actual_gradient, gradient, rtol=1e-9, atol=1e-12)


def add_hook(x):
    y = x * 2
    y.register_hook(lambda dy: dy * 3)
    return y


def call_autograd(x):
    return x * torch.autograd.grad((x * x).sum(), x)[0]


REJECTED = {
    "a tile's numel": (MeanGradient.apply, "MeanGradient", "is not pointwise"),
    "the image's mean": (CentredImage.apply, "CentredImage", "is not pointwise"),
    "in place": (lambda x: InPlaceDouble.apply(x * 1), "InPlaceDouble", "modifies its arguments in place"),
    "a hook": (add_hook, "register_hook", "not recorded"),
    "a gradient": (call_autograd, "autograd.grad", "not recorded"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_functions(name):
    function, *parts = REJECTED[name]
    with pytest.raises(nd.UserError) as caught:
        check_module(FunctionModule(lambda x, conv: function(conv(x)), nn.Conv2d(3, 3, 3)), IMAGES, grids=[(1, 1, 2)])
    message = str(caught.value)
    assert all(part in message for part in (".py:", *parts)), message


class NonLinearBackward(torch.autograd.Function):
    """Function with a non-linear backward pass: it does not commute with sums of partial gradients."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return (3 * dy).tanh() + 0.1


@pytest.mark.parametrize("options", [{"scheme": "deep_halo(layers=3)"}, {"strips": 2}], ids=str)
def test_non_linear_backward_is_outside_segments(options):
    """In a segment, cells computed on several ranks would each contribute a partial gradient."""
    convs = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
    module = nn.Sequential(convs[0], FunctionModule(NonLinearBackward.apply), *convs[1:])
    check_module(module, IMAGES, grids=[(1, 3, 1), (1, 2, 2), (2, 2, 1)], **options)


def test_gathered_function():
    module = nn.Sequential(nn.Conv2d(3, 3, 3), FunctionModule(CentredImage.apply), nn.Conv2d(3, 2, 1))
    check_module(module, IMAGES, grids=[(1, 1, 2), (2, 2, 1)], gather_at=["1"])


def test_backward_hooks_are_rejected():
    module = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())
    module[1].register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,))
    with pytest.raises(nd.UserError, match="the module '1' has a backward hook"):
        check_module(module, IMAGES, grids=[(1, 1, 2)])


def test_unsupported_modules_are_rejected():
    scripted = nn.Sequential(nn.Conv2d(3, 3, 3), torch.jit.script(nn.ReLU()))
    for module, message in (
        (scripted, "'1' was created by torch.jit"),
        (nn.Sequential(nn.LazyConv2d(3, 3)), "is lazy"),
    ):
        with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError, match=message):
            ndt.distribute(module, IMAGES, grid)


def test_functions_of_other_threads_are_not_recorded():
    """Functions that other virtual ranks run during a capture are not recorded."""
    from threading import Thread

    from neondist.torch.ir.custom_gradients import record_autograd_functions

    x, gradients = torch.ones(3, requires_grad=True), []
    with record_autograd_functions() as calls:
        thread = Thread(target=lambda: gradients.append(torch.autograd.grad(StraightThrough.apply(x, 2.0).sum(), x)[0]))
        thread.start()
        thread.join()
    assert calls == []
    assert gradients[0].tolist() == [1.0, 1.0, 1.0]
