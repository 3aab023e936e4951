"""Values that code reads from buffers and from tensors that depend on neither inputs nor parameters."""

import contextlib
import copy
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import check_module, share_captures  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.torch.capture.capture import capture_module  # noqa: E402

IMAGES = (2, 4, 8, 12)


def make_offsets(n):
    return torch.stack(torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")).flatten(1).T


def compute_window_mask(h, w, size, shift):
    """Compute the attention mask of shifted windows as Swin does."""
    mask = torch.zeros(1, h, w, 1)
    count = 0
    for rows in (slice(0, -size), slice(-size, -shift), slice(-shift, None)):
        for cols in (slice(0, -size), slice(-size, -shift), slice(-shift, None)):
            mask[:, rows, cols] = count
            count += 1
    windows = mask.view(1, h // size, size, w // size, size, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size)
    offset = windows.unsqueeze(1) - windows.unsqueeze(2)
    return offset.masked_fill(offset != 0, -100.0).masked_fill(offset == 0, 0.0)


def use_in_place(y):
    t = torch.zeros(4)
    t[1:3] += torch.arange(2) + 1
    t.mul_(2).clamp_(max=3)
    return y * t.sum().item() + t.view(2, 2)[1, 0].item()


def write_to_literals(y):
    count, factor = torch.tensor(0), torch.tensor(1.0).fill_(2.5).type(y.type()).to(y[0].device)
    count += 1
    return y * factor.expand_as(y) + count.clone().mul_(3).item() + count


def use_positions(y):
    place = torch.arange(y.shape[1]).unsqueeze(1) * torch.exp(torch.arange(0, 4, 2) * (-math.log(1e4) / 4))
    table = torch.stack([place.sin(), place.cos()], 2).flatten(1)
    return y + table[:, 0].view(1, -1, 1, 1).to(y) * float(table.max())


def use_mask(y):
    mask = torch.ones(y.shape[1:2]).bool()
    mask[1] = False
    return y[:, mask] * mask.sum().item() if mask.any() else y


CONSTANTS = {
    "tolist": lambda y: y - y.mean(torch.arange(2, y.dim()).tolist(), keepdim=True),
    "item": lambda y: y / torch.tensor(y.shape[2:]).prod().item(),
    "float": lambda y: y * float(torch.linspace(0, 1, y.shape[-1]).norm()),
    "int": lambda y: y.roll(int(torch.full((3,), 2).sum()), 3),
    "complex": lambda y: y * complex(torch.tensor([1.0, 2.0]).sum()).real,
    "index": lambda y: y[:, :, torch.tensor([1, 3]).max() :, : torch.arange(9)[-1]],
    "element": lambda y: y[:, torch.arange(4)[2]] + y[:, [0, 2]][:, torch.tensor(1)],
    "range": lambda y: sum(y.roll(k, 2) for k in range(torch.tensor(3))),
    "bool": lambda y: y * 2 if torch.ones(3).sum() > 2 else y,
    "and": lambda y: y * 2 if torch.eye(2).bool().any() and not torch.eye(2).bool().all() else y,
    "equal": lambda y: y * 2 if torch.equal(torch.arange(2), torch.tensor([0, 1])) else y,
    "allclose": lambda y: y * 2 if torch.allclose(torch.ones(2), torch.tensor([1.0, 1.0])) else y,
    "in": lambda y: y * 2 if 3 in torch.arange(5) else y,
    "loop": lambda y: sum(y.roll(int(k), 2) for k in torch.arange(3)),
    "loop over pairs": lambda y: sum(y.roll((int(a), int(b)), (2, 3)) for a, b in make_offsets(2)),
    "unpacked": lambda y: y.roll([*torch.tensor([1, 2])][1].item(), 2),
    "numpy": lambda y: y * float(torch.arange(4).numpy().sum()),
    "asarray": lambda y: y * np.asarray(torch.arange(4)).max(),
    "math": lambda y: y * math.sqrt(torch.tensor(y.shape[1])),
    "round trip": lambda y: y * torch.from_numpy(np.arange(4.0)).sum().item(),
    "zeros like": lambda y: y * (torch.zeros_like(y[0, 0, 0]).sum().item() + 2) + y.new_ones(3).sum().item(),
    "in place": use_in_place,
    "literals": write_to_literals,
    "positions": use_positions,
    "mask": use_mask,
    "mask set": lambda y: F.pad(y, (0, 1)).masked_fill(torch.arange(y.shape[-1] + 1) > 3, 0.5),
    "nonzero": lambda y: sum(y.roll(int(k), 2) for k in torch.eye(3).nonzero()[:, 1]),
    "nonzero as an index": lambda y: y[:, (torch.arange(4) % 2).nonzero()[:, 0]],
    "masked_select": lambda y: y * torch.arange(4).masked_select(torch.arange(4) > 1).sum(),
    "masked_select of cells": lambda y: y.masked_select(torch.arange(4).view(4, 1, 1) > 1),
    "masked_select by name": lambda y: torch.masked_select(y, mask=torch.ones(12).bool()),
    "repeats": lambda y: y.repeat_interleave(torch.arange(4), 1) + torch.repeat_interleave(y, torch.arange(4), dim=1),
    "repeats of cells": lambda y: torch.repeat_interleave(y, repeats=torch.tensor([1, 0] * 4), dim=-2),
    "repeats of a vector": lambda y: y[0, :, 0, 0].repeat_interleave(torch.arange(4)),
    "repeats of one": lambda y: y.repeat_interleave(torch.tensor([2]), 2).repeat_interleave(torch.tensor(2), 3),
    "unique": lambda y: y * len(torch.unique(torch.tensor([1, 1, 2]))),
    "one hot": lambda y: y * F.one_hot(torch.arange(4)).view(1, 4, 4, 1).sum(2, keepdim=True),
    "window mask": lambda y: y + compute_window_mask(8, 12, 4, 2).sum((0, 1))[0].item(),
    "split": lambda y: torch.cat([*y.split(torch.tensor([1, 3]).tolist(), 1)][::-1], 1),
    "no grad": lambda y: y * sum_without_gradient(),
    "string": lambda y: y * float(f"{torch.tensor(2.5):.1f}"),
    "einsum": lambda y: y * torch.einsum("i,i->", torch.arange(3.0), torch.ones(3)).item(),
    "deep": lambda y: y * float(torch.linalg.inv(torch.eye(2) * 2).diagonal().cumsum(0)[-1]),
}


def sum_without_gradient():
    with torch.no_grad():
        return torch.arange(4).sum().item()


class ConvolvedFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(4, 4, 3, padding=1), function

    def forward(self, x):
        return self.function(self.conv(x))


@pytest.mark.long
def test_code_reads_constants():
    """All functions in one module; the long timeout is for the other rank's capture."""
    module = ConvolvedFunction(lambda y: [function(y) for function in CONSTANTS.values()])
    check_module(module, IMAGES, grids=((1, 1, 2),), timeout=240)


@pytest.mark.long
def test_criteria_read_constants():
    def criterion(y, t):
        names = "tolist", "bool", "loop over pairs", "numpy", "in place", "nonzero as an index", "one hot"
        return F.mse_loss(y, t) + sum(CONSTANTS[name](y).sum() for name in names)

    assert find_training_difference(nn.Conv2d(4, 4, 3, padding=1), criterion, 1, (1, 2, 1)) is None


class CausalTransformer(nn.Module):
    def __init__(self, is_causal, registered):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.encoder, self.is_causal = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), is_causal
        if registered:
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(24))
        else:
            self.mask = None

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        mask = self.mask if self.mask is not None else nn.Transformer.generate_square_subsequent_mask(24)
        return self.encoder(tokens, mask=mask, is_causal=self.is_causal)


