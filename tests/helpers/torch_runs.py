"""PyTorch modules on grids of virtual ranks, compared with one process."""

import copy
import importlib
import re
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from case_selection import select_grids
from device import ON_GPU
from idle_cells import find_idle_cells
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import neondist.torch as ndt
from neondist import ProcessGrid
from neondist.comm import loopback
from neondist.errors import UserError
from neondist.torch.execution.image_blocks import TracedImageModule
from neondist.torch.ir.layout import ranges_at_place, shape_of
from neondist.torch.lowering import training_memory
from neondist.torch.module import criteria
from neondist.torch.module import programs as capturing
from neondist.torch.training import factory

if ON_GPU and not torch.cuda.is_available():
    pytest.skip("PyTorch finds no GPU", allow_module_level=True)
training_memory.MIN_DEDUPLICATED_BYTES = 1  # tests are small: let views replace all saved tensors
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
"""device of modules; inputs and results are on the host"""
FROM_TORCH_MODULE = importlib.import_module("neondist.torch.convert.from_torch")
COMBINED_GRIDS = (1, 3, 2), (2, 1, 2)
OTHER_GRIDS = (1, 1, 1), (1, 2, 1), (1, 1, 3), (1, 2, 2), (2, 1, 1)
GRIDS = (*COMBINED_GRIDS, *OTHER_GRIDS)
"""(replicas, rows, cols)"""


PLAIN_TYPES = int, float, list, dict, torch.Tensor, SimpleNamespace


class FunctionModule(nn.Module):
    """Module that calls a function of its inputs and submodules."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, *inputs):
        return self.function(*inputs, *self.inner)


def run_serial(module, inputs, gradients=None, change=None):
    """Return outputs, gradients of inputs and parameters, and buffers of one process.

    Parameters
    ----------
    change : callable, optional
        Called with the module after the pass; the results of another pass are under 'after'.
    """
    module = copy.deepcopy(module).to(DEVICE)
    with _default_device():
        result = _run_serial_pass(module, inputs, gradients)
        if change is not None:
            module.zero_grad()
            change(module)
            result["after"] = _run_serial_pass(module, inputs)
    return result


def _default_device():
    """Return a context in which modules create tensors on DEVICE."""
    return nullcontext() if DEVICE.type == "cpu" else DEVICE


def _run_serial_pass(module, inputs, gradients=None):
    inputs = [x.to(DEVICE, copy=True).requires_grad_(x.is_floating_point()) for x in inputs]
    result = module(*inputs)
    outputs = [y for y in torch.utils._pytree.tree_leaves(result) if isinstance(y, torch.Tensor)]
    gradients = gradients or draw_gradients(outputs)
    torch.autograd.backward(*select_differentiable(outputs, [g.to(DEVICE) for g in gradients]))
    return {
        "outputs": [_to_host(y) for y in outputs],
        "differentiable": [y.requires_grad for y in outputs],
        "gradients": gradients,
        "inputs": [_to_host(x.grad) for x in inputs],
        "parameters": {name: _to_host(p.grad) for name, p in module.named_parameters()},
        "buffers": {name: _to_host(b).clone() for name, b in module.named_buffers()},
    }


def _to_host(tensor):
    return None if tensor is None else tensor.detach().cpu()


def draw_gradients(outputs):
    """Return a random gradient for each output."""
    generator = torch.Generator("cpu").manual_seed(5)
    options = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    return [torch.randn(y.shape, **options).to(y.dtype) for y in outputs]


def select_differentiable(outputs, gradients):
    """Return the outputs that have a gradient, and the gradients for them."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    return [y for y, _ in pairs], [g for _, g in pairs]


def run_distributed(module, inputs, gradients, grid, **options):
    """Return the results of `run_serial` from virtual ranks.

    Parameters
    ----------
    change : callable and gradients, optional
        Change as of `run_serial`, and the output gradients of the second pass.
    cells : bool
        Whether to look for received cells without effect on the results; their descriptions are under 'idle'.
    inference : bool
        Whether to run a pass under inference_mode first.
    memory : str, optional
        As of `distribute`, or 'least': as little memory as possible.
    """
    replicas, rows, cols = grid
    planes, run_options = (
        options.pop("planes", 1),
        {key: options.pop(key) for key in ("timeout", "at_once") if key in options},
    )
    (change, gradients_after), check_cells = options.pop("change", None) or (None, None), options.pop("cells", False)
    inference = options.pop("inference", False)

    def body(world):
        with ProcessGrid(world, replicas=replicas, rows=rows, cols=cols, planes=planes) as ranks, _default_device():
            local_module = copy.deepcopy(module).to(DEVICE)
            shapes = [tuple(x.shape) for x in inputs]
            args = (local_module, shapes if len(shapes) > 1 else shapes[0], ranks)
            own_options = options | {"dtype": inputs[0].dtype}
            if options.get("memory") == "least":
                own_options["memory"] = find_least_memory(*args, **own_options)
            model = ndt.distribute(*args, **own_options)
            if inference:
                _run_inference_pass(model, inputs)
            result = _run_distributed_pass(model, inputs, gradients)
            if change is not None:
                model.comm.ledger.clear()
                local_module.zero_grad()
                change(local_module)
                result["after"] = _run_distributed_pass(model, inputs, gradients_after)
            if check_cells and DEVICE.type == "cpu":
                result["idle"] = find_idle_cells(model, [model.scatter(x, index) for index, x in enumerate(inputs)])
            return result

    with mock.patch("neondist.system.memory.process_overhead_bytes", return_value=0):
        return loopback.run(replicas * rows * cols * planes, body, **run_options)


