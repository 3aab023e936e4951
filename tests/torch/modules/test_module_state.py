"""Modules and criteria after a capture: left as they were, and captured anew when a value that was read changes."""

import array
import collections
import contextvars
import ctypes
import dataclasses
import functools
import logging
import multiprocessing
import os
import threading
import types
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from turns import some  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.torch.capture.capture import capture_module  # noqa: E402
from neondist.torch.capture.watch import Watch  # noqa: E402
from neondist.torch.convert import from_torch  # noqa: E402

SHAPE = 1, 2, 6, 5
SCALE, TABLE = 1.0, {"scale": 1.0}


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale=1.0):
        self.scale = scale


class Hidden:
    """Gives its values as attributes, as OmegaConf does."""

    def __init__(self):
        self._values = {"scale": 1.0}

    def __getattr__(self, name):
        return self.__dict__["_values"][name]


class Schedule:
    def __init__(self):
        self._now = [1.0]

    @property
    def now(self):
        return self._now[0]

    def __call__(self):
        return self._now[0]

    def value(self):
        return self.now


def closed(kept):
    return lambda: kept[0]


def default(kept=[1.0]):  # noqa: B006
    return kept[0]


def of_global():
    return SCALE * TABLE["scale"]


Pair = collections.namedtuple("Pair", "a b")
KEPT = [1.0]
CONTEXT = contextvars.ContextVar("scale", default=1.0)


class Weak:
    def __init__(self, reference):
        self.alive = Config()
        self.of = reference(self.alive)


def of_thread():
    found = threading.local()
    found.scale = 1.0
    return found


PLACES = {  # what is kept, how it is read, and how it changes
    "list": (lambda: [1.0], lambda k: k[0], lambda k: k.__setitem__(0, 3.0)),
    "nested": (lambda: {"a": [(1.0, [1.0])]}, lambda k: k["a"][0][1][0], lambda k: k["a"][0][1].__setitem__(0, 3.0)),
    "longer": (lambda: [1.0], sum, lambda k: k.append(2.0)),
    "deque": (lambda: collections.deque([1.0]), sum, lambda k: k.append(2.0)),
    "set": (lambda: {1.0}, sum, lambda k: k.add(2.0)),
    "key": (lambda: {1.0: 0}, lambda k: next(iter(k)), lambda k: (k.clear(), k.update({3.0: 0}))),
    "defaultdict": (lambda: collections.defaultdict(lambda: 1.0), lambda k: k.get("a", 1.0), lambda k: k.update(a=3.0)),
    "namedtuple": (lambda: Pair([1.0], 0), lambda k: k.a[0], lambda k: k.a.__setitem__(0, 3.0)),
    "dataclass": (Config, lambda k: k.scale, lambda k: setattr(k, "scale", 3.0)),
    "slots": (Slots, lambda k: k.scale, lambda k: setattr(k, "scale", 3.0)),
    "namespace": (lambda: types.SimpleNamespace(s=1.0), lambda k: k.s, lambda k: setattr(k, "s", 3.0)),
    "UserDict": (lambda: collections.UserDict(s=1.0), lambda k: k["s"], lambda k: k.update(s=3.0)),
    "getattr": (Hidden, lambda k: k.scale, lambda k: k._values.update(scale=3.0)),
    "property": (Schedule, lambda k: k.now, lambda k: k._now.__setitem__(0, 3.0)),
    "call": (Schedule, lambda k: k(), lambda k: k._now.__setitem__(0, 3.0)),
    "bound method": (lambda: Schedule().value, lambda k: k(), lambda k: k.__self__._now.__setitem__(0, 3.0)),
    "partial": (
        lambda: functools.partial(lambda s: s[0], [1.0]), lambda k: k(), lambda k: k.args[0].__setitem__(0, 3.0),
    ),
    "closure": (
        lambda: closed([1.0]), lambda k: k(), lambda k: k.__closure__[0].cell_contents.__setitem__(0, 3.0),
    ),
    "cell": (lambda: closed([1.0]), lambda k: k(), lambda k: setattr(k.__closure__[0], "cell_contents", [3.0])),
    "default": (lambda: default, lambda k: k(), lambda k: k.__defaults__[0].__setitem__(0, 3.0)),
    "array": (lambda: np.ones(2000), lambda k: float(k[1999]), lambda k: k.__setitem__(1999, 3.0)),
    "weak proxy": (lambda: Weak(weakref.proxy), lambda k: k.of.scale, lambda k: setattr(k.alive, "scale", 3.0)),
    "weak reference": (lambda: Weak(weakref.ref), lambda k: k.of().scale, lambda k: setattr(k.alive, "scale", 3.0)),
    "shared value": (lambda: multiprocessing.Value("d", 1.0), lambda k: k.value, lambda k: setattr(k, "value", 3.0)),
    "shared array": (lambda: multiprocessing.Array("d", 2), lambda k: k[1], lambda k: k.__setitem__(1, 3.0)),
    "ctypes": (lambda: ctypes.c_double(1.0), lambda k: k.value, lambda k: setattr(k, "value", 3.0)),
    "numbers": (lambda: array.array("d", [1.0]), sum, lambda k: k.append(2.0)),
    "bytes": (lambda: bytearray(b"a"), sum, lambda k: k.append(2)),
    "of a thread": (of_thread, lambda k: k.scale, lambda k: setattr(k, "scale", 3.0)),
    "of a context": (lambda: CONTEXT, lambda k: k.get(), lambda k: k.set(3.0)),
    "environment": (
        lambda: None, lambda k: float(os.environ.get("SCALE", "1")), lambda k: os.environ.__setitem__("SCALE", "3"),
    ),
    "type": (lambda: [2], lambda k: k[0] if isinstance(k[0], bool) else 1.5, lambda k: k.__setitem__(0, True)),
    "class": (Config, lambda k: Config.scale, lambda k: setattr(Config, "scale", 3.0)),
    "global": (lambda: None, lambda k: of_global(), lambda k: globals().update(SCALE=3.0)),
    "item of a global": (lambda: None, lambda k: of_global(), lambda k: TABLE.update(scale=3.0)),
    "shadowed": (lambda: type("Kept", (Config,), {})(), lambda k: k.scale, lambda k: setattr(k, "scale", 3.0)),
    "function": (lambda: Schedule(), lambda k: k.value(), lambda k: setattr(k, "value", lambda: 3.0)),
}  # fmt: skip


