"""State that a forward keeps for the next one, and values without gradients: noticed, and left as they were."""

import copy
import functools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_runs import Function, check  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.torch.capture import persistent_state  # noqa: E402

IMAGES, GRIDS = (2, 3, 9, 7), ((1, 1, 2), (1, 3, 1), (2, 1, 2))


class Counter:
    calls = 0


class Keeping(nn.Module):
    """Calls a function of itself and x."""

    def __init__(self, function):
        super().__init__()
        self.function, self.conv = function, nn.Conv2d(3, 3, 3, padding=1)
        self.count, self.cache, self.seen, self.named, self.counter = 0, None, [], {}, Counter()
        self.array, self.tensor = np.zeros(2), torch.tensor(0.0)
        self.register_buffer(
            "mean",
            torch.full(
                (
                    3,
                    1,
                    1,
                ),
                0.5,
            ),
        )
        self.register_buffer("empty", None)

    def forward(self, x):
        return self.function(self, self.conv(x))


def warming_up(self, x):
    self.count += 1
    return x * min(1.0, self.count / 10)


def as_tensor(self, x):
    self.count += 1
    return x * torch.tensor(self.count)


def remembering(self, x):
    before, self.cache = self.cache, x.detach()
    return x if before is None else x + before


def appending(self, x):
    self.seen.append(x.mean().detach())
    return x * sum(self.seen)


def naming(self, x):
    y = x + self.named.get("before", 0)
    self.named["before"] = y.detach()
    return y


def of_an_object(self, x):
    self.counter.calls += 1
    return x * self.counter.calls


def after_three(self, x):
    self.count += 1
    return x if self.count <= 3 else x * 2


def at_times(self, x):
    self.count += 1
    return x * 2 if self.count % 100 == 0 else x


def decaying(self, x):
    self.counter.calls += 0.9
    return x if 0.1 * self.counter.calls < 5 else x * 2


def when_full(self, x):
    self.seen.append(0)
    return x if len(self.seen) < 10 else x * 2


def of_an_array(self, x):
    self.array[0] += 1
    return x if self.array[0] < 10 else x * 2


def of_itself(self, x):
    self.tensor = self.tensor + 1  # no buffer
    return x * self.tensor


def in_a_loop(self, x):
    self.count += 3
    while self.count > 1:
        self.count -= 1
    return x if self.count < 1 else x * 2


def first_is_another(self, x):
    scale, self.named["scale"] = (torch.ones(200).sum() if self.cache is None else torch.ones(300).sum()), 1
    self.cache = self.cache or "set"
    return x * scale


def drawn_once(self, x):
    if self.cache is None:
        self.cache = torch.rand(x.shape[-1])
    return x * self.cache


def of_parameters(self, x):
    if self.cache is None:
        self.cache = self.conv.weight.detach().square().sum()
    return x * self.cache


def fading(self, x):
    if self.cache is None:
        self.cache = torch.full((x.shape[-1],), 2.0)
    self.cache.mul_(0.9)
    return x * self.cache


REFUSED = {
    "count": warming_up,
    "count ": as_tensor,
    "cache": remembering,
    "seen": appending,
    "named": naming,
    "counter": of_an_object,
    "cache, named": first_is_another,
    "cache  ": drawn_once,
    "cache   ": of_parameters,
    "cache    ": fading,
    "count  ": after_three,
    "count   ": at_times,
    "counter ": decaying,
    "seen ": when_full,
    "array": of_an_array,
    "tensor": of_itself,
    "count    ": in_a_loop,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_next_pass_reads_is_refused(name):
    module = Keeping(REFUSED[name])
    before = dict(vars(module))
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError) as caught:
        ndt.distribute(module, IMAGES, grid)
    assert f"the forward changes {name.strip()}, which the next one reads" in str(caught.value)
    assert str(caught.value).startswith(f"{__file__}:")
    assert vars(module) == before
    assert (module.seen, module.named, module.counter.calls) == ([], {}, 0)


def replacing(self, x):
    self.conv.weight = nn.Parameter(self.conv.weight * 2)
    return self.conv(x)


def freezing(self, x):
    self.conv.bias.requires_grad_(False)
    return x * self.conv.bias[:, None, None]


def hooking(self, x):
    self.conv.register_forward_hook(lambda _, given, y: y * 2)
    return self.conv(x)


def making(self, x):
    if not hasattr(self, "last"):
        self.last = nn.Conv2d(3, 3, 1)
    return self.last(x)


def resizing(self, x):
    self.empty = x.new_ones(3, 1, 1) if self.empty is None else self.empty
    return x * self.empty


OF_MODULES = {
    "the parameter conv.weight; create": replacing, "the parameter conv.bias; create, replace or freeze": freezing,
    "the parameter last.weight; create": making,
    "the hooks of conv; register": hooking, "the buffer empty; register it before": resizing,
}  # fmt: skip


@pytest.mark.parametrize("words", OF_MODULES)
def test_what_modules_keep_is_no_matter_of_a_pass(words):
    module = Keeping(OF_MODULES[words])
    before, hooks = dict(module.named_parameters()), len(module.conv._forward_hooks)
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError, match=f"the forward changes {words}"):
        ndt.distribute(module, IMAGES, grid)
    assert all(p is before[name] and p.requires_grad for name, p in module.named_parameters())
    assert (module.empty, len(module.conv._forward_hooks)) == (None, hooks)


def counting(self, x):
    self.count += 1
    self.counter.calls += 1
    return x * 2


