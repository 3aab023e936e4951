"""Modules that cannot be captured or distributed: located messages, and the remedies that they suggest."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from test_torch_bad_input import RANKS, check_rejected, collect_messages  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch_training import IMAGES, Net, build_seeded, draw_tensor  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.torch.capture.tracing import suspend_hooks_and_modes  # noqa: E402


class FunctionModule(nn.Module):
    """Module that calls a function; it is defined here because error messages name its file."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class ConvolvedFunction(nn.Module):
    """Convolution followed by a module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3), FunctionModule(function))

    def forward(self, x):
        return self.body(x)


DATA_DEPENDENT = {
    "if": lambda x: x * 2 if x.sum() > 0 else x,
    "item": lambda x: x[..., : int(x.amax().item())],
    "nonzero": lambda x: x[..., : x.nonzero().shape[0]],
    "float": lambda x: x / float(x.max()),
    "mask": lambda x: x[x > 0],
    "numpy": lambda x: torch.from_numpy(x.numpy()) * 2,
    "format": lambda x: x * len(f"{x.mean():.3f}"),
    "list": lambda x: x * x.sum().tolist(),
    "repeats": lambda x: x.repeat_interleave(x[0, 0, 0].long().abs(), -1),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
@pytest.mark.long
def test_data_dependent_code(name):
    for message in collect_messages(lambda grid: ndt.distribute(ConvolvedFunction(DATA_DEPENDENT[name]), IMAGES, grid)):
        assert "test_capture_errors.py:" in message, message
        assert "not on their values" in message, message
        assert len(message.splitlines()) == 1
        assert len(message) < 600


def test_assigned_tensor_data():
    def body(grid):
        ndt.distribute(ConvolvedFunction(lambda x: setattr(x, "data", 2 * x)), IMAGES, grid)

    check_rejected(body, "aten.copy_.default modifies a tensor in place under torch.no_grad() or through .detach()")


def differentiate_dual_tensor(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones_like(x)).sin()).tangent


UNRECORDED = {
    "autograd.grad": (lambda x: torch.func.grad(torch.sum)(x), "compute the derivative with ordinary operators"),
    "hooks": (lambda x: x.register_hook(torch.neg) and x, "use a torch.autograd.Function instead"),
    "jvp": (lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1], "compute the derivative with ordinary operators"),
    "jacfwd": (lambda x: torch.func.jacfwd(torch.sin)(x[0, 0, 0]), "compute the derivative with ordinary operators"),
    "dual tensors": (differentiate_dual_tensor, "compute the derivative with ordinary operators"),
    "backward": (lambda x: x.sum().backward() or x, "compute the derivative with ordinary operators"),
    "addresses": (lambda x: x + x.data_ptr(), "compute with ordinary operators instead"),
    "copies": (lambda x: copy.deepcopy(nn.Conv2d(3, 3, 1))(x), "compute with ordinary operators instead"),
    "functionalisation": (torch.func.functionalize(torch.sin), "compute with ordinary operators instead"),
    "conversion": (lambda x: nn.Conv2d(2, 2, 1).half()(x.half()), "convert modules before the forward pass"),
    "branches": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "use torch.where instead"),
    "number of classes": (lambda x: F.one_hot((x > 0).long()), "pass num_classes"),
    "packed sequences": (
        lambda x: nn.utils.rnn.pack_padded_sequence(x[0], [4, 4, 2], batch_first=True).data,
        "pass padded sequences to the recurrent layer",
    ),
    "distributions": (torch.poisson, "use torch.rand, randn, randint, bernoulli, multinomial or randperm instead"),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_remedies(name):
    function, remedy = UNRECORDED[name]
    for message in collect_messages(lambda grid: ndt.distribute(ConvolvedFunction(function), IMAGES, grid)):
        assert remedy in message
        assert "gather_at" not in message
        assert len(message.splitlines()) == 1
    vectorised = ConvolvedFunction(torch.vmap(torch.sin))
    assert not any(collect_messages(lambda grid: ndt.distribute(vectorised, IMAGES, grid))), "a transform is left open"


def test_conversions_without_effect_are_captured():
    module = ConvolvedFunction(lambda x: module.body[0].to(x.device).float()(x))
    assert not any(collect_messages(lambda grid: ndt.distribute(module, IMAGES, grid)))


def test_writes_through_windows():
    """PyTorch's functionalisation would set the cells outside of all windows to zero."""

    def write(x):
        y = x * 1.0
        y.unfold(2, 2, 3).transpose(1, 2).mul_(2)
        return y

    check_rejected(
        lambda grid: ndt.distribute(ConvolvedFunction(write), IMAGES, grid),
        "a write through Tensor.unfold is not recorded; write to slices instead",
    )


@pytest.mark.parametrize("prepare", [lambda x: x, lambda x: x.mean((2, 3))], ids=["tiles", "replicated"])
def test_memory_layouts(prepare):
    check_rejected(
        lambda grid: ndt.distribute(
            ConvolvedFunction(lambda x: torch.as_strided(prepare(x), (2, 2), (1, 3))), IMAGES, grid
        ),
        "aten.as_strided.default in module 'body.1' cannot be distributed: its memory layout differs from that in one",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (5, 1)}, "antialias to a single column"),
        ({"scale_factor": (0.5, 1.05)}, "copies the input but rescales its gradient; pass size instead"),
    ],
)
def test_incorrect_antialiasing_in_pytorch(options, message):
    interpolate = ConvolvedFunction(lambda x: F.interpolate(x, mode="bilinear", antialias=True, **options))
    check_rejected(lambda grid: ndt.distribute(interpolate, IMAGES, grid), message)


