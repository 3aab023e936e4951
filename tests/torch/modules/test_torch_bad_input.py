"""Invalid use of distributed modules: one message on all ranks, without deadlocks."""

import copy
import functools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import FunctionModule, share_captures  # noqa: E402
from torch_training import CELLS, IMAGES, Net, build_seeded, draw_labels, draw_tensor  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402

RANKS = 2
CAPTURED_PROGRAMS = {}
"""captured programs of Net and the criteria, shared by all tests"""


@pytest.fixture
def shared_programs():
    with share_captures(CAPTURED_PROGRAMS):
        yield


def collect_messages(body, ranks=RANKS):
    """Return the error message of body(grid) on each virtual rank, empty without an error."""

    def rank(world):
        with nd.ProcessGrid(world) as grid:
            try:
                body(grid)
            except nd.UserError as error:
                return str(error) if error.raised_on_all_ranks else f"not agreed: {error}"
            return ""

    return loopback.run(ranks, rank, timeout=20.0)


def check_rejected(body, expected):
    """Assert that body(grid) raises an error with this message on all ranks."""
    for message in collect_messages(body):
        assert expected in message, message


def set_up(grid, build=Net):
    model = ndt.distribute(build_seeded(build), IMAGES, grid)
    return model, model.scatter(draw_tensor(*IMAGES))


def test_different_weights():
    def body(grid):
        module = build_seeded(Net)
        with torch.no_grad():
            module.last.bias += grid.rank
        ndt.distribute(module, IMAGES, grid)

    check_rejected(
        body, "rank 1 has a different module from rank 0: its 'last.bias' differs; build the module from the same seed"
    )


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.2), nn.ELU()], ids=["slope", "function"])
def test_different_modules(activation):
    def body(grid):
        ndt.distribute(nn.Sequential(nn.LeakyReLU(0.1) if grid.rank else activation), IMAGES, grid)

    check_rejected(
        body,
        "rank 1 has a different module from rank 0: the module's steps differ; build the module from the same seed",
    )


@pytest.mark.parametrize("compiler", ["automatic", 1])
def test_compile_that_is_no_function(compiler):
    check_rejected(
        lambda grid: ndt.distribute(build_seeded(Net), IMAGES, grid, compile=compiler),
        f"compile: {compiler!r}; expected True for torch.compile, 'auto', or a function that compiles a function",
    )


def test_compile_on_one_rank_only():
    def body(grid):
        ndt.distribute(build_seeded(Net), IMAGES, grid, compile="auto" if grid.rank else False)

    check_rejected(body, "rank 1 has a different module from rank 0: compile='auto'")


def test_different_shapes():
    def body(grid):
        ndt.distribute(nn.ReLU(), (1, 1, 8, 8 + grid.rank), grid)

    check_rejected(body, "rank 1 has a different module from rank 0: ")


def test_missing_inputs():
    class TwoInputs(nn.Module):
        def forward(self, x, mask):
            return x * mask

    def body(grid):
        ndt.distribute(TwoInputs(), IMAGES, grid)

    check_rejected(body, "'mask'; give one input per required argument of forward, or wrap the module")


@pytest.mark.parametrize("function", [lambda x: x["a"] * 2, lambda x: sum(x.values()), lambda x: dict(x.items())["a"]])
def test_dictionaries_of_inputs(function):
    check_rejected(lambda grid: ndt.distribute(FunctionModule(function), (2, 3, 8, 8), grid), "if forward takes a dict")
    shapes = {"a": (2, 3, 8, 8)}
    check_rejected(lambda grid: ndt.distribute(FunctionModule(function), shapes, grid), "give a list of their shapes")


