"""From a captured graph to a plan: each operator by its rule, in terms of views, sums and local work."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .building import Builder
from .functionalize import is_simple, written
from .graph import Value, axes_of_values
from .layout import Mesh, axes_of, whole
from .registry import POINTWISE, RULES, TRACING
from .steps import Where
from .transfer import Wanted


class Lowering(Builder):
    """Context of a rule: the plan being built, and the current operator.

    Attributes
    ----------
    target : the operator
    out : its results, as fake tensors of the global shape
    draws : int
        What the next random numbers are keyed by; it follows from the place of the operator in the program.
    functions : sequence of UserFunction
        The autograd.Functions that the program calls, by number.
    in_parts : bool
        Whether tiles go through some of it in parts, on one rank too.
    note : str
        What of it goes together, in words.
    overlaps : sequence of Wanted
        What each rank is given of the inputs, where that is more than its tiles.
    """

    in_parts = False
    note = ""
    overlaps: Sequence[Wanted] = ()

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh, rank)
        self.out: Any = None
        self.target: Any = None
        self.key: Value | None = None
        self.draws = 0
        self.functions: Sequence[Any] = ()
        self._call: Any = None
        self._gradients: dict[Any, list[bool]] = {}
        self._faking = FakeTensorMode(allow_non_fake_inputs=True)

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the values that an operator gives."""
        if target is operator.getitem:
            return args[0][args[1]]
        if isinstance(target, type):  # a named tuple of results
            return tuple(args)
        found = self._called(target, args, kwargs)
        self._note(str(target), found)
        return found

    def _note(self, name: str, found: Any) -> None:
        """Take note of the operator whose result the last step gave."""
        first = found[0] if isinstance(found, tuple) and found else found
        if self.steps and isinstance(first, Value) and first.id == self.steps[-1].outputs[0]:
            self.steps[-1].op = name

    def _called(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            self.refuse("is not an ATen operator")
        bound = _bound(target, args, kwargs)
        values = [v for v in pytree.tree_leaves(bound) if isinstance(v, Value)]
        name = str(target)
        self.target, self._call = target, (target, args, kwargs)
        found = RULES.get(name)
        always = found is not None and found.always
        random = _is_random(target, bound)  # each rank would draw numbers of its own
        if found is None and target.namespace == "prims" and any(value.kind != "constant" for value in values):
            self.refuse("PyTorch has no gradient for it")
        if not (always or random or axes_of_values(values)):
            return self.alike()
        if found is not None:
            given = {name: bound[name] for name in found.whole if isinstance(bound.get(name), Value)}
            return found.function(self, **bound | {name: self.gathered(value) for name, value in given.items()})
        if not random and (torch.Tag.pointwise in target.tags or name in POINTWISE):
            return self.pointwise(target, args, kwargs)
        inner = self.apart()
        if inner is not None:
            return inner
        if not self.mesh.axes:
            return self.alike()
        return self.refuse("each rank would draw its own random numbers" if random else "")

    @property
    def parts_of_gradients(self) -> bool:
        """Whether the gradient of a value may come in parts, which are added up further back."""
        return False

    def alike(self) -> Any:
        """Return what the operator at hand gives, which every rank computes from all of its arguments."""
        values, run = self.tensors()
        values = [self.gathered(value) for value in values]
        out = self.out
        if isinstance(out, (tuple, list)):
            return self.locals(run, values, out)
        if not isinstance(out, torch.Tensor):
            self.refuse("depends on the values of a tensor")
        (found,) = self._locals(run, values, [whole(out.shape)], [out.dtype], frozenset())
        return found

    def tensors(self, target: Any = None) -> tuple[list[Value], Callable[..., Any]]:
        """Return the values among the arguments of the operator at hand, and it as a function of their tensors.

        Parameters
        ----------
        target : callable, optional
            What takes these arguments instead of the operator.
        """
        return _of_tensors(target or self._call[0], *self._call[1:])

    def apart(self, own: bool = False) -> Any:
        """Return what the operator at hand gives, taken apart into simpler ones; None: it is as simple as can be.

        Parameters
        ----------
        own : bool
            Whether by what PyTorch itself runs, where its decompositions would be made of what has no gradient.
        """
        target, args, kwargs = self._call
        ways = [None if own else decomposition_table.get(target), target.decompose if target._can_decompose() else None]
        # some entries of the table take other arguments than the operator, such as the reduction of a loss by its name
        found = (self.traced(*_of_tensors(way, args, kwargs)) for way in ways if way is not None)
        return next((each for each in found if each is not None), None)

    def traced(self, values: Sequence[Value], run: Callable[..., Any]) -> Any:
        """Return what a function of tensors gives, operator by operator; None: it cannot be traced."""
        try:
            with TRACING:
                fakes = [self.fake(value) for value in values]
                graph = make_fx(run, tracing_mode="fake")(*fakes)
                if not is_simple(graph.graph):
                    graph = make_fx(functionalize(run), tracing_mode="fake")(*fakes)
                    if any(map(written, graph.graph.nodes)):  # it leaves what some operators are composed of
                        graph = make_fx(functionalize(graph), tracing_mode="fake")(*fakes)
        except Exception:  # what cannot be traced cannot be taken apart
            return None
        return self.inline(graph, values)

    def read(self, env: Mapping[Any, Any], arg: Any) -> Any:
        """Return what an argument stands for, whose node has been lowered."""
        if not isinstance(arg, torch.fx.Node):
            return arg
        one_of_several = arg.target is operator.getitem and env[arg.args[0]] is not None
        if one_of_several and env[arg] is None and isinstance(arg.meta.get("val"), torch.Tensor):
            made: Any = arg.args[0]
            self.where = Where(str(made.target), self.where.module, self.where.source)
            self.refuse(f"its result {arg.args[1]} is used, and only others have a rule")
        return env[arg]

    def random_key(self) -> tuple[Value, int]:
        """Return the value of a number that is drawn for each pass, and another one for each call.

        Both are the same on every rank of every grid, whatever steps a plan has.
        """
        if self.key is None:
            self.key = self._value((), frozenset(), torch.int64, "constant", ())
        self.draws += 1
        return self.key, self.draws - 1

    def inline(self, graph: torch.fx.GraphModule, inputs: Sequence[Value]) -> Any:
        """Lower another graph at this place."""
        env: dict[torch.fx.Node, Any] = {}
        waiting, outer = list(inputs)[::-1], self.out
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                env[node] = waiting.pop()
            elif node.op == "get_attr":
                env[node] = self.constant(getattr(graph, node.target))
            elif node.op == "output":
                self.out = outer
                return pytree.tree_map(partial(self.read, env), node.args[0])
            else:
                args, kwargs = pytree.tree_map(partial(self.read, env), (node.args, dict(node.kwargs)))
                self.out = node.meta.get("val")
                env[node] = found = self.call(node.meta.get("twin", node.target), args, kwargs)
                if "twin" in node.meta:  # what is read of these from here on is what was written
                    env.update((old, found) for old in written(node))
        return None

    def pointwise(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operation gives that looks at one index of each argument for each of its results."""
        values, run = _of_tensors(target, args, kwargs)
        layout = self.common([value.layout for value in values])
        context = axes_of(layout)
        aligned = [self.aligned(value, layout, context) for value in values]
        outs = self.out if isinstance(self.out, (tuple, list)) else [self.out]
        several = self.out is outs
        found = self.locals(run if several else lambda *ts: (run(*ts),), aligned, outs, [layout for _ in outs])
        self.trained(found, self._differentiable(target, run, values))
        return found if several else found[0]

    def _differentiable(self, target: Any, run: Callable[..., Any], values: Sequence[Value]) -> list[bool]:
        """Tell which results of an operator have a gradient: of some, such as Bessel functions, PyTorch knows none."""
        key = target, *((value.dtype, value.kind == "constant") for value in values)
        if key not in self._gradients:
            ones = [torch.ones((1,) * len(value.shape), dtype=value.dtype) for value in values]
            for one, value in zip(ones, values, strict=True):
                one.requires_grad_(value.kind != "constant" and (one.is_floating_point() or one.is_complex()))
            with torch.enable_grad():  # clones, since it may write into its arguments
                found = run(*(one.clone() for one in ones))
            self._gradients[key] = [y.requires_grad for y in pytree.tree_leaves(found)]
        return self._gradients[key]

    def fake(self, value: Value) -> Any:
        """Return a tensor without memory, of a value's global shape."""
        with self._faking:
            return torch.empty(value.shape, dtype=value.dtype)


def _of_tensors(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Value], Callable[..., Any]]:
    """Return the values among an operator's arguments, and the operator as a function of their tensors alone."""
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Value)]
    if target is torch.ops.aten.view.default:  # what would do in one process: here memory may lie otherwise
        target = torch.ops.aten.reshape.default

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            filled[i] = tensor
        given, named = pytree.tree_unflatten(filled, spec)
        return target(*given, **named)

    values = [leaves[i] for i in at]
    if values == [arg for arg in args if isinstance(arg, Value)]:  # none in a list: no tree to build in each pass
        places = [i for i, arg in enumerate(args) if isinstance(arg, Value)]

        def run_flat(*tensors: torch.Tensor) -> Any:
            filled = list(args)
            for i, tensor in zip(places, tensors, strict=True):
                filled[i] = tensor
            return target(*filled, **kwargs)

        return values, run_flat
    return values, run


def _is_random(target: Any, bound: Mapping[str, Any]) -> bool:
    """Return whether an operator draws random numbers, given these arguments."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if any(bound.get(name) is False for name in ("train", "training")):
        return False
    return all(bound[name] != 0 for name in ("dropout", "dropout_p", "p") if name in bound)


def _bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, defaults included; the first tensor is `x`."""
    found = {}
    for at, argument in enumerate(target._schema.arguments):
        name = "x" if argument.name in ("self", "input") else argument.name
        if at < len(args):
            found[name] = args[at]
        elif argument.name in kwargs:
            found[name] = kwargs[argument.name]
        else:
            found[name] = argument.default_value if argument.has_default_value() else None
    return found
