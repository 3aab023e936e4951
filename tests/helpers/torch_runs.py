"""Modules of PyTorch on grids of virtual ranks, compared with one process."""

import copy
import importlib
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from device import ON_GPU
from idle_cells import idle_cells
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from turns import in_turn as in_turn  # for the tests here

from neondist import ProcessGrid
from neondist.comm import loopback
from neondist.torch.execution.blocks import TracedImage
from neondist.torch.ir.layout import shape_of
from neondist.torch.ir.transfer import at_place
from neondist.torch.module import criteria
from neondist.torch.module import module as capturing
from neondist.torch.training import factory

if ON_GPU and not torch.cuda.is_available():
    pytest.skip("PyTorch finds no GPU", allow_module_level=True)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
"""where modules run; inputs are given on the host, and results returned there"""
CONVERSION = importlib.import_module("neondist.torch.convert.from_torch")
BOTH_AXES_AND_REPLICAS = (1, 3, 2), (2, 1, 2)
OTHERS = (1, 1, 1), (1, 2, 1), (1, 1, 3), (1, 2, 2), (2, 1, 1)
GRIDS = (*BOTH_AXES_AND_REPLICAS, *OTHERS)
"""(replicas, rows, cols)"""


PLAIN = int, float, list, dict, torch.Tensor, SimpleNamespace


class Function(nn.Module):
    """A function of inputs, and of modules inside, as a module."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, *inputs):
        return self.function(*inputs, *self.inner)


def serial(module, inputs, gradients=None, change=None):
    """Return the outputs, the gradients of inputs and parameters, and the buffers, of one process.

    Parameters
    ----------
    change : callable, optional
        Of the module: called after the pass; another pass follows, whose results are under 'after'.
    """
    module = copy.deepcopy(module).to(DEVICE)
    with _default_device():
        found = _serial_pass(module, inputs, gradients)
        if change is not None:
            module.zero_grad()
            change(module)
            found["after"] = _serial_pass(module, inputs)
    return found


def _default_device():
    """Return a context in which what a module makes is on the GPU, if there is one."""
    return nullcontext() if DEVICE.type == "cpu" else DEVICE


def _serial_pass(module, inputs, gradients=None):
    inputs = [x.to(DEVICE, copy=True).requires_grad_(x.is_floating_point()) for x in inputs]
    found = module(*inputs)
    outputs = [y for y in torch.utils._pytree.tree_leaves(found) if isinstance(y, torch.Tensor)]
    gradients = gradients or drawn_like(outputs)
    torch.autograd.backward(*differentiable(outputs, [g.to(DEVICE) for g in gradients]))
    return {
        "outputs": [_on_host(y) for y in outputs],
        "differentiable": [y.requires_grad for y in outputs],
        "gradients": gradients,
        "inputs": [_on_host(x.grad) for x in inputs],
        "parameters": {name: _on_host(p.grad) for name, p in module.named_parameters()},
        "buffers": {name: _on_host(b).clone() for name, b in module.named_buffers()},
    }


def _on_host(tensor):
    return None if tensor is None else tensor.detach().cpu()


def drawn_like(outputs):
    """Return a random gradient for each output."""
    generator = torch.Generator("cpu").manual_seed(5)
    made = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    return [torch.randn(y.shape, **made).to(y.dtype) for y in outputs]


def differentiable(outputs, gradients):
    """Return the outputs that have a gradient, and the gradients for them."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    return [y for y, _ in pairs], [g for _, g in pairs]


def distributed(module, inputs, gradients, grid, **more):
    """Return the same as `serial` does, from virtual ranks.

    Parameters
    ----------
    change : callable and gradients, optional
        As of `serial`, and the gradients of the second pass.
    cells : bool
        Whether to look for cells that come from other ranks and are not needed: their steps are under 'idle'.
    inference : bool
        Whether a pass under inference_mode comes first.
    """
    import neondist.torch as ndt

    replicas, rows, cols = grid
    planes, running = more.pop("planes", 1), {key: more.pop(key) for key in ("timeout", "at_once") if key in more}
    (change, gradients_after), cells = more.pop("change", None) or (None, None), more.pop("cells", False)
    inference = more.pop("inference", False)

    def body(world):
        with ProcessGrid(world, replicas=replicas, rows=rows, cols=cols, planes=planes) as ranks, _default_device():
            mine = copy.deepcopy(module).to(DEVICE)
            shapes = [tuple(x.shape) for x in inputs]
            model = ndt.distribute(mine, shapes if len(shapes) > 1 else shapes[0], ranks, dtype=inputs[0].dtype, **more)
            if inference:
                _inference_pass(model, inputs)
            found = _distributed_pass(model, inputs, gradients)
            if change is not None:
                model.comm.ledger.clear()
                mine.zero_grad()
                change(mine)
                found["after"] = _distributed_pass(model, inputs, gradients_after)
            if cells and DEVICE.type == "cpu":
                found["idle"] = idle_cells(model, [model.scatter(x, at) for at, x in enumerate(inputs)])
            return found

    return loopback.run(replicas * rows * cols * planes, body, **running)


