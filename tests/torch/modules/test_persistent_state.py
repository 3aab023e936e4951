"""State that persists between forward passes: detected, and left unchanged."""

import copy
import functools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_runs import FunctionModule, check_module  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.torch.capture import persistent_state  # noqa: E402
from neondist.torch.capture.capture import capture_module  # noqa: E402

IMAGES, GRIDS = (2, 3, 9, 7), ((1, 1, 2), (1, 3, 1), (2, 1, 2))


class Counter:
    calls = 0


class Doubling(torch.autograd.Function):
    """Function without saved tensors."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class Tripling(Doubling):
    """Function that differs from `Doubling` only in its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 3


class StatefulModule(nn.Module):
    """Module that applies an autograd.Function, and calls a function of itself and x."""

    def __init__(self, function):
        super().__init__()
        self.function, self.conv = function, nn.Conv2d(3, 3, 3, padding=1)
        self.count, self.cache, self.history, self.dictionary, self.counter = 0, None, [], {}, Counter()
        self.array, self.tensor = np.zeros(2), torch.tensor(0.0)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5))
        self.register_buffer("empty", None)

    def forward(self, x):
        return self.function(self, Doubling.apply(self.conv(x)))


def warm_up(self, x):
    self.count += 1
    return x * min(1.0, self.count / 10)


def count_in_tensor(self, x):
    self.count += 1
    return x * torch.tensor(self.count)


def add_previous(self, x):
    previous, self.cache = self.cache, x.detach()
    return x if previous is None else x + previous


def append_means(self, x):
    self.history.append(x.mean().detach())
    return x * sum(self.history)


def store_by_name(self, x):
    y = x + self.dictionary.get("before", 0)
    self.dictionary["before"] = y.detach()
    return y


def count_in_object(self, x):
    self.counter.calls += 1
    return x * self.counter.calls


def switch_after_three(self, x):
    self.count += 1
    return x if self.count <= 3 else x * 2


def switch_periodically(self, x):
    self.count += 1
    return x * 2 if self.count % 100 == 0 else x


def count_in_floats(self, x):
    self.counter.calls += 0.9
    return x if 0.1 * self.counter.calls < 5 else x * 2


def switch_at_length(self, x):
    self.history.append(0)
    return x if len(self.history) < 10 else x * 2


def switch_at_dictionary_size(self, x):
    self.dictionary[len(self.dictionary)] = torch.arange(x.shape[-1])
    return x if len(self.dictionary) < 10 else x * 2


def switch_at_size_of_named_items(self, x):
    self.dictionary[f"mean {len(self.dictionary)}"] = x.detach().mean()
    return x if len(self.dictionary) < 10 else x * 2


def switch_at_last_key(self, x):
    self.dictionary["step", len(self.dictionary)] = None
    return x if max(self.dictionary)[1] < 10 else x * 2


def switch_at_set_size(self, x):
    self.history = {*self.history, len(self.history)}
    return x if len(self.history) < 10 else x * 2


def switch_at_length_of_nested_list(self, x):
    self.dictionary.setdefault("means", []).append(x.detach().mean())
    return x if len(self.dictionary["means"]) < 10 else x * 2


def switch_at_length_of_tuple(self, x):
    self.history = (*self.history, None)
    return x if len(self.history) < 10 else x * 2


def switch_at_length_of_text(self, x):
    self.dictionary["log"] = self.dictionary.get("log", "") + "."
    return x if len(self.dictionary["log"]) < 10 else x * 2


def count_in_array(self, x):
    self.array[0] += 1
    return x if self.array[0] < 10 else x * 2


def count_in_attribute_tensor(self, x):
    self.tensor = self.tensor + 1  # not a buffer
    return x * self.tensor


def count_in_loop(self, x):
    self.count += 3
    while self.count > 1:
        self.count -= 1
    return x if self.count < 1 else x * 2


def differ_on_first_pass(self, x):
    scale, self.dictionary["scale"] = (torch.ones(200).sum() if self.cache is None else torch.ones(300).sum()), 1
    self.cache = self.cache or "set"
    return x * scale


def cache_random(self, x):
    if self.cache is None:
        self.cache = torch.rand(x.shape[-1])
    return x * self.cache


def cache_parameters(self, x):
    if self.cache is None:
        self.cache = self.conv.weight.detach().square().sum()
    return x * self.cache


def decay_cache(self, x):
    if self.cache is None:
        self.cache = torch.full((x.shape[-1],), 2.0)
    self.cache.mul_(0.9)
    return x * self.cache


def switch_autograd_function(self, x):
    self.count += 1
    return (Doubling if self.count == 1 else Tripling).apply(x)


