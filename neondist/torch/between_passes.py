"""What a forward leaves on its module for the next one: a captured module computes the same in every pass.

Counters, caches and results for whoever looks are harmless. What the next forward would read is not, and is refused.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
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
from .holder import GONE
from .module_state import OF_MODULES, PLAIN, Reach, content, plain

_PLAIN = (bool, int, float, str)
_MANY, _LATER = 1000, 10_000
"""Numbers that passes count have grown by the latter after as many, and lists that they fill are longer."""
_ARITHMETIC = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"
_OF_ONE = "neg", "pos", "abs"
_CHOICES = "lt", "le", "gt", "ge", "eq", "ne", "bool"


class _Probe:
    """Numbers that passes change: which choices of a pass depend on them, and what it does if they are others.

    Parameters
    ----------
    shift : number
        What is added to them.
    flips : int
        So many choices are taken the other way; a loop has to end.
    """

    def __init__(self, shift: int = 0, flips: int = 0) -> None:
        self.shift, self._flips, self.chosen = shift, flips, False
        self._kinds = {kind: self._kind(kind) for kind in (int, float)}

    def number(self, value: Any) -> Any:
        """Return a number that tells what is chosen by it, and by what is computed from it."""
        return self._kinds[int if isinstance(value, int) else float](value + self.shift)

    def _kind(self, base: Any) -> Any:
        def computes(name: str) -> Callable[..., Any]:
            def method(one: Any, *others: Any) -> Any:
                operation = getattr(base, name, None)
                found = NotImplemented if operation is None else operation(one, *others)
                if found is NotImplemented and others and isinstance(others[0], float):
                    found = getattr(float, name)(float(one), *others)
                if isinstance(found, bool):
                    self.chosen = True
                    self._flips -= 1
                    return found != (self._flips >= 0)
                return self._kinds[type(found)](found) if type(found) in self._kinds else found

            return method

        names = [f"__{letter}{name}__" for name in _ARITHMETIC for letter in ("", "r")]
        names += [f"__{name}__" for name in (*_OF_ONE, *_CHOICES)]
        methods = {name: computes(name) for name in names}
        return type(base.__name__, (base,), {**methods, "__hash__": base.__hash__})


_TRACER = "torch.fx._symbolic_trace"


class Snapshot:
    """A module's state at a time, with everything that its forward can reach."""

    def __init__(self, module: nn.Module) -> None:
        reach = Reach(module, set())
        self.asks_for_gradients = reach.asks_for_gradients
        self.iterators, self._generators = reach.iterators, reach.generators
        self._before = [(holder, holder.read()) for holder in reach.holders if holder.restored]
        self._arrays = [(path, array, array.copy()) for path, array in reach.arrays.items()]

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
        for path, array, then in self._arrays:
            if content(array) != content(then):
                found[path] = None, [array]
        return found

    def tensors_of(self, names: Collection[str]) -> list[torch.Tensor]:
        """Return the tensors that stood in places of these names."""
        held = [(holder.called(key), value) for holder, before in self._before for key, value in before.items()]
        return [value for name, value in held if isinstance(value, torch.Tensor) and name in names]

    def probe(self, names: Collection[str], probe: _Probe) -> None:
        """Let numbers of these names that have changed, and lists that have grown, be what a probe makes of them."""
        for holder, before in self._before:
            present = holder.read()
            if holder.of_modules or all(holder.called(key) not in names for key in present):
                continue
            changed = {
                key: probe.number(now)
                for key, now in present.items()
                if isinstance(now, (int, float)) and not isinstance(now, bool) and not _equal(before.get(key), now)
            }
            if isinstance(holder.store, (list, deque)) and len(present) > len(before) and probe.shift:
                changed = dict(enumerate([*present.values()] * _MANY))
            if changed:
                holder.restore(present | changed)
        for path, array, _ in self._arrays:
            if path in names and array.dtype.kind in "iuf" and probe.shift:
                array += np.array(_MANY).astype(array.dtype)

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
        for path, array, values in self._arrays:
            if names is None or path in names:
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
def observed(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[bool]:
    """Leave a module as it was when it has been captured; raise NotRecorded if its next pass would be another one.

    Gives whether the module asks whether there are gradients.

    Parameters
    ----------
    inputs : fake tensors
    """
    before = Snapshot(module)
    if before.iterators:
        raise NotRecorded(
            f"the forward may read from the iterator {next(iter(before.iterators))}, whose next value would be frozen",
            _place(module),
        )
    drawn = _drawn(), before.drawn()
    changed: list[str] = []
    held: list[dict[tuple[str, str, bool], Any]] = []

    def begin(*_: Any) -> None:
        held.append(_held(module))

    def end(*_: Any) -> None:
        changed.extend(before.changes())
        held.append(_held(module))

    with module.register_forward_pre_hook(begin), module.register_forward_hook(end):
        try:
            yield before.asks_for_gradients
        finally:
            before.restore()
    try:
        for kind, name, side in {**held[0], **held[-1]} if held else ():
            then, now = (each.get((kind, name, side), []) for each in (held[0], held[-1]))
            if then != now:
                raise NotRecorded(f"the forward changes the {kind} {name}; {_REMEDIES[kind]}", _place(module))
        if changed:
            _check_next_pass(module, inputs)
        if (_drawn(), before.drawn()) != drawn:
            _check_draws(module, inputs, before)
    finally:
        before.restore()


def _held(module: nn.Module) -> dict[tuple[str, str, bool], Any]:
    """Return what PyTorch's modules keep themselves, by kind and name, and a captured one does not change."""
    found: dict[tuple[str, str, bool], Any] = {}
    for path, part in module.named_modules():
        start = f"{path}." if path else ""
        for name, tensor in part._parameters.items():
            found["parameter", start + name, False] = id(tensor), tensor is not None and tensor.requires_grad
        for name, tensor in part._buffers.items():
            found["buffer", start + name, False] = None if tensor is None else tensor.shape
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            found["hooks of", path or "the module", hooks is part._forward_hooks] = list(hooks)
    return found


_REMEDIES = {
    "parameter": "make, replace or freeze it before a pass",
    "buffer": "register it before, with the shape that it will have",
    "hooks of": "register them before a pass",
}


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
        self._parents: dict[int, list[Any]] = {}
        self._of_pass = set(map(id, given))
        self._carried = set(map(id, carried))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.read |= any(id(tensor) in self._carried for tensor in tensors)
        if not is_shape_only(func) and tensors:
            new = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
            self._kept += new
            self._parents.update(dict.fromkeys(map(id, new), tensors))
            if any(self.follows(tensor) for tensor in tensors):
                self._of_pass.update(map(id, new))
        self.operators.append((str(func), [_told(leaf) for leaf in leaves]))
        return found

    def follows(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was computed from the inputs or parameters of the pass."""
        return id(tensor) in self._of_pass

    def is_cache(self, value: Any, old: Sequence[torch.Tensor]) -> bool:
        """Tell whether a value would be the same in every pass: not computed from its old one either."""
        if not isinstance(value, torch.Tensor) or self.follows(value):
            return False
        waiting, seen = [value], set[int]()
        while waiting:
            one = waiting.pop()
            if any(one is each for each in old):
                return False
            if id(one) not in seen:
                seen.add(id(one))
                waiting += self._parents.get(id(one), [])
        return True


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
    caches = [
        name
        for name, (_, values) in changes.items()
        if all(first.is_cache(value, before.tensors_of([name])) for value in values)
    ]
    before.restore(caches)
    rest = {name: kept for name, kept in changes.items() if name not in caches}
    leaves = pytree.tree_leaves([values for _, values in rest.values()])
    carried = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    after = Snapshot(module)
    for probe in (chosen := _Probe()), _Probe(_LATER), _Probe(flips=_MANY):
        if probe is not chosen and not (chosen.chosen if not probe.shift else rest):
            continue
        after.restore()
        before.probe(rest, probe)
        again = _failing(lambda: _pass(module, inputs, carried))
        if again is None or again.read or again.operators != first.operators:
            raise NotRecorded(
                f"the forward changes {', '.join(rest or changes)}, which the next one reads, but all passes of a"
                " distributed module are alike; keep it in a buffer",
                _place(next(iter((rest or changes).values()))[0] or module),
            )


def _place(module: nn.Module) -> str:
    """Return the file and line of a module's forward; of a criterion, of its function."""
    called = getattr(module, "criterion", None)
    for name in ("func", "__func__"):  # of a functools.partial, of a method
        called = getattr(called, name, called)
    return defined_at(called if isinstance(called, FunctionType) else type(module).forward)


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
    raise NotRecorded(why, _place(module))