@pytest.mark.parametrize(("is_causal", "registered"), [(None, True), (True, False)])
@pytest.mark.long
def test_causal_transformers(is_causal, registered):
    torch.manual_seed(0)
    with Float64Default():
        check_module(CausalTransformer(is_causal, registered), (2, 4, 4, 6), grids=((1, 2, 1),))


class Float64Default:
    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


REJECTED = {
    "input": lambda y: y * float(y.detach().mean()),
    "input, if": lambda y: y if y.sum() > 0 else -y,
    "written": lambda y: y * float(torch.zeros(3).copy_(y.detach()[0, 0, 0, :3]).sum()),
    "written view": lambda y: y * read_written_view(y),
    "random": lambda y: y * int(torch.randperm(3)[0]),
    "random in place": lambda y: y * float(torch.zeros(3).uniform_().sum()),
    "mask of an input": lambda y: y[y > 0].sum(),
}


def read_written_view(y):
    t = torch.zeros(4)
    t[1:].copy_(y.detach()[0, 0, 0, :3])
    return float(t.sum())


@pytest.mark.parametrize("name", REJECTED)
def test_values_of_inputs_are_rejected(name):
    with nd.ProcessGrid() as grid, pytest.raises(nd.NeondistError, match=r"test_constants\.py:\d+: "):
        ndt.distribute(ConvolvedFunction(REJECTED[name]), IMAGES, grid)