REJECTED = {
    "count": warm_up,
    "count ": count_in_tensor,
    "cache": add_previous,
    "history": append_means,
    "dictionary": store_by_name,
    "counter": count_in_object,
    "cache, dictionary": differ_on_first_pass,
    "cache  ": cache_random,
    "cache   ": cache_parameters,
    "cache    ": decay_cache,
    "count  ": switch_after_three,
    "count   ": switch_periodically,
    "counter ": count_in_floats,
    "history ": switch_at_length,
    "dictionary ": switch_at_dictionary_size,
    "dictionary  ": switch_at_size_of_named_items,
    "dictionary   ": switch_at_last_key,
    "dictionary    ": switch_at_length_of_nested_list,
    "dictionary     ": switch_at_length_of_text,
    "history  ": switch_at_set_size,
    "history   ": switch_at_length_of_tuple,
    "array": count_in_array,
    "tensor": count_in_attribute_tensor,
    "count    ": count_in_loop,
    "count     ": switch_autograd_function,
}


@pytest.mark.parametrize("name", REJECTED)
def test_persistent_state_is_rejected(name):
    module = StatefulModule(REJECTED[name])
    original = dict(vars(module))
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError) as caught:
        ndt.distribute(module, IMAGES, grid)
    assert f"the forward pass changes {name.strip()}, which the next forward pass reads" in str(caught.value)
    assert str(caught.value).startswith(f"{__file__}:")
    assert vars(module) == original
    assert (module.history, module.dictionary, module.counter.calls) == ([], {}, 0)


def replace_parameter(self, x):
    self.conv.weight = nn.Parameter(self.conv.weight * 2)
    return self.conv(x)


def freeze_parameter(self, x):
    self.conv.bias.requires_grad_(False)
    return x * self.conv.bias[:, None, None]


def register_hook(self, x):
    self.conv.register_forward_hook(lambda _, inputs, y: y * 2)
    return self.conv(x)


def register_hook_after_use(self, x):
    y = self.conv(x)
    if not self.conv._forward_hooks:
        self.conv.register_forward_hook(lambda _, inputs, y: y * 2)
    return y


def remove_hook(self, x):
    self.conv._forward_pre_hooks.clear()
    return self.conv(x)


@pytest.mark.parametrize("change", [register_hook, register_hook_after_use, remove_hook])
def test_changes_of_hooks_that_affect_the_next_pass_are_rejected(change):
    module = StatefulModule(change)
    module.conv.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    message = "the forward pass changes the hooks of conv, which the next forward pass reads"
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError, match=message) as caught:
        ndt.distribute(module, IMAGES, grid)
    assert str(caught.value).startswith(f"{__file__}:")
    assert (len(module.conv._forward_hooks), len(module.conv._forward_pre_hooks)) == (0, 1)


def record_outputs(self, x):
    """Register recording hooks in the first pass, as Transformers does for hidden states."""
    if not self.count:
        self.count = 1
        self.conv.register_forward_hook(lambda _, inputs, y: self.history.append(y))
    self.history.clear()
    return self.conv(x) + self.history[0]


def register_observer(self, x):
    self.conv.register_forward_pre_hook(lambda module, inputs: self.dictionary.update(shape=inputs[0].shape))
    return self.conv(x)


@pytest.mark.parametrize("forward", [record_outputs, register_observer])
def test_hooks_that_a_pass_changes(forward):
    module = StatefulModule(forward)
    check_module(module, IMAGES, grids=((1, 1, 2),))
    assert (len(module.conv._forward_hooks), len(module.conv._forward_pre_hooks)) == (0, 0)


def create_module(self, x):
    if not hasattr(self, "last"):
        self.last = nn.Conv2d(3, 3, 1)
    return self.last(x)


def create_buffer(self, x):
    self.empty = x.new_ones(3, 1, 1) if self.empty is None else self.empty
    return x * self.empty


MODULE_CHANGES = {
    "the parameter conv.weight; create": replace_parameter,
    "the parameter conv.bias; create, replace or freeze": freeze_parameter,
    "the parameter last.weight; create": create_module,
    "the buffer empty; give it its final shape before": create_buffer,
}  # fmt: skip


@pytest.mark.parametrize("message", MODULE_CHANGES)
def test_module_changes_are_rejected(message):
    module = StatefulModule(MODULE_CHANGES[message])
    original, hooks = dict(module.named_parameters()), len(module.conv._forward_hooks)
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError, match=f"the forward pass changes {message}"):
        ndt.distribute(module, IMAGES, grid)
    assert all(p is original[name] and p.requires_grad for name, p in module.named_parameters())
    assert (module.empty, len(module.conv._forward_hooks)) == (None, hooks)


def test_buffers_created_by_a_first_pass():
    module = StatefulModule(create_buffer)
    module(torch.ones(IMAGES))
    check_module(module, IMAGES, grids=((1, 1, 2),))


def count_only(self, x):
    self.count += 1
    self.counter.calls += 1
    return x * 2


def cache_grid(self, x):
    if self.cache is None or self.cache.shape != x.shape[-1:]:
        self.cache = torch.arange(x.shape[-1]).to(x)
    if "rows" not in self.dictionary:
        self.dictionary["rows"] = x.new_ones(1, 1, x.shape[2], 1).cumsum(2)
    return x * self.cache + self.dictionary["rows"]