def test_unregistered_trainable_tensor():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(3, 1, 1, requires_grad=True)

        def forward(self, x):
            return x * self.scale

    check_rejected(
        lambda grid: ndt.distribute(Net(), IMAGES, grid),
        "aten.mul.Tensor receives a tensor that requires grad but is not a",
    )


def test_python_errors_of_the_module():
    def body(grid):
        ndt.distribute(ConvolvedFunction(lambda x: x.view(5, -1)), IMAGES, grid)

    for message in collect_messages(body):
        assert "test_capture_errors.py:" in message
        assert "FunctionModule cannot be captured" in message or "ConvolvedFunction cannot be captured" in message
        assert "shape '[5, -1]' is invalid" in message
        assert "values" not in message


@pytest.mark.parametrize(
    ("convert", "name"),
    [
        (lambda y: (y for _ in range(2)), "generator"),
        (lambda y: {"image": y, "function": len}, "builtin_function_or_method"),
        (lambda y: [torch.distributions.Normal(y, 1.0)], "torch.distributions.normal.Normal"),
    ],
)
def test_outputs_of_other_classes(convert, name):
    check_rejected(
        lambda grid: ndt.distribute(FunctionModule(convert), IMAGES, grid),
        f"shape {IMAGES}: the output contains an object of class {name}; return tensors, or tuples, lists, dictionaries"
        " or dataclasses of tensors",
    )


@torch.library.custom_op("tests::smoothed", mutates_args=())
def smooth(x: torch.Tensor) -> torch.Tensor:
    return x + x.roll(1, 2)


@smooth.register_fake
def smooth_fake(x):
    return torch.empty_like(x)


UNSUPPORTED = {
    "eigvals": lambda x: torch.linalg.eigvals(x[..., :7, :]).abs(),
    "histc": lambda x: x.histc(4),
    "smoothed": lambda x: smooth(x),
}


SUPPORTED = {
    "grid_sample": lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1), align_corners=False),
    "sort": lambda x: x.flatten(2).sort(-1)[0],
    "cumsum": lambda x: x.cumsum(2),
}


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_operators_without_a_rule_are_located(name):
    def body(grid):
        with pytest.raises(ndt.UnsupportedOperator) as caught:
            ndt.distribute(ConvolvedFunction(UNSUPPORTED[name]), IMAGES, grid)
        error = caught.value
        assert error.module == "body.1"
        assert "test_capture_errors.py:" in error.source
        assert name in error.operator
        message = str(error)
        assert message.startswith(error.source)
        assert "pass gather_at=['body.1'] to compute that module on whole arrays on every rank" in message
        raise error

    check_rejected(body, "in module 'body.1' cannot be distributed")


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("name", [*UNSUPPORTED, *SUPPORTED])
def test_suggested_remedy_works(name):
    module = build_seeded(lambda: ConvolvedFunction((UNSUPPORTED | SUPPORTED)[name]))
    expected = module(draw_tensor(*IMAGES))

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(module, IMAGES, grid, gather_at=["body.1"])
            return model.gather(model(model.scatter(draw_tensor(*IMAGES))))

    for actual in loopback.run(RANKS, body):
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("shared_captures")
def test_gather_at_suggests_similar_names():
    def body(grid):
        ndt.distribute(build_seeded(Net), IMAGES, grid, gather_at=["firts"])

    check_rejected(body, "gather_at: the module has no submodule named 'firts'; did you mean 'first'?")
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.ConfigError, match=r"got a string; use \['first'\]"):
        ndt.distribute(build_seeded(Net), IMAGES, grid, gather_at="first")


def trace_model(kind, model, x):
    """Trace or transform a distributed module."""
    if kind == "jit":
        torch.jit.trace(model, x)
    elif kind == "export":
        torch.export.export(model, (x,))
    elif kind == "jvp":
        torch.func.jvp(model, (x,), (torch.ones_like(x),))
    else:
        torch.func.vmap(model)(x[None])


@pytest.mark.parametrize("kind", ["jit", "export", "jvp", "vmap"])
def test_distributed_modules_cannot_be_traced(kind):
    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(nn.Conv2d(1, 1, 3, padding=1), (1, 1, 6, 6), grid)
            x = model.scatter(torch.ones(1, 1, 6, 6))
            with pytest.raises(nd.ConfigError, match=r"apply them to the original module, model\.module"):
                trace_model(kind, model, x)
            assert model(x).shape == x.shape

    loopback.run(2, body)


def test_compiled_functions_call_distributed_modules_eagerly():
    module = nn.Conv2d(1, 1, 3, padding=1)
    image = torch.randn(1, 1, 6, 6)

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(module, image.shape, grid)

            @torch.compile(backend="eager")
            def step(image, target):
                return model.loss(nn.functional.mse_loss, model(model.scatter(image)), model.scatter_target(target))

            return step(image, torch.zeros_like(image)).item()

    expected = nn.functional.mse_loss(module(image), torch.zeros_like(image)).item()
    assert loopback.run(2, body) == pytest.approx([expected] * 2)


def test_export_in_another_thread():
    """PyTorch keeps the modes of an export for all threads; calls in other threads must not end them."""
    exporting, called = threading.Event(), threading.Event()

    def wait_between_operators(x):
        y = x.sin()
        exporting.set()
        assert called.wait(60)
        return y.cos()

    with ThreadPoolExecutor(1) as pool:
        program = pool.submit(torch.export.export, FunctionModule(wait_between_operators), (torch.ones(2),))
        assert exporting.wait(60)
        with suspend_hooks_and_modes():
            called.set()
            targets = [str(node.target) for node in program.result().graph.nodes if node.op == "call_function"]
    assert targets == ["aten.sin.default", "aten.cos.default"]
