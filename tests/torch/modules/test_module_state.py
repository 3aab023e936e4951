"""Modules and criteria after a capture: left unchanged, whether the capture succeeds or fails."""

import functools
import logging
from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
import torch.nn.utils.prune as prune  # noqa: E402
from case_selection import select_cases  # noqa: E402
from torch import nn  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.torch.capture.capture import capture_module  # noqa: E402
from neondist.torch.convert import from_torch  # noqa: E402

SHAPE = 1, 2, 6, 5


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale=1.0):
        self.scale = scale


class SharedLayers(nn.Module):
    """Module with a layer under two names, tied weights and attributes that `forward` modifies."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(2, 2, 3, padding=1)
        self.b, self.list, self.calls, self.cache = self.a, [self.a], 0, None
        self.tied = nn.Conv2d(2, 2, 3, padding=1)
        self.tied.weight = self.a.weight
        self.history, self.dictionary, self.array, self.slots = [], {}, np.zeros(3), Slots(0)
        self.register_buffer("mean", torch.zeros(1), persistent=False)
        self.register_buffer("other", self.mean)
        self.a.bias.requires_grad_(False)
        self.tied.bias.grad = torch.ones(2)
        self.tied.eval()
        self.register_forward_pre_hook(lambda module, args: None)

    def forward(self, x):
        self.calls += 1
        self.slots.scale += 1
        self.array[0] += 1
        self.history.append(x.detach())
        self.dictionary["x"] = x.shape
        self.cache, self.lazily = x.shape, 3
        return self.tied(self.b(self.a(x)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(2, 2, 3, padding=1)
        self.b, self.r = self.a, nn.GRU(2, 2, batch_first=True)

    def forward(self, x):
        y = self.b(self.a(x)).movedim(1, -1)
        return self.r(y.flatten(0, 1))[0].view(y.shape).movedim(-1, 1)


def build_parametrised():
    module = nn.Sequential(SharedLayers(), nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 1)))
    return module.append(module[1])


class TransformedOutput(SharedLayers):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(super().forward(x))


@functools.lru_cache
def make_columns(extent):
    return torch.arange(extent) * 2.0


class UnregisteredState(SharedLayers):
    """Module with an unregistered norm or tensor or a view of a buffer, and a function with a cache."""

    def __init__(self, name):
        super().__init__()
        self.extra = {"norm": [nn.BatchNorm2d(2)], "tensor": [torch.ones(1)], "view": self.mean[:1]}[name]

    def forward(self, x):
        y = super().forward(x) * make_columns(x.shape[-1])
        return self.extra[0](y) if callable(self.extra[0]) else y * self.extra[0].add_(1)


MODULES = {
    "hidden norm": lambda: UnregisteredState("norm"), "hidden tensor": lambda: UnregisteredState("tensor"),
    "view of a buffer": lambda: UnregisteredState("view"),
    "shared": SharedLayers, "recurrent": Recurrent, "parametrised": build_parametrised,
    "value": lambda: TransformedOutput(lambda y: y if y.sum() > 0 else -y),
    "count": lambda: TransformedOutput(lambda y: y[: int(y.sum())]),
    "error": lambda: TransformedOutput(lambda y: 1 / 0),
    "shape": lambda: TransformedOutput(lambda y: y @ y),
    "no rule": lambda: TransformedOutput(lambda y: F.fractional_max_pool2d(y, 2, output_size=3)),
    "indices": lambda: TransformedOutput(lambda y: F.adaptive_max_pool2d(y, 3, return_indices=True)),
    "array": lambda: TransformedOutput(lambda y: torch.from_numpy(y.detach().numpy())),
}  # fmt: skip


def record_state(module):
    """Return the attributes of a module by identity or value, and the objects, to keep them alive."""
    entries, alive = {}, []

    def record(value, path, depth=0):
        alive.append(value)
        if isinstance(value, torch.Tensor):
            entries[path] = id(value), type(value), value.requires_grad, id(value.grad), value._version, value.tolist()
        elif isinstance(value, np.ndarray):
            entries[path] = id(value), value.tolist()
        elif isinstance(value, (int, float, str, tuple)):
            entries[path] = value
        elif isinstance(value, (dict, list, set)):
            entries[path] = id(value), type(value), len(value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                record(item, f"{path}[{key}]", depth + 1)
        else:
            entries[path] = id(value), getattr(value, "scale", None)

    for path, part in module.named_modules(remove_duplicate=False):
        record(vars(part), path)
    return entries, alive


@pytest.mark.parametrize("name", select_cases(MODULES))
@pytest.mark.long
def test_modules_are_left_unchanged(name, capfd):
    torch.manual_seed(0)
    module = MODULES[name]()
    original, alive = record_state(module)
    generator_state = torch.get_rng_state()

    def body(world):
        with nd.ProcessGrid(world) as grid:
            ndt.distribute(module, SHAPE, grid)

    def convert(world):
        from_torch(module, SHAPE, model=nd.Convnet)

    def call_as_criterion(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(nn.Identity(), SHAPE, grid)
            x = model.scatter(torch.ones(SHAPE))
            model.loss(lambda y, t: module(y).mean(), model(x), x)

    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    for ranks, run in ((2, body), (1, convert), (2, call_as_criterion)):
        try:
            nd.loopback.run(ranks, run)
        except nd.UserError as error:
            assert "rank" not in str(error) or ranks > 1  # noqa: PT017
        assert record_state(module)[0] == original, (ranks, run)
    assert type(make_columns(SHAPE[-1])) is torch.Tensor
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert capfd.readouterr() == ("", "")
    assert not log.disabled
    del alive


def test_user_output_is_printed(capsys):
    import sys

    module = TransformedOutput(lambda y: (print("mine", file=sys.stderr), y if y.sum() > 0 else -y)[1])
    with pytest.raises(nd.ConfigError, match="needs the value of a tensor"):
        capture_module(module, [(SHAPE, torch.float32)])
    assert set(capsys.readouterr().err.split()) == {"mine"}


def test_cached_parametrizations():
    """With `parametrize.cached()`, one rank runs the module itself."""
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 1)))
    image, expected = torch.ones(SHAPE), module(torch.ones(SHAPE))

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(module, SHAPE, grid)
            return [model.gather(model(model.scatter(image))) for _ in range(2)]

    for ranks in (1, 2):
        with nn.utils.parametrize.cached():
            results = nd.loopback.run(ranks, body)
        for outputs in results:
            for output in outputs:
                torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


@dataclass
class Statistics:
    mean: torch.Tensor
    unused: torch.Tensor | None = None


@dataclass(frozen=True)
class Prediction:
    image: torch.Tensor
    others: list
    name: str = "prediction"


class Predictor(nn.Conv2d):
    def forward(self, x):
        y = super().forward(x)
        return Prediction(y, [Statistics(y.mean((2, 3)))])


@pytest.mark.parametrize("ranks", [1, 3])
def test_dataclasses_as_outputs(ranks):
    module = Predictor(2, 3, 3)
    expected = module(torch.ones(SHAPE))

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(module, SHAPE, grid)
            output = model(model.scatter(torch.ones(SHAPE)))
            loss = model.loss(lambda y, _: y.image.sum() + y.others[0].mean.sum(), output, None)
            return loss.detach(), model.gather(output)

    for loss, output in nd.loopback.run(ranks, body):
        assert (type(output), type(output.others[0]), output.name) == (Prediction, Statistics, "prediction")
        assert output.others[0].unused is None
        torch.testing.assert_close(output.image, expected.image)
        torch.testing.assert_close(output.others[0].mean, expected.others[0].mean)
        torch.testing.assert_close(loss, expected.image.sum() + expected.others[0].mean.sum())


@pytest.mark.parametrize("kind", ["DataParallel", "DistributedDataParallel"])
def test_parallel_wrappers_are_rejected(kind):
    parallel = getattr(nn.parallel, kind)
    wrapper = parallel.__new__(parallel)  # it would need a process group, or GPUs
    nn.Module.__init__(wrapper)
    wrapper.module = nn.Conv2d(2, 2, 1)
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.ConfigError, match=f"pass model.module, not its {kind}"):
        ndt.distribute(wrapper, SHAPE, grid)


@pytest.mark.long
def test_each_virtual_rank_can_seed():
    shared = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))

    def body(world):
        with nd.ProcessGrid(world) as grid:
            first, second = build(), torch.randn(2)
            model = ndt.distribute(first if world.size == 2 else shared, SHAPE, grid)
            torch.randn(grid.rank)
            y = model(model.scatter(torch.ones(SHAPE)))
            return model.loss(F.l1_loss, y, torch.zeros_like(y)).item(), second.tolist()

    for ranks in (2, 3):
        results = [nd.loopback.run(ranks, body) for _ in range(3)]
        assert all(result == results[0][0] for run in results[:1] for result in run)
        assert len({str([numbers for _, numbers in run]) for run in results}) == 1


def make_pruned():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1)).double()
    prune.l1_unstructured(module[0], "weight", 0.3)
    prune.ln_structured(module[0], "weight", 0.2, n=2, dim=0)
    return module


def make_weight_norm_hook():
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.weight_norm(nn.Conv2d(2, 6, 3, padding=1))).double()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("make", [make_pruned, make_weight_norm_hook])
def test_weights_computed_by_hooks_are_those_of_the_last_pass(make):
    def train(module, model, grid=None):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(SHAPE, dtype=torch.float64)
            optimizer.zero_grad()
            if grid is None:
                model(x).square().mean().backward()
            else:
                y = model(model.scatter(x))
                model.loss(lambda y, _: y.square().mean(), y, torch.zeros_like(y)).backward()
            optimizer.step()
        return module[0].weight.detach().clone()

    def body(world):
        with nd.ProcessGrid(world) as grid:
            module = make()
            model = ndt.distribute(module, SHAPE, grid)
            return train(module, model, grid), len({*map(id, model.programs._programs.values())})

    module = make()
    expected = train(module, module)
    for weight, num_programs in nd.loopback.run(2, body):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)
        assert num_programs == 1