COUNTS = {
    "len": lambda y: y if len(y[y > 0]) else -y,
    "numel": lambda y: y if y.masked_select(y > 0).numel() > 2 else -y,
    "range": lambda y: y * sum(1.0 for _ in range((y > 0).nonzero().shape[0])),
}


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_of_selected_elements_are_rejected(name):
    message = r"test_constants\.py:\d+: ConvolvedFunction cannot be captured .*shape of a result depends on the values"
    with nd.ProcessGrid() as grid, pytest.raises(nd.ConfigError, match=message + ".* instead of selecting elements"):
        ndt.distribute(ConvolvedFunction(COUNTS[name]), IMAGES, grid)


def find_training_difference(module, criterion, number, grid, before_step=None, captures=share_captures):
    """Train on virtual ranks and in one process; return the first difference, or None."""
    torch.manual_seed(1)
    module = module.double()
    xs, ts = torch.randn(number, *IMAGES, dtype=torch.float64), torch.randn(number, *IMAGES, dtype=torch.float64)

    def train(model, plain, scatter, scatter_target, loss):
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        for step in range(number):
            if before_step:
                before_step(plain, step)
            optimizer.zero_grad()
            value = loss(copy.copy(criterion), model(scatter(xs[step])), scatter_target(ts[step]))
            value.backward()
            optimizer.step()
        return {**{k: v.clone() for k, v in plain.state_dict().items()}, "loss": value.detach()}

    serial = copy.deepcopy(module)
    expected = train(serial, serial, torch.clone, torch.clone, lambda c, y, t: c(y, t))

    def body(world):
        replicas, rows, cols = grid
        with nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            local_module = copy.deepcopy(module)
            model = ndt.distribute(local_module, IMAGES, ranks)
            return train(model, local_module, model.scatter, model.scatter_target, model.loss)

    with captures():
        states = nd.loopback.run(math.prod(grid), body)
    for state in states:
        for name, value in expected.items():
            if not torch.allclose(state[name].double(), value.double(), rtol=1e-9, atol=1e-9):
                return name, state[name], value
    return None


