"""Tensors with known values in a capture: they follow from shapes, literals, and buffers alone; code may read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from .errors import NotRecorded
from .functionalize import REGION, memory_of, written_arguments

LARGEST = 2**18
"""Elements of a tensor whose values are computed; no code reads numbers one by one from larger ones."""
_FOLDED = frozenset(
    ["argwhere", "bincount", "masked_select", "nonzero", "one_hot", "repeat_interleave", "unique", "unique_consecutive"]
)
"""Functions with results whose shapes depend on values."""
_TENSOR: Any = torch.Tensor
_MASKED = torch.masked_select, _TENSOR.masked_select
_CHOOSING = *_MASKED, torch.repeat_interleave, _TENSOR.repeat_interleave
_BATCH_NORMS = nn.BatchNorm1d.forward.__code__, nn.SyncBatchNorm.forward.__code__
_OF_VALUES = (
    _TENSOR.numpy, _TENSOR.__array__, _TENSOR.__dlpack__, _TENSOR.__format__, _TENSOR.__repr__, _TENSOR.tolist,
)  # fmt: skip
"""Functions that no dispatch mode sees: those read the memory."""
_REAL = torch.Tensor, nn.Parameter
_INDEXED = _TENSOR.__getitem__, _TENSOR.__setitem__
_OF_NO_VALUES = frozenset(
    getattr(_TENSOR, name).__get__ for name in ("device", "dtype", "is_leaf", "layout", "requires_grad")
) | {_TENSOR._is_view, _TENSOR.is_inference, _TENSOR.storage_offset, _TENSOR.stride, _TENSOR.untyped_storage}
"""PyTorch asks for these by far the most while it traces."""


class Reads(NamedTuple):
    """The tensors from which a forward has read numbers: what was captured holds for these values alone.

    Attributes
    ----------
    buffers : set of str
    others : list of torch.Tensor
        Such as plain attributes and what closures refer to.
    """

    buffers: set[str]
    others: list[torch.Tensor]


class _Known(NamedTuple):
    value: torch.Tensor
    sources: set[str]
    others: dict[int, torch.Tensor]


class KnownValues(TorchDispatchMode):
    """Compute, beside fake tensors, the values of those that no input, parameter or random number reaches.

    Attributes
    ----------
    reads : Reads
    trained : list of torch.Tensor
        Those with gradients that are no parameters of the module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads(set(), [])
        self.trained: list[torch.Tensor] = []
        self._known: Any = WeakIdKeyDictionary()
        self._outside: Any = WeakIdKeyDictionary()  # views of real tensors

    def note(self, fakes: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Take note of the buffers: fake tensors, and their values."""
        for name, fake in fakes.items():
            value = values.get(name)
            if value is not None and value.numel() <= LARGEST and not value.is_meta:
                with no_dispatch():
                    self._known[fake] = _Known(value.detach().clone(), {name}, {})

    def peek(self, tensor: Any) -> Any:
        """Return the value of a tensor; None: it is not known."""
        known = self._of(tensor)
        return None if known is None else known.value

    def read(self, tensor: Any) -> torch.Tensor | None:
        """Return the value of a tensor, and take note that it was read; None: it is not known."""
        known = None if tensor is None else self._of(tensor)
        if known is None:
            return None
        self.reads.buffers.update(known.sources)
        self.reads.others.extend(t for t in known.others.values() if all(t is not other for other in self.reads.others))
        return known.value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shapes_alone = is_shape_only(func)
        known = [self._of(t, literal=func is torch.ops.aten.lift_fresh.default, blank=shapes_alone) for t in tensors]
        self.trained.extend(t for t in tensors if type(t) in _REAL and t.requires_grad)
        is_known = None not in known and torch.Tag.nondeterministic_seeded not in func.tags
        is_known = is_known and not any(isinstance(leaf, (torch.SymInt, torch.SymFloat)) for leaf in leaves)
        if is_known and torch.Tag.data_dependent_output in func.tags:
            for tensor in tensors:
                self.read(tensor)
            return _computed(func, leaves, spec, known)
        writes = [w for w in pytree.tree_leaves(written_arguments(func, args, kwargs)) if isinstance(w, torch.Tensor)]
        if any(map(self._is_outside, writes)):  # before it does: a pass would not
            raise NotRecorded(
                "the forward writes into a tensor that is not a buffer of the module, or reaches a buffer by another"
                " name; register it as a buffer, and write into that"
            )
        found = func(*args, **kwargs)
        outs = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        if func.is_view and any(map(self._is_outside, tensors)):
            self._outside.update(dict.fromkeys(outs))
        is_known = is_known and all(_is_small(out) for out in outs)
        values = _attempt(func, leaves, spec, known) if is_known else None
        memories = [memory_of(tensor) for tensor in writes]
        touched = [each for each in list(self._known) if memory_of(each) in memories] if memories else []
        if values is None:
            for tensor in touched:
                del self._known[tensor]
            return found
        sources: set[str] = set()
        others: dict[int, torch.Tensor] = {}
        for each in filter(None, known if not shapes_alone else ()):
            sources |= each.sources
            others |= each.others
        for tensor in touched:
            self._known[tensor].sources.update(sources)
            self._known[tensor].others.update(others)
        for out, value in zip(outs, values, strict=True):
            if all(out is not tensor for tensor in tensors):
                self._known[out] = _Known(value, set(sources), dict(others))
        return found

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor outlives the capture, and is neither a parameter nor a buffer."""
        return type(tensor) in _REAL or tensor in self._outside

    def _of(self, tensor: Any, literal: bool = False, blank: bool = False) -> _Known | None:
        """Return what is known of a tensor.

        Parameters
        ----------
        literal : bool
            Whether a real tensor is a literal of the code.
        blank : bool
            Whether the shape alone matters.
        """
        known: _Known | None = self._known.get(tensor)
        if known is None and blank and _is_small(tensor):
            with no_dispatch():
                return _Known(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), set(), {})
        if known is not None or type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.is_meta:
            return known
        if tensor.numel() > LARGEST:
            return None
        with no_dispatch():
            found = _Known(tensor.clone(), set(), {} if literal else {id(tensor): tensor})
        self._known[tensor] = found
        return found


