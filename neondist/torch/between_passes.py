"""What a forward leaves on its module for the next one: a captured module computes the same in every pass.

Counters, caches and results for whoever looks are harmless. What the next forward would read is not, and is refused.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from .constants import is_shape_only, known_values
from .errors import NotRecorded, defined_at

_OF_MODULES = frozenset(vars(nn.Module()))
_GONE = object()
_PLAIN = (bool, int, float, str)
_CONTAINERS = (list, dict, set, deque)
_CONSTANT = (nn.Module, torch.Tensor, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)


class Kept(NamedTuple):
    """What is kept in one place: the attributes of a module or of a plain object, or what is in a container."""

    module: nn.Module
    name: str
    holder: Any
    values: dict[Any, Any]


class Attributes:
    """What a module, and those in it, keep, at a time."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = list(_kept(module))

    def changes(self) -> dict[str, tuple[nn.Module, list[Any]]]:
        """Return by name what is another value now: the module that keeps it, and the values that are new."""
        before = {(one.name, id(one.holder)): one.values for one in self._before}
        found: dict[str, tuple[nn.Module, list[Any]]] = {}
        for one in _kept(self._module):
            old = before.get((one.name, id(one.holder)), one.values)  # of what holds them, the holder tells
            for key in {**old, **one.values}:
                now, then = one.values.get(key, _GONE), old.get(key, _GONE)
                if not _same(then, now):
                    found.setdefault(_named(one, key), (one.module, []))[1].append(now)
        return found

    def restore(self, names: Collection[str] | None = None) -> None:
        """Make it what it was; default: all of it."""
        for one in self._before:
            if not isinstance(one.holder, dict):
                if names is None or one.name in names:
                    one.holder.clear()
                    (one.holder.update if isinstance(one.holder, set) else one.holder.extend)(one.values.values())
                continue
            for key in [*one.holder, *one.values]:
                if key in _OF_MODULES or not (names is None or _named(one, key) in names):
                    continue
                if key in one.values:
                    one.holder[key] = one.values[key]
                else:
                    one.holder.pop(key, None)


def _named(one: Kept, key: Any) -> str:
    """Return the name of an attribute; containers are told as a whole."""
    return one.name if one.holder is not vars(one.module) else f"{one.name}.{key}".removeprefix(".")


def _kept(module: nn.Module) -> Iterator[Kept]:
    for path, part in module.named_modules():
        attributes = {name: value for name, value in vars(part).items() if name not in _OF_MODULES}
        yield Kept(part, path, vars(part), attributes)
        for name, value in attributes.items():
            where = f"{path}.{name}".removeprefix(".")
            if isinstance(value, dict):
                yield Kept(part, where, value, dict(value))
            elif isinstance(value, _CONTAINERS):
                yield Kept(part, where, value, dict(enumerate(value)))
            elif hasattr(value, "__dict__") and not isinstance(value, _CONSTANT):
                yield Kept(part, where, vars(value), dict(vars(value)))


def _same(old: Any, new: Any) -> bool:
    return old is new or (isinstance(old, _PLAIN) and isinstance(new, _PLAIN) and old == new)


@contextmanager
def observed(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Leave a module as it was when it has been captured; raise NotRecorded if its next pass would be another one.

    Parameters
    ----------
    inputs : fake tensors
    """
    before, drawn = Attributes(module), _drawn()
    changed: list[str] = []
    with module.register_forward_hook(lambda *_: changed.extend(before.changes())):
        try:
            yield
        finally:
            before.restore()
    try:
        if changed:
            _check_next_pass(module, inputs)
        if _drawn() != drawn:
            _check_draws(module, inputs)
    finally:
        before.restore()


def _drawn() -> int:
    """Return a number for the state of generators that are not PyTorch's."""
    return hash((random.getstate(), repr(np.random.get_state(legacy=False))))  # of a long array the ends, and the place


class _Watching(TorchDispatchMode):
    """Notes operators, and which tensors follow from the inputs and parameters of a pass.

    Attributes
    ----------
    operators : list
        What tells two passes apart.
    carried : list of tensors
        From a pass before; `read` tells whether any was read.
    """

    def __init__(self, given: Sequence[torch.Tensor], carried: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.operators: list[Any] = []
        self.read = False
        self._kept = [*given, *carried]  # or others could have their ids
        self._of_pass = set(map(id, given))
        self._carried = set(map(id, carried))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.read |= any(id(tensor) in self._carried for tensor in tensors)
        if not is_shape_only(func) and any(self.follows(tensor) for tensor in tensors):
            new = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
            self._kept += new
            self._of_pass.update(map(id, new))
        self.operators.append((str(func), [_told(leaf) for leaf in leaves]))
        return found

    def follows(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was computed from the inputs or parameters of the pass."""
        return id(tensor) in self._of_pass

    def is_cache(self, value: Any) -> bool:
        """Tell whether a value would be the same in every pass."""
        return isinstance(value, torch.Tensor) and not self.follows(value)


def _told(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, (*_PLAIN, torch.dtype, torch.device)) else type(leaf).__name__
    shown = type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.numel() < 100
    with no_dispatch():
        return tuple(leaf.shape), leaf.dtype, leaf.tolist() if shown else None


def _pass(module: nn.Module, inputs: Sequence[torch.Tensor], carried: Sequence[torch.Tensor] = ()) -> _Watching:
    """Return what a forward does, on tensors without memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # real ones could be written to
    fakes: dict[str, Any] = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
    with mode, torch.compiler.set_stance("force_eager"):
        given = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        with _Watching([*given, *fakes.values()], carried) as watching, known_values(module):
            torch.func.functional_call(module, fakes, tuple(given))
    return watching


def _check_next_pass(module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Raise NotRecorded if a pass reads what the one before has changed, or computes another thing for it."""
    before = Attributes(module)
    first = _pass(module, inputs)
    changes = before.changes()
    caches = [name for name, (_, values) in changes.items() if all(map(first.is_cache, values))]
    before.restore(caches)
    rest = {name: kept for name, kept in changes.items() if name not in caches}
    leaves = pytree.tree_leaves([values for _, values in rest.values()])
    second = _failing(lambda: _pass(module, inputs, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
    if second is None or second.read or second.operators != first.operators:
        raise NotRecorded(
            f"the forward changes {', '.join(rest or changes)}, which the next one reads, but all passes of a"
            " distributed module are alike; keep it in a buffer",
            defined_at(type(next(iter((rest or changes).values()))[0]).forward),
        )


def _failing(run: Callable[[], Any]) -> Any:
    """Return what a function returns, or None if it fails."""
    try:
        return run()
    except Exception:
        return None


def _check_draws(module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Raise NotRecorded if each pass draws random numbers that are not PyTorch's."""
    for _ in range(3):  # or another thread was drawing
        before = _drawn()
        _failing(lambda: _pass(module, inputs))
        if _drawn() == before:
            return
    why = "the forward draws from Python's or NumPy's random, which would be frozen; draw with torch"
    raise NotRecorded(why, defined_at(type(module).forward))