def _inference_pass(model, inputs):
    """Run a pass that leaves nothing: buffers, the number of steps and counts of messages are as before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
    with torch.inference_mode():
        model(*(model.scatter(x.to(DEVICE), at) for at, x in enumerate(inputs)))
    for buffer, value in buffers:
        buffer.copy_(value)
    model.step = 0
    model.comm.ledger.clear()


def _distributed_pass(model, inputs, gradients):
    mine, ranks = model.module, model.grid
    inputs, gradients = ([tensor.to(DEVICE) for tensor in tensors] for tensors in (inputs, gradients))
    tiles = [model.scatter(x, at).requires_grad_(x.is_floating_point()) for at, x in enumerate(inputs)]
    outputs = [y for y in torch.utils._pytree.tree_leaves(model(*tiles)) if isinstance(y, torch.Tensor)]
    layouts = [lay for lay in model._runner().layouts if lay is not None]
    parts = [model.tiling.part(g, lay) for g, lay in zip(gradients, layouts, strict=True)]
    torch.autograd.backward(*differentiable(outputs, parts))
    trained = [name for name, p in mine.named_parameters(remove_duplicate=False) if p.requires_grad]
    if ranks.size > 1:
        assert sent(model) == model.plan.traffic(ranks.rank, trained, inputs=True)
    return {
        "outputs": [_on_host(model.tiling.gathered(y, lay)) for y, lay in zip(outputs, layouts, strict=True)],
        "differentiable": [y.requires_grad for y in outputs],
        "inputs": [None if x.grad is None else input_gradient(model, at, x.grad) for at, x in enumerate(tiles)],
        "parameters": {name: _on_host(p.grad) for name, p in mine.named_parameters()},
        "buffers": {name: _on_host(b).clone() for name, b in mine.named_buffers()},
    }


def input_gradient(model, at, gradient):
    """Return the gradient of a whole input, given this rank's, which is a share of it where several have cells."""
    layout, overlaps = model.tiling.inputs[at], model._runner().overlaps
    if not overlaps or not overlaps[at]:
        return _on_host(model.tiling.gathered(gradient, layout))
    whole = part = torch.zeros(shape_of(layout), dtype=gradient.dtype, device="cpu")
    for dim, (lo, hi) in at_place(overlaps[at], model.comm.place).items():
        part = part.narrow(dim, lo, hi - lo)
    part += gradient.cpu()
    model.grid.world.allreduce(whole.numpy())
    return whole


def in_blocks(module, x, size):
    """Return the first output put together from blocks, what the module gives of the whole, and the blocks."""
    module = module.to(x.dtype).eval()
    named = dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers(remove_duplicate=False))
    program = capturing.capture_module(module, [(tuple(x.shape), x.dtype)])
    blocks = TracedImage(program, tuple(x.shape), (), "whole").blocks(size)
    with torch.no_grad():
        expected = next(y for y in torch.utils._pytree.tree_leaves(module(x)) if isinstance(y, torch.Tensor))
        found = torch.full_like(expected, torch.nan)
        for number in range(len(blocks)):
            part = blocks.run(number, x[(..., *blocks.image(number).slices)].clone(), *named)
            found[(..., *blocks.output(number).slices)] = part
    return found, expected, blocks


def sent(model):
    """Return the bytes that a rank has sent, as its plan tells them."""
    found = Counter()
    for account, count in model.comm.ledger.items():
        found[account.kind, account.layer, account.direction] += count * account.nbytes
    return dict(found)