def find_least_memory(module, shapes, grid, **options):
    """Return the least `memory` with which a module can be distributed, according to the error for less."""
    try:
        ndt.distribute(module, shapes, grid, **options | {"memory": f"{grid.size} B"})
    except UserError as error:
        needed = re.search(r"a pass needs ([\d.]+) (B|kB|MB)\b", str(error))
        if needed is None:
            raise
        unit = {"B": 1, "kB": 1e3, "MB": 1e6}[needed[2]]
        return f"{grid.size * int(1.01 * float(needed[1]) * unit + 1)} B"
    return f"{grid.size} B"


def run_uncompiled(function):
    """Return the function that a module passes to its compiler."""
    return function


def _run_inference_pass(model, inputs):
    """Run a pass without effects: buffers, step number and message counts are restored."""
    buffers = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
    with torch.inference_mode():
        model(*(model.scatter(x.to(DEVICE), index) for index, x in enumerate(inputs)))
    for buffer, value in buffers:
        buffer.copy_(value)
    model.step = 0
    model.comm.ledger.clear()


def _run_distributed_pass(model, inputs, gradients):
    module, ranks = model.module, model.grid
    inputs, gradients = ([tensor.to(DEVICE) for tensor in tensors] for tensors in (inputs, gradients))
    tiles = [model.scatter(x, index).requires_grad_(x.is_floating_point()) for index, x in enumerate(inputs)]
    outputs = [y for y in torch.utils._pytree.tree_leaves(model(*tiles)) if isinstance(y, torch.Tensor)]
    layouts = [layout for layout in model.programs.current.layouts_by_output if layout is not None]
    local_gradients = [model.tiling.local_part(g, layout) for g, layout in zip(gradients, layouts, strict=True)]
    torch.autograd.backward(*select_differentiable(outputs, local_gradients))
    trained = [name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    if ranks.size > 1:
        assert count_sent_bytes(model) == model.plan.traffic(ranks.rank, trained, inputs=True)
    return {
        "outputs": [_to_host(model.tiling.gather(y, layout)) for y, layout in zip(outputs, layouts, strict=True)],
        "differentiable": [y.requires_grad for y in outputs],
        "inputs": [
            None if x.grad is None else gather_input_gradient(model, index, x.grad) for index, x in enumerate(tiles)
        ],
        "parameters": {name: _to_host(p.grad) for name, p in module.named_parameters()},
        "buffers": {name: _to_host(b).clone() for name, b in module.named_buffers()},
    }


def gather_input_gradient(model, index, gradient):
    """Return the full gradient of an input from local ones, which add up where tiles overlap."""
    layout, overlaps = model.tiling.input_layouts[index], model.programs.current.widened_ranges
    if not overlaps or not overlaps[index]:
        return _to_host(model.tiling.gather(gradient, layout))
    full = part = torch.zeros(shape_of(layout), dtype=gradient.dtype, device="cpu")
    for dim, (lo, hi) in ranges_at_place(overlaps[index], model.comm.place).items():
        part = part.narrow(dim, lo, hi - lo)
    part += gradient.cpu()
    model.grid.world.allreduce(full.numpy())
    return full


def run_in_blocks(module, x, size):
    """Return the first output assembled from blocks, the output for the full image, and the blocks."""
    module = module.to(x.dtype).eval()
    tensors = dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers(remove_duplicate=False))
    program = capturing.capture_module(module, [(tuple(x.shape), x.dtype)])
    blocks = TracedImageModule(program, tuple(x.shape), (), "whole").divide_into_blocks(size)
    with torch.no_grad():
        expected = next(y for y in torch.utils._pytree.tree_leaves(module(x)) if isinstance(y, torch.Tensor))
        output = torch.full_like(expected, torch.nan)
        for number in range(len(blocks)):
            block = blocks.run(number, x[(..., *blocks.input_box(number).slices)].clone(), *tensors)
            output[(..., *blocks.output_box(number).slices)] = block
    return output, expected, blocks


def count_sent_bytes(model):
    """Return the bytes that a rank has sent, in the format of its plan."""
    counts = Counter()
    for account, count in model.comm.ledger.items():
        counts[account.kind, account.layer, account.direction] += count * account.nbytes
    return dict(counts)


