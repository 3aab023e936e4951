"""Lowering of a captured graph to a plan: the rule of each operator adds views, sums and local work."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..ir.functionalize import store_out_of_place_variants, store_result, written_values
from ..ir.graph import Value, axes_of_values, supports_gradients
from ..ir.layout import Layout, Mesh, NeededRanges
from ..ir.registry import POINTWISE_OPS, RULES, TRACING_LOCK
from .builder import PlanBuilder

_REMEDY_FOR_RANDOM_NUMBERS = "use torch.rand, randn, randint, bernoulli, multinomial or randperm instead"
_REMEDY_FOR_VALUES = (
    "a module's computation may depend on the shapes of tensors, but not on their values: use torch.where"
)


class Lowering(PlanBuilder):
    """Context of a rule: the plan being built, and the current operator.

    Attributes
    ----------
    target : the current operator
    fake_out : its results, as fake tensors of the global shape
    draw_number : int
        Key of the next random numbers; determined by the position of the operator in the program.
    autograd_functions : sequence of AutogradFunctionCall
        The autograd.Functions that the program calls, by number.
    subdivides_tiles : bool
        Whether parts of the program are computed in pieces of a tile, even on one rank.
    partitions_channels : bool
        Whether the current operator is partitioned by channels instead of cells.
    group_description : str
        Description of the operators that are executed as a group.
    widened_ranges : sequence of NeededRanges
        Ranges of the inputs that are passed to each rank, where these ranges exceed the rank's tiles.
    """

    subdivides_tiles = False
    group_description = ""
    widened_ranges: Sequence[NeededRanges] = ()

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh, rank)
        self.fake_out: Any = None
        self.target: Any = None
        self.seed: Value | None = None
        self.draw_number = 0
        self.partitions_channels = False
        self.autograd_functions: Sequence[Any] = ()
        self._current_call: Any = None
        self._differentiable_results: dict[Any, list[bool]] = {}
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def lower_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower one call of an operator and return its values."""
        if target is operator.getitem:
            return args[0][args[1]]
        if isinstance(target, type):  # a named tuple of results
            return tuple(args)
        count = len(self.steps)
        # torch.compile would split functions that pass the immutable lists of torch.fx to an operator
        args = [list(arg) if isinstance(arg, list) else arg for arg in args]
        kwargs = {name: list(arg) if isinstance(arg, list) else arg for name, arg in kwargs.items()}
        result = self._lower_operator(target, args, kwargs)
        if len(self.steps) > count:  # operators without effect, such as dropout at rate 0, return their argument
            self._record_operator_name(str(target), result)
        return result

    def _record_operator_name(self, name: str, result: Any) -> None:
        """Record the operator that the last step computes."""
        first_value = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first_value, Value) and first_value.id in self.steps[-1].outputs[:1]:
            self.steps[-1].op_name = name

    def _lower_operator(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            self.refuse("it is not an ATen operator")
        bound = bind_arguments(target, args, kwargs)
        values = [v for v in pytree.tree_leaves(bound) if isinstance(v, Value)]
        name = str(target)
        self.target, self._current_call = target, (target, args, kwargs)
        rule = RULES.get(name)
        applies_if_replicated = rule is not None and (
            rule.applies_if_replicated or self.partitions_channels
        )  # even if all ranks have all values
        is_random = _is_random(target, bound)  # each rank would draw different numbers
        if rule is None and target.namespace == "prims" and any(value.kind != "constant" for value in values):
            self.refuse("PyTorch has no gradient for it")
        if not (applies_if_replicated or is_random or axes_of_values(values)):
            return self.compute_replicated()
        if rule is not None:
            whole_values = {name: bound[name] for name in rule.whole if isinstance(bound.get(name), Value)}
            result = rule.function(self, **bound | {name: self.gather(value) for name, value in whole_values.items()})
            returns_tensor = [str(returned.type) for returned in target._schema.returns] == ["Tensor"]
            if returns_tensor and not isinstance(result, Value | tuple):  # a tuple: with new values of written buffers
                self.refuse(f"its rule {rule.function.__name__} returns {type(result).__name__} instead of a value")
            return result
        if not is_random and self._is_pointwise:
            return self.lower_pointwise(target, args, kwargs)
        decomposed = self.decompose()
        if decomposed is not None:
            return decomposed
        if not self.mesh.axes:
            return self.compute_replicated()
        if is_random:
            self.refuse("each rank would draw its own random numbers", _REMEDY_FOR_RANDOM_NUMBERS)
        return self.refuse()

    @property
    def has_partial_gradients(self) -> bool:
        """Whether the gradient of a value may arrive in parts, which are summed later in the backward pass."""
        return False

    def compute_replicated(self) -> Any:
        """Return the results of the current operator, computed by every rank from all of its arguments."""
        values, run = self.values_and_function()
        if not isinstance(self.fake_out, (tuple, list, torch.Tensor)):
            self.refuse("it depends on the values of a tensor", _REMEDY_FOR_VALUES)
        results = self.local_call(run, [self.gather(value) for value in values])
        if not (self.mesh.axes and self._is_pointwise):
            return results
        return self._mark_constant_results(results, self.target, run, values)

    @property
    def _is_pointwise(self) -> bool:
        return torch.Tag.pointwise in self.target.tags or str(self.target) in POINTWISE_OPS

    def _mark_constant_results(
        self, results: Any, target: Any, run: Callable[..., Any], values: Sequence[Value]
    ) -> Any:
        """Mark results of a pointwise operator that have no gradient as constant, and return all results."""
        leaves = pytree.tree_leaves(results)
        self.mark_constants(leaves, self._results_have_gradients(target, run, values, [y.dtype for y in leaves]))
        return results

    def local_call(
        self, run: Callable[..., Any], args: Sequence[Value], layouts: Sequence[Layout] | None = None
    ) -> Any:
        """Return the result of the current operator, or the tuple of its results, computed locally by `run`."""
        if isinstance(self.fake_out, (tuple, list)):
            return self.local_results(run, args, self.fake_out, layouts)
        (result,) = self.local_results(lambda *tensors: (run(*tensors),), args, [self.fake_out], layouts)
        return result

    def values_and_function(self, target: Any = None) -> tuple[list[Value], Callable[..., Any]]:
        """Return the values among the arguments of the current operator, and the operator as a function.

        Parameters
        ----------
        target : callable, optional
            Function of the same arguments to return instead of the operator.
        """
        return tensor_call(target or self._current_call[0], *self._current_call[1:])

    def decompose(self, builtin_only: bool = False) -> Any:
        """Lower the current operator by its decomposition into simpler operators; return None if there is none.

        Parameters
        ----------
        builtin_only : bool
            Whether to use only the operator's composite implementation; entries of PyTorch's table may lack gradients.
        """
        target, args, kwargs = self._current_call
        args, kwargs = list(args), dict(kwargs)
        for argument in target._schema.arguments[len(args) :]:  # the table's entries may name them differently
            if argument.kwarg_only or argument.name not in kwargs:
                break
            args.append(kwargs.pop(argument.name))
        table_entry = None if builtin_only else decomposition_table.get(target)
        decompositions = [table_entry, target.decompose if target._can_decompose() else None]
        # some entries of the table take arguments that differ from the operator's, such as a loss's reduction by name
        results = (self.trace_and_lower(*tensor_call(run, args, kwargs)) for run in decompositions if run is not None)
        result = next((result for result in results if result is not None), None)
        return self._detach_as_in_pytorch(result, target, args, kwargs) if isinstance(result, tuple) else result

    def _detach_as_in_pytorch(self, results: tuple[Any, ...], *call: Any) -> tuple[Any, ...]:
        """Return the results of a decomposition, detached where the operator itself has no gradient."""
        values, run = tensor_call(*call)
        try:
            with TRACING_LOCK:
                outputs = _run_with_gradients(run, values, [self.fake_tensor(value) for value in values])
        except RuntimeError:  # PyTorch has no gradient with respect to an argument
            return results
        output_tuple = outputs if isinstance(outputs, tuple) else (outputs,)
        detached_flags = [isinstance(output, torch.Tensor) and not output.requires_grad for output in output_tuple]
        return tuple(
            self.detach(value) if isinstance(value, Value) and value.kind != "constant" and is_detached else value
            for value, is_detached in zip_longest(results, detached_flags)
        )

    def trace_and_lower(self, values: Sequence[Value], run: Callable[..., Any]) -> Any:
        """Return the results of a function of tensors, traced and lowered by operator; None if it cannot be traced."""
        try:
            with TRACING_LOCK:
                fakes = [self.fake_tensor(value) for value in values]
                graph = make_fx(run, tracing_mode="fake")(*fakes)
                if not store_out_of_place_variants(graph.graph):
                    graph = make_fx(functionalize(run), tracing_mode="fake")(*fakes)
                    if any(map(written_values, graph.graph.nodes)):  # composite operators contain writes
                        graph = make_fx(functionalize(graph), tracing_mode="fake")(*fakes)
        except Exception:  # untraceable functions cannot be decomposed
            return None
        outer_fake_out = self.fake_out
        try:
            return self._lower_inline(graph, values)
        finally:
            self.fake_out = outer_fake_out

    def read(self, env: Mapping[Any, Any], arg: Any) -> Any:
        """Return the value of an argument whose node has been lowered."""
        if not isinstance(arg, torch.fx.Node):
            return arg
        is_one_of_several = arg.target is operator.getitem and env[arg.args[0]] is not None
        if is_one_of_several and env[arg] is None and isinstance(arg.meta.get("val"), torch.Tensor):
            producer: Any = arg.args[0]
            self.where = self.where._replace(operator=str(producer.target))
            self.refuse(f"its result {arg.args[1]} is used, but its rule does not compute that result")
        return env[arg]

    def random_key(self) -> tuple[Value, int]:
        """Return the value of the random seed of each pass, and a different number for each call.

        Both are the same on every rank of every grid, independent of the steps of the plan.
        """
        if self.seed is None:
            self.seed = self._new_value((), frozenset(), torch.int64, "constant", ())
        self.draw_number += 1
        return self.seed, self.draw_number - 1

    def _lower_inline(self, graph: torch.fx.GraphModule, inputs: Sequence[Value]) -> Any:
        """Lower another graph in place of the current operator."""
        env: dict[torch.fx.Node, Any] = {}
        remaining_inputs = list(inputs)[::-1]
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                env[node] = remaining_inputs.pop()
            elif node.op == "get_attr":
                env[node] = self.add_constant(getattr(graph, node.target))
            elif node.op == "output":
                return pytree.tree_map(partial(self.read, env), node.args[0])
            else:
                args, kwargs = pytree.tree_map(partial(self.read, env), (node.args, dict(node.kwargs)))
                self.fake_out = node.meta.get("val")
                store_result(env, node, self.lower_call(node.meta.get("out_of_place", node.target), args, kwargs))
        return None

    def as_first_result(self, value: Value) -> Any:
        """Return the first result of the current operator, followed by None for each of its further results."""
        fake_outs = self.fake_out
        return (value, *[None] * (len(fake_outs) - 1)) if isinstance(fake_outs, (tuple, list)) else value

    def lower_pointwise(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower a pointwise operation."""
        values, run = tensor_call(target, args, kwargs)
        aligned, layout = self.align_pointwise(values)
        results = self.local_call(run, aligned, [layout for _ in pytree.tree_leaves(self.fake_out)])
        return self._mark_constant_results(results, target, run, values)

    def _results_have_gradients(
        self, target: Any, run: Callable[..., Any], values: Sequence[Value], dtypes: Sequence[torch.dtype]
    ) -> list[bool]:
        """Return whether each result of an operator has a gradient: some, such as Bessel functions, have none."""
        key = target, *dtypes, *((value.dtype, value.kind == "constant") for value in values)
        if key not in self._differentiable_results:
            samples = [torch.ones((1,) * len(value.shape), dtype=value.dtype) for value in values]
            results = pytree.tree_leaves(_run_with_gradients(run, values, samples))
            self._differentiable_results[key] = [y.requires_grad for y in results]
        return self._differentiable_results[key]

    def fake_tensor(self, value: Value) -> torch.Tensor:
        """Return a fake tensor of a value's global shape."""
        with self._fake_mode:
            return torch.empty(value.shape, dtype=value.dtype)


def tensor_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Value], Callable[..., Any]]:
    """Return the values among an operator's arguments, and the operator as a function of only their tensors."""
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    values = [leaf for leaf in leaves if isinstance(leaf, Value)]
    if target is torch.ops.aten.view.default:  # strides may differ from those in one process
        target = torch.ops.aten.reshape.default

    def run(*tensors: torch.Tensor) -> Any:
        inputs = iter(tensors)
        positional, named = pytree.tree_unflatten([next(inputs) if isinstance(x, Value) else x for x in leaves], spec)
        return target(*positional, **named)

    if values == [arg for arg in args if isinstance(arg, Value)]:  # no value is in a list: passes rebuild no tree
        positions = [i for i, arg in enumerate(args) if isinstance(arg, Value)]

        def run_flat(*tensors: torch.Tensor) -> Any:
            filled_args = list(args)
            for i, tensor in zip(positions, tensors, strict=True):
                filled_args[i] = tensor
            return target(*filled_args, **kwargs)

        return values, run_flat
    return values, run


def _run_with_gradients(run: Callable[..., Any], values: Sequence[Value], samples: Sequence[torch.Tensor]) -> Any:
    """Return the results of an operator for samples of values; those of values with gradients require gradients."""
    for sample, value in zip(samples, values, strict=True):
        sample.requires_grad_(value.kind != "constant" and supports_gradients(value.dtype))
    with torch.enable_grad():
        return run(*(sample.clone() for sample in samples))  # clones, since the operator may write to its arguments


def _is_random(target: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether an operator draws random numbers, given these arguments."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if any(arguments.get(name) is False for name in ("train", "training")):
        return False
    return all(arguments[name] != 0 for name in ("dropout", "dropout_p", "p") if name in arguments)


def bind_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, defaults included; `self` and `input` are renamed to `x`."""
    bound = {}
    for at, argument in enumerate(target._schema.arguments):
        name = "x" if argument.name in ("self", "input") else argument.name
        if at < len(args):
            bound[name] = args[at]
        elif argument.name in kwargs:
            bound[name] = kwargs[argument.name]
        else:
            bound[name] = argument.default_value if argument.has_default_value() else None
    return bound
