"""Conversion of PyTorch modules to models of neondist layers."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from ...comm import ProcessGrid
from ...comm.agreement import all_or_none, check_equal_on_ranks
from ...errors import ConfigError, ShapeError
from ...models import ConvnetDist, MLPDist, Model
from ...terminal.console import counted
from ..capture.capture import capture_module, decompose, node_location
from ..capture.persistent_state import RestorableState
from ..ir.errors import UnsupportedOperator
from ..ir.functionalize import store_result, written_values
from .network import ModuleTensor, NetworkBuilder, TracedValue
from .operators import CONVERTERS


def from_torch(
    module: nn.Module,
    example_shape: Sequence[int],
    grid: ProcessGrid | None = None,
    *,
    model: type[Model] | None = None,
    **arguments: Any,
) -> Model:
    """Convert a PyTorch module to an equivalent model of neondist layers, with copies of its weights.

    Results agree up to rounding in training and evaluation, including running statistics; only dropout draws different
    random numbers. Images are (N, *spatial, C), as in all neondist models, instead of PyTorch's (N, C, *spatial). The
    module is not modified and shares no memory with the model.

    Parameters
    ----------
    module : nn.Module
        A module on the CPU with one input and one output, all parameters trainable, and all submodules in the same
        mode.
    example_shape : (N, C, *spatial) or (N, C)
        Global shape of the whole batch and image.
    grid : ProcessGrid, optional
        Grid of the model. Default: all ranks for distributed models, this process alone for serial models.
    model : class, optional
        Class of the model. Default: ConvnetDist, or MLPDist for vectors. A serial class, such as Convnet, gets serial
        layers.
    **arguments
        Arguments of the class: cost, optimizer, seed, ... `dtype` defaults to the module's dtype.

    Returns
    -------
    Model
        A built model, whose layers are named after the modules from which they were converted.

    Raises
    ------
    UnsupportedOperator
        No layer corresponds to an operator; the message names the operator, the module, and the user's file and line.
    ConfigError
        The module does not have exactly one input and one output, mixes modes, does not have all parameters in float32
        or all in float64, or differs between training and evaluation in more than dropout and batch normalisation.
    """
    shape = tuple(example_shape)
    model_class = model or (ConvnetDist if len(shape) > 2 else MLPDist)
    grid = grid or (ProcessGrid() if model_class.distributed else ProcessGrid.serial())
    grid.check("from_torch")
    with all_or_none(grid.world):
        network, output = _convert_both_modes(module, shape, arguments.get("dtype", torch.get_default_dtype()))
        layers = network.nest_into_nodes(output)
        if model_class.distributed:
            layers = [layer.distributed_counterpart() for layer in layers]
        result = model_class(layers, **{"dtype": _dtype_name(network.dtype)} | arguments)
        layer_names = {layer.name for layer in result.leaves}
        weights = {name: array for name, array in network.weights.items() if name.rpartition("/")[0] in layer_names}
    check_equal_on_ranks(
        grid.world,
        {"the module's layers": sorted(map(str, layer_names))}
        | {name: zlib.crc32(array) for name, array in weights.items()},
    )
    result.build(network.input.layer_shape, shape[0], grid)
    result.load_state(weights)
    return result


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _convert_both_modes(
    module: nn.Module, shape: tuple[int, ...], default_dtype: Any
) -> tuple[NetworkBuilder, TracedValue]:
    """Return the network in training mode and its output; only dropout and batch norms may differ in evaluation."""
    mismatched = [name for name, part in module.named_modules() if part.training != module.training]
    if mismatched:
        raise ConfigError(
            f"module '{mismatched[0]}' is in {'eval' if module.training else 'train'}() mode, but the whole module is"
            " not, and layers share one mode; call train() or eval() on the whole module"
        )
    tensors = [*module.parameters(), *module.buffers()]
    dtypes = {_dtype_name(tensor.dtype) for tensor in tensors if tensor.is_floating_point()}
    dtypes = dtypes or {_dtype_name(default_dtype)}
    if dtypes not in ({"float32"}, {"float64"}):
        raise ConfigError(
            f"the module has parameters in {', '.join(sorted(dtypes))}; convert all to float32, or all to float64"
        )
    dtype = getattr(torch, *dtypes)
    value_numbers: dict[Any, int] = {}
    networks_by_mode = {}
    state = RestorableState(module)
    try:
        for training in (True, False):
            networks_by_mode[training] = _convert_module(module.train(training), shape, dtype, value_numbers)
    finally:
        state.restore()
    if networks_by_mode[True][1].value_number != networks_by_mode[False][1].value_number:
        raise ConfigError(
            f"{type(module).__name__} differs between training and evaluation in more than dropout and batch"
            " normalisation, unlike a model of layers; use neondist.torch.distribute, which accepts such modules"
        )
    return networks_by_mode[True]


def _convert_module(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, value_numbers: dict[Any, int]
) -> tuple[NetworkBuilder, TracedValue]:
    """Return the network of a module in its current mode, and its output."""
    input_specs = [(shape, dtype)]
    program = capture_module(module, input_specs)
    try:
        return _fill_network(program, NetworkBuilder(shape, dtype, module.training, value_numbers))
    except UnsupportedOperator:  # the slower decomposition may consist of operators that correspond to layers
        return _fill_network(
            decompose(program, module, input_specs), NetworkBuilder(shape, dtype, module.training, value_numbers)
        )


def _fill_network(program: Any, net: NetworkBuilder) -> tuple[NetworkBuilder, TracedValue]:
    """Add the operators of a program to a network; return the network and its output."""
    signature = program.graph_signature
    specs_by_name = {spec.arg.name: spec for spec in signature.input_specs}
    (output_node,) = (node for node in program.graph.nodes if node.op == "output")
    result_nodes = [
        result
        for spec, result in zip(signature.output_specs, output_node.args[0], strict=True)
        if spec.kind == OutputKind.USER_OUTPUT
    ]
    input_specs = [spec for spec in signature.input_specs if spec.kind == InputKind.USER_INPUT]
    if len(result_nodes) != 1 or len(input_specs) != 1 or not isinstance(result_nodes[0], torch.fx.Node):
        raise ConfigError(
            f"the module has {counted(len(input_specs), 'input')} and {counted(len(result_nodes), 'output')}; convert a"
            " module with exactly one of each"
        )
    buffer_names = {  # by the results that are written to the buffers
        result: spec.target
        for spec, result in zip(signature.output_specs, output_node.args[0], strict=True)
        if spec.kind == OutputKind.BUFFER_MUTATION
    }
    for node in program.graph.nodes:
        buffer_names |= {old: specs_by_name[old.name].target for old in written_values(node) if old.op == "placeholder"}
    buffer_names = {result: name for result, name in buffer_names.items() if not name.endswith("num_batches_tracked")}
    needed_nodes = {result_nodes[0], *buffer_names}
    converted_nodes = set()
    for node in reversed(program.graph.nodes):
        if node in needed_nodes or not needed_nodes.isdisjoint(written_values(node)):
            converted_nodes.add(node)
            needed_nodes.update(node.all_input_nodes)
    env: dict[Any, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = specs_by_name[node.name]
            tensor = program.state_dict.get(spec.target)  # None: a constant or a non-persistent buffer
            is_trained = spec.kind == InputKind.PARAMETER and tensor is not None and tensor.requires_grad
            env[node] = (
                net.input if spec.kind == InputKind.USER_INPUT else ModuleTensor(str(spec.target), tensor, is_trained)
            )
        elif node in converted_nodes:
            args, kwargs = pytree.tree_map(
                lambda arg: env[arg] if isinstance(arg, torch.fx.Node) else arg, (node.args, dict(node.kwargs))
            )
            value = args[0][args[1]] if node.target is operator.getitem else _convert_node(net, node, args, kwargs)
            store_result(env, node, value)
    for result, name in buffer_names.items():
        if not isinstance(env[result], ModuleTensor) or env[result].name != name:
            net.refuse(f"it changes the buffer '{name}'", node_location(result))
    output = env[result_nodes[0]]
    if not isinstance(output, TracedValue):
        raise ConfigError("the module's output is not computed from its input; return the output of a layer")
    if not output.matches_layer_axes:
        net.refuse(
            f"its output has shape {output.shape}, but the layer's output is {output.layer_shape} for each sample"
        )
    return net, output


def _convert_node(net: NetworkBuilder, node: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target = node.meta.get("out_of_place", node.target)
    net.where = node_location(node)._replace(operator=str(target))
    converter = CONVERTERS.get(str(target))
    if converter is None:
        return net.refuse()
    net.fake_out = pytree.tree_leaves(node.meta["val"])[0]
    schema_args = target._schema.arguments
    arg_names = ["x" if argument.name in ("self", "input") else argument.name for argument in schema_args]
    defaults = {name: a.default_value for name, a in zip(arg_names, schema_args, strict=True) if a.has_default_value()}
    bound_args = defaults | dict(zip(arg_names, args, strict=False)) | kwargs
    first_input = bound_args.get("x", net.input)
    if not isinstance(first_input, TracedValue):
        return net.refuse("only values computed from the input can be converted to layers")
    try:
        return converter.function(net, **bound_args)
    except (ConfigError, ShapeError) as error:
        return net.refuse(str(error))
