"""Detection of state that a forward pass keeps for the next one; a captured module runs the same program in every pass.

Counters, caches and stored results are harmless; state that the next forward pass would read is rejected.
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

from ..ir.errors import CaptureError, definition_site
from .expressions import RepeatedPasses
from .module_state import NN_MODULE_ATTRIBUTES, PLAIN_TYPES, ReachableState, content_key, plain_key
from .value_container import MISSING, ValueContainer

_LENGTH_FACTOR, _COUNTER_SHIFT = 1000, 10_000
"""Multiplier of the length of collections, and increment of counters, to simulate many later passes."""
_COLLECTIONS = list, deque, tuple, str, dict, set, frozenset
_ARITHMETIC_OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"
_UNARY_OPERATORS = "neg", "pos", "abs"
_PREDICATE_METHODS = "lt", "le", "gt", "ge", "eq", "ne", "bool"


class _ControlFlowProbe:
    """Instrumented replacements of numbers that passes change, to detect control flow that depends on these numbers.

    Parameters
    ----------
    shift : number
        Added to the numbers.
    num_inverted_comparisons : int
        Number of comparisons to invert; finite, so that loops end.
    """

    def __init__(self, shift: int = 0, num_inverted_comparisons: int = 0) -> None:
        self.shift, self._comparisons_to_invert, self.was_compared = shift, num_inverted_comparisons, False
        self._instrumented_classes = {kind: self._instrumented_class(kind) for kind in (int, float)}

    def instrument(self, value: Any) -> Any:
        """Return an instrumented number; comparisons of it, and of numbers computed from it, are recorded."""
        return self._instrumented_classes[int if isinstance(value, int) else float](value + self.shift)

    def _instrumented_class(self, base: Any) -> Any:
        def operator_method(name: str) -> Callable[..., Any]:
            def method(number: Any, *operands: Any) -> Any:
                operation = getattr(base, name, None)
                result = NotImplemented if operation is None else operation(number, *operands)
                if result is NotImplemented and operands and isinstance(operands[0], float):
                    result = getattr(float, name)(float(number), *operands)
                if isinstance(result, bool):
                    self.was_compared = True
                    self._comparisons_to_invert -= 1
                    return result != (self._comparisons_to_invert >= 0)
                instrumented_class = self._instrumented_classes.get(type(result))
                return result if instrumented_class is None else instrumented_class(result)

            return method

        names = [f"__{letter}{name}__" for name in _ARITHMETIC_OPERATORS for letter in ("", "r")]
        names += [f"__{name}__" for name in (*_UNARY_OPERATORS, *_PREDICATE_METHODS)]
        methods = {name: operator_method(name) for name in names}
        return type(base.__name__, (base,), {**methods, "__hash__": base.__hash__})


def _lengthen(collection: Any) -> Any:
    """Return a collection with many more items, similar to its own."""
    if not isinstance(collection, (dict, set, frozenset)):
        return collection * _LENGTH_FACTOR
    *_, last = collection
    keys = dict.fromkeys(_following_key(last, number) for number in range(1, _LENGTH_FACTOR))
    if isinstance(collection, dict):
        return {**dict.fromkeys(keys, collection[last]), **collection}
    return {*keys, *collection}


def _following_key(key: Any, number: int) -> Any:
    """Return a key of the same type that probably follows a key after some passes."""
    if isinstance(key, tuple) and key:
        return *key[:-1], _following_key(key[-1], number)
    return key + number if isinstance(key, (int, float)) else f"{key}{number}" if isinstance(key, str) else object()


_FX_TRACER_MODULE = "torch.fx._symbolic_trace"


_LISTS_OF_RNN_WEIGHTS = "_flat_weights", "_flat_weight_refs"
"""Attributes of recurrent layers that PyTorch updates when it exchanges their parameters."""


class RestorableState:
    """State of a module and of everything that its forward can reach."""

    def __init__(self, module: nn.Module) -> None:
        state = ReachableState(module, set())
        self.depends_on_grad_mode = state.depends_on_grad_mode
        self.iterators, self._generators = state.iterators, state.random_generators
        self._misses_by_cache = {cache: cache.cache_info().misses for cache in state.caches}
        self._values = [(container, container.read_values()) for container in state.containers if container.is_restored]
        self._arrays = [(path, array, array.copy()) for path, array in state.arrays.items()]

    def changed_values(self) -> dict[str, tuple[nn.Module | None, list[Any]]]:
        """Return, by the name of each changed value, the module that contains it and the new values."""
        changes: dict[str, tuple[nn.Module | None, list[Any]]] = {}
        for container, before in self._values:
            if container.in_nn_module:
                continue
            current = container.read_values()
            for key in {**before, **current}:
                old, new = before.get(key, MISSING), current.get(key, MISSING)
                name = container.value_name(key)
                if not (
                    old is new
                    or key in NN_MODULE_ATTRIBUTES
                    or (isinstance(container.module, nn.RNNBase) and name.rpartition(".")[2] in _LISTS_OF_RNN_WEIGHTS)
                    or _equal_plain_values(old, new)
                    or _is_fx_wrapper(new, old)
                ):
                    changes.setdefault(name, (container.module, []))[1].append(new)
        for path, array, old in self._arrays:
            if content_key(array) != content_key(old):
                changes[path] = None, [array]
        return changes

    def lengthened_collections(self) -> list[tuple[ValueContainer, dict[Any, Any]]]:
        """Return the containers of collections that have grown, with values that make these collections much longer."""
        lengthened = []
        for container, before in self._values:
            current = {} if container.in_nn_module else container.read_values()
            values = {key: _lengthen(new) for key, new in current.items() if _has_grown(before.get(key), new)}
            if container.names is None and len(current) > len(before) and isinstance(container.object, _COLLECTIONS):
                items = _lengthen(container.object)
                values |= items if isinstance(items, dict) else dict(enumerate(items))
            if values:
                lengthened.append((container, values))
        return lengthened

    def insert_probe_numbers(self, names: Collection[str], probe: _ControlFlowProbe) -> None:
        """Replace changed numbers of these names with the probe's; if the probe shifts numbers, shift arrays, too."""
        for container, before in self._values:
            current = container.read_values()
            if container.in_nn_module or all(container.value_name(key) not in names for key in current):
                continue
            changed = {
                key: probe.instrument(new)
                for key, new in current.items()
                if isinstance(new, (int, float))
                and not isinstance(new, bool)
                and not _equal_plain_values(before.get(key), new)
            }
            if changed:
                container.restore(current | changed)
        for path, array, _ in self._arrays:
            if path in names and array.dtype.kind in "iuf" and probe.shift:
                array += np.array(_LENGTH_FACTOR).astype(array.dtype)

    def restore(self) -> None:
        """Restore the state."""
        for container, before in self._values:
            container.restore(before)
        for _, array, values in self._arrays:
            np.copyto(array, values)

    def clear_functools_caches(self) -> None:
        """Clear functools caches filled in a pass; they hold fake tensors."""
        for cache, misses in self._misses_by_cache.items():
            if cache.cache_info().misses != misses:
                cache.cache_clear()
                self._misses_by_cache[cache] = 0

    def generator_hash(self) -> int:
        """Return a hash of the states of Python's and NumPy's global random generators, and of the module's own."""
        states: list[Any] = [random.getstate(), pickle.dumps(np.random.get_state(legacy=False))]
        for generator in self._generators.values():
            get_state = getattr(generator, "getstate", getattr(generator, "get_state", None))
            states.append(repr(get_state() if get_state else generator.bit_generator.state))
        return hash(tuple(states))