class Masked(nn.Module):
    """Convolution with a mask and other optional arguments."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x, mask=None, scale=None, *, negate=False):
        y = self.conv(x) if mask is None else self.conv(x) * mask
        return -y if negate else y


def test_inputs_may_be_named():
    image, mask = draw_tensor(*IMAGES), draw_tensor(IMAGES[0], 1, *IMAGES[2:])
    original = build_seeded(Masked)
    expected = original(image, mask)

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(copy.deepcopy(original), [image.shape, mask.shape], grid)
            x, m = model.scatter(image), model.scatter(mask, 1)
            return [
                model.gather(model(*args, **named)) for args, named in (([x], {"mask": m}), ([], {"mask": m, "x": x}))
            ]

    for ranks in 1, RANKS:
        for outputs in loopback.run(ranks, body):
            for output in outputs:
                torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"negate": True},
            "in the order of example_shape, but not negate; wrap it in a module whose forward passes the",
        ),
        ({"scale": 2.0}, "in the order of example_shape, but not scale; wrap it in a module"),
        ({"masks": None}, "Masked.forward: got an unexpected keyword argument 'masks'"),
        ({"mask": None}, "example_shape gives 1 input, but the module got 2; pass a tile per input, and wrap it in a"),
    ],
)
def test_other_named_arguments(arguments, message):
    def body(grid):
        model = ndt.distribute(build_seeded(Masked), IMAGES, grid)
        model(model.scatter(draw_tensor(*IMAGES)), **arguments)

    check_rejected(body, message)


def test_modules_without_positional_inputs():
    class Named(nn.Module):
        def forward(self, **named):
            return named["x"]

    check_rejected(
        lambda grid: ndt.distribute(Named(), IMAGES, grid), "too many positional arguments; give one input per"
    )


@pytest.mark.parametrize(
    "module", [nn.Embedding(5, 4), nn.CrossEntropyLoss(), nn.Conv2d(3, 3, 3).double()], ids=lambda m: type(m).__name__
)
def test_wrong_default_dtype(module):
    shapes = [IMAGES, (IMAGES[0], *IMAGES[2:])] if isinstance(module, nn.CrossEntropyLoss) else IMAGES
    named = ", ".join(["float32"] * (2 if shapes is not IMAGES else 1))
    check_rejected(
        lambda grid: ndt.distribute(module, shapes, grid, dtype=torch.float32),
        f"; inputs have dtype {named}: if the module needs others, pass dtype= (a list for several inputs), or",
    )


def test_error_on_one_rank_is_raised_on_all():
    def body(grid):
        ndt.distribute(nn.Conv2d(3 + grid.rank, 3, 1), IMAGES, grid)

    check_rejected(
        body, "Conv2d cannot be captured for inputs of shape (2, 3, 11, 9): RuntimeError: Given groups=1, weight"
    )


TILES = {
    "whole image": (lambda x: draw_tensor(*IMAGES), "input 0 has shape (2, 3, 11, 9), but this rank's tile of"),
    "no batch": (lambda x: x[0], "cut the image with model.scatter(image)"),
    "dtype": (lambda x: x.float(), "input 0 has dtype torch.float32, but the module takes torch.float64"),
    "array": (lambda x: x.numpy(), "input 0: expected a torch.Tensor, got ndarray; use torch.from_numpy to convert"),
    "none": (lambda x: None, "input 0: expected a torch.Tensor, got NoneType"),
}  # fmt: skip


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("everywhere", [True, False])
def test_bad_tiles(name, everywhere):
    make_invalid, message = TILES[name]

    def body(grid):
        model, x = set_up(grid)
        model(make_invalid(x) if everywhere or grid.rank == 1 else x)

    check_rejected(body, message)


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("index", [-1, 1])
def test_positions_of_inputs(index):
    check_rejected(
        lambda grid: set_up(grid)[0].scatter(draw_tensor(*IMAGES), index),
        f"index: {index}; expected the position of an input, 0 to 0",
    )


def test_wrong_number_of_inputs():
    def body(grid):
        model, x = set_up(grid)
        model(x, x)

    check_rejected(body, "example_shape gives 1 input, but the module got 2")


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("mistake", ["train", "gradients", "no_grad", "frozen", "weights", "loss"])
def test_different_calls_on_ranks(mistake):
    def body(grid):
        model, x = set_up(grid)
        is_different = grid.rank == 1
        if mistake == "train":
            model.train(not is_different)
        elif mistake == "gradients":
            x.requires_grad_(is_different)
        elif mistake == "frozen":
            model.last.requires_grad_(is_different)
        elif mistake == "weights" and is_different:
            model.load_state_dict(Net().state_dict())
        elif mistake == "loss" and is_different:
            model.loss(F.mse_loss, x, x)
        with torch.set_grad_enabled(not is_different if mistake == "no_grad" else True):
            model(x)

    check_rejected(
        body,
        {
            "train": "rank 1: the mode is eval(), but train() on rank 0; all ranks must make the same call",
            "gradients": "rank 1: requires_grad of input 0 is True, but False on rank 0",
            "no_grad": "rank 1: torch.is_grad_enabled() is False, but True on rank 0",
            "frozen": "rank 1: the list of parameters that require gradients is",
            "weights": "rank 1 has a different module from rank 0: its 'first.weight' differs",
            "loss": "rank 1: the call is loss, but forward on rank 0",
        }[mistake],
    )


@pytest.mark.usefixtures("shared_programs")
def test_reloaded_equal_weights_are_accepted():
    def body(grid):
        model, x = set_up(grid)
        if grid.rank == 0:
            model.load_state_dict(build_seeded(Net).state_dict())
        return model(x), model(x)

    assert collect_messages(body) == ["", ""]


SHAPES = {
    "text": ("big", "expected (N, C, *spatial)"),
    "one": ((3,), "expected (N, C, *spatial)"),
    "zero": ((1, 3, 0, 5), "expected (N, C, *spatial)"),
    "other channels": ((2, 4, 11, 9), "Net cannot be captured for inputs of shape (2, 4, 11, 9)"),
    "other rank": ((2, 3, 11), "Net cannot be captured for inputs of shape (2, 3, 11)"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_bad_example_shapes(name):
    shape, message = SHAPES[name]
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.ConfigError) as caught:
        ndt.distribute(build_seeded(Net), shape, grid)
    assert message in str(caught.value)


def test_bad_arguments():
    with nd.ProcessGrid.serial() as grid:
        for arguments, message in (
            ({"module": lambda x: x}, "module: expected a torch.nn.Module, got function"),
            ({"dtype": "float32"}, "dtype: expected a torch.dtype, or one per input (1), got 'float32'"),
            ({"transport": "nccl"}, "transport: expected 'mpi' or 'torch', got the text 'nccl'"),
            ({"grid": 3}, "grid: expected a ProcessGrid, got 3"),
        ):
            all_arguments = {"module": build_seeded(Net), "example_shape": IMAGES, "grid": grid} | arguments
            with pytest.raises(nd.ConfigError) as caught:
                ndt.distribute(**all_arguments)
            assert message in str(caught.value)


@pytest.mark.usefixtures("shared_programs")
def test_global_tensors_of_the_wrong_shape():
    with nd.ProcessGrid.serial() as grid:
        model, _ = set_up(grid)
        for shape in ((2, 4, 11, 9), (3, 11, 9), (2, 3, 11), (0, 3, 11, 9)):
            with pytest.raises(nd.ShapeError, match=r"a whole tensor of shape \(2, 3, 11, 9\), .* or image size, got"):
                model.scatter(draw_tensor(*shape))
        with pytest.raises(nd.ShapeError, match=r"image: expected a torch.Tensor, got ndarray"):
            model.scatter(draw_tensor(*IMAGES).numpy())
        for shape in ((2, 11, 10), (3, 11, 9), (2, 3, 9, 11), (5,)):
            with pytest.raises(
                nd.ShapeError,
                match=r"of shape .* matches none of the outputs \(2, 3, 11, 9\).* call model.scatter\(image\) first",
            ):
                model.scatter_target(torch.zeros(shape))


class Criterion:
    def __call__(self, y, t):
        return y.flatten().put(t.flatten()[:1].long(), y.flatten()[:1]).mean()

    method = __call__


NO_RULE = (
    "test_torch_bad_input.py:{}: aten.put.default cannot be distributed because it has no rule; write the criterion"
)
CRITERION_LINE = Criterion.__call__.__code__.co_firstlineno
CRITERIA = {
    "no rule, object": (Criterion(), NO_RULE.format(CRITERION_LINE)),
    "no rule, method": (Criterion().method, NO_RULE.format(CRITERION_LINE)),
    "no rule, partial": (functools.partial(Criterion.method, None), NO_RULE.format(CRITERION_LINE)),
    "of cells": (nn.CrossEntropyLoss(reduction="none"), "returned a tensor of shape (2, 11, 9) (one value per cell"),
    "of cells, own": (lambda y, t: (y - t[:, None]) ** 2, "criterion: returned a tensor of shape (2, 3, 11, 9)"),
    "two": (lambda y, t: (y.mean(), y.sum()), "criterion: must return one tensor"),
    "values decide": (lambda y, t: y.mean() if y.sum() > 0 else y.sum(), "pass it as a part of the target; or use"),
    "wrong dtype": (nn.MSELoss(), "criterion"),
    "number": (lambda y, t: 3.0, "criterion: must return one tensor"),
    "one class": (lambda y, t: F.cross_entropy(y[:, :1], t * 0), "over a single class is 0 for any output"),
    "one class, dense": (lambda y, t: nn.CrossEntropyLoss()(y[:, :1], y[:, 1:2].detach()), "over a single class is 0"),
}  # fmt: skip


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("name", CRITERIA)
def test_bad_criteria(name):
    criterion, message = CRITERIA[name]

    def body(grid):
        model, x = set_up(grid)
        target = model.scatter_target(draw_labels(*CELLS))
        model.loss(criterion, model(x), target)

    check_rejected(body, message)


@pytest.mark.usefixtures("shared_programs")
def test_unknown_output_tensors():
    def body(grid):
        model, x = set_up(grid)
        y = model(x)
        model.loss(F.mse_loss, y[:, :, 1:], y[:, :, 1:])

    for rank, message in enumerate(collect_messages(body)):
        assert message.startswith(f"rank {rank}: no tensor of this model has a part of shape (2, 3, ")


@pytest.mark.usefixtures("shared_programs")
def test_second_derivatives_are_rejected():
    def body(world):
        with nd.ProcessGrid(world) as grid:
            model, x = set_up(grid)
            x.requires_grad_()
            loss = model.loss(F.cross_entropy, model(x), model.scatter_target(draw_labels(*CELLS)))
            (dx,) = torch.autograd.grad(loss, x, create_graph=True)
            with pytest.raises(nd.ConfigError, match="second derivatives of a distributed module"):
                dx.square().sum().backward()

    loopback.run(RANKS, body, timeout=20.0)


@pytest.mark.parametrize("change", ["deleted", "resized", "replaced"])
@pytest.mark.long
def test_changed_modules(change):
    def body(grid):
        model, x = set_up(grid)
        if change == "deleted":
            del model.last.bias
        elif change == "resized":
            model.last.bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        else:
            model.last = nn.Conv2d(5, 3, 1).double()
        model(x)

    assert all(collect_messages(body))


def test_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    for statement in ("import neondist.torch", "from neondist.torch import distribute"):
        process = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {statement}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 1
        assert (
            "neondist.errors.MissingPackageError: neondist.torch needs PyTorch: pip install 'neondist[torch]'"
            in process.stderr
        )


@pytest.mark.parametrize("strategy", ["AllReduce", "PS"])
def test_module_converted_after_its_optimizer_was_created(strategy):
    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(nn.Linear(3, 2).double(), (4, 3), grid)
            optimizer = ndt.DistributedOptimizer(model, torch.optim.SGD, strategy, lr=0.1)
            model.module.float()
            y = model(model.scatter(torch.ones(4, 3)))
            with pytest.raises(nd.ConfigError, match=r"'(weight|bias)' is .*float32 on cpu, but was .*float64 on cpu"):
                model.loss(nn.MSELoss(), y, model.scatter_target(torch.zeros(4, 2))).backward()
            with pytest.raises(nd.ConfigError, match="convert the module before you create"):
                optimizer.step()
        return True

    assert nd.loopback.run(2, body) == [True, True]


@pytest.mark.parametrize("strategy", ["AllReduce", "PS"])
def test_other_optimizer_of_partitioned_parameters(strategy):
    def body(world):
        with nd.ProcessGrid(world) as grid:
            module, other = nn.Linear(3, 2), nn.Linear(2, 1)
            ndt.DistributedOptimizer(ndt.distribute(module, (4, 3), grid), torch.optim.SGD, strategy, lr=0.1)
            torch.optim.Adam(other.parameters()).step()
            plain = torch.optim.Adam(module.parameters())
            if strategy == "AllReduce":  # every rank has all gradients
                plain.step()
            else:
                with pytest.raises(nd.ConfigError, match=r"a DistributedOptimizer partitions .* of this Adam"):
                    plain.step()
        return True

    assert nd.loopback.run(2, body) == [True, True]
