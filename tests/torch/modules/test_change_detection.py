"""Changes of values that modules and criteria read, which require another capture."""

import array
import collections
import contextvars
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import threading
import types
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from test_module_state import SHAPE, Slots  # noqa: E402
from torch import nn  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.torch.capture.watch import StateWatch  # noqa: E402

SCALE, TABLE, data, items, found = 1.0, {"scale": 1.0}, np.zeros(3), [2.0], [3.0]


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class HiddenConfig:
    """Configuration with values as attributes, as in OmegaConf."""

    def __init__(self):
        self._values = {"scale": 1.0}

    def __getattr__(self, name):
        return self.__dict__["_values"][name]


class Schedule:
    def __init__(self):
        self._scale = [1.0]

    @property
    def scale(self):
        return self._scale[0]

    def __call__(self):
        return self._scale[0]

    def value(self):
        return self.scale


def make_closure(value):
    return lambda: value[0]


def read_default(value=[1.0]):  # noqa: B006
    return value[0]


def read_globals():
    return SCALE * TABLE["scale"]


Pair = collections.namedtuple("Pair", "a b")


CONTEXT = contextvars.ContextVar("scale", default=1.0)


class WeakReference:
    def __init__(self, reference):
        self.target = Config()
        self.reference = reference(self.target)


def make_thread_local():
    values = threading.local()
    values.scale = 1.0
    return values


VALUES = {  # functions that make, read and change a value
    "list": (lambda: [1.0], lambda k: k[0], lambda k: k.__setitem__(0, 3.0)),
    "nested": (lambda: {"a": [(1.0, [1.0])]}, lambda k: k["a"][0][1][0], lambda k: k["a"][0][1].__setitem__(0, 3.0)),
    "list length": (lambda: [1.0], sum, lambda k: k.append(2.0)),
    "deque": (lambda: collections.deque([1.0]), sum, lambda k: k.append(2.0)),
    "set": (lambda: {1.0}, sum, lambda k: k.add(2.0)),
    "key": (lambda: {1.0: 0}, lambda k: next(iter(k)), lambda k: (k.clear(), k.update({3.0: 0}))),
    "defaultdict": (lambda: collections.defaultdict(lambda: 1.0), lambda k: k.get("a", 1.0), lambda k: k.update(a=3.0)),
    "namedtuple": (lambda: Pair([1.0], 0), lambda k: k.a[0], lambda k: k.a.__setitem__(0, 3.0)),
    "dataclass": (Config, lambda k: k.scale, lambda k: setattr(k, "scale", 3.0)),
    "slots": (Slots, lambda k: k.scale, lambda k: setattr(k, "scale", 3.0)),
    "namespace": (lambda: types.SimpleNamespace(s=1.0), lambda k: k.s, lambda k: setattr(k, "s", 3.0)),
    "UserDict": (lambda: collections.UserDict(s=1.0), lambda k: k["s"], lambda k: k.update(s=3.0)),
    "getattr": (HiddenConfig, lambda k: k.scale, lambda k: k._values.update(scale=3.0)),
    "property": (Schedule, lambda k: k.scale, lambda k: k._scale.__setitem__(0, 3.0)),
    "call": (Schedule, lambda k: k(), lambda k: k._scale.__setitem__(0, 3.0)),
    "bound method": (lambda: Schedule().value, lambda k: k(), lambda k: k.__self__._scale.__setitem__(0, 3.0)),
    "partial": (
        lambda: functools.partial(lambda s: s[0], [1.0]), lambda k: k(), lambda k: k.args[0].__setitem__(0, 3.0),
    ),
    "closure": (
        lambda: make_closure([1.0]), lambda k: k(), lambda k: k.__closure__[0].cell_contents.__setitem__(0, 3.0),
    ),
    "closure cell": (
        lambda: make_closure([1.0]), lambda k: k(), lambda k: setattr(k.__closure__[0], "cell_contents", [3.0]),
    ),
    "default": (lambda: read_default, lambda k: k(), lambda k: k.__defaults__[0].__setitem__(0, 3.0)),
    "array": (lambda: np.ones(2000), lambda k: float(k[1999]), lambda k: k.__setitem__(1999, 3.0)),
    "weak proxy": (
        lambda: WeakReference(weakref.proxy), lambda k: k.reference.scale, lambda k: setattr(k.target, "scale", 3.0),
    ),
    "weak reference": (
        lambda: WeakReference(weakref.ref), lambda k: k.reference().scale, lambda k: setattr(k.target, "scale", 3.0),
    ),
    "shared value": (lambda: multiprocessing.Value("d", 1.0), lambda k: k.value, lambda k: setattr(k, "value", 3.0)),
    "shared array": (lambda: multiprocessing.Array("d", 2), lambda k: k[1], lambda k: k.__setitem__(1, 3.0)),
    "ctypes": (lambda: ctypes.c_double(1.0), lambda k: k.value, lambda k: setattr(k, "value", 3.0)),
    "array of numbers": (lambda: array.array("d", [1.0]), sum, lambda k: k.append(2.0)),
    "bytes": (lambda: bytearray(b"a"), sum, lambda k: k.append(2)),
    "thread local": (make_thread_local, lambda k: k.scale, lambda k: setattr(k, "scale", 3.0)),
    "context variable": (lambda: CONTEXT, lambda k: k.get(), lambda k: k.set(3.0)),
    "environment": (
        lambda: None, lambda k: float(os.environ.get("SCALE", "1")), lambda k: os.environ.__setitem__("SCALE", "3"),
    ),
    "type": (lambda: [2], lambda k: k[0] if isinstance(k[0], bool) else 1.5, lambda k: k.__setitem__(0, True)),
    "class": (Config, lambda k: Config.scale, lambda k: setattr(Config, "scale", 3.0)),
    "global": (lambda: None, lambda k: read_globals(), lambda k: globals().update(SCALE=3.0)),
    "global item": (lambda: None, lambda k: read_globals(), lambda k: TABLE.update(scale=3.0)),
    "shadowed": (lambda: type("SubConfig", (Config,), {})(), lambda k: k.scale, lambda k: setattr(k, "scale", 3.0)),
    "function": (lambda: Schedule(), lambda k: k.value(), lambda k: setattr(k, "value", lambda: 3.0)),
}  # fmt: skip