def find_difference(actual, expected):
    """Return the largest difference relative to the maximum of its tensor, and the name of the tensor.

    The scale is at least 1e-5, because 1e-9 of it is the rounding error of sums of ones.
    """
    pairs = list(zip(actual["differentiable"], expected["differentiable"], strict=True))
    if (True, False) in pairs:  # the opposite is allowed for zero gradients, which are compared below
        return float("inf"), f"output {pairs.index((True, False))} has a gradient, unlike in PyTorch, and"
    largest, name = 0.0, ""
    for kind in ("outputs", "inputs", "parameters", "buffers"):
        values, references = actual[kind], expected[kind]
        keys = list(references) if isinstance(references, dict) else range(len(references))
        nonempty = [references[key] for key in keys if references[key] is not None and references[key].numel()]
        magnitudes = [(t if t.is_complex() else t.double()).abs().nan_to_num(posinf=0.0) for t in nonempty]
        sizes = [magnitude.max().item() for magnitude in magnitudes]
        # scale of tensors that are zero up to rounding, such as a bias before batch norm
        floor = 1e-3 * max(sizes, default=1.0)
        for key in keys:
            a, b = values[key], references[key]
            if a is None and b is None:
                continue
            if a is None or b is None:  # no output depends on it
                a, b = (torch.zeros_like(x if x is not None else y) if x is None else x for x, y in ((a, b), (b, a)))
            assert a.shape == b.shape, (kind, key, a.shape, b.shape)
            a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.double() for t in (a, b))
            differs = (a != b) & ~(a.isnan() & b.isnan())
            mismatch = torch.where(torch.isfinite(b), torch.zeros_like(b), differs.double() * 1e9)
            deviation = torch.where(torch.isfinite(b), (a - b).abs(), mismatch).max().item() if b.numel() else 0.0
            finite = b[torch.isfinite(b)]
            deviation /= max(1e-5, floor, finite.abs().max().item() if finite.numel() else 1.0)
            if not deviation <= largest:
                largest, name = deviation, f"{kind} {key}"
    return largest, name


def _address(value):
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.numel()
    return value.data_ptr() if real else None


@contextmanager
def share_captures(programs=None):
    """Let virtual ranks, whose modules are copies, share the results of torch.export.

    Calls with the same dictionary share them as well, between modules with equal representations.
    """
    capture_module, programs = capturing.capture_module, {} if programs is None else programs

    def captured(module, shapes, *arguments, **options):
        mode = tuple(m.training for m in module.modules())
        signature = tuple((tuple(shape), dtype) for shape, dtype in shapes)
        attributes = [
            value for name, value in vars(module).items() if isinstance(value, PLAIN_TYPES) and name[0] != "_"
        ]
        # code may depend on these values; a tensor's repr would suspend the tracing of another thread
        buffers = [b.tolist() for b in module.buffers() if b.numel() < 10 and not b.is_meta]
        values = tuple(map(repr, (*buffers, *attributes)))
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        key = type(module), repr(module), getattr(module, "criterion", None), signature, mode, values, autocast
        with lock:
            if key in programs:
                return programs[key]
            program = capture_module(module, shapes, *arguments, **options)
            # programs that hold tensors of this module are not shared, since ranks change theirs independently
            shared = {_address(t) for t in (*program.reads.tensors, *program.constants.values())} - {None}
            if not any(_address(value) in shared for value in vars(module).values()):
                programs[key] = program
        return program

    lock = threading.Lock()
    with pytest.MonkeyPatch.context() as patch:
        for place in (capturing, criteria, factory, FROM_TORCH_MODULE):
            patch.setattr(place, "capture_module", captured)
        yield
        assert capturing.capture_module is captured, "share_captures: entered by several threads, so it is not undone"


def check_module(module, *shapes, grids=None, tolerance=1e-9, **options):
    """Check that a module gives the results of one process in float64 on all grids; default: a selection."""
    torch.manual_seed(3)
    module = module.double()
    inputs = [torch.randn(shape, dtype=torch.float64) if isinstance(shape, tuple) else shape for shape in shapes]
    expected = run_serial(module, inputs)
    with share_captures():
        for grid in grids or (*select_grids(COMBINED_GRIDS, 1), *select_grids(OTHER_GRIDS, 1)):
            for rank, result in enumerate(
                run_distributed(module, inputs, expected["gradients"], grid, **dict(options))
            ):
                deviation, name = find_difference(result, expected)
                assert deviation <= tolerance, f"grid {grid}, rank {rank}: {name} is off by {deviation:.1e}"


class ParallelModules(nn.Module):
    """Independent modules, each with an input of its own."""

    def __init__(self, modules):
        super().__init__()
        self.inner = nn.ModuleList(modules)

    def forward(self, *inputs):
        return [module(x) for module, x in zip(self.inner, inputs, strict=True)]


def split_into_groups(names, size=7):
    """Split names into lists of modules that are checked together."""
    names = list(names)
    return [names[first : first + size] for first in range(0, len(names), size)]


def check_modules(modules, shape, **options):
    """Apply `check_module` to a dictionary of modules at once, since most of its time is overhead.

    After a failure each module is checked alone to name it.
    """
    try:
        check_module(
            ParallelModules(copy.deepcopy(module) for module in modules.values()), *[shape] * len(modules), **options
        )
    except Exception:
        for name, module in modules.items():
            try:
                check_module(module, shape, **options)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
        raise
