"""A module as a graph of ATen operators at the global shape; fake tensors, so that no memory is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from ..errors import ConfigError
from ..halo import ExchangePolicy
from .checks import check_module
from .constants import known_values, remove_reads
from .custom_gradients import recorded
from .errors import NotRecorded
from .functionalize import is_simple, keep_statistics, note_result
from .graph import Value
from .layout import Layout, Mesh, axes_of, whole
from .lower import Lowering
from .no_grad import stop_gradients
from .persistent_state import observed
from .plan import TorchPlan
from .schemes import put_into
from .steps import Where
from .tracing import Shapes, no_graph, tracing, user_frames

DRAWS = 1000
"""More than an operator has of random numbers' keys."""


def captured(
    module: nn.Module,
    shapes: Shapes,
    what: str = "",
    device: torch.device | None = None,
) -> Any:
    """Return the exported program of a module, composite operators kept.

    Neither no_grad, inference_mode nor autocast around the call are part of it: they hold for what runs. To code
    that asks for it, `torch.is_grad_enabled()` has the value that it has around the call.

    Parameters
    ----------
    what : str
        What errors call the module; default: its class.
    device : torch.device, optional
        Of the inputs; default: where the module's parameters and buffers are.

    Raises
    ------
    ConfigError
        If its control flow depends on the values of tensors, if it has hooks of its way back, or if it cannot be
        traced for another reason.
    """
    check_module(module)
    gradients = torch.is_grad_enabled()
    importlib.import_module("torch._dynamo")  # what it makes of autograd.Function is not to see that of `recorded`
    with tracing(what or type(module).__name__, shapes), recorded() as functions, known_values(module) as values:
        with FakeTensorMode(allow_non_fake_inputs=True):
            on = device or device_of(module)
            inputs = tuple(torch.empty(tuple(shape), dtype=dtype, device=on) for shape, dtype in shapes)
        with observed(module, inputs) as asks, no_graph(), torch.set_grad_enabled(gradients or not asks):
            program: Any = torch.export.export(module, inputs, strict=False)
        remove_reads(program)
        tied = _join_names(program)
        stop_gradients(program, lambda node: where(node).source)
        specs = program.graph_signature.input_specs
        buffers = [spec.arg.name for spec in specs if spec.kind == InputKind.BUFFER]
        if not is_simple(program.graph, buffers):
            try:
                program = _without_writes(program)
            except AssertionError:
                if not tied:
                    raise
                raise NotRecorded(
                    f"the forward writes into a part of the buffer {tied[0]}, which has several names, or reads it"
                    " by one that it had before; keep one name"
                ) from None
        program.functions, program.reads, program.trained = functions, values.reads, values.trained
        return program


def _join_names(program: Any) -> list[str]:
    """Let a buffer with several names be read and written by the first; return the others."""
    first: dict[int, Any] = {}
    found: list[str] = []
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    tensors = {**program.constants, **program.state_dict}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.BUFFER:
            node = nodes[spec.arg.name]
            if (other := first.setdefault(id(tensors[spec.target]), node)) is not node:
                node.replace_all_uses_with(other)
                found.append(spec.target)
    return found


def _without_writes(program: Any) -> Any:
    """Return the program with no operator in place, and none that PyTorch only composes of others."""
    keep_statistics(program.graph)
    return program.run_decompositions({})


def decomposed(program: Any, module: nn.Module, shapes: Shapes) -> Any:
    """Return what `captured` gave with no operator in place, and none that PyTorch only composes of others."""
    with tracing(type(module).__name__, shapes):
        found = _without_writes(program)
        found.functions, found.reads, found.trained = program.functions, program.reads, program.trained
        return found


def device_of(module: nn.Module) -> torch.device:
    """Return where the first of a module's parameters and buffers is; of one without, PyTorch's default device."""
    own = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)
    return torch.get_default_device() if own is None else own