class ReadingModule(nn.Module):
    def __init__(self, value, read):
        super().__init__()
        self.value, self.read, self.conv = value, read, nn.Conv2d(2, 2, 3, padding=1)
        self.unread = {"step": 0}

    def forward(self, x):
        return self.conv(x) * self.read(self.value)


@pytest.fixture(autouse=True)
def restored_globals():
    yield
    globals().update(SCALE=1.0)
    CONTEXT.set(1.0)
    os.environ.pop("SCALE", None)
    TABLE["scale"] = Config.scale = read_default.__defaults__[0][0] = 1.0


@pytest.mark.parametrize("name", VALUES)
def test_changed_values_are_detected(name):
    make, read, change = VALUES[name]
    value = make()
    module = ReadingModule(value, read)
    trainer = types.SimpleNamespace(value=value)
    watches = [
        StateWatch(module),
        StateWatch(lambda y, t: read(trainer.value) * F.mse_loss(y, t)),
        StateWatch(functools.partial(lambda k, y, t: read(k) * F.mse_loss(y, t), value)),
    ]
    original = [watch.key() for watch in watches]
    module.unread["step"] += name != "getattr"  # a name that no code reads; with __dict__ it could be read
    assert [watch.key() for watch in watches] == original
    change(value)
    assert all(watch.key() != key for watch, key in zip(watches, original, strict=True)), name


class GradientDependent(nn.Module):
    """Module whose code depends on the gradient mode."""

    def forward(self, x):
        return x * 2 if torch.is_grad_enabled() and x.requires_grad else x * 3