class Reading(nn.Module):
    def __init__(self, kept, read):
        super().__init__()
        self.kept, self.read, self.conv = kept, read, nn.Conv2d(2, 2, 3, padding=1)
        self.unread = {"step": 0}

    def forward(self, x):
        return self.conv(x) * self.read(self.kept)


@pytest.fixture(autouse=True)
def as_before():
    yield
    globals().update(SCALE=1.0)
    CONTEXT.set(1.0)
    os.environ.pop("SCALE", None)
    TABLE["scale"] = Config.scale = default.__defaults__[0][0] = 1.0


@pytest.mark.parametrize("name", PLACES)
def test_a_value_that_changes_is_seen(name):
    make, read, change = PLACES[name]
    kept = make()
    module = Reading(kept, read)
    trainer = types.SimpleNamespace(kept=kept)
    watches = [
        Watch(module),
        Watch(lambda y, t: read(trainer.kept) * F.mse_loss(y, t)),
        Watch(functools.partial(lambda k, y, t: read(k) * F.mse_loss(y, t), kept)),
    ]
    before = [watch.key() for watch in watches]
    module.unread["step"] += name != "getattr"  # a name that no code has; with __dict__ it could
    assert [watch.key() for watch in watches] == before
    change(kept)
    assert all(watch.key() != key for watch, key in zip(watches, before, strict=True)), name


class Asking(nn.Module):
    """Computes something else without gradients."""

    def forward(self, x):
        return x * 2 if torch.is_grad_enabled() and x.requires_grad else x * 3


def test_code_that_asks_for_gradients():
    torch.manual_seed(0)
    module, image = nn.Sequential(nn.Conv2d(2, 2, 3), Asking()), torch.randn(SHAPE)

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(module, SHAPE, grid)
            for gradients in (True, False, True):
                with torch.set_grad_enabled(gradients):
                    torch.testing.assert_close(model.gather(model(model.scatter(image))), module(image))

    nd.loopback.run(2, body)


