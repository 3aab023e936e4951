"""Constant folding in a capture: values of tensors that depend on no input, parameter or random number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..ir.errors import CaptureError
from ..ir.functionalize import GRAD_MODE_REGION, storage_id, tensors_in, written_arguments

MAX_KNOWN_ELEMENTS = 2**18
"""Maximum number of elements of a tensor whose values are computed; code cannot read numbers from larger tensors."""
_VALUE_DEPENDENT_SHAPE_FUNCTIONS = frozenset(
    ["argwhere", "bincount", "masked_select", "nonzero", "one_hot", "repeat_interleave", "unique", "unique_consecutive"]
)
"""Functions whose result shapes depend on values."""
_TENSOR: Any = torch.Tensor
_MASKED_SELECT_FUNCTIONS = torch.masked_select, _TENSOR.masked_select
_SELECTION_FUNCTIONS = *_MASKED_SELECT_FUNCTIONS, torch.repeat_interleave, _TENSOR.repeat_interleave
_BATCH_NORM_FORWARD_CODES = nn.BatchNorm1d.forward.__code__, nn.SyncBatchNorm.forward.__code__
_METHODS_READING_MEMORY = (
    _TENSOR.numpy, _TENSOR.__array__, _TENSOR.__dlpack__, _TENSOR.__format__, _TENSOR.__repr__, _TENSOR.tolist,
)  # fmt: skip
"""Methods that read memory directly, without an operator that a dispatch mode could intercept."""
_REAL_TENSOR_TYPES = torch.Tensor, nn.Parameter
_INDEXING_METHODS = _TENSOR.__getitem__, _TENSOR.__setitem__
_METADATA_FUNCTIONS = frozenset(
    (*(getattr(_TENSOR, name) for name in (
        "_is_view", "dim", "is_conj", "is_inference", "is_neg", "numel", "size", "storage_offset", "stride",
        "untyped_storage")),
     *(getattr(_TENSOR, name).__get__ for name in (
        "_base", "device", "dtype", "grad", "is_leaf", "is_mkldnn", "is_nested", "is_quantized", "is_sparse", "layout",
        "ndim", "requires_grad", "shape")))
)  # fmt: skip
"""Functions that read no values; tracing calls them so often that they bypass the tracker."""


class ValueReads(NamedTuple):
    """Tensors from which a forward pass has read numbers; the captured program is valid only for the values read.

    Attributes
    ----------
    buffer_names : set of str
    tensors : list of torch.Tensor
        Other tensors, such as plain attributes and closure variables.
    """

    buffer_names: set[str]
    tensors: list[torch.Tensor]


class _KnownValue(NamedTuple):
    value: torch.Tensor
    buffer_names: set[str]
    tensors: dict[int, torch.Tensor]


class KnownValueTracker(TorchDispatchMode):
    """Mode that computes the values of fake tensors that depend on no input, parameter or random number.

    Attributes
    ----------
    reads : ValueReads
    unregistered_tensors : list of torch.Tensor
        Tensors that require gradients but are not parameters of the module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = ValueReads(set(), [])
        self.unregistered_tensors: list[torch.Tensor] = []
        self._known_values: Any = WeakIdKeyDictionary()
        self._views_outliving_capture: Any = WeakIdKeyDictionary()
        self._results: Any = WeakIdKeyDictionary()

    def record_buffers(self, values: Mapping[str, torch.Tensor], module: nn.Module, _: Any) -> None:
        """Record the values of a module's buffers, which are fake tensors while the module is traced."""
        for name, fake in module.named_buffers(remove_duplicate=False):
            value = values.get(name)
            if value is not None and value.numel() <= MAX_KNOWN_ELEMENTS and not value.is_meta:
                with no_dispatch():
                    self._known_values[fake] = _KnownValue(value.detach().clone(), {name}, {})

    def known_or_none(self, tensor: Any) -> Any:
        """Return the value of a tensor, or None if the value is unknown."""
        known = self._known_value(tensor)
        return None if known is None else known.value

    def read_and_record(self, tensor: Any) -> torch.Tensor | None:
        """Return the value of a tensor and record the read; None if the value is unknown."""
        known = None if tensor is None else self._known_value(tensor)
        if known is None:
            return None
        self.reads.buffer_names.update(known.buffer_names)
        self.reads.tensors.extend(t for t in known.tensors.values() if all(t is not u for u in self.reads.tensors))
        return known.value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lists = (arg if isinstance(arg, (list, tuple)) else [arg] for arg in (*args, *kwargs.values()))
        leaves = list(chain.from_iterable(lists))  # operators have no other nested arguments
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shape_only = depends_on_shape_only(func)
        is_literal = func is torch.ops.aten.lift_fresh.default
        known_values = [self._known_value(t, is_literal=is_literal, shape_only=shape_only) for t in tensors]
        self.unregistered_tensors.extend(t for t in tensors if type(t) in _REAL_TENSOR_TYPES and t.requires_grad)
        is_known = None not in known_values and torch.Tag.nondeterministic_seeded not in func.tags
        is_known = is_known and not any(isinstance(leaf, (torch.SymInt, torch.SymFloat)) for leaf in leaves)
        if is_known and torch.Tag.data_dependent_output in func.tags:
            for tensor in tensors:
                self.read_and_record(tensor)
            return _compute_values(func, args, kwargs, known_values)
        written_tensors = tensors_in(written_arguments(func, args, kwargs))
        if any(map(self._outlives_capture, written_tensors)):  # a captured pass would not repeat the write
            raise CaptureError(
                "the forward pass writes to a tensor that is not a buffer of the module, or to a buffer through another"
                " reference; register the tensor as a buffer, and write to this buffer under its registered name"
            )
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        if func.is_view and any(map(self._outlives_capture, tensors)):
            self._views_outliving_capture.update(dict.fromkeys(outputs))
        else:  # real tensors, too: torch.export itself computes the values of literals with one element
            self._results.update(dict.fromkeys(outputs))
        is_known = is_known and all(_is_small_enough_to_track(out) for out in outputs)
        values = _try_compute(func, args, kwargs, known_values) if is_known else None
        storages = [storage_id(tensor) for tensor in written_tensors]
        changed = [tensor for tensor in list(self._known_values) if storage_id(tensor) in storages] if storages else []
        if values is None:
            for tensor in changed:
                del self._known_values[tensor]
            return result
        buffer_names: set[str] = set()
        read_tensors: dict[int, torch.Tensor] = {}
        for argument in filter(None, known_values if not shape_only else ()):
            buffer_names |= argument.buffer_names
            read_tensors |= argument.tensors
        for tensor in changed:
            self._known_values[tensor].buffer_names.update(buffer_names)
            self._known_values[tensor].tensors.update(read_tensors)
        for out, value in zip(outputs, values, strict=True):
            if all(out is not tensor for tensor in tensors):
                self._known_values[out] = _KnownValue(value, set(buffer_names), dict(read_tensors))
        return result

    def _outlives_capture(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor outlives the capture and is neither a parameter nor a buffer."""
        is_real = type(tensor) in _REAL_TENSOR_TYPES and tensor not in self._results
        return is_real or tensor in self._views_outliving_capture

    def _known_value(self, tensor: Any, is_literal: bool = False, shape_only: bool = False) -> _KnownValue | None:
        """Return the known value of a tensor, or None.

        Parameters
        ----------
        is_literal : bool
            Whether a real tensor is a literal of the code.
        shape_only : bool
            Whether only the shape matters.
        """
        entry: _KnownValue | None = self._known_values.get(tensor)
        if entry is None and shape_only and _is_small_enough_to_track(tensor):
            with no_dispatch():
                return _KnownValue(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), set(), {})
        if entry is not None or type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.is_meta:
            return entry
        if tensor.numel() > MAX_KNOWN_ELEMENTS:
            return None
        with no_dispatch():
            entry = _KnownValue(tensor.clone(), set(), {} if is_literal else {id(tensor): tensor})
        self._known_values[tensor] = entry
        return entry


class _KnownValueProvider(TorchFunctionMode):
    """Mode that passes known values to functions that read memory, have value-dependent shapes, or index by masks.

    Attributes
    ----------
    batch_count : torch.Tensor or None
        Batch counter that PyTorch's batch norm has just read, for a cumulative average (momentum 1 / batch_count).
    """

    def __init__(self, tracker: KnownValueTracker) -> None:
        super().__init__()
        self._tracker = tracker
        self.batch_count: torch.Tensor | None = None
        self._batch_norm_depth = 0

    def change_batch_norm_depth(self, change: int, *_: Any) -> None:
        """Record that a forward of PyTorch's batch norm begins (1) or has ended (-1)."""
        self._batch_norm_depth += change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METHODS_READING_MEMORY and (value := self._tracker.read_and_record(args[0])) is not None:
            with torch._C.DisableTorchFunction(), no_dispatch():
                return func(value.clone(), *args[1:], **kwargs)
        batch_count, self.batch_count = self.batch_count, None
        momentum = None if batch_count is None else 1.0 / float(self._tracker.known_or_none(batch_count))
        if momentum is not None and func is F.batch_norm and kwargs.get("momentum") == momentum:
            return self._batch_norm_with_cumulative_average(batch_count, *args, **kwargs)
        self._tracker.read_and_record(batch_count)
        if func is _TENSOR.__float__ and self._batch_norm_depth and self._tracker.known_or_none(args[0]) is not None:
            self.batch_count = args[0]
            return float(self._tracker.known_or_none(self.batch_count))
        if func in _INDEXING_METHODS:
            args = (args[0], self._replace_masks(args[1]), *args[2:])
        if func in _METADATA_FUNCTIONS:
            return func(*args, **kwargs)
        with self._tracker:
            if getattr(func, "__name__", "") in _VALUE_DEPENDENT_SHAPE_FUNCTIONS:
                folded = self._fold_to_literals(func, args, kwargs)
                if folded is not None:
                    return folded
                if func is F.one_hot and (args[1:] or (kwargs.get("num_classes", -1),))[0] == -1:
                    raise CaptureError("the number of classes of one_hot depends on values; pass num_classes")
            return func(*args, **kwargs)

    def _fold_to_literals(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a function's results as literals, or a selection by a known mask or counts; None if unknown."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = {id(leaf): self._tracker.read_and_record(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if not values or None in values.values():
            return self._select_by_known_values(func, *args, **kwargs) if func in _SELECTION_FUNCTIONS else None
        args, kwargs = pytree.tree_unflatten([values.get(id(leaf), leaf) for leaf in leaves], spec)
        with torch._C.DisableTorchFunction(), no_dispatch():
            results = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, _as_literal, results)

    def _select_by_known_values(
        self, func: Any, x: Any, selector: Any = None, dim: int | None = None, **options: Any
    ) -> Any:
        """Return the elements of a tensor selected by a mask or repeat counts; None if these are unknown."""
        is_mask = func in _MASKED_SELECT_FUNCTIONS
        selector = options.get("mask" if is_mask else "repeats", selector)
        value = self._tracker.read_and_record(selector) if isinstance(selector, torch.Tensor) else None
        if value is None:
            return None
        with torch._C.DisableTorchFunction(), no_dispatch():
            if is_mask:
                shape = torch.broadcast_shapes(x.shape, value.shape)
                indices = value.expand(shape).flatten().nonzero()[:, 0]
            else:
                indices = torch.repeat_interleave(value.expand(x.numel() if dim is None else x.shape[dim]))
        x = x.expand(shape) if is_mask else x
        return (x.flatten() if dim is None else x).index_select(dim or 0, _as_literal(indices))

    def _batch_norm_with_cumulative_average(
        self, batch_count: Any, x: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        """Return the result of a batch norm whose running statistics are cumulative averages over the counted batches.

        If the averaging factor were a number, each pass would need a new program.
        """
        with self._tracker:
            statistics = torch.zeros_like(running_mean), torch.zeros_like(running_var)
            result = F.batch_norm(x, *statistics, weight, bias, training, 1.0, eps)
            for running, new in zip((running_mean, running_var), statistics, strict=True):
                averaging_factor = 1.0 / batch_count.to(running.dtype)
                running.mul_(1.0 - averaging_factor).add_(new * averaging_factor)
            return result

    def _replace_masks(self, index: Any) -> Any:
        """Return an index whose known boolean masks are replaced with integer indices."""
        items: list[Any] = []
        for item in index if isinstance(index, tuple) else (index,):
            is_mask = isinstance(item, torch.Tensor) and item.dtype == torch.bool
            value = self._tracker.read_and_record(item) if is_mask else None
            if value is None or not value.dim():
                items.append(item)
                continue
            with torch._C.DisableTorchFunction(), no_dispatch():
                indices = value.nonzero(as_tuple=True)
            with self._tracker:
                items.extend(map(_as_literal, indices))
        return tuple(items) if isinstance(index, tuple) or len(items) > 1 else items[0]


def depends_on_shape_only(func: Any) -> bool:
    """Return whether an operator depends only on the shape of its tensor argument, not on the values."""
    name = str(func)
    return "_like" in name or ".new_" in name


def _as_literal(value: torch.Tensor) -> torch.Tensor:
    with no_dispatch():
        items = value.tolist()
    return torch.tensor(items, dtype=value.dtype, device=value.device).reshape(value.shape)


def _is_small_enough_to_track(tensor: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in tensor.shape) and tensor.numel() <= MAX_KNOWN_ELEMENTS


def _compute_values(func: Any, args: Any, kwargs: Any, known_values: Sequence[Any]) -> Any:
    values = iter(known_values)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(values).value, (args, kwargs))
    # without DisableTorchFunction, torch.export would record torch.no_grad and decompose the whole program
    with torch._C.DisableTorchFunction(), torch.no_grad(), no_dispatch():
        return func(*args, **kwargs)


def _try_compute(func: Any, args: Any, kwargs: Any, known_values: Sequence[Any]) -> list[torch.Tensor] | None:
    try:
        return tensors_in(_compute_values(func, args, kwargs, known_values))
    except Exception:  # for example, an operator that accepts only fake tensors
        return None


@contextmanager
def track_known_values(module: nn.Module) -> Iterator[KnownValueTracker]:
    """Let a captured forward pass read numbers from tensors with known values; yield the tracker of the reads."""
    tracker = KnownValueTracker()
    buffers = dict(module.named_buffers(remove_duplicate=False))

    provider = _KnownValueProvider(tracker)
    with ExitStack() as hooks:
        for part in module.modules():
            if getattr(type(part).forward, "__code__", None) in _BATCH_NORM_FORWARD_CODES:
                hooks.enter_context(part.register_forward_pre_hook(partial(provider.change_batch_norm_depth, 1)))
                decrease_depth = partial(provider.change_batch_norm_depth, -1)
                hooks.enter_context(part.register_forward_hook(decrease_depth, always_call=True))
        hooks.enter_context(module.register_forward_pre_hook(partial(tracker.record_buffers, buffers)))
        hooks.enter_context(provider)
        yield tracker
        tracker.read_and_record(provider.batch_count)


def remove_number_reads(program: Any) -> None:
    """Remove operators that returned numbers, now constants of the program, and no-grad regions left empty."""
    for module in reversed(list(program.graph_module.modules())):  # regions before their callers
        graph: Any = getattr(module, "graph", None)
        for node in reversed(graph.nodes if graph is not None else ()):
            if not node.users and (_returns_only_numbers(node.target) or _is_empty_subgraph(module, node)):
                graph.erase_node(node)


def _is_empty_subgraph(module: nn.Module, node: Any) -> bool:
    """Return whether a node is, or calls, a region without operators."""
    name = node.target if node.op == "get_attr" else node.args[1].target if node.target is GRAD_MODE_REGION else ""
    graph: Any = getattr(getattr(module, name, None), "graph", None)
    return graph is not None and all(inner.op in ("placeholder", "get_attr", "output") for inner in graph.nodes)


def _returns_only_numbers(target: Any) -> bool:
    results = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return bool(results) and all(str(value.type) in ("number", "int", "float", "bool", "Scalar") for value in results)