def test_code_that_depends_on_grad_mode():
    torch.manual_seed(0)
    module, image = nn.Sequential(nn.Conv2d(2, 2, 3), GradientDependent()), torch.randn(SHAPE)

    def body(world):
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(module, SHAPE, grid)
            for gradients in (True, False, True):
                with torch.set_grad_enabled(gradients):
                    torch.testing.assert_close(model.gather(model(model.scatter(image))), module(image))

    nd.loopback.run(2, body)


MODULE_CHANGES = {
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
    "backward hook": lambda m: m[0].register_full_backward_hook(lambda *_: None),
    "backward hook before": lambda m: m[0].register_full_backward_pre_hook(lambda *_: None),
    "forward": lambda m: setattr(m[1], "forward", lambda x: x),
}


@pytest.mark.parametrize("name", MODULE_CHANGES)
def test_module_changes_are_detected(name):
    module = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), GradientDependent())
    watch = StateWatch(module)
    original = watch.key()
    MODULE_CHANGES[name](module)
    changed = watch.key()
    assert changed != original
    assert watch.key() == changed
    if name.startswith("eval"):
        module.train()
        assert watch.key() == original


@pytest.mark.parametrize("name", ["nested", "slots", "bound method", "array", "global item"])
@pytest.mark.long
def test_passes_after_a_change(name):
    make, read, change = VALUES[name]

    def body(world):
        value, losses = make(), []
        torch.manual_seed(0)
        module, image = ReadingModule(value, read), torch.randn(SHAPE)
        with nd.ProcessGrid(world) as grid:
            model = ndt.distribute(module, SHAPE, grid)

            def criterion(y, t):
                return read(value) * F.mse_loss(y, t)

            for _ in range(2):
                y = model(model.scatter(image))
                loss = model.loss(criterion, y, model.scatter_target(image))
                expected = module(image)
                torch.testing.assert_close(model.gather(y), expected)
                torch.testing.assert_close(loss, criterion(expected, image))
                losses.append(loss.item())
                grid.world.allgather(0)
                if not losses[1:] and (grid.rank == 0 or name != "global item"):
                    change(value)
                grid.world.allgather(0)
            assert losses[0] != losses[1]

    for ranks in (1, 2):
        nd.loopback.run(ranks, body)
        TABLE["scale"] = 1.0


def test_counters_of_criteria_are_ignored():
    class Trainer:
        def __init__(self):
            self.calls, self.last, self.history, self.unrelated = 0, None, [], 0

        def loss(self, y, t):
            self.calls += 1
            self.last = F.mse_loss(y, t)
            self.history.append(self.last.detach())
            return self.last

    trainer = Trainer()
    with nd.ProcessGrid.serial() as grid:
        model = ndt.distribute(nn.Conv2d(2, 2, 1), SHAPE, grid)
        for step in range(6):
            trainer.unrelated = step
            y = model(torch.ones(SHAPE))
            plain = model._criteria.can_call_directly(trainer.loss, y, y)
            assert plain == (step > 0)
            model.loss(trainer.loss, y, y.detach())
    assert trainer.calls == 6


def test_iterators_are_rejected_unread():
    module = ReadingModule(iter([1.0, 2.0]), next)
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.ConfigError, match="iterator value, whose next value"):
        ndt.distribute(module, SHAPE, grid)
    assert list(module.value) == [1.0, 2.0]


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, __import__("random").Random])
def test_random_generators_are_rejected(make):
    module = ReadingModule(
        make(3), lambda generator: generator.normal() if hasattr(generator, "normal") else generator.random()
    )
    with (
        nd.ProcessGrid.serial() as grid,
        pytest.raises(nd.ConfigError, match="random generator, whose values would be"),
    ):
        ndt.distribute(module, SHAPE, grid)


def test_only_global_variables_that_code_reads_are_watched():
    """A global variable with the name of an attribute, such as a large array, is neither watched nor hashed."""

    def read(x):
        def nested():
            return items[0] * globals()["found"][0]

        return x.data * nested()

    watch = StateWatch(read)
    before = watch.key()
    data[0] += 1
    assert watch.key() == before
    for values in items, found:
        values[0] += 1
        assert watch.key() != before
        before = watch.key()
