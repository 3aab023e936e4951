"""Gradients that torch.export does not record: custom autograd.Functions, hooks, and gradients computed in forward.

torch.export records the forward of a Function and drops its backward. Therefore, Functions are replaced with custom
operators that run the user's code; other code whose gradients would be dropped is rejected.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.function import Function, FunctionMeta
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from .errors import CaptureError, definition_site
from .functionalize import tensors_in
from .registry import CAPTURE_REPLACEMENTS, POINTWISE_OPS, TRACING_LOCK

FUNCTION_OPERATOR = "neondist.function.default"
"""Name of the operator in captured graphs; its signature is (tensors, call_index) -> tensors."""
_RECORDED_CALLS: ContextVar[list[AutogradFunctionCall] | None] = ContextVar("_RECORDED_CALLS", default=None)
"""Calls recorded so far while this thread captures a module; None: it captures none."""


class _TensorPlaceholder:
    def __init__(self, _: torch.Tensor) -> None: ...


def _fill_placeholders(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    remaining_tensors = iter(tensors)
    return pytree.tree_map_only(_TensorPlaceholder, lambda _: next(remaining_tensors), tree)


class AutogradFunctionCall:
    """A call of an autograd.Function, as a function of the tensors among its arguments."""

    def __init__(self, cls: Any, args: Sequence[Any]) -> None:
        self._cls = cls
        self._args = pytree.tree_map_only(torch.Tensor, _TensorPlaceholder, tuple(args))
        self._outputs: Any = None

    @property
    def name(self) -> str:
        """Description of the class: its name, with the file and line of its forward if known."""
        source = definition_site(self._cls.forward)
        return f"autograd.Function {self._cls.__qualname__}" + (f" ({source})" if source else "")

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors among the results; their gradients are those of the Function's own backward."""
        with suspend_recording():
            results = _declared_method(Function, "apply", self._cls)(*_fill_placeholders(self._args, tensors))
        if self._outputs is None:
            self._outputs = pytree.tree_map_only(torch.Tensor, _TensorPlaceholder, results)
        return tensors_in(results)

    def unflatten_outputs(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the results in their original structure, given their tensors."""
        return _fill_placeholders(self._outputs, tensors)

    def gradients_if_pointwise(self, tensors: Sequence[torch.Tensor], tiled_dims: Sequence[int]) -> list[bool] | None:
        """Return which results have a gradient, if forward and backward are pointwise; else None.

        Forward and backward are traced twice, once for larger extents, to detect dependence on a tile's shape.

        Parameters
        ----------
        tensors : fake tensors of the global shape
        tiled_dims : tiled dimensions, counted from the last (-1)
        """
        traces = [_trace_grads(self, tensors), _trace_grads(self, [_enlarge(tensor, tiled_dims) for tensor in tensors])]
        if None in traces:
            return None
        (graph, has_gradient), (larger_graph, _) = (traced for traced in traces if traced is not None)
        is_pointwise = graph.code == larger_graph.code and all(map(_is_pointwise_graph, (graph, larger_graph)))
        return has_gradient if is_pointwise else None


def _enlarge(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    shape = list(tensor.shape)
    for dim in dims:
        if -dim <= len(shape) and shape[dim] > 1:
            shape[dim] += 1
    return tensor.new_empty(shape)


def _trace_grads(
    call: AutogradFunctionCall, tensors: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, list[bool]] | None:
    """Return forward and backward as a graph, and which results have a gradient; None if tracing fails."""
    has_gradient: list[bool] = []

    def forward_and_backward(*tensors: torch.Tensor) -> Any:
        with torch.enable_grad():
            xs = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
            ys = call(*xs)
            has_gradient[:] = [y.requires_grad for y in ys]
            outs = [y for y in ys if y.requires_grad]
            ins = [x for x in xs if x.requires_grad]
            dxs = torch.autograd.grad(outs, ins, [y.detach().sin() for y in outs], allow_unused=True) if outs else ()
        return ys, dxs

    try:
        with TRACING_LOCK:
            graph = make_fx(forward_and_backward, tracing_mode="fake")(*tensors)
    except Exception:  # for example, the code reads values
        return None
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, has_gradient


def _is_pointwise_graph(graph: torch.fx.GraphModule) -> bool:
    """Return whether each computed element depends on only one index of each tensor."""
    shapes = set[tuple[int, ...]]()
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            tags, name = node.target.tags, str(node.target)
            if torch.Tag.nondeterministic_seeded in tags:
                return False
            if torch.Tag.pointwise not in tags and name not in POINTWISE_OPS | _POINTWISE_IF_SAME_SHAPE:
                return False
        value = getattr(graph, node.target) if node.op == "get_attr" else node.meta.get("val")
        shapes.update(tuple(tensor.shape) for tensor in tensors_in(value) if tensor.numel() != 1)
    return len(shapes) < 2


_POINTWISE_IF_SAME_SHAPE = {
    "aten.detach.default", "aten.view.default", "aten.expand.default", "aten.ones_like.default",
    "aten.zeros_like.default", "aten.full_like.default", "aten.scalar_tensor.default", "aten.view_as.default",
}  # fmt: skip
"""Operators that are pointwise if all of their tensors have the same shape, or one element."""


class _UnrecordedFunctionGuard(TorchFunctionMode):
    """Mode that rejects or replaces operations of a forward pass that torch.export does not record."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _TENSOR_DATA.__get__ and isinstance(args[0], FakeTensor):  # PyTorch reads real tensors' data
            return args[0].detach()
        if func == _TENSOR_DATA.__set__:
            return _assign_data(*args)
        if func in _UNRECORDED_FUNCTION_NAMES:
            _reject_unrecorded(func)
        return CAPTURE_REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _reject_unrecorded(func: Any) -> None:
    raise CaptureError(f"{_UNRECORDED_FUNCTION_NAMES[func]} in a forward pass is not recorded; {_REMEDIES[func]}")


def _assign_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Assign Tensor.data; for a fake tensor, copy the value into it instead, since copies are recorded."""
    if not isinstance(tensor, FakeTensor):  # only PyTorch itself assigns the data of real tensors
        _TENSOR_DATA.__set__(tensor, value)
    elif (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
        raise CaptureError("assigning Tensor.data in a forward pass is not recorded if shape, dtype or device change")
    else:
        tensor.detach().copy_(value.detach(), *DATA_ASSIGNMENT_FLAGS)


DATA_ASSIGNMENT_FLAGS = (True,)
"""Extra arguments of the copies that are recorded for assignments of Tensor.data; other copies lack them."""
_TENSOR_DATA: Any = torch.Tensor.data
_enter_dual_level: Any = forward_ad.enter_dual_level
_pack_padded_sequence: Any = torch._C._VariableFunctions._pack_padded_sequence
_UNRECORDED_FUNCTION_NAMES: dict[Any, str] = {
    torch.Tensor.register_hook: "Tensor.register_hook",
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
    torch.Tensor.backward: "Tensor.backward",
    _enter_dual_level: "forward-mode differentiation (torch.func.jvp, jacfwd, hessian, linearize)",
    _pack_padded_sequence: "pack_padded_sequence",
}
_convert_module: Any = torch.nn.Module._apply
_REMEDIES = dict.fromkeys(_UNRECORDED_FUNCTION_NAMES, "compute the derivative with ordinary operators instead") | {
    torch.Tensor.register_hook: "use a torch.autograd.Function instead",
    _pack_padded_sequence: "pass padded sequences to the recurrent layer, and mask its results with torch.where",
}


def _reject_dual_level() -> int:
    """Reject forward-mode differentiation in the thread that captures a module."""
    if _RECORDED_CALLS.get() is not None:
        _reject_unrecorded(_enter_dual_level)
    return _enter_dual_level()


def _reject_conversion(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], *args: Any) -> Any:
    """Reject conversions of modules, such as half(), in the thread that captures a module, unless nothing changes."""
    if _RECORDED_CALLS.get() is None:
        return _convert_module(module, function, *args)
    for tensor in (*module.parameters(), *module.buffers()):
        with torch._C._DisableTorchDispatch():
            example = torch.empty((), dtype=tensor.dtype, device=tensor.device)
            is_converted = function(example) is not example
        if is_converted:
            raise CaptureError(
                f"converting a {type(module).__name__} in a forward pass, such as by half() or to(), is not recorded;"
                " create and convert modules before the forward pass"
            )
    return module


@contextmanager
def record_autograd_functions() -> Iterator[list[AutogradFunctionCall]]:
    """Record, as operators, the autograd.Functions that this thread applies, except PyTorch's own."""
    calls: list[AutogradFunctionCall] = []
    token = _RECORDED_CALLS.set(calls)
    # patch the metaclass: modules may hold a reference to MyFunction.apply, and PyTorch's apply, compiled since 2.14,
    # reads these methods from the class in every call
    for name, read in _PATCHED_METHODS.items():
        setattr(FunctionMeta, name, property(read))
    torch.nn.Module._apply = _reject_conversion  # type: ignore[method-assign]
    forward_ad.enter_dual_level = _reject_dual_level  # torch function modes do not see it
    try:
        with _UnrecordedFunctionGuard():
            yield calls
    finally:
        for name in _PATCHED_METHODS:
            delattr(FunctionMeta, name)
        torch.nn.Module._apply = _convert_module  # type: ignore[method-assign]
        forward_ad.enter_dual_level = _enter_dual_level
        _RECORDED_CALLS.reset(token)


@contextmanager
def suspend_recording() -> Iterator[None]:
    """Apply autograd.Functions themselves in this thread, instead of recording them as operators."""
    token = _RECORDED_CALLS.set(None)
    try:
        yield
    finally:
        _RECORDED_CALLS.reset(token)


def _declared_method(cls: Any, name: str, owner: Any = None) -> Any:
    """Return a method as declared by a class or its bases, bound to `owner` (default: the class)."""
    return inspect.getattr_static(cls, name).__get__(None, owner or cls)


def _becomes_operator(cls: Any) -> bool:
    """Return whether this thread replaces calls of a Function in a capture: users' Functions and checkpoints."""
    is_user = not (_declared_method(cls, "forward").__module__ or "").startswith("torch.")
    return _RECORDED_CALLS.get() is not None and (is_user or cls is CheckpointFunction)


def _forward_or_operator_call(cls: Any) -> Any:
    """Return a Function's forward or, while a module is captured, a function that calls the operator instead."""
    forward = _declared_method(cls, "forward")
    if not _becomes_operator(cls):
        return forward
    takes_context = _declared_method(cls, "setup_context") is _declared_method(Function, "setup_context")

    @functools.wraps(forward)  # PyTorch reads defaults of arguments from the signature
    def record_call(*args: Any) -> Any:
        return _apply_as_operator(cls, args[takes_context:])

    return record_call


def _setup_context_or_no_op(cls: Any) -> Any:
    """Return a Function's setup_context or, while a module is captured, a function that does nothing."""
    setup_context = _declared_method(cls, "setup_context")
    is_overridden = setup_context is not _declared_method(Function, "setup_context")
    return (lambda ctx, inputs, output: None) if is_overridden and _becomes_operator(cls) else setup_context


_PATCHED_METHODS = {"forward": _forward_or_operator_call, "setup_context": _setup_context_or_no_op}


def _apply_as_operator(cls: Any, args: Sequence[Any]) -> Any:
    """Record a call of a Function as an operator and return its results; for checkpoints, run the function itself."""
    if cls is CheckpointFunction:
        run, _, *call_args = args
        return run(*call_args)
    calls = _RECORDED_CALLS.get()
    assert calls is not None
    call = AutogradFunctionCall(cls, args)
    calls.append(call)
    return call.unflatten_outputs(torch.ops.neondist.function(tensors_in(args), len(calls) - 1))


torch.library.define("neondist::function", "(Tensor[] tensors, int call_index) -> Tensor[]")


@torch.library.register_fake("neondist::function")
def _fake_results(tensors: list[torch.Tensor], call_index: int) -> list[torch.Tensor]:
    calls = _RECORDED_CALLS.get()
    assert calls is not None, "the operator runs only while a module is captured"
    versions_before = [tensor._version for tensor in tensors]
    results = calls[call_index](*tensors)
    if [tensor._version for tensor in tensors] != versions_before:
        raise RuntimeError(f"{calls[call_index].name} modifies its arguments in place; return new tensors instead")
    return [tensor.clone() for tensor in results]
