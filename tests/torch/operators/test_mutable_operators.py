"""Operators that write to their arguments according to PyTorch's schemas: detected, and equal on tiles."""

import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_runs import FunctionModule, check_module  # noqa: E402

from neondist import ProcessGrid  # noqa: E402
from neondist.errors import UserError  # noqa: E402
from neondist.torch import distribute  # noqa: E402
from neondist.torch.capture.capture import capture_module  # noqa: E402
from neondist.torch.ir.functionalize import RUNNING_STATS, written_arguments, written_values  # noqa: E402

_FOREIGN_WORDS = "cudnn", "miopen", "gather_stats", "backward", "no_update.out"  # for other devices or dtypes


def list_operators():
    """Yield all operators of ATen."""
    # dir(torch.ops.aten) lists only operators that were accessed before
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for name in sorted(name for name in names if "::" not in name):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield from (getattr(packet, overload) for overload in packet.overloads())


def test_written_arguments_match_schemas():
    count = 0
    for operator in list_operators():
        arguments = operator._schema.arguments
        expected = [arg.name for arg in arguments if arg.alias_info and arg.alias_info.is_write]
        actual = written_arguments(operator, [], {arg.name: arg.name for arg in arguments})
        assert actual[: len(expected)] == expected, operator
        count += bool(expected)
    assert count > 1000


def list_norm_operators():
    """Return the names of operators with running statistics on this device."""
    named = {str(op): {arg.name for arg in op._schema.arguments} for op in list_operators()}
    return [
        name
        for name, args in named.items()
        if set(RUNNING_STATS) <= args and not any(part in name for part in _FOREIGN_WORDS)
    ]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list_norm_operators())
def test_written_statistics(name, training):
    operator = getattr(getattr(torch.ops.aten, name.split(".")[1]), name.split(".")[2])
    values = {
        "input": torch.randn(2, 4, 3, 3), "weight": torch.ones(4), "bias": torch.zeros(4), "momentum": 0.5, "eps": 1e-5,
        "running_mean": torch.ones(4), "running_var": torch.full((4,), 3.0), "cudnn_enabled": False,
        "training": training, "use_input_stats": training,
    }  # fmt: skip
    inputs = {}
    for arg in operator._schema.arguments:
        inputs[arg.name] = torch.empty(0) if arg.is_out else values[arg.name]
    before = {name: inputs[name].clone() for name in RUNNING_STATS}
    try:
        operator(**inputs)
    except NotImplementedError:
        pytest.skip("not available on this device")
    written = [arg for arg in written_arguments(operator, [], inputs) if isinstance(arg, torch.Tensor)]
    for name in RUNNING_STATS:
        changed = not torch.equal(inputs[name], before[name])
        assert changed <= any(inputs[name] is arg for arg in written), name


class WritingModule(nn.Module):
    """Module that calls a function of x and of buffers, to which it writes."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return self.function(x * 2, self.mean, self.var)


def average(x):
    return x.detach().mean((0, 2, 3))


def take_first(x, *_):
    return x


WRITES = {
    "native_batch_norm": lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, True, 0.5, 1e-5)[0],
    "native_batch_norm, fixed": lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, False, 0.5, 1e-5)[0],
    "_native_batch_norm_legit": lambda x, m, v: torch._native_batch_norm_legit(x, None, None, m, v, True, 0.5, 1e-5)[0],
    "_batch_norm_impl_index": lambda x, m, v: torch._batch_norm_impl_index(
        x, None, None, m, v, True, 0.5, 1e-5, False
    )[0],
    "batch_norm": lambda x, m, v: torch.batch_norm(x, None, None, m, v, True, 0.5, 1e-5, False),
    "instance_norm": lambda x, m, v: torch.instance_norm(x, None, None, m, v, True, 0.5, 1e-5, False),
    "batch_norm_update_stats": lambda x, m, v: take_first(x, torch.batch_norm_update_stats(x.detach(), m, v, 0.5)),
    "out": lambda x, m, v: take_first(x, torch.add(m, average(x), out=m)),
    "several outs": lambda x, m, v: take_first(x, torch.frexp(average(x), out=(m, v.int()))),
    "_foreach_add_": lambda x, m, v: take_first(x, torch._foreach_add_([m, v], [average(x), average(x)])),
    "_foreach_mul_ of numbers": lambda x, m, v: take_first(x, torch._foreach_mul_([m, v], 0.5)),
    "_fused_sgd_": lambda x, m, v: take_first(x, torch._fused_sgd_(
        [m], [average(x)], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=True,
    )),
    "index_put_": lambda x, m, v: take_first(x, m.index_put_((torch.tensor([1, 2]),), average(x)[:2])),
    "copy_ to a view": lambda x, m, v: take_first(x, m[1:3].copy_(average(x)[:2])),
    "scatter_": lambda x, m, v: take_first(x, m.scatter_(0, torch.tensor([0, 3]), average(x)[:2])),
    "set_": lambda x, m, v: take_first(x, m.set_(average(x))),
    "resize_": lambda x, m, v: take_first(x, m.resize_(2).fill_(1.0)),
    "one of several results": lambda x, m, v: x.max(1, keepdim=True)[0].add_(1).mul_(x[:, :1]),
    "rrelu_with_noise_": lambda x, m, v: torch.ops.aten.rrelu_with_noise_(x, torch.zeros_like(x), 0.1, 0.3, False),
}  # fmt: skip
REJECTED = {"set_", "resize_", "batch_norm_update_stats", "several outs", "_fused_sgd_", "rrelu_with_noise_"}
"""Rejected or exact, depending on how the PyTorch version decomposes them."""


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.long
def test_writes_on_tiles(name):
    try:
        check_module(WritingModule(WRITES[name]), (2, 4, 4, 6), grids=((1, 1, 2),))
    except UserError:
        assert name in REJECTED


class TiedNorms(nn.Module):
    """Two norms with one running mean."""

    def __init__(self, writes=False):
        super().__init__()
        self.norms, self.writes = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3)), writes
        self.norms[2].running_mean = self.norms[0].running_mean

    def forward(self, x):
        y = self.norms(x)
        if self.writes:
            self.norms[2].running_mean[0] += 1
        return y + self.norms[0].running_mean[:, None, None]


def test_buffer_with_two_names():
    check_module(TiedNorms(), (2, 3, 8, 9), grids=((1, 1, 2), (2, 1, 1)))
    with ProcessGrid.serial() as grid, pytest.raises(UserError, match="running_mean, which has several names"):
        distribute(TiedNorms(writes=True), (2, 3, 8, 9), grid)


class UnusedNorm(nn.Module):
    """Norm whose result is unused, in a program that PyTorch has to functionalize."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        torch.maximum(self.norm(x), x)
        y = x * 1
        row = y[:, :, 1:2]
        y[0] = 1.5
        return x * y + row


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_statistics_of_unused_norms(norm):
    check_module(UnusedNorm(norm(3, affine=True, track_running_stats=True)), (2, 3, 8, 9), grids=((1, 1, 2), (2, 1, 1)))