def with_a_cache(self, x):
    if self.cache is None or self.cache.shape != x.shape[-1:]:
        self.cache = torch.arange(x.shape[-1]).to(x)
    if "rows" not in self.named:
        self.named["rows"] = x.new_ones(1, 1, x.shape[2], 1).cumsum(2)
    return x * self.cache + self.named["rows"]


def with_a_key(self, x):
    """Caches as neuraloperator's."""
    if self.seen is None or self.seen != x.shape[-2:]:
        rows, cols = (torch.linspace(0, 1, extent).to(x) for extent in x.shape[-2:])
        self.cache, self.seen = torch.meshgrid(rows, cols, indexing="ij"), x.shape[-2:]
    rows, cols = self.cache
    return x * rows.expand(len(x), 1, -1, -1) + cols


def looked_at(self, x):
    self.cache = x.square().mean()
    self.seen = [x.detach()]
    return x * 3


def running_mean(self, x):
    with torch.no_grad():
        self.mean.mul_(0.9).add_(x.mean((0, 2, 3))[:, None, None], alpha=0.1)
    return x - self.mean


def summed_up(self, x):
    self.mean += x.detach().mean((0, 2, 3))[:, None, None]
    return x - self.mean


def logging_at_times(self, x):
    self.count += 1
    self.array[0] += 1
    if self.count % 10 == 0 or self.array[0] > 100:
        print(f"pass {self.count:d}")
    return x * 2


@functools.cache
def columns(extent):
    return torch.arange(extent) / extent


def with_a_function_of_functools(self, x):
    """Caches for both, of which one is cleared together with what the other changes."""
    self.cache = columns(x.shape[-1]) if self.cache is None else self.cache
    return x * columns(x.shape[-2])[:, None] * self.cache


@pytest.mark.parametrize(
    "function",
    [counting, with_a_cache, with_a_key, looked_at, running_mean, summed_up, logging_at_times,
     with_a_function_of_functools],
)  # fmt: skip
@pytest.mark.long
def test_what_is_harmless(function):
    module = Keeping(function)
    check(module, IMAGES, grids=GRIDS)
    columns.cache_clear()
    with nd.ProcessGrid.serial() as grid:
        ndt.distribute(module, IMAGES, grid)
    assert (module.count, module.cache, module.seen, module.named, module.counter.calls) == (0, None, [], {}, 0)
    assert {type(columns(extent)) for extent in IMAGES[-2:]} == {torch.Tensor}


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_that_are_not_pytorchs(draw):
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError, match="Python's or NumPy's random"):
        ndt.distribute(Keeping(lambda self, x: x * draw()), IMAGES, grid)


def test_a_tensor_that_is_no_buffer_may_be_replaced():
    build = Keeping(lambda self, x: x * self.cache).double()
    build.cache = torch.full((1, 1, 1, 7), 2.0, dtype=torch.float64)
    image = torch.randn(IMAGES, dtype=torch.float64)

    def body(world):
        with nd.ProcessGrid(world) as grid:
            module, found = copy.deepcopy(build), []
            model = ndt.distribute(module, IMAGES, grid)
            for factor in (2.0, 3.0):
                module.cache = torch.full((1, 1, 1, 7), factor, dtype=torch.float64)
                found.append(model.gather(model(model.scatter(image))).detach())
            return found

    for two, three in nd.loopback.run(2, body):
        torch.testing.assert_close(three / 3, two / 2)


def under_inference_mode(x):
    with torch.inference_mode():
        mean = x.mean((2, 3), keepdim=True)
    return x - mean.clone()


def switched(x):
    y = torch.zeros_like(x)
    for k in range(3):
        with torch.set_grad_enabled(k == 2):
            y = (x + y).tanh()
    return y


@pytest.mark.parametrize("function", [under_inference_mode, switched])
def test_gradients_that_are_switched_off(function):
    check(Function(lambda x, conv: function(conv(x)), nn.Conv2d(3, 3, 3)), IMAGES, grids=GRIDS)


def doubled(x):
    with torch.no_grad():
        x.mul_(2)
    return x * x


def through_detach(x):
    x.detach()[:, :1].fill_(1)
    return x * x


@pytest.mark.parametrize("function", [doubled, through_detach])
def test_writing_behind_the_back_of_gradients_is_refused(function):
    with pytest.raises(nd.UserError, match=r"\.py:\d+: .* which its gradient does not see"):
        check(Function(lambda x, conv: function(conv(x)), nn.Conv2d(3, 3, 3)), IMAGES, grids=[(1, 1, 2)])


def test_parameters_that_are_written_to_are_refused_by_place():
    class Clipped(nn.Conv2d):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    class ClippedData(nn.Conv2d):
        def forward(self, x):
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    for kind, words in ((Clipped, "which its gradient does not see"), (ClippedData, "Tensor.data in a forward")):
        with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError) as caught:
            ndt.distribute(nn.Sequential(kind(3, 3, 3)), IMAGES, grid)
        assert words in str(caught.value)
        assert __file__ in str(caught.value)


@torch.fx.wrap
def doubled(x):
    return 2 * x


def test_functions_that_pytorch_wraps_while_it_traces_are_no_changes(monkeypatch):
    """As those of torchvision's windows: two passes to compare would be a quarter of the time of capturing."""
    monkeypatch.setattr(persistent_state, "_check_next_pass", lambda *_: pytest.fail("compares two passes"))
    with nd.ProcessGrid.serial() as grid:
        ndt.distribute(Function(lambda x, conv: doubled(conv(x)), nn.Conv2d(3, 3, 3)), IMAGES, grid)
