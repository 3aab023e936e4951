"""What a forward leaves on its module for the next one: a captured module computes the same in every pass.

Counters, caches and results for whoever looks are harmless. What the next forward would read is not, and is refused.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from .constants import is_shape_only, known_values
from .errors import NotRecorded, defined_at
from .module_state import GONE, OF_MODULES, PLAIN, Reach, plain

_PLAIN = (bool, int, float, str)
_TRACER = "torch.fx._symbolic_trace"


class Snapshot:
    """A module's state at a time, with everything that its forward can reach."""

    def __init__(self, module: nn.Module) -> None:
        reach = Reach(module, set())
        self.iterators, self._generators = reach.iterators, reach.generators
        self._before = [(holder, holder.read()) for holder in reach.holders if holder.restored]
        self._arrays = [(array, array.copy()) for array in reach.arrays]

    def changes(self) -> dict[str, tuple[nn.Module | None, list[Any]]]:
        """Return by name what is another value now: the module that keeps it, and the values that are new."""
        found: dict[str, tuple[nn.Module | None, list[Any]]] = {}
        for holder, before in self._before:
            if holder.of_modules:
                continue
            present = holder.read()
            for key in {**before, **present}:
                then, now = before.get(key, GONE), present.get(key, GONE)
                if not (then is now or key in OF_MODULES or _equal(then, now) or _stands_for(now, then)):
                    found.setdefault(holder.called(key), (holder.module, []))[1].append(now)
        return found

    def restore(self, names: Collection[str] | None = None) -> None:
        """Make it what it was; default: all of it."""
        for holder, before in self._before:
            if names is None or holder.path in names:
                holder.restore(before)
            elif holder.mark:
                present = holder.read()
                some = [key for key in {**before, **present} if holder.called(key) in names]
                holder.restore(
                    {key: value for key, value in present.items() if key not in some}
                    | {key: before[key] for key in some if key in before}
                )
        for array, values in self._arrays:
            np.copyto(array, values)

    def drawn(self) -> int:
        """Return a number for the states of the generators that the module holds."""
        states = []
        for one in self._generators.values():
            state = getattr(one, "getstate", getattr(one, "get_state", None))
            states.append(repr(state() if state else one.bit_generator.state))
        return hash(tuple(states))


def _equal(then: Any, now: Any) -> bool:
    return isinstance(then, PLAIN) and isinstance(now, PLAIN) and plain(then) == plain(now)


def _stands_for(now: Any, then: Any) -> bool:
    """Tell whether a value is what torch.fx.wrap puts in a function's place for as long as PyTorch traces."""
    inside = getattr(now, "__globals__", None)
    return isinstance(inside, dict) and inside.get("__name__") == _TRACER and getattr(now, "__wrapped__", None) is then


@contextmanager
def observed(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Leave a module as it was when it has been captured; raise NotRecorded if its next pass would be another one.

    Parameters
    ----------
    inputs : fake tensors
    """
    before = Snapshot(module)
    if before.iterators:
        raise NotRecorded(
            f"the forward may read from the iterator {next(iter(before.iterators))}, whose next value would be frozen",
            defined_at(type(module).forward),
        )
    drawn = _drawn(), before.drawn()
    changed: list[str] = []

    with module.register_forward_hook(lambda *_: changed.extend(before.changes())):
        try:
            yield
        finally:
            before.restore()
    try:
        if changed:
            _check_next_pass(module, inputs)
        if (_drawn(), before.drawn()) != drawn:
            _check_draws(module, inputs, before)
    finally:
        before.restore()


def _drawn() -> int:
    """Return a number for the state of generators that are not PyTorch's."""
    return hash((random.getstate(), pickle.dumps(np.random.get_state(legacy=False))))


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
    fakes: dict[str, Any] = {}  # real ones could be written to
    of: dict[torch.Tensor, Any] = {}
    for path, part in module.named_modules():  # each place once: functional_call restores them in the same order
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                of[tensor] = of[tensor] if tensor in of else mode.from_tensor(tensor)
                fakes[f"{path}.{name}".removeprefix(".")] = of[tensor]
    with mode, torch.compiler.set_stance("force_eager"):
        given = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        with _Watching([*given, *fakes.values()], carried) as watching, known_values(module):
            torch.func.functional_call(module, fakes, tuple(given), tie_weights=False)
    return watching


def _check_next_pass(module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Raise NotRecorded if a pass reads what the one before has changed, or computes another thing for it."""
    before = Snapshot(module)
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
            defined_at(type(next(iter((rest or changes).values()))[0] or module).forward),
        )


def _failing(run: Callable[[], Any]) -> Any:
    """Return what a function returns, or None if it fails."""
    try:
        return run()
    except Exception:
        return None


def _check_draws(module: nn.Module, inputs: Sequence[torch.Tensor], state: Snapshot) -> None:
    """Raise NotRecorded if each pass draws random numbers that are not PyTorch's."""
    for _ in range(3):  # or another thread was drawing
        before = _drawn(), state.drawn()
        _failing(lambda: _pass(module, inputs))
        if (_drawn(), state.drawn()) == before:
            return
    why = "the forward draws from Python's or NumPy's random, which would be frozen; draw with torch"
    raise NotRecorded(why, defined_at(type(module).forward))
