"""Invalid use of distributed modules: one message, on all ranks, and no rank that waits for ever."""

import functools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import captured_once as capturing_once  # noqa: E402
from torch_training import CELLS, IMAGES, Net, drawn, labels, made  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402

RANKS = 2
PROGRAMS = {}
"""those of Net and of the criteria, the same in all tests"""


@pytest.fixture
def captured_before():
    with capturing_once(PROGRAMS):
        yield


class Function(nn.Module):
    def __init__(self, function, child=None):
        super().__init__()
        self.function, self.child = function, child

    def forward(self, *inputs):
        return self.function(*inputs)


class Inner(nn.Module):
    """With a module inside that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3), Function(function))

    def forward(self, x):
        return self.body(x)


def messages(body, ranks=RANKS):
    """Return what body(grid) is refused with on each of the virtual ranks."""

    def rank(world):
        with nd.ProcessGrid(world) as grid:
            try:
                body(grid)
            except nd.UserError as error:
                return str(error) if error.agreed else f"not agreed: {error}"
            return ""

    return loopback.run(ranks, rank, timeout=20.0)


def refused(body, message):
    """Assert that all ranks have an error with these words."""
    for said in messages(body):
        assert message in said, said


def ready(grid, build=Net):
    model = ndt.distribute(made(build), IMAGES, grid)
    return model, model.scatter(drawn(*IMAGES))


def test_other_weights():
    def body(grid):
        module = made(Net)
        with torch.no_grad():
            module.last.bias += grid.rank
        ndt.distribute(module, IMAGES, grid)

    refused(body, "rank 1 has a different module from rank 0: its 'last.bias' differs; build it from the same seed")


@pytest.mark.parametrize("other", [nn.LeakyReLU(0.2), nn.ELU()], ids=["slope", "function"])
def test_other_modules(other):
    def body(grid):
        ndt.distribute(nn.Sequential(nn.LeakyReLU(0.1) if grid.rank else other), IMAGES, grid)

    refused(body, "rank 1 has a different module from rank 0: the module's steps differ; build it from the same seed")


def test_other_shapes():
    def body(grid):
        ndt.distribute(nn.ReLU(), (1, 1, 8, 8 + grid.rank), grid)

    refused(body, "rank 1 has a different module from rank 0: ")


def test_an_error_of_one_rank_is_one_of_all():
    def body(grid):
        ndt.distribute(nn.Conv2d(3 + grid.rank, 3, 1), IMAGES, grid)

    refused(body, "Conv2d cannot be captured for inputs of shape (2, 3, 11, 9): RuntimeError: Given groups=1, weight")


DATA_DEPENDENT = {
    "if": lambda x: x * 2 if x.sum() > 0 else x,
    "item": lambda x: x[..., : int(x.amax().item())],
    "nonzero": lambda x: x[..., : x.nonzero().shape[0]],
    "float": lambda x: x / float(x.max()),
    "mask": lambda x: x[x > 0],
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
@pytest.mark.long
def test_values_decide(name):
    for said in messages(lambda grid: ndt.distribute(Inner(DATA_DEPENDENT[name]), IMAGES, grid)):
        assert "test_torch_bad_input.py:" in said, said
        assert "not on their values" in said, said
        assert len(said.splitlines()) == 1
        assert len(said) < 600


def test_the_data_of_a_tensor():
    def body(grid):
        ndt.distribute(Inner(lambda x: torch.cat([x, x.data])), IMAGES, grid)

    refused(body, "Tensor.data in a forward is not recorded; use .detach() instead")


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x.mean((2, 3))], ids=["tiles", "every rank's"])
def test_places_in_memory(of):
    refused(
        lambda grid: ndt.distribute(Inner(lambda x: torch.as_strided(of(x), (2, 2), (1, 3))), IMAGES, grid),
        "aten.as_strided.default in module 'body.1' cannot be distributed: its memory layout differs from that in one",
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"size": (5, 1)}, "antialias to a single column"),
        ({"scale_factor": (0.5, 1.05)}, "cells unchanged, but not their gradient"),
    ],
)
def test_where_pytorchs_antialias_is_wrong(how, said):
    interpolate = Inner(lambda x: F.interpolate(x, mode="bilinear", antialias=True, **how))
    refused(lambda grid: ndt.distribute(interpolate, IMAGES, grid), said)


def test_a_tensor_with_a_gradient_that_is_no_parameter():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(3, 1, 1, requires_grad=True)

        def forward(self, x):
            return x * self.scale

    refused(
        lambda grid: ndt.distribute(Net(), IMAGES, grid),
        "aten.mul.Tensor receives a tensor that requires grad but is not a",
    )


def test_python_errors_of_the_module():
    def body(grid):
        ndt.distribute(Inner(lambda x: x.view(5, -1)), IMAGES, grid)

    for said in messages(body):
        assert "test_torch_bad_input.py:" in said
        assert "Function cannot be captured" in said or "Inner cannot be captured" in said
        assert "shape '[5, -1]' is invalid" in said
        assert "values" not in said


@torch.library.custom_op("tests::smoothed", mutates_args=())
def smoothed(x: torch.Tensor) -> torch.Tensor:
    return x + x.roll(1, 2)


@smoothed.register_fake
def smoothed_shape(x):
    return torch.empty_like(x)


REFUSED = {
    "eigvals": lambda x: torch.linalg.eigvals(x[..., :7, :]).abs(),
    "histc": lambda x: x.histc(4),
    "smoothed": lambda x: smoothed(x),
}
OTHERS = {
    "grid_sample": lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1), align_corners=False),
    "sort": lambda x: x.flatten(2).sort(-1)[0],
    "cumsum": lambda x: x.cumsum(2),
}


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize("name", REFUSED)
def test_operators_without_a_rule_name_their_place(name):
    def body(grid):
        with pytest.raises(ndt.UnsupportedOperator) as caught:
            ndt.distribute(Inner(REFUSED[name]), IMAGES, grid)
        error = caught.value
        assert error.module == "body.1"
        assert "test_torch_bad_input.py:" in error.source
        assert name in error.operator
        said = str(error)
        assert said.startswith(error.source)
        assert "gather_at=['body.1'] computes that module on whole arrays on every rank" in said
        raise error

    refused(body, "in module 'body.1' cannot be distributed")


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize("name", [*REFUSED, *OTHERS])
def test_the_remedy_works(name):
    module = made(lambda: Inner((REFUSED | OTHERS)[name]))
    expected = module(drawn(*IMAGES))

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(module, IMAGES, grid, gather_at=["body.1"])
            return model.gather(model(model.scatter(drawn(*IMAGES))))

    for found in loopback.run(RANKS, body):
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("captured_once")
def test_gather_at_names_what_is_close():
    def body(grid):
        ndt.distribute(made(Net), IMAGES, grid, gather_at=["firts"])

    refused(body, "gather_at: the module has none named 'firts'; did you mean 'first'?")
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.ConfigError, match=r"got a string; use \['first'\]"):
        ndt.distribute(made(Net), IMAGES, grid, gather_at="first")


TILES = {
    "whole image": (lambda x: drawn(*IMAGES), "input 0 has shape (2, 3, 11, 9), but this rank's tile of"),
    "no batch": (lambda x: x[0], "cut the image with model.scatter(image)"),
    "dtype": (lambda x: x.float(), "input 0 has dtype torch.float32, but the module takes torch.float64"),
    "array": (lambda x: x.numpy(), "input 0: expected a torch.Tensor, got ndarray; torch.from_numpy makes one"),
    "none": (lambda x: None, "input 0: expected a torch.Tensor, got NoneType"),
}  # fmt: skip


@pytest.mark.usefixtures("captured_before")
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("everywhere", [True, False])
def test_tiles(name, everywhere):
    spoil, message = TILES[name]

    def body(grid):
        model, x = ready(grid)
        model(spoil(x) if everywhere or grid.rank == 1 else x)

    refused(body, message)


@pytest.mark.usefixtures("captured_before")
def test_numbers_of_inputs():
    def body(grid):
        model, x = ready(grid)
        model(x, x)

    refused(body, "the module takes 1 input, as example_shape says, got 2")


@pytest.mark.usefixtures("captured_before")
@pytest.mark.parametrize("mistake", ["train", "gradients", "no_grad", "frozen", "weights", "loss"])
def test_ranks_that_would_do_different_things(mistake):
    def body(grid):
        model, x = ready(grid)
        odd = grid.rank == 1
        if mistake == "train":
            model.train(not odd)
        elif mistake == "gradients":
            x.requires_grad_(odd)
        elif mistake == "frozen":
            model.last.requires_grad_(odd)
        elif mistake == "weights" and odd:
            model.load_state_dict(Net().state_dict())
        elif mistake == "loss" and odd:
            model.loss(F.mse_loss, x, x)
        with torch.set_grad_enabled(not odd if mistake == "no_grad" else True):
            model(x)

    refused(
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


@pytest.mark.usefixtures("captured_before")
def test_weights_that_came_by_another_way_are_no_mistake():
    def body(grid):
        model, x = ready(grid)
        if grid.rank == 0:
            model.load_state_dict(made(Net).state_dict())
        return model(x), model(x)

    assert messages(body) == ["", ""]


SHAPES = {
    "text": ("big", "expected (N, C, *spatial)"),
    "one": ((3,), "expected (N, C, *spatial)"),
    "zero": ((1, 3, 0, 5), "expected (N, C, *spatial)"),
    "other channels": ((2, 4, 11, 9), "Net cannot be captured for inputs of shape (2, 4, 11, 9)"),
    "other rank": ((2, 3, 11), "Net cannot be captured for inputs of shape (2, 3, 11)"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_example_shapes(name):
    shape, message = SHAPES[name]
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.ConfigError) as caught:
        ndt.distribute(made(Net), shape, grid)
    assert message in str(caught.value)


def test_other_arguments():
    with nd.ProcessGrid.serial() as grid:
        for arguments, message in (
            ({"module": lambda x: x}, "module: expected a torch.nn.Module, got function"),
            ({"dtype": "float32"}, "dtype: expected a torch.dtype, or one for each of 1 inputs, got 'float32'"),
            ({"transport": "nccl"}, "choose 'mpi' or 'torch'"),
            ({"grid": 3}, "grid: expected a ProcessGrid, got 3"),
        ):
            given = {"module": made(Net), "example_shape": IMAGES, "grid": grid} | arguments
            with pytest.raises(nd.ConfigError) as caught:
                ndt.distribute(**given)
            assert message in str(caught.value)


@pytest.mark.usefixtures("captured_before")
def test_whole_tensors_of_the_wrong_shape():
    with nd.ProcessGrid.serial() as grid:
        model, _ = ready(grid)
        for shape in ((2, 4, 11, 9), (3, 11, 9), (2, 3, 11), (0, 3, 11, 9)):
            with pytest.raises(nd.ShapeError, match=r"a whole tensor of shape \(2, 3, 11, 9\), .* or image size, got"):
                model.scatter(drawn(*shape))
        with pytest.raises(nd.ShapeError, match=r"image: expected a torch.Tensor, got ndarray"):
            model.scatter(drawn(*IMAGES).numpy())
        for shape in ((2, 11, 10), (3, 11, 9), (2, 3, 9, 11), (5,)):
            with pytest.raises(
                nd.ShapeError, match=r"a target of shape .* matches none of the outputs \(2, 3, 11, 9\)"
            ):
                model.scatter_target(torch.zeros(shape))


class Drawn:
    def __call__(self, y, t):
        return torch.histc(y, bins=4).mean()

    method = __call__


NO_RULE = "test_torch_bad_input.py:{}: aten.histc.default cannot be distributed, it has no rule; write the criterion"
LINE = Drawn.__call__.__code__.co_firstlineno
CRITERIA = {
    "no rule, object": (Drawn(), NO_RULE.format(LINE)),
    "no rule, method": (Drawn().method, NO_RULE.format(LINE)),
    "no rule, partial": (functools.partial(Drawn.method, None), NO_RULE.format(LINE)),
    "of cells": (nn.CrossEntropyLoss(reduction="none"), "returned a tensor of shape (2, 11, 9), such as one value"),
    "of cells, own": (lambda y, t: (y - t[:, None]) ** 2, "criterion: returned a tensor of shape (2, 3, 11, 9)"),
    "two": (lambda y, t: (y.mean(), y.sum()), "criterion: must return one tensor"),
    "values decide": (lambda y, t: y.mean() if y.sum() > 0 else y.sum(), "criterion cannot be captured"),
    "wrong dtype": (nn.MSELoss(), "criterion"),
    "number": (lambda y, t: 3.0, "criterion: must return one tensor"),
}  # fmt: skip


@pytest.mark.usefixtures("captured_before")
@pytest.mark.parametrize("name", CRITERIA)
def test_criteria(name):
    criterion, message = CRITERIA[name]

    def body(grid):
        model, x = ready(grid)
        target = model.scatter_target(labels(*CELLS))
        model.loss(criterion, model(x), target)

    refused(body, message)


@pytest.mark.usefixtures("captured_before")
def test_a_tensor_that_is_no_part_of_anything():
    def body(grid):
        model, x = ready(grid)
        y = model(x)
        model.loss(F.mse_loss, y[:, :, 1:], y[:, :, 1:])

    for rank, said in enumerate(messages(body)):
        assert said.startswith(f"rank {rank}: no tensor of this model has a part of shape (2, 3, ")


@pytest.mark.usefixtures("captured_before")
def test_gradients_of_gradients_are_no_wrong_numbers():
    def body(world):
        with nd.ProcessGrid(world) as grid:
            model, x = ready(grid)
            x.requires_grad_()
            loss = model.loss(F.cross_entropy, model(x), model.scatter_target(labels(*CELLS)))
            (dx,) = torch.autograd.grad(loss, x, create_graph=True)
            with pytest.raises(nd.ConfigError, match="second derivatives of a distributed module"):
                dx.square().sum().backward()

    loopback.run(RANKS, body, timeout=20.0)


@pytest.mark.parametrize("change", ["deleted", "resized", "replaced"])
@pytest.mark.long
def test_a_module_that_changes_afterwards(change):
    def body(grid):
        model, x = ready(grid)
        if change == "deleted":
            del model.last.bias
        elif change == "resized":
            model.last.bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        else:
            model.last = nn.Conv2d(5, 3, 1).double()
        model(x)

    assert all(messages(body))


def test_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    for statement in ("import neondist.torch", "from neondist.torch import distribute"):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {statement}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert (
            "neondist.errors.MissingPackageError: neondist.torch needs PyTorch: pip install 'neondist[torch]'"
            in done.stderr
        )
