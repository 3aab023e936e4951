"""Gradients of a user's own, which torch.export does not record: exact, or refused on all ranks."""

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_runs import Function, check, in_turn  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402

IMAGES, GRIDS = (2, 3, 9, 7), ((1, 1, 2), (1, 3, 1), (1, 2, 2), (2, 1, 2), (1, 5, 2))


class StraightThrough(torch.autograd.Function):
    """Its gradient is not its derivative, which is zero."""

    @staticmethod
    def forward(ctx, x, steps):
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, dy):
        return -ctx.scale * dy, None


class Bounded(torch.autograd.Function):
    """Function of two tensors, with a second result that has no gradient."""

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
    """Function of one index each, except for a number that a tile does not know."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy / dy.numel()


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean((2, 3), keepdim=True)

    @staticmethod
    def backward(ctx, dy):
        return dy


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return dy


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return StraightThrough.apply(x, 2) + 1

    @staticmethod
    def backward(ctx, dy):
        return dy.sign()


def bounded(x):
    larger, above = Bounded.apply(x, x.flip(3))
    return larger * (1 + above)


EXACT = {
    "rounded": lambda x: StraightThrough.apply(x * 1.5, 4.0),
    "reversed": lambda x: Reversed.apply(x.sin(), 0.3),
    "two tensors, two results": bounded,
    "nested, by a name of its own": Nested.apply,
    "of what every rank has": lambda x: x * MeanGradient.apply(x.mean((0, 2, 3), keepdim=True)),
    "checkpoint, reentrant": lambda x: checkpoint(
        lambda a: (a * a.mean((2, 3), keepdim=True)).sin(), x, use_reentrant=True
    ),
    "vmap": lambda x: torch.vmap(lambda a: a * a.sum())(x),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.long
def test_a_functions_own_gradient(name):
    conv = nn.Conv2d(3, 3, 3, padding=1)
    check(Function(lambda x, conv: conv(EXACT[name](conv(x))), conv), IMAGES, grids=in_turn(GRIDS))


def test_a_function_in_a_loss():
    def criterion(y, target):
        return F.mse_loss(StraightThrough.apply(y, 3.0), target)

    torch.manual_seed(0)
    image, target = torch.randn(IMAGES, dtype=torch.float64), torch.randn(IMAGES, dtype=torch.float64)

    build = nn.Conv2d(3, 3, 3, padding=1).double()

    def body(world):
        with nd.ProcessGrid(world) as grid:
            module = copy.deepcopy(build)
            model = ndt.distribute(module, IMAGES, grid)
            loss = model.loss(criterion, model(model.scatter(image)), model.scatter_target(target))
            loss.backward()
            return loss.detach(), module.weight.grad

    ((loss, gradient),) = loopback.run(1, body)
    for other, found in loopback.run(4, body):
        torch.testing.assert_close(other, loss, rtol=1e-10, atol=0)
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-12)


def hooked(x):
    y = x * 2
    y.register_hook(lambda dy: dy * 3)
    return y


def slope(x):
    return x * torch.autograd.grad((x * x).sum(), x)[0]


REFUSED = {
    "a tile's numel": (MeanGradient.apply, "MeanGradient", "one index each"),
    "the image's mean": (Centred.apply, "Centred", "one index each"),
    "in place": (lambda x: InPlace.apply(x * 1), "InPlace", "modifies its arguments in place"),
    "a hook": (hooked, "register_hook", "not recorded"),
    "a gradient": (slope, "autograd.grad", "not recorded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    function, *words = REFUSED[name]
    with pytest.raises(nd.UserError) as caught:
        check(Function(lambda x, conv: function(conv(x)), nn.Conv2d(3, 3, 3)), IMAGES, grids=[(1, 1, 2)])
    message = str(caught.value)
    assert all(word in message for word in (".py:", *words)), message


class Squashed(torch.autograd.Function):
    """Its backward is not linear: parts of a gradient give something else than their sum."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return (3 * dy).tanh() + 0.1


@pytest.mark.parametrize("how", [{"scheme": "deep_halo(layers=3)"}, {"strips": 2}], ids=str)
def test_a_backward_that_is_not_linear_is_in_no_segment(how):
    """There, cells that several ranks compute give each a part of a gradient."""
    convs = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
    module = nn.Sequential(convs[0], Function(Squashed.apply), *convs[1:])
    check(module, IMAGES, grids=[(1, 3, 1), (1, 2, 2), (2, 2, 1)], **how)


def test_a_function_that_is_computed_whole():
    module = nn.Sequential(nn.Conv2d(3, 3, 3), Function(Centred.apply), nn.Conv2d(3, 2, 1))
    check(module, IMAGES, grids=[(1, 1, 2), (2, 2, 1)], gather_at=["1"])


def test_a_hook_of_the_way_back_is_refused():
    module = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())
    module[1].register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,))
    with pytest.raises(nd.UserError, match="the module '1' has a backward hook"):
        check(module, IMAGES, grids=[(1, 1, 2)])


def test_modules_that_cannot_be_captured():
    scripted = nn.Sequential(nn.Conv2d(3, 3, 3), torch.jit.script(nn.ReLU()))
    for module, words in ((scripted, "'1' was made by torch.jit"), (nn.Sequential(nn.LazyConv2d(3, 3)), "is lazy")):
        with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError, match=words):
            ndt.distribute(module, IMAGES, grid)


def test_other_threads_apply_functions_as_ever():
    """While one captures, virtual ranks run: the Functions of their passes are not recorded."""
    from threading import Thread

    from neondist.torch.ir.custom_gradients import record_functions

    x, found = torch.ones(3, requires_grad=True), []
    with record_functions() as calls:
        thread = Thread(target=lambda: found.append(torch.autograd.grad(StraightThrough.apply(x, 2.0).sum(), x)[0]))
        thread.start()
        thread.join()
    assert calls == []
    assert found[0].tolist() == [1.0, 1.0, 1.0]