VIEWS = (
    "y", "y[0]", "y[:, 1]", "y[..., 1:4]", "y[:, :, 2:, ::2]", "y[:, 0, 1:3]", "y.diagonal(0, 0, 1)", "y[:, 1:][:, 0]",
)  # fmt: skip
UPDATES = "{} = 1.5", "{} = {} * 2 + 1", "{} += 0.5", "{}.mul_({}.mean())", "{}.sub_(1).mul_(2)", "{} = {}.flip(-1)"


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.long
def test_writes_through_views(seed):
    """Random writes to parts of a tensor are captured in one pass, and equal those of one process."""
    rng = random.Random(seed)
    lines = []
    for _ in range(rng.randrange(2, 6)):
        view = rng.choice(VIEWS)
        update = rng.choice(UPDATES)
        if view == "y" or "diagonal" in view:
            update = "{}.mul_({}.mean())" if update.startswith("{} ") else update
        lines.append(update.format(view, view))
        if rng.random() < 0.3:
            lines.append("total = total + y * 3")
    start = rng.choice(("x * 1", "torch.zeros_like(x)", "x.new_ones(x.shape)"))
    source = "\n    ".join(["def function(x):", f"y, total = {start}, x", *lines, "return x * y + total"])
    namespace = {"torch": torch}
    exec(source, namespace)
    module, shape = FunctionModule(namespace["function"]), (2, 3, 5, 6)
    program = capture_module(module, [(shape, torch.float64)])
    writes = [node for node in program.graph.nodes if written_values(node)]
    assert writes, source
    assert all("out_of_place" in node.meta for node in writes), source
    check_module(module, shape, grids=((1, 1, 2), (2, 2, 1)))


ASSIGNMENTS = {
    "self": "self.mean = self.mean",
    "self, then in place": "self.mean = self.mean; self.mean += 1",
    "conditional": "self.mean = self.mean if self.training else self.mean * 2",
    "new value": "self.mean = self.mean * 0.9 + new",
    "in place later": "self.mean = new; self.mean += 1; self.var = self.mean * 2",
    "previous value": "old = self.mean.detach(); self.mean = new; self.var = old",
    "previous view": "old = self.mean.view(4); self.mean = new; self.var = old",
    "previous value first": "self.var = self.mean.detach(); self.mean = new",
    "exchange": "self.mean, self.var = self.var.detach(), self.mean.detach()",
    "exchange of views": "self.mean, self.var = self.var.view(4), self.mean.view(4)",
    "copies": "old = self.mean.detach(); self.mean.copy_(new); self.var.copy_(old)",
}


class AssigningModule(nn.Module):
    """Module that assigns tensors to its buffers."""

    def __init__(self, code):
        super().__init__()
        self.code = code
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        exec(self.code, {"self": self, "new": average(x)})
        return x * 2


@pytest.mark.parametrize("name", ASSIGNMENTS)
@pytest.mark.long
def test_assigned_buffers(name):
    check_module(AssigningModule(ASSIGNMENTS[name]), (2, 4, 4, 6), grids=((1, 1, 2),))


def test_writes_through_views_of_views():
    def function(x):
        y = x * 1
        part = y[:, 1:]
        part[0] = 1.5
        part.mul_(2).add_(1)[..., 0].sub_(3)
        return x * y

    module, shape = FunctionModule(function), (2, 3, 4, 6)
    program = capture_module(module, [(shape, torch.float64)])
    writes = [node for node in program.graph.nodes if written_values(node)]
    assert len(writes) == 4
    assert all("out_of_place" in node.meta for node in writes)
    check_module(module, shape, grids=((1, 1, 2), (2, 2, 1)))


def test_writes_through_views_of_returned_tensors():
    def function(x):
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, 1:]
        return y

    program = capture_module(FunctionModule(function), [((2, 3, 4, 4), torch.float64)])
    names = [node.name for node in next(reversed(program.graph.nodes)).args[0]]
    assert names == [spec.arg.name for spec in program.graph_signature.output_specs]
