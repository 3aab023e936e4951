"""State that a forward leaves on its module for the next one; a captured module computes the same in every pass.

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

from .errors import NotRecorded, defined_at
from .expressions import Passes
from .holder import GONE
from .module_state import OF_MODULES, PLAIN, Reach, content, plain

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


def _probes(numbers_change: bool) -> Iterator[_Probe]:
    """Yield what the next passes look at numbers with; those that take other choices, if the first has seen any."""
    yield (first := _Probe())
    if numbers_change:
        yield _Probe(_LATER)
    if first.chosen:
        yield _Probe(flips=_MANY)


_TRACER = "torch.fx._symbolic_trace"


class Snapshot:
    """A module's state at a time, with everything that its forward can reach."""

    def __init__(self, module: nn.Module) -> None:
        reach = Reach(module, set())
        self.asks_for_gradients = reach.asks_for_gradients
        self.iterators, self._generators = reach.iterators, reach.generators
        self._caches = {cache: cache.cache_info().misses for cache in reach.caches}
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

    def restore(self) -> None:
        """Make it what it was."""
        for holder, before in self._before:
            holder.restore(before)
        for _, array, values in self._arrays:
            np.copyto(array, values)

    def clear_caches(self) -> None:
        """Clear caches of functions that keep results of a pass, tensors without memory."""
        for cache, misses in self._caches.items():
            if cache.cache_info().misses != misses:
                cache.cache_clear()
                self._caches[cache] = 0

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
    """Return whether a value is what torch.fx.wrap puts in a function's place for as long as PyTorch traces."""
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
            f"the forward may read from the iterator {next(iter(before.iterators))}, whose next value would be"
            " captured as a constant",
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
            before.clear_caches()
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
        before.clear_caches()


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
    "parameter": "create, replace or freeze it before a pass",
    "buffer": "register it before the first pass, with its final shape",
    "hooks of": "register them before a pass",
}


def _drawn() -> int:
    """Return a number for the state of generators that are not PyTorch's."""
    return hash((random.getstate(), pickle.dumps(np.random.get_state(legacy=False))))


def _check_next_pass(module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Raise NotRecorded if a pass computes another thing for what the one before has left."""
    before, passes = Snapshot(module), Passes(module, inputs)
    first = passes.run()
    changes = before.changes()
    rest = {name: kept for name, kept in changes.items() if any(map(passes.recorder.follows, kept[1]))}
    after = Snapshot(module)
    for probe in _probes(bool(rest)):
        after.restore()
        before.probe(rest, probe)
        if _failing(passes.run) != first:
            raise NotRecorded(
                f"the forward changes {', '.join(rest or changes)}, which the next one reads, but every pass of a"
                " distributed module runs the captured graph; keep it in a buffer, or, if only the first pass"
                " changes it, call the module once before distribute",
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
        _failing(Passes(module, inputs).run)
        if (_drawn(), state.drawn()) == before:
            return
    why = (
        "the forward draws from Python's or NumPy's random generator, whose values would be captured as"
        " constants; draw with torch"
    )
    raise NotRecorded(why, _place(module))