class _Calls(TorchFunctionMode):
    """Know values in all calls of PyTorch's functions, arrays of them, and the shapes that depend on them.

    Attributes
    ----------
    count : torch.Tensor or None
        The number of batches that PyTorch's batch norm has just read, for a share of 1 / count in running statistics.
    """

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values
        self.count: torch.Tensor | None = None
        self._depth = 0

    def enter(self, *_: Any) -> None:
        """Take note that PyTorch's own batch norm begins."""
        self._depth += 1

    def leave(self, *_: Any) -> None:
        """Take note that it has ended."""
        self._depth -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_VALUES and (value := self._values.read(args[0])) is not None:
            with torch._C.DisableTorchFunction(), no_dispatch():
                return func(value.clone(), *args[1:], **kwargs)
        count, self.count = self.count, None
        share = None if count is None else 1.0 / float(self._values.peek(count))
        if share is not None and func is F.batch_norm and kwargs.get("momentum") == share:
            return self._averaged(count, *args, **kwargs)
        self._values.read(count)
        if func is _TENSOR.__float__ and self._depth and self._values.peek(args[0]) is not None:
            self.count = args[0]
            return float(self._values.peek(self.count))
        if func in _INDEXED:
            args = (args[0], self._index(args[1]), *args[2:])
        if func in _OF_NO_VALUES:
            return func(*args, **kwargs)
        with self._values:
            if getattr(func, "__name__", "") in _FOLDED:
                found = self._folded(func, args, kwargs)
                if found is not None:
                    return found
            return func(*args, **kwargs)

    def _folded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of a function of known values as literals; None: they are not known."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = {id(leaf): self._values.read(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if not values or None in values.values():
            return self._chosen(func, *args, **kwargs) if func in _CHOOSING else None
        args, kwargs = pytree.tree_unflatten([values.get(id(leaf), leaf) for leaf in leaves], spec)
        with torch._C.DisableTorchFunction(), no_dispatch():
            found = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, _literal, found)

    def _chosen(self, func: Any, x: Any, where: Any = None, dim: int | None = None, **more: Any) -> Any:
        """Return the elements of a tensor that known repeats or a known mask choose; None: these are not known."""
        masks = func in _MASKED
        where = more.get("mask" if masks else "repeats", where)
        value = self._values.read(where) if isinstance(where, torch.Tensor) else None
        if value is None:
            return None
        with torch._C.DisableTorchFunction(), no_dispatch():
            if masks:
                shape = torch.broadcast_shapes(x.shape, value.shape)
                places = value.expand(shape).flatten().nonzero()[:, 0]
            else:
                places = torch.repeat_interleave(value.expand(x.numel() if dim is None else x.shape[dim]))
        x = x.expand(shape) if masks else x
        return (x.flatten() if dim is None else x).index_select(dim or 0, _literal(places))

    def _averaged(
        self, count: Any, x: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        """Return the result of a batch norm whose running statistics are means over all batches, counted by a tensor.

        As numbers that the program holds, shares would need another program in each pass.
        """
        with self._values:
            statistics = torch.zeros_like(running_mean), torch.zeros_like(running_var)
            found = F.batch_norm(x, *statistics, weight, bias, training, 1.0, eps)
            for running, new in zip((running_mean, running_var), statistics, strict=True):
                share = 1.0 / count.to(running.dtype)
                running.mul_(1.0 - share).add_(new * share)
            return found

    def _index(self, index: Any) -> Any:
        """Return an index with the places of known masks in their stead."""
        found: list[Any] = []
        for each in index if isinstance(index, tuple) else (index,):
            value = self._values.read(each) if isinstance(each, torch.Tensor) and each.dtype == torch.bool else None
            if value is None or not value.dim():
                found.append(each)
                continue
            with torch._C.DisableTorchFunction(), no_dispatch():
                places = value.nonzero(as_tuple=True)
            with self._values:
                found.extend(map(_literal, places))
        return tuple(found) if isinstance(index, tuple) or len(found) > 1 else found[0]


def is_shape_only(func: Any) -> bool:
    """Return whether an operator looks at the shape of its tensor, and not at its values."""
    name = str(func)
    return "_like" in name or ".new_" in name


def _literal(value: torch.Tensor) -> torch.Tensor:
    with no_dispatch():
        numbers = value.tolist()
    return torch.tensor(numbers, dtype=value.dtype, device=value.device).reshape(value.shape)


def _is_small(tensor: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in tensor.shape) and tensor.numel() <= LARGEST


def _computed(func: Any, leaves: Sequence[Any], spec: Any, known: Sequence[Any]) -> Any:
    values = iter(known)
    filled = [next(values).value if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(filled, spec)
    # torch.export would record torch.no_grad, and decompose the whole program for its sake
    with torch._C.DisableTorchFunction(), torch.no_grad(), no_dispatch():
        return func(*args, **kwargs)


def _attempt(func: Any, leaves: Sequence[Any], spec: Any, known: Sequence[Any]) -> list[torch.Tensor] | None:
    try:
        found = _computed(func, leaves, spec, known)
    except Exception:  # such as an operator for fake tensors alone
        return None
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


@contextmanager
def known_values(module: nn.Module) -> Iterator[KnownValues]:
    """Let a forward that is captured read numbers from tensors with known values; give what it has read."""
    values = KnownValues()
    real = dict(module.named_buffers(remove_duplicate=False))

    def begin(module: nn.Module, _: Any) -> None:
        values.note(dict(module.named_buffers(remove_duplicate=False)), real)

    calls = _Calls(values)
    with ExitStack() as hooks:
        for part in module.modules():
            if getattr(type(part).forward, "__code__", None) in _BATCH_NORMS:
                hooks.enter_context(part.register_forward_pre_hook(calls.enter))
                hooks.enter_context(part.register_forward_hook(calls.leave, always_call=True))
        hooks.enter_context(module.register_forward_pre_hook(begin))
        hooks.enter_context(calls)
        yield values
        values.read(calls.count)


def remove_reads(program: Any) -> None:
    """Remove what gave numbers: these stand in the program now; and regions without gradients that did nothing else."""
    for module in reversed(list(program.graph_module.modules())):  # regions before what calls them
        graph: Any = getattr(module, "graph", None)
        for node in reversed(graph.nodes if graph is not None else ()):
            if not node.users and (_gives_numbers(node.target) or _does_nothing(module, node)):
                graph.erase_node(node)


def _does_nothing(module: nn.Module, node: Any) -> bool:
    """Return whether a node is, or calls, a region in which nothing is called."""
    name = node.target if node.op == "get_attr" else node.args[1].target if node.target is REGION else ""
    graph: Any = getattr(getattr(module, name, None), "graph", None)
    return graph is not None and all(inner.op in ("placeholder", "get_attr", "output") for inner in graph.nodes)


def _gives_numbers(target: Any) -> bool:
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return bool(returns) and all(str(one.type) in ("number", "int", "float", "bool", "Scalar") for one in returns)