class StatefulModule(nn.Module):
    """Module that calls a function of itself and x."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(4, 4, 1), function
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(4, 3))
        self.register_buffer("fixed", torch.tensor([2.0, 0.5]))
        self.register_buffer("unit", F.normalize(torch.ones(4), dim=0))
        self.attribute = torch.tensor(3.0)

    def forward(self, x):
        return self.function(self, self.conv(x))


def average_batches(self, y):
    self.count += 1
    share = 1 / float(self.count)
    self.mean.lerp_(y.detach().mean((0, 2, 3)), share)
    return y - self.mean.view(1, -1, 1, 1)


def warm_up(self, y):
    self.count.add_(1)
    return y * min(1.0, self.count.item() / 3)


def initialise(self, y):
    if self.count == 0:
        self.mean.copy_(y.detach().mean((0, 2, 3)))
        self.count.fill_(1)
    return y - self.mean.view(1, -1, 1, 1)


def use_queue(self, y):
    at = int(self.count)
    self.queue[:, at] = y.detach().mean((0, 2, 3))
    self.count[()] = (at + 1) % 3
    return y + self.queue.sum(1).view(1, -1, 1, 1)


def iterate_power(self, y):
    weight = self.conv.weight.flatten(1)
    with torch.no_grad():
        self.unit.copy_(F.normalize(weight @ F.normalize(weight.T @ self.unit, dim=0), dim=0))
    return y / (self.unit @ weight @ weight.T @ self.unit)


def track_maximum(self, y):
    with torch.no_grad():
        self.mean.copy_(torch.maximum(self.mean, y.amax((0, 2, 3))))
    return y / (1 + self.mean.view(1, -1, 1, 1).abs())


BUFFERS = {
    "decaying": average_batches,
    "warming": warm_up,
    "initialised": initialise,
    "queued": use_queue,
    "powered": iterate_power,
    "extremes": track_maximum,
    "fixed": lambda self, y: y * self.fixed[0].item() if self.fixed.min() > 0 else y,
    "attribute": lambda self, y: y * float(self.attribute),
}


def change(module, step):
    if step == 2:
        module.count.zero_()
        module.fixed.mul_(1.5)
        module.attribute.add_(1)


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.long
def test_code_reads_buffers(name):
    captures = contextlib.nullcontext if name == "attribute" else share_captures  # each rank has its own tensor
    assert find_training_difference(StatefulModule(BUFFERS[name]), F.mse_loss, 3, (1, 1, 2), change, captures) is None


READS = {
    "item": lambda t: t[0].item(),
    "float": lambda t: float(t[0]),
    "iteration": lambda t: sum(float(k) for k in t),
    "tolist": lambda t: t.tolist()[0],
    "tolist of an alias": lambda t: t.flatten().contiguous().view(2).tolist()[0],
    "numpy": lambda t: float(t.numpy()[0]),
    "asarray": lambda t: np.asarray(t)[0],
    "from_dlpack": lambda t: np.from_dlpack(t)[0],
    "memoryview": lambda t: memoryview(t.numpy())[0],
    "format": lambda t: float(f"{t[0]}"),
    "str": lambda t: float(str(t)[8:].split(",")[0]),
    "in": lambda t: 2 + (1.25 in t),
    "nonzero": lambda t: 1 + len((t > 1).nonzero()),
    "equal": lambda t: 2 + torch.equal(t, t.new_tensor([1.25, 1.5])),
}
"""functions of a tensor of two numbers"""


class ReadingModule(nn.Module):
    def __init__(self, registered, reads=READS):
        super().__init__()
        self.conv, self.reads, numbers = nn.Conv2d(4, 4, 1), list(reads), torch.tensor([1.25, 1.5])
        if registered:
            self.register_buffer("numbers", numbers)
        else:
            self.numbers = numbers

    def forward(self, x):
        y = self.conv(x)
        return [y * READS[name](self.numbers) for name in self.reads]


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.long
def test_all_kinds_of_reads_are_recorded(registered):
    for name in READS:
        recorded = capture_module(ReadingModule(registered, [name]), [((1, 4, 1, 1), torch.float32)]).reads
        assert recorded.buffer_names if registered else recorded.tensors, name


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.long
def test_changed_values_are_read(registered):
    def body(world):
        with nd.ProcessGrid(world, cols=2) as ranks:
            module = ReadingModule(registered)
            model, x, differences = ndt.distribute(module, IMAGES, ranks), torch.ones(IMAGES), []
            for change in (None, 0.25, 2.5):
                if change is not None:
                    module.numbers[0] = change
                ys = [model.gather(y) for y in model(model.scatter(x))]
                differences += [
                    (name, change) for name, y, z in zip(READS, ys, module(x), strict=True) if not torch.allclose(y, z)
                ]
            return differences

    with share_captures():
        assert nd.loopback.run(2, body) == [[], []]