OF_MODULES = {
    "eval": lambda m: m.eval(),
    "eval of a part": lambda m: m[1].eval(),
    "other part": lambda m: setattr(m, "0", nn.Conv2d(2, 2, 3, stride=2)),
    "other shape": lambda m: setattr(m[1], "weight", nn.Parameter(torch.ones(1))),
    "part added": lambda m: m.append(nn.ReLU()),
    "part removed": lambda m: m.__delitem__(1),
    "number": lambda m: setattr(m[1], "momentum", 0.3),
    "dtype": lambda m: m.double(),
    "no bias": lambda m: m[0].register_parameter("bias", None),
    "tied": lambda m: setattr(m[1], "bias", m[0].bias),
    "frozen, where the code asks": lambda m: m[1].weight.requires_grad_(False),
    "hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "hook before": lambda m: m[0].register_forward_pre_hook(lambda *_: None),
    "forward": lambda m: setattr(m[1], "forward", lambda x: x),
}


@pytest.mark.parametrize("name", OF_MODULES)
def test_a_change_of_a_module_is_seen_and_taken_back(name):
    module = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), Asking())
    watch = Watch(module)
    before = watch.key()
    OF_MODULES[name](module)
    after = watch.key()
    assert after != before
    assert watch.key() == after
    if name.startswith("eval"):
        module.train()
        assert watch.key() == before


@pytest.mark.parametrize("name", ["nested", "slots", "bound method", "array", "item of a global"])
@pytest.mark.long
def test_passes_after_a_change(name):
    make, read, change = PLACES[name]

    def body(world):
        kept, found = make(), []
        torch.manual_seed(0)
        module, image = Reading(kept, read), torch.randn(SHAPE)
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(module, SHAPE, grid)

            def criterion(y, t):
                return read(kept) * F.mse_loss(y, t)

            for _ in range(2):
                y = model(model.scatter(image))
                loss = model.loss(criterion, y, model.scatter_target(image))
                expected = module(image)
                torch.testing.assert_close(model.gather(y), expected)
                torch.testing.assert_close(loss, criterion(expected, image))
                found.append(loss.item())
                grid.world.allgather(0)
                if not found[1:] and (grid.rank == 0 or name != "item of a global"):
                    change(kept)
                grid.world.allgather(0)
            assert found[0] != found[1]

    for ranks in (1, 2):
        nd.loopback.run(ranks, body)
        TABLE["scale"] = 1.0


def test_what_a_criterion_counts_itself_is_no_change():
    class Trainer:
        def __init__(self):
            self.calls, self.last, self.seen, self.unrelated = 0, None, [], 0

        def loss(self, y, t):
            self.calls += 1
            self.last = F.mse_loss(y, t)
            self.seen.append(self.last.detach())
            return self.last

    trainer = Trainer()
    with nd.ProcessGrid.serial() as grid:
        model = ndt.distribute(nn.Conv2d(2, 2, 1), SHAPE, grid)
        for step in range(6):
            trainer.unrelated = step
            y = model(torch.ones(SHAPE))
            plain = model._criteria.is_plain(trainer.loss, y, y)
            assert plain == (step > 0)
            model.loss(trainer.loss, y, y.detach())
    assert trainer.calls == 6


