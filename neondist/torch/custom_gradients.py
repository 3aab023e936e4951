"""Gradients that torch.export does not record: a user's autograd.Functions, hooks, gradients taken in a forward.

It records what the forward of a Function computes, and forgets its backward. So Functions become operators here, which
run as the user wrote them; what else would be forgotten is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, FunctionMeta
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from .errors import NotRecorded, defined_at
from .registry import CAPTURED_AS, POINTWISE, TRACING

OPERATOR = "neondist.function.default"
"""By this name a captured graph has them: (tensors, number) -> tensors."""
_RECORDED: ContextVar[list[UserFunction] | None] = ContextVar("_RECORDED", default=None)
"""Those of the module that this thread is capturing."""


class UserFunction:
    """One call of an autograd.Function, as a function of the tensors among its arguments.

    Attributes
    ----------
    name : str
        The class, and the file and line where it is defined.
    """

    def __init__(self, cls: Any, args: Sequence[Any]) -> None:
        self._cls = cls
        leaves, self._spec = pytree.tree_flatten(tuple(args))
        self._at = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._outputs: tuple[list[Any], Any] | None = None

    @property
    def name(self) -> str:
        """The class, and where it is defined."""
        source = defined_at(self._cls.forward)
        return f"autograd.Function {self._cls.__qualname__}" + (f" ({source})" if source else "")

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors among what it gives, with its own gradients."""
        leaves = list(self._leaves)
        for at, tensor in zip(self._at, tensors, strict=True):
            leaves[at] = tensor
        args = pytree.tree_unflatten(leaves, self._spec)
        token = _RECORDED.set(None)
        try:
            found, spec = pytree.tree_flatten(_declared(Function, "apply", self._cls)(*args))
        finally:
            _RECORDED.reset(token)
        if self._outputs is None:
            self._outputs = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in found], spec
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

    def outputs(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what it gives, as its caller wants it, made of these tensors."""
        assert self._outputs is not None
        leaves, spec = self._outputs
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if leaf is None else leaf for leaf in leaves], spec)

    def pointwise(self, tensors: Sequence[torch.Tensor], longer: Sequence[int]) -> list[bool] | None:
        """Return which results have a gradient, if forward and backward look at one index each; else None.

        Both are recorded, twice, the second time for other extents: what depends on a tile's shape shows.

        Parameters
        ----------
        tensors : fake tensors of the global shape
        longer : the dimensions, counted from the last (-1), that are cut
        """
        found = [_traced(self, tensors), _traced(self, [_grown(tensor, longer) for tensor in tensors])]
        if None in found:
            return None
        (graph, trained), (other, _) = (one for one in found if one is not None)
        same = graph.code == other.code and all(map(_looks_at_one_index, (graph, other)))
        return trained if same else None


def _grown(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    shape = list(tensor.shape)
    for dim in dims:
        if -dim <= len(shape) and shape[dim] > 1:
            shape[dim] += 1
    return tensor.new_empty(shape)


def _traced(function: UserFunction, tensors: Sequence[torch.Tensor]) -> tuple[torch.fx.GraphModule, list[bool]] | None:
    """Return forward and backward as a graph, and which results have a gradient; None if they cannot be recorded."""
    trained: list[bool] = []

    def both(*tensors: torch.Tensor) -> Any:
        with torch.enable_grad():
            xs = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
            ys = function(*xs)
            trained[:] = [y.requires_grad for y in ys]
            ends = [y for y in ys if y.requires_grad]
            starts = [x for x in xs if x.requires_grad]
            dxs = torch.autograd.grad(ends, starts, [y.detach().sin() for y in ends], allow_unused=True) if ends else ()
        return ys, dxs

    try:
        with TRACING:
            graph = make_fx(both, tracing_mode="fake")(*tensors)
    except Exception:  # such as one that asks for values
        return None
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, trained


def _looks_at_one_index(graph: torch.fx.GraphModule) -> bool:
    """Return whether each number of all that is computed depends on one index of each tensor."""
    shapes = set()
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            tags, name = node.target.tags, str(node.target)
            if torch.Tag.nondeterministic_seeded in tags:
                return False
            if torch.Tag.pointwise not in tags and name not in POINTWISE | _SHAPED_ALIKE:
                return False
        value = getattr(graph, node.target) if node.op == "get_attr" else node.meta.get("val")
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.numel() != 1:
                shapes.add(tuple(tensor.shape))
    return len(shapes) < 2


_SHAPED_ALIKE = {
    "aten.detach.default", "aten.view.default", "aten.expand.default", "aten.ones_like.default",
    "aten.zeros_like.default", "aten.full_like.default", "aten.scalar_tensor.default", "aten.view_as.default",
}  # fmt: skip
"""Operators that look at one index if all of their tensors have the same shape, or one element."""


class _Refusing(TorchFunctionMode):
    """Refuses what a forward does that is not recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = func not in _OF_TENSORS or isinstance(args[0], FakeTensor)  # PyTorch asks for data of others
        if func in _NOT_RECORDED and ours:
            raise NotRecorded(f"{_NOT_RECORDED[func]} in a forward is not recorded{_INSTEAD.get(func, '')}")
        return CAPTURED_AS.get(func, func)(*args, **(kwargs or {}))


_DATA: Any = torch.Tensor.data
_NOT_RECORDED: dict[Any, str] = {
    _DATA.__get__: "Tensor.data",
    _DATA.__set__: "Tensor.data",
    torch.Tensor.register_hook: "Tensor.register_hook",
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
    torch.Tensor.backward: "Tensor.backward",
}
_OF_TENSORS = (_DATA.__get__, _DATA.__set__)
_INSTEAD = {_DATA.__get__: "; say .detach() instead"}


@contextmanager
def recorded() -> Iterator[list[UserFunction]]:
    """Give the autograd.Functions that this thread applies, which become operators; what PyTorch applies does not."""
    calls: list[UserFunction] = []
    token = _RECORDED.set(calls)
    # of the metaclass: modules may have kept MyFunction.apply by a name of their own, and PyTorch's apply, which is
    # compiled since 2.14, reads these from the class in every call
    for name, read in _READ.items():
        setattr(FunctionMeta, name, property(read))
    try:
        with _Refusing():
            yield calls
    finally:
        for name in _READ:
            delattr(FunctionMeta, name)
        _RECORDED.reset(token)


def _declared(cls: Any, name: str, owner: Any = None) -> Any:
    """Return a method as a class, or one that it inherits from, declares it; bound to `owner`, default the class."""
    return inspect.getattr_static(cls, name).__get__(None, owner or cls)


def _is_recorded(cls: Any) -> bool:
    """Return whether a Function that this thread applies becomes an operator; PyTorch's do not."""
    ours = not (_declared(cls, "forward").__module__ or "").startswith("torch.")
    return _RECORDED.get() is not None and (ours or cls is CheckpointFunction)


def _forward(cls: Any) -> Any:
    """Return a Function's forward; while a module is captured, one that calls the operator instead."""
    forward = _declared(cls, "forward")
    if not _is_recorded(cls):
        return forward
    has_context = _declared(cls, "setup_context") is _declared(Function, "setup_context")

    @functools.wraps(forward)  # its signature tells the defaults
    def recording(*args: Any) -> Any:
        return _applied(cls, args[has_context:])

    return recording


def _setup_context(cls: Any) -> Any:
    """Return a Function's setup_context; while a module is captured, one that does nothing."""
    declared = _declared(cls, "setup_context")
    is_own = declared is not _declared(Function, "setup_context")
    return (lambda ctx, inputs, output: None) if is_own and _is_recorded(cls) else declared


_READ = {"forward": _forward, "setup_context": _setup_context}


def _applied(cls: Any, args: Sequence[Any]) -> Any:
    """Return what the operator of a Function gives."""
    if cls is CheckpointFunction:
        run, _, *given = args
        return run(*given)
    calls = _RECORDED.get()
    assert calls is not None
    call = UserFunction(cls, args)
    calls.append(call)
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return call.outputs(torch.ops.neondist.function(tensors, len(calls) - 1))


torch.library.define("neondist::function", "(Tensor[] tensors, int number) -> Tensor[]")


@torch.library.register_fake("neondist::function")
def _fake(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    calls = _RECORDED.get()
    assert calls is not None, "the operator runs only while a module is captured"
    before = [tensor._version for tensor in tensors]
    found = calls[number](*tensors)
    if [tensor._version for tensor in tensors] != before:
        raise RuntimeError(f"{calls[number].name} modifies its arguments in place; let it return new tensors")
    return [tensor.clone() for tensor in found]