def where(node: Any) -> Where:
    """Return where in the user's program a node stands."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    frames = user_frames(node.meta.get("stack_trace") or "")
    return Where(str(node.target), path, frames[-1] if frames else "")


def lowered(
    program: Any,
    mesh: Mesh,
    rank: int,
    layouts: Sequence[Layout],
    gather_at: Sequence[str] = (),
    schemes: Mapping[str, ExchangePolicy] | None = None,
    recompute: bool = False,
    lowering: Lowering | None = None,
    trained: dict[str, torch.Tensor] | None = None,
) -> tuple[TorchPlan, Any]:
    """Return the plan of a program for one rank, and the tree of its outputs.

    Parameters
    ----------
    layouts : sequence of Layout
        How each of the user's inputs is cut.
    gather_at : sequence of str
        Paths of modules that every rank computes whole; an image that comes from there is cut again.
    schemes : dict of path to ExchangePolicy
        Of modules' windows; default: exact.
    recompute : bool
        Whether the way back runs segments again.
    lowering : Lowering, optional
        What makes the plan.
    trained : dict of name to tensor, optional
        Takes tensors with gradients that are no parameters of the module, which count as such; default: refused.
    """
    lowering, signature = lowering or Lowering(mesh, rank), program.graph_signature
    lowering.functions = program.functions
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    parameters: dict[str, int] = {}
    buffers: dict[str, int] = {}
    inputs: list[int] = []
    env: dict[Any, Any] = {}
    changed: dict[str, Any] = {}
    waiting = list(layouts)[::-1]
    gathering = _Gathering(lowering, gather_at)
    outputs: Sequence[Any] = ()
    ends: Sequence[Any] = ()
    for place, node in enumerate(program.graph.nodes):
        if node.op == "placeholder":
            env[node] = _given(lowering, node, specs[node.name], program, waiting, parameters, buffers, inputs, trained)
        elif node.op == "output":
            lowering.where, ends = where(node), node.args[0]
            outputs = pytree.tree_map(lambda arg: gathering.outside(lowering.read(env, arg)), node.args[0])
        else:
            lowering.where, lowering.out, lowering.draws = where(node), node.meta.get("val"), place * DRAWS
            _check_static(lowering)
            pick = gathering.inside if gathering.at(node) else gathering.outside

            def value(arg: Any, pick: Callable[[Any], Any] = pick) -> Any:
                return pick(lowering.read(env, arg))

            args, kwargs = pytree.tree_map(value, (node.args, dict(node.kwargs)))
            found = lowering.call(node.meta.get("twin", node.target), args, kwargs)
            olds = note_result(env, node, found)
            changed |= {specs[old.name].target: old for old in olds if old.op == "placeholder"}
            if gathering.at(node):
                gathering.note(found)
    mutated = {name: lowering.gathered(gathering.outside(lowering.read(env, old))).id for name, old in changed.items()}
    results: list[Any] = []
    for spec, out, end in zip(signature.output_specs, outputs, ends, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            results.append(lowering.enter(out, ()) if isinstance(out, Value) else out)  # a parameter counts once
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            mutated[spec.target] = lowering.gathered(out).id
        else:
            lowering.where = where(end)
            lowering.refuse("an input, or a parameter, is changed in place")
    ids = [out.id if isinstance(out, Value) else _Plain(out) for out in results]
    plan = TorchPlan(
        mesh,
        rank,
        lowering.steps,
        lowering.values,
        parameters,
        buffers,
        inputs,
        ids,
        mutated,
        None if lowering.key is None else lowering.key.id,
        recompute,
    )
    put_into(plan.steps, schemes or {})
    return plan, program.call_spec.out_spec


def _check_static(lowering: Lowering) -> None:
    for out in pytree.tree_leaves(lowering.out):
        if isinstance(out, torch.SymInt) or (isinstance(out, torch.Tensor) and not _is_static(out)):
            here = lowering.where
            raise ConfigError(
                f"{here.place}{here.operator}{_inside(here)}: the shape of its result depends"
                " on the values of tensors; a module's computation may depend on their shapes, but not on their"
                " values"
            )


def _is_static(tensor: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in tensor.shape)


def _inside(here: Where) -> str:
    return f" in module '{here.module}'" if here.module else ""


class _Plain:
    """An output that is not a tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _given(
    lowering: Lowering,
    node: Any,
    spec: Any,
    program: Any,
    waiting: list[Layout],
    parameters: dict[str, int],
    buffers: dict[str, int],
    inputs: list[int],
    trained: dict[str, torch.Tensor] | None,
) -> Any:
    fake = node.meta["val"]
    if spec.kind == InputKind.CONSTANT_TENSOR:
        constant = program.constants[spec.target]
        if isinstance(constant, FakeTensor):
            here = where(next(iter(node.users), node))
            raise ConfigError(
                f"{here.place}{here.operator}{_inside(here)} receives a tensor that PyTorch"
                " could not trace, such as the .data of another; use .detach() instead"
            )
        # a parameter that was read from a list or a dictionary
        for name in parameters:
            if name in program.state_dict and _memory(program.state_dict[name]) == _memory(constant):
                return lowering.values[parameters[name]]
        # PyTorch may have detached it
        trainable = (t for t in (constant, *program.trained) if t.requires_grad)
        other = next((t for t in trainable if _memory(t) == _memory(constant)), None)
        if other is None:
            return lowering.constant(constant)
        if trained is None:
            here = where(next(iter(node.users), node))
            raise ConfigError(
                f"{here.place}{here.operator}{_inside(here)} receives a tensor that requires"
                " grad but is not a parameter of the module; register it as an nn.Parameter of a module"
            )
        value = lowering.input(whole(fake.shape), fake.dtype, "parameter")
        parameters[spec.target], trained[spec.target] = value.id, other
        return value
    if not isinstance(fake, torch.Tensor):
        return fake
    layout = waiting.pop() if spec.kind == InputKind.USER_INPUT else whole(fake.shape)
    if spec.kind == InputKind.USER_INPUT:
        given, value = lowering.image(layout, fake.dtype)
        inputs.append(given.id)
        return value
    kinds = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "constant"}
    value = lowering.input(layout, fake.dtype, kinds.get(spec.kind, "value"))
    if spec.kind == InputKind.PARAMETER:
        parameters[spec.target] = value.id
    elif spec.kind == InputKind.BUFFER:
        buffers[spec.target] = value.id
    else:
        raise ConfigError(f"an input of kind {spec.kind} cannot be distributed")
    return value


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class _Gathering:
    """The modules that every rank computes whole."""

    def __init__(self, lowering: Lowering, paths: Sequence[str]) -> None:
        self.lowering, self.paths = lowering, tuple(paths)
        self.made: set[int] = set()
        self.moved: dict[tuple[int, bool], Value] = {}

    def at(self, node: Any) -> bool:
        """Return whether a node is computed whole."""
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        return any(path in self.paths for path in [*stack, *([""] if "" in self.paths else [])])

    def note(self, made: Any) -> None:
        """Take note of the values that were computed whole."""
        self.made.update(value.id for value in pytree.tree_leaves(made) if isinstance(value, Value))

    def inside(self, value: Any) -> Any:
        """Return a value as a module that is computed whole has it."""
        return self._moved(value, True)

    def outside(self, value: Any) -> Any:
        """Return a value as others have it."""
        return self._moved(value, False)

    def _moved(self, value: Any, whole: bool) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._moved(each, whole) for each in value)
        if not isinstance(value, Value) or value.kind == "parameter":
            return value
        if whole == (value.id in self.made) or (whole and not axes_of(value.layout)):
            return value
        key = value.id, whole
        if key not in self.moved:
            if whole:
                self.moved[key] = self.lowering.gathered(value)
            else:
                mesh = self.lowering.mesh
                is_image = len(value.shape) == mesh.spatial + 2
                self.moved[key] = self.lowering.recut(value, mesh.image(value.shape)) if is_image else value
        return self.moved[key]