class Shared(nn.Module):
    """One layer under two names, tied weights, and attributes that its forward changes."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(2, 2, 3, padding=1)
        self.b, self.list, self.calls, self.cache = self.a, [self.a], 0, None
        self.tied = nn.Conv2d(2, 2, 3, padding=1)
        self.tied.weight = self.a.weight
        self.seen, self.named, self.array, self.slots = [], {}, np.zeros(3), Slots(0)
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
        self.seen.append(x.detach())
        self.named["x"] = x.shape
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


def parametrised():
    module = nn.Sequential(Shared(), nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 1)))
    return module.append(module[1])


class Failing(Shared):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return self.how(super().forward(x))


@functools.lru_cache
def columns(extent):
    return torch.arange(extent) * 2.0


class Hiding(Shared):
    """Has a norm and a tensor that are not registered, a view of a buffer, and a function with a cache."""

    def __init__(self, name):
        super().__init__()
        self.of = {"norm": [nn.BatchNorm2d(2)], "tensor": [torch.ones(1)], "view": self.mean[:1]}[name]

    def forward(self, x):
        y = super().forward(x) * columns(x.shape[-1])
        return self.of[0](y) if callable(self.of[0]) else y * self.of[0].add_(1)


MODULES = {
    "hidden norm": lambda: Hiding("norm"), "hidden tensor": lambda: Hiding("tensor"),
    "view of a buffer": lambda: Hiding("view"),
    "shared": Shared, "recurrent": Recurrent, "parametrised": parametrised,
    "value": lambda: Failing(lambda y: y if y.sum() > 0 else -y),
    "count": lambda: Failing(lambda y: y[: int(y.sum())]),
    "error": lambda: Failing(lambda y: 1 / 0),
    "shape": lambda: Failing(lambda y: y @ y),
    "no rule": lambda: Failing(lambda y: F.fractional_max_pool2d(y, 2, output_size=3)),
    "indices": lambda: Failing(lambda y: F.adaptive_max_pool2d(y, 3, return_indices=True)),
    "array": lambda: Failing(lambda y: torch.from_numpy(y.detach().numpy())),
}  # fmt: skip


def state(module):
    """Return everything that a module has, by identity or value, with what tensors have."""
    found, alive = {}, []

    def of(value, path, depth=0):
        alive.append(value)
        if isinstance(value, torch.Tensor):
            found[path] = id(value), type(value), value.requires_grad, id(value.grad), value._version, value.tolist()
        elif isinstance(value, np.ndarray):
            found[path] = id(value), value.tolist()
        elif isinstance(value, (int, float, str, tuple)):
            found[path] = value
        elif isinstance(value, (dict, list, set)):
            found[path] = id(value), type(value), len(value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                of(item, f"{path}[{key}]", depth + 1)
        else:
            found[path] = id(value), getattr(value, "scale", None)

    for path, part in module.named_modules(remove_duplicate=False):
        of(vars(part), path)
    return found, alive


@pytest.mark.parametrize("name", some(MODULES))
@pytest.mark.long
def test_a_module_is_left_as_it_was(name, capfd):
    torch.manual_seed(0)
    module = MODULES[name]()
    before, alive = state(module)
    drawn = torch.get_rng_state()

    def body(world):
        with nd.ProcessGrid(world) as grid:
            ndt.distribute(module, SHAPE, grid)

    def converted(world):
        from_torch(module, SHAPE, model=nd.Convnet)

    def as_criterion(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(nn.Identity(), SHAPE, grid)
            x = model.scatter(torch.ones(SHAPE))
            model.loss(lambda y, t: module(y).mean(), model(x), x)

    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    for ranks, run in ((2, body), (1, converted), (2, as_criterion)):
        try:
            nd.loopback.run(ranks, run)
        except nd.UserError as error:
            assert "rank" not in str(error) or ranks > 1  # noqa: PT017
        assert state(module)[0] == before, (ranks, run)
    assert type(columns(SHAPE[-1])) is torch.Tensor
    assert torch.equal(torch.get_rng_state(), drawn)
    assert capfd.readouterr() == ("", "")
    assert not log.disabled
    del alive


def test_print_of_the_user_stays(capsys):
    import sys

    module = Failing(lambda y: (print("mine", file=sys.stderr), y if y.sum() > 0 else -y)[1])
    with pytest.raises(nd.ConfigError, match="needs the value of a tensor"):
        capture_module(module, [(SHAPE, torch.float32)])
    assert set(capsys.readouterr().err.split()) == {"mine"}


def test_an_iterator_is_refused_before_it_is_read():
    module = Reading(iter([1.0, 2.0]), next)
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.ConfigError, match="iterator kept, whose next value"):
        ndt.distribute(module, SHAPE, grid)
    assert list(module.kept) == [1.0, 2.0]


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, __import__("random").Random])
def test_generators_that_a_module_holds(make):
    module = Reading(make(3), lambda kept: kept.normal() if hasattr(kept, "normal") else kept.random())
    with (
        nd.ProcessGrid.serial() as grid,
        pytest.raises(nd.ConfigError, match="random generator, whose values would be"),
    ):
        ndt.distribute(module, SHAPE, grid)


@pytest.mark.parametrize("kind", ["DataParallel", "DistributedDataParallel"])
def test_wrappers_are_refused_by_name(kind):
    parallel = getattr(nn.parallel, kind)
    wrapper = parallel.__new__(parallel)  # it would need a process group, or GPUs
    nn.Module.__init__(wrapper)
    wrapper.module = nn.Conv2d(2, 2, 1)
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.ConfigError, match=f"pass model.module, not its {kind}"):
        ndt.distribute(wrapper, SHAPE, grid)


@pytest.mark.long
def test_virtual_ranks_seed_inside():
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
        assert all(found == results[0][0] for run in results[:1] for found in run)
        assert len({str([drawn for _, drawn in run]) for run in results}) == 1