def collect_without_limit(self, x):
    """Read the last item of collections that grow; their lengths have no effect."""
    self.dictionary[len(self.dictionary)] = torch.arange(x.shape[-1]).to(x)
    self.history.append(x.shape)
    return x * self.dictionary[len(self.dictionary) - 1] * self.history[-1].numel()


def evict_old_items(self, x):
    """Keep a cache of a few extents."""
    if x.shape not in self.dictionary:
        if len(self.dictionary) > 2:
            self.dictionary.popitem()
        self.dictionary[x.shape] = torch.arange(x.shape[-1]).to(x)
    return x * self.dictionary[x.shape]


def cache_by_extent(self, x):
    """Cache a grid by its extent, as neuraloperator does."""
    if self.history is None or self.history != x.shape[-2:]:
        rows, cols = (torch.linspace(0, 1, extent).to(x) for extent in x.shape[-2:])
        self.cache, self.history = torch.meshgrid(rows, cols, indexing="ij"), x.shape[-2:]
    rows, cols = self.cache
    return x * rows.expand(len(x), 1, -1, -1) + cols


def store_statistics(self, x):
    self.cache = x.square().mean()
    self.history = [x.detach()]
    return x * 3


def update_running_mean(self, x):
    with torch.no_grad():
        self.mean.mul_(0.9).add_(x.mean((0, 2, 3))[:, None, None], alpha=0.1)
    return x - self.mean


def accumulate_mean(self, x):
    self.mean += x.detach().mean((0, 2, 3))[:, None, None]
    return x - self.mean


def log_periodically(self, x):
    self.count += 1
    self.array[0] += 1
    if self.count % 10 == 0 or self.array[0] > 100:
        print(f"pass {self.count:d}")
    return x * 2


@functools.cache
def make_columns(extent):
    return torch.arange(extent) / extent


def cache_with_functools(self, x):
    """Cache in functools and in an attribute; the functools cache is cleared when the attribute is restored."""
    self.cache = make_columns(x.shape[-1]) if self.cache is None else self.cache
    return x * make_columns(x.shape[-2])[:, None] * self.cache


@pytest.mark.parametrize(
    "function",
    [count_only, cache_grid, collect_without_limit, evict_old_items, cache_by_extent, store_statistics,
     update_running_mean, accumulate_mean, log_periodically, cache_with_functools],
)  # fmt: skip
@pytest.mark.long
def test_harmless_state(function):
    module = StatefulModule(function)
    check_module(module, IMAGES, grids=GRIDS)
    make_columns.cache_clear()
    with nd.ProcessGrid.serial() as grid:
        ndt.distribute(module, IMAGES, grid)
    assert (module.count, module.cache, module.history, module.dictionary, module.counter.calls) == (0, None, [], {}, 0)
    assert {type(make_columns(extent)) for extent in IMAGES[-2:]} == {torch.Tensor}


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_foreign_random_numbers_are_rejected(draw):
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError, match="Python's or NumPy's random"):
        ndt.distribute(StatefulModule(lambda self, x: x * draw()), IMAGES, grid)


def test_attribute_tensors_may_be_replaced():
    original = StatefulModule(lambda self, x: x * self.cache).double()
    original.cache = torch.full((1, 1, 1, 7), 2.0, dtype=torch.float64)
    image = torch.randn(IMAGES, dtype=torch.float64)

    def body(world):
        with nd.ProcessGrid(world) as grid:
            module, outputs = copy.deepcopy(original), []
            model = ndt.distribute(module, IMAGES, grid)
            for factor in (2.0, 3.0):
                module.cache = torch.full((1, 1, 1, 7), factor, dtype=torch.float64)
                outputs.append(model.gather(model(model.scatter(image))).detach())
            return outputs

    for doubled, tripled in nd.loopback.run(2, body):
        torch.testing.assert_close(tripled / 3, doubled / 2)


@torch.fx.wrap
def wrapped_double(x):
    return 2 * x


def test_wrapped_functions_need_no_second_pass(monkeypatch):
    """Such as torchvision's shifted windows: comparing two passes would add a quarter to the capture time."""
    monkeypatch.setattr(
        persistent_state, "_reject_state_kept_between_passes", lambda *_: pytest.fail("compares two passes")
    )
    with nd.ProcessGrid.serial() as grid:
        ndt.distribute(FunctionModule(lambda x, conv: wrapped_double(conv(x)), nn.Conv2d(3, 3, 3)), IMAGES, grid)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_passes_of_recurrent_layers_are_not_repeated(layer, monkeypatch):
    """Repeated passes would run each step of a sequence several times."""
    monkeypatch.setattr(persistent_state, "RepeatedPasses", None)
    capture_module(layer(3, 4), [((5, 2, 3), torch.float32)])