def _has_grown(old: Any, new: Any) -> bool:
    return old is not new and type(old) is type(new) and isinstance(new, _COLLECTIONS) and len(new) > len(old)


def _equal_plain_values(old: Any, new: Any) -> bool:
    return isinstance(old, PLAIN_TYPES) and isinstance(new, PLAIN_TYPES) and plain_key(old) == plain_key(new)


def _is_fx_wrapper(value: Any, inner: Any) -> bool:
    """Return whether a value is the wrapper that torch.fx.wrap substitutes for a function while PyTorch traces."""
    global_names = getattr(value, "__globals__", None)
    return (
        isinstance(global_names, dict)
        and global_names.get("__name__") == _FX_TRACER_MODULE
        and getattr(value, "__wrapped__", None) is inner
    )


@contextmanager
def restore_after_capture(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[bool]:
    """Restore a module after its capture; raise CaptureError if the module's next pass would behave differently.

    Yields whether the module's code depends on whether gradients are computed.

    Parameters
    ----------
    inputs : fake tensors
    """
    before = RestorableState(module)
    if before.iterators:
        raise CaptureError(
            f"the forward pass may read from the iterator {next(iter(before.iterators))}, whose next value would be"
            " captured as a constant; read this value before the forward pass",
            _forward_definition_site(module),
        )
    random_state = before.generator_hash()
    changed_names: list[str] = []
    changed_hooks: list[str] = []
    snapshots: list[dict[tuple[str, str], Any]] = []

    def record_state_after_forward(*_: Any) -> None:
        changed_names.extend(before.changed_values())
        snapshots.append(_nn_module_state(module))

    with (
        module.register_forward_pre_hook(lambda *_: snapshots.append(_nn_module_state(module))),
        module.register_forward_hook(record_state_after_forward),
    ):
        try:
            yield before.depends_on_grad_mode
        finally:
            before.restore()
            before.clear_functools_caches()
    try:
        for kind, name in {**snapshots[0], **snapshots[-1]} if snapshots else ():
            old_state, new_state = (items.get((kind, name), []) for items in (snapshots[0], snapshots[-1]))
            if old_state != new_state and kind == "hooks of":
                changed_hooks.append(f"the hooks of {name}")
            elif old_state != new_state:
                raise CaptureError(
                    f"the forward pass changes the {kind} {name}; {_REMEDY_BY_KIND[kind]}",
                    _forward_definition_site(module),
                )
        if changed_names or changed_hooks:
            _reject_state_kept_between_passes(module, inputs, changed_hooks)
        if before.generator_hash() != random_state:
            _reject_non_torch_random_draws(module, inputs, before)
    finally:
        before.restore()
        before.clear_functools_caches()


def _nn_module_state(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the state that nn.Module itself holds, by kind and name; a forward pass must not change it."""
    state: dict[tuple[str, str], Any] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, tensor in part._parameters.items():
            state["parameter", prefix + name] = id(tensor), tensor is not None and tensor.requires_grad
        for name, tensor in part._buffers.items():
            state["buffer", prefix + name] = None if tensor is None else tensor.shape
        state["hooks of", path or "the module"] = [*part._forward_hooks, *part._forward_pre_hooks]
    return state


_REMEDY_BY_KIND = {
    "parameter": "create, replace or freeze it before the forward pass",
    "buffer": "give it its final shape before distributing the module, for example by a first forward pass",
}


def _reject_state_kept_between_passes(
    module: nn.Module, inputs: Sequence[torch.Tensor], changed_hooks: Sequence[str]
) -> None:
    """Raise CaptureError if a pass depends on state or on hooks that the previous pass left behind."""
    before, passes = RestorableState(module), RepeatedPasses(module, inputs)
    expected_numbers = passes.run()
    changes = before.changed_values()
    persistent = {n: change for n, change in changes.items() if any(map(passes.numbering.is_dependent, change[1]))}
    after = RestorableState(module)
    first_probe = _ControlFlowProbe()  # records comparisons; a further probe inverts them
    probes, lengthened = [first_probe], list[tuple[ValueContainer, dict[Any, Any]]]()
    for probe in probes:
        after.restore()
        before.insert_probe_numbers(persistent, probe)
        for container, values in lengthened if probe.shift else ():
            container.restore(container.read_values() | values)
        if _run_or_none(passes.run) != expected_numbers:
            names = [*(persistent or changes), *changed_hooks]
            raise CaptureError(
                f"the forward pass changes {', '.join(names)}, which the next forward pass reads, but"
                " every pass of a distributed module runs the captured graph; store this state in a buffer, or, if only"
                " the first pass changes it, call the module once before distribute",
                _forward_definition_site(next(iter((persistent or changes).values()), [module])[0] or module),
            )
        if probe is first_probe:
            lengthened = after.lengthened_collections()
            probes += [_ControlFlowProbe(_COUNTER_SHIFT)] if persistent or lengthened else []
            probes += [_ControlFlowProbe(num_inverted_comparisons=_LENGTH_FACTOR)] if probe.was_compared else []


def _forward_definition_site(module: nn.Module) -> str:
    """Return the file and line of a module's forward, or of a criterion's function."""
    function = getattr(module, "criterion", None)
    for name in ("func", "__func__"):  # inside a functools.partial or a method
        function = getattr(function, name, function)
    return definition_site(function if isinstance(function, FunctionType) else type(module).forward)


def _run_or_none(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception:
        return None


def _reject_non_torch_random_draws(module: nn.Module, inputs: Sequence[torch.Tensor], state: RestorableState) -> None:
    """Raise CaptureError if every pass draws from Python's or NumPy's random generators."""
    for _ in range(3):  # another thread may have drawn numbers
        before = state.generator_hash()
        _run_or_none(RepeatedPasses(module, inputs).run)
        if state.generator_hash() == before:
            return
    message = (
        "the forward pass draws from Python's or NumPy's random generator, whose values would be captured as"
        " constants; use PyTorch's random functions instead"
    )
    raise CaptureError(message, _forward_definition_site(module))