def difference(found, expected):
    """Return the largest difference, relative to the largest number of the tensor, and where it is.

    Numbers below 1e-5 are compared as if they were that large: 1e-9 of it is the rounding of sums of ones.
    """
    pairs = list(zip(found["differentiable"], expected["differentiable"], strict=True))
    if (True, False) in pairs:  # the other way round is fine where the gradients are zeros, which is compared below
        return float("inf"), f"output {pairs.index((True, False))} has a gradient, which PyTorch does not compute, and"
    worst, where = 0.0, ""
    for kind in ("outputs", "inputs", "parameters", "buffers"):
        have, want = found[kind], expected[kind]
        keys = list(want) if isinstance(want, dict) else range(len(want))
        sizes = [
            (want[key] if want[key].is_complex() else want[key].double()).abs().nan_to_num(posinf=0.0).max().item()
            for key in keys
            if want[key] is not None and want[key].numel()
        ]
        least = 1e-3 * max(sizes, default=1.0)  # what is zero but for rounding, such as a bias before batch norm
        for key in keys:
            a, b = have[key], want[key]
            if a is None and b is None:
                continue
            if a is None or b is None:  # nothing depends on it
                a, b = (torch.zeros_like(x if x is not None else y) if x is None else x for x, y in ((a, b), (b, a)))
            assert a.shape == b.shape, (kind, key, a.shape, b.shape)
            a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.double() for t in (a, b))
            same = torch.where(torch.isfinite(b), torch.zeros_like(b), (a != b).double() * 1e9)
            off = torch.where(torch.isfinite(b), (a - b).abs(), same).max().item() if b.numel() else 0.0
            finite = b[torch.isfinite(b)]
            off /= max(1e-5, least, finite.abs().max().item() if finite.numel() else 1.0)
            if not off <= worst:
                worst, where = off, f"{kind} {key}"
    return worst, where


def _address(value):
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.numel()
    return value.data_ptr() if real else None


@contextmanager
def captured_once(programs=None):
    """Let virtual ranks share what torch.export finds: their modules are copies of one.

    So do calls that are given one dictionary: their modules are alike if they look alike.
    """
    real, programs = capturing.capture_module, {} if programs is None else programs

    def captured(module, shapes, *what, **more):
        mode = tuple(m.training for m in module.modules())
        given = tuple((tuple(shape), dtype) for shape, dtype in shapes)
        attributes = [value for name, value in vars(module).items() if isinstance(value, PLAIN) and name[0] != "_"]
        read = tuple(
            map(repr, (*(b for b in module.buffers() if b.numel() < 10), *attributes))
        )  # as code may read them
        key = type(module), repr(module), getattr(module, "criterion", None), given, mode, read
        with lock:
            if key in programs:
                return programs[key]
            program = real(module, shapes, *what, **more)
            # this module's own tensors are not shared: others change theirs at other moments
            live = {_address(t) for t in (*program.reads.others, *program.constants.values())} - {None}
            if not any(_address(value) in live for value in vars(module).values()):
                programs[key] = program
        return program

    lock = threading.Lock()
    with pytest.MonkeyPatch.context() as patch:
        for place in (capturing, criteria, factory, CONVERSION):
            patch.setattr(place, "capture_module", captured)
        yield


def check(module, *shapes, grids=None, tolerance=1e-9, **more):
    """Assert that a module gives the numbers of one process on all of the grids, in float64; default: on some."""
    torch.manual_seed(3)
    module = module.double()
    inputs = [torch.randn(shape, dtype=torch.float64) if isinstance(shape, tuple) else shape for shape in shapes]
    expected = serial(module, inputs)
    with captured_once():
        for grid in grids or (*in_turn(BOTH_AXES_AND_REPLICAS, 1), *in_turn(OTHERS, 1)):
            for rank, found in enumerate(distributed(module, inputs, expected["gradients"], grid, **dict(more))):
                worst, where = difference(found, expected)
                assert worst <= tolerance, f"grid {grid}, rank {rank}: {where} is off by {worst:.1e}"


class Beside(nn.Module):
    """Modules side by side, each of an input of its own."""

    def __init__(self, modules):
        super().__init__()
        self.inner = nn.ModuleList(modules)

    def forward(self, *inputs):
        return [module(x) for module, x in zip(self.inner, inputs, strict=True)]


def groups(names, most=7):
    """Return lists of names, to be checked at once."""
    names = list(names)
    return [names[first : first + most] for first in range(0, len(names), most)]


def check_beside(modules, shape, **how):
    """Assert of a dictionary of modules what `check` does, at once: most of the time goes into what all share.

    If something is wrong, each is tried alone, to name it.
    """
    try:
        check(Beside(copy.deepcopy(module) for module in modules.values()), *[shape] * len(modules), **how)
    except Exception:
        for name, module in modules.items():
            try:
                check(module, shape, **how)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
        raise
