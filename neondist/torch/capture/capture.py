"""Capture of a module as a graph of ATen operators at the global shape, on fake tensors without memory."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ...halo import ExchangePolicy
from ..exchange.schemes import assign_schemes
from ..ir.autocast import autocast_dtypes
from ..ir.custom_gradients import record_autograd_functions
from ..ir.errors import CaptureError, position_text
from ..ir.functionalize import (
    clone_aliased_buffer_values,
    reject_writes_through_windows,
    separate_statistics_updates,
    store_out_of_place_variants,
    store_result,
)
from ..ir.graph import Value
from ..ir.layout import Layout, Mesh, replicated
from ..lowering.lowering import Lowering
from ..lowering.plan import TorchPlan
from ..lowering.steps import OperatorPosition
from .autocast import devices_with_own_autocast, floating_dtypes, mark_autocast_regions
from .checks import check_module
from .constants import remove_number_reads, track_known_values
from .no_grad import detach_no_grad_values
from .persistent_state import restore_after_capture
from .regions import PartitioningConverter
from .tracing import (
    SHAPE_REMEDY,
    InputSpecs,
    allow_self_assignment,
    hide_printed_graph,
    register_dataclasses_of_outputs,
    tracing,
    user_frames,
)

RANDOM_KEY_STRIDE = 1000
"""Stride of random-number keys between operators; exceeds the number of keys that an operator uses."""


def capture_module(module: nn.Module, shapes: InputSpecs, name: str = "", device: torch.device | None = None) -> Any:
    """Return the exported program of a module; it keeps composite operators unless writes require functionalisation.

    no_grad, inference_mode and autocast around this call are not captured; those around a run of the program apply to
    that run, except autocast where the module itself sets it. The captured dtypes, however, are those under autocast
    around this call, and `torch.is_grad_enabled()` in the module returns the mode around this call.

    Parameters
    ----------
    name : str
        Name of the module in errors; default: its class.
    device : torch.device, optional
        Device of the inputs; default: that of the module's parameters and buffers.

    Raises
    ------
    ConfigError
        If the module's control flow depends on tensor values, if it has backward hooks, or if it cannot be traced for
        another reason.
    """
    check_module(module)
    grad_enabled = torch.is_grad_enabled()
    importlib.import_module("torch._dynamo")  # before `record_autograd_functions` patches what it inspects
    with (
        tracing(name or type(module).__name__, shapes),
        record_autograd_functions() as calls,
        track_known_values(module) as values,
    ):
        with FakeTensorMode(allow_non_fake_inputs=True):
            input_device = device or device_of(module)
            inputs = tuple(torch.empty(tuple(shape), dtype=dtype, device=input_device) for shape, dtype in shapes)
        with (
            restore_after_capture(module, inputs) as depends_on_grad_mode,
            register_dataclasses_of_outputs(module),
            hide_printed_graph(),
            allow_self_assignment(),
            torch.set_grad_enabled(grad_enabled or not depends_on_grad_mode),
        ):
            program: Any = torch.export.export(module, inputs, strict=False)
        program.functions, program.reads = calls, values.reads
        program.unregistered_tensors = values.unregistered_tensors
        clone_aliased_buffer_values(program.graph)
        remove_number_reads(program)
        aliases = _merge_buffer_aliases(program)
        detach_no_grad_values(program, lambda node: node_location(node).source)
        specs = program.graph_signature.input_specs
        buffers = [spec.arg.name for spec in specs if spec.kind == InputKind.BUFFER]
        if store_out_of_place_variants(program.graph, buffers):
            results = next(reversed(program.graph.nodes)).args[0]
            for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
                if isinstance(result, torch.fx.Node):
                    spec.arg.name = result.name
        else:
            try:
                program = _functionalize(program)
            except AssertionError:
                if not aliases:
                    raise
                raise CaptureError(
                    f"the forward pass writes into a part of the buffer {aliases[0]}, which has several names, or reads"
                    " it through an alias made before the write; keep one name"
                ) from None
        return program


def _merge_buffer_aliases(program: Any) -> list[str]:
    """Redirect all names of a buffer to the first; return the other names."""
    first_node_by_id: dict[int, Any] = {}
    duplicate_names: list[str] = []
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    tensors = {**program.constants, **program.state_dict}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.BUFFER:
            node = nodes[spec.arg.name]
            if (original := first_node_by_id.setdefault(id(tensors[spec.target]), node)) is not node:
                node.replace_all_uses_with(original)
                duplicate_names.append(spec.target)
    return duplicate_names


def _functionalize(program: Any) -> Any:
    """Return the program without in-place and composite operators."""
    reject_writes_through_windows(program.graph)
    separate_statistics_updates(program.graph)
    mark_autocast_regions(program)
    program.graph_module.recompile()
    result = program.run_decompositions({})
    result.functions, result.reads = program.functions, program.reads
    result.unregistered_tensors = program.unregistered_tensors
    return result


def decompose(program: Any, module: nn.Module, shapes: InputSpecs) -> Any:
    """Return a captured program without in-place and composite operators."""
    with tracing(type(module).__name__, shapes):
        return _functionalize(program)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter or buffer, or PyTorch's default device."""
    first_device = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)
    return torch.get_default_device() if first_device is None else first_device


