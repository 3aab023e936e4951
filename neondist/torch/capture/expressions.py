"""Value numbering of forward passes, to compare the computations of different passes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.custom_gradients import suspend_recording
from ..ir.functionalize import storage_id, tensors_in
from .consistency import as_bytes_tensor
from .constants import depends_on_shape_only, track_known_values


class _Dependence(IntEnum):
    """Dependence of a value on parameters and buffers, or also on inputs or random numbers."""

    NOTHING, OWN_TENSORS, INPUTS = range(3)


class ValueNumberingMode(TorchDispatchMode):
    """Value numbering of the expressions that passes compute: equal expressions have equal numbers in all passes.

    State that a pass leaves for the next pass has the same number in both, unless the state depends on the inputs of
    the earlier pass, on random numbers, or on parameters or buffers that may change between the passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._number_by_key: dict[tuple[Any, ...], int] = {}
        self._dependence_by_number: dict[int, _Dependence] = {}
        self._number_by_tensor_id: dict[int, int] = {}
        self._write_by_storage: dict[int, int] = {}
        self._keep_alive: list[Any] = []  # keeps ids unique

    def begin_pass(self, inputs: Sequence[torch.Tensor], state: Sequence[torch.Tensor], state_may_change: bool) -> None:
        """Begin a pass with these inputs, parameters and buffers."""
        state_may_change = state_may_change or any(storage_id(tensor) in self._write_by_storage for tensor in state)
        max_dependence = _Dependence.NOTHING if state_may_change else _Dependence.OWN_TENSORS
        for numbering in (self._number_by_tensor_id, self._write_by_storage):
            for key, number in numbering.items():
                if self._dependence_by_number[number] > max_dependence:
                    numbering[key] = self._value_number(("before", number))
        for index, tensor in enumerate((*inputs, *state)):
            self._write_by_storage.pop(storage_id(tensor), None)
            dependence = _Dependence.INPUTS if index < len(inputs) else _Dependence.OWN_TENSORS
            self._number_by_tensor_id[id(tensor)] = self._value_number(("given", index), dependence)
        self._keep_alive += (*inputs, *state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shape_only = depends_on_shape_only(func)
        operand_keys = [self._operand_key(leaf, shape_only) for leaf in pytree.tree_leaves((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        dependences = [self._dependence_by_number[number] for kind, number in operand_keys if kind == "tensor"]
        dependence = _Dependence.INPUTS if is_random else max(dependences, default=_Dependence.NOTHING)
        number = self._value_number((str(func), *operand_keys), dependence)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(value):
                    self._write_by_storage[storage_id(tensor)] = number
        for index, tensor in enumerate(tensors_in(result)):
            self._number_by_tensor_id[id(tensor)] = self._value_number(("output", index, number), dependence)
            self._keep_alive.append(tensor)
        return result

    def expression_number(self, tensor: torch.Tensor) -> int:
        """Return the number of the expression that yields a tensor's current values."""
        number = self._number_by_tensor_id.get(id(tensor))
        write = self._write_by_storage.get(storage_id(tensor))
        if number is None:
            self._keep_alive.append(tensor)
            number = self._number_by_tensor_id[id(tensor)] = self._value_number(("constant", _constant_key(tensor)))
        if write is None:
            return number
        dependence = max(self._dependence_by_number[number], self._dependence_by_number[write])
        return self._value_number(("written", number, write), dependence)

    def is_dependent(self, value: Any) -> bool:
        """Return whether a value depends on inputs, parameters, buffers or random numbers, or contains no tensor."""
        tensors = tensors_in(value)
        return not tensors or any(self._dependence_by_number[self.expression_number(tensor)] for tensor in tensors)

    def _operand_key(self, leaf: Any, shape_only: bool) -> tuple[str, Any]:
        if not isinstance(leaf, torch.Tensor):
            is_plain = isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))
            return "value", repr(leaf) if is_plain else type(leaf).__name__
        return ("shape", (tuple(leaf.shape), leaf.dtype)) if shape_only else ("tensor", self.expression_number(leaf))

    def _value_number(self, key: tuple[Any, ...], dependence: _Dependence = _Dependence.NOTHING) -> int:
        number = self._number_by_key.setdefault(key, len(self._number_by_key))
        self._dependence_by_number.setdefault(number, dependence)
        return number


def _constant_key(tensor: torch.Tensor) -> Any:
    """Return a key of a tensor that no operator computed: its values, where accessible, else its id."""
    metadata: tuple[Any, ...] = tuple(tensor.shape), tensor.dtype
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return *metadata, id(tensor)
    with no_dispatch():
        return *metadata, hashlib.sha256(as_bytes_tensor(tensor).numpy().data).digest()


class RepeatedPasses:
    """Repeated forward passes of a module on fake tensors.

    Parameters
    ----------
    inputs : fake tensors
    """

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self._module, self._inputs, self._assigns_buffers = module, inputs, False
        self._fake_mode, self.numbering = FakeTensorMode(allow_non_fake_inputs=True), ValueNumberingMode()
        self._fake_tensors: dict[str, Any] = {}  # fake, because the module could write to real tensors
        fakes: dict[torch.Tensor, Any] = {}
        for path, part in module.named_modules():  # including aliases, which functional_call restores in order
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    fakes[tensor] = fakes[tensor] if tensor in fakes else self._fake_mode.from_tensor(tensor)
                    self._fake_tensors[f"{path}.{name}".removeprefix(".")] = fakes[tensor]

    def run(self) -> list[Any]:
        """Run a pass; return the expression numbers of its results, and of all parameters and buffers after it."""
        with self._fake_mode, torch.compiler.set_stance("force_eager"):
            inputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self._inputs]
            may_change = self._module.training or self._assigns_buffers
            self.numbering.begin_pass(inputs, [*self._fake_tensors.values()], may_change)
            hook = self._module.register_forward_hook(self._find_assigned_buffers)
            with self.numbering, track_known_values(self._module), suspend_recording(), hook:
                result = torch.func.functional_call(self._module, self._fake_tensors, tuple(inputs), tie_weights=False)
        return [
            self.numbering.expression_number(tensor) for tensor in (*tensors_in(result), *self._fake_tensors.values())
        ]

    def _find_assigned_buffers(self, *_: Any) -> None:
        buffers = self._module.named_buffers(remove_duplicate=False)
        self._assigns_buffers |= any(self._fake_tensors.get(name) is not buffer for name, buffer in buffers)