def node_location(node: Any) -> OperatorPosition:
    """Return the location of a node in the user's program."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    frames = user_frames(node.meta.get("stack_trace") or "")
    return OperatorPosition(str(node.target), path, frames[-1] if frames else "", devices_with_own_autocast(node))


def lower_program(
    program: Any,
    mesh: Mesh,
    rank: int,
    layouts: Sequence[Layout],
    gather_at: Sequence[str] = (),
    schemes: Mapping[str, ExchangePolicy] | None = None,
    recompute: bool = False,
    lowering: Lowering | None = None,
    unregistered_tensors: dict[str, torch.Tensor] | None = None,
    channel_nodes: Collection[torch.fx.Node] = (),
) -> tuple[TorchPlan, Any]:
    """Return the plan of a program for one rank, and the tree structure of the program's outputs.

    Parameters
    ----------
    layouts : sequence of Layout
        Layout of each of the user's inputs.
    gather_at : sequence of str
        Paths of modules that every rank computes on whole arrays; their output images are tiled again.
    schemes : dict of path to ExchangePolicy
        Border schemes of modules' windows; default: exact.
    recompute : bool
        Whether the backward pass recomputes segments.
    lowering : Lowering, optional
        Builder of the plan.
    unregistered_tensors : dict of name to tensor, optional
        Receives tensors that require gradients but are not parameters; treated as parameters. Default: rejected.
    channel_nodes : collection of torch.fx.Node
        Nodes that are partitioned by channels instead of cells.
    """
    lowering, signature = lowering or Lowering(mesh, rank), program.graph_signature
    lowering.autograd_functions = program.functions
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    inputs = _ProgramInputs(lowering, program, layouts, unregistered_tensors)
    env: dict[Any, Any] = {}
    changed_nodes: dict[str, Any] = {}
    regions = PartitioningConverter(lowering, gather_at, channel_nodes)
    outputs: Sequence[Any] = ()
    output_nodes: Sequence[Any] = ()
    for position, node in enumerate(program.graph.nodes):
        if node.op == "placeholder":
            env[node] = inputs.lower_placeholder(node, specs[node.name])
        elif node.op == "output":
            lowering.where, output_nodes = node_location(node), node.args[0]
            outputs = pytree.tree_map(lambda arg: regions.convert(lowering.read(env, arg)), node.args[0])
        else:
            lowering.where, lowering.fake_out = node_location(node), node.meta.get("val")
            lowering.draw_number = position * RANDOM_KEY_STRIDE
            _check_static_shape(lowering)
            regions.begin_node(node)

            def read_argument(arg: Any, node: Any = node) -> Any:
                return regions.convert(lowering.read(env, arg), node)

            args, kwargs = pytree.tree_map(read_argument, (node.args, dict(node.kwargs)))
            result = lowering.lower_call(node.meta.get("out_of_place", node.target), args, kwargs)
            overwritten = store_result(env, node, result)
            changed_nodes |= {specs[old.name].target: old for old in overwritten if old.op == "placeholder"}
            regions.record_result(result, node)
    mutated = {name: lowering.read(env, old) for name, old in changed_nodes.items()}
    results: list[Any] = []
    for spec, out, output_node in zip(signature.output_specs, outputs, output_nodes, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:  # the gradient of a returned parameter is counted once
            results.append(lowering.sum_gradient(out, ()) if isinstance(out, Value) else out)
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            mutated[spec.target] = out
        else:
            lowering.where = node_location(output_node)
            lowering.refuse("an input is changed in place")
    new_ids = {name: value.id for name, value in zip(mutated, regions.gather(mutated.values()), strict=True)}
    output_ids = [out.id if isinstance(out, Value) else _NonTensorOutput(out) for out in results]
    plan = TorchPlan(
        mesh,
        rank,
        lowering.steps,
        lowering.values,
        inputs.parameters,
        inputs.buffers,
        inputs.inputs,
        output_ids,
        new_ids,
        None if lowering.seed is None else lowering.seed.id,
        recompute,
        floating_dtypes({node: lowering.read(env, node) for node in env}) if any(autocast_dtypes()) else {},
    )
    assign_schemes(plan.steps, schemes or {})
    return plan, program.call_spec.out_spec


def _check_static_shape(lowering: Lowering) -> None:
    for out in pytree.tree_leaves(lowering.fake_out):
        sizes = out.shape if isinstance(out, torch.Tensor) else [out]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise ConfigError(
                f"{position_text(lowering.where)}: the shape of its result depends on the values of tensors;"
                f" {SHAPE_REMEDY}"
            )


class _NonTensorOutput:
    def __init__(self, value: Any) -> None:
        self.value = value


class _ProgramInputs:
    """Values of the parameters, buffers and inputs of a program being lowered; arguments as for `lower_program`.

    Attributes
    ----------
    parameters, buffers : dict of name to id
    inputs : list of id
    """

    def __init__(
        self,
        lowering: Lowering,
        program: Any,
        layouts: Sequence[Layout],
        unregistered_tensors: dict[str, torch.Tensor] | None,
    ) -> None:
        self.parameters, self.buffers, self.inputs = dict[str, int](), dict[str, int](), list[int]()
        self._lowering, self._program, self._layouts = lowering, program, iter(layouts)
        self._unregistered_tensors = unregistered_tensors

    def lower_placeholder(self, node: Any, spec: Any) -> Any:
        """Return the value of a placeholder."""
        fake = node.meta["val"]
        if spec.kind == InputKind.CONSTANT_TENSOR:
            return self._lower_constant(node, spec.target)
        if not isinstance(fake, torch.Tensor):
            return fake
        if spec.kind == InputKind.USER_INPUT:
            passed_value, value = self._lowering.passed_image_and_tile(next(self._layouts), fake.dtype)
            self.inputs.append(passed_value.id)
            return value
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            raise ConfigError(f"the module has an input of kind {spec.kind}; pass only tensors to it")
        is_parameter = spec.kind == InputKind.PARAMETER
        kind = "parameter" if is_parameter else "constant"
        value = self._lowering.new_input(replicated(fake.shape), fake.dtype, kind)
        (self.parameters if is_parameter else self.buffers)[spec.target] = value.id
        return value

    def _lower_constant(self, node: Any, name: str) -> Value:
        program, lowering, constant = self._program, self._lowering, self._program.constants[name]
        reader = node_location(next(iter(node.users), node))
        if isinstance(constant, FakeTensor):
            raise ConfigError(
                f"{position_text(reader)} receives a tensor that PyTorch could not trace, such as x.data; use"
                " x.detach() instead"
            )
        # a parameter read from a list or a dictionary
        for known, value in self.parameters.items():
            if known in program.state_dict and _memory_key(program.state_dict[known]) == _memory_key(constant):
                return lowering.values[value]
        # PyTorch may have detached a tensor that requires gradients
        trainable = (t for t in (constant, *program.unregistered_tensors) if t.requires_grad)
        parameter = next((t for t in trainable if _memory_key(t) == _memory_key(constant)), None)
        if parameter is None:
            return lowering.add_constant(constant)
        if self._unregistered_tensors is None:
            raise ConfigError(
                f"{position_text(reader)} receives a tensor that requires grad but is not a parameter of the module;"
                " register it as an nn.Parameter of a module"
            )
        fake = node.meta["val"]
        new_parameter = lowering.new_input(replicated(fake.shape), fake.dtype, "parameter")
        self.parameters[name], self._unregistered_tensors[name] = new_parameter.id, parameter
        return new_parameter


def _memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
