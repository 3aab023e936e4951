"""Descriptions of what forward passes compute, by which passes are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from .consistency import bits_of
from .constants import is_shape_only, known_values


class Recorder(TorchDispatchMode):
    """Numbers the expressions that passes compute: equal ones have equal numbers, in one pass and in the next.

    What a pass leaves for the next one keeps its number there, unless it follows from what only that pass was given,
    or from numbers that it drew.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._following: set[int] = set()
        self._of: dict[int, int] = {}  # by the tensor's id
        self._writes: dict[int, int] = {}  # by the storage that was written to
        self._kept: list[Any] = []  # or others could have their ids

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        """Begin a pass with these inputs and parameters."""
        for numbers in (self._of, self._writes):
            for key, number in numbers.items():
                if number in self._following:
                    numbers[key] = self._number(("before", number))
        for at, tensor in enumerate(given):
            self._writes.pop(_storage(tensor), None)
            self._of[id(tensor)] = self._number(("given", at), follows=True)
        self._kept += given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_shape = is_shape_only(func)
        leaves = [self._described(leaf, by_shape) for leaf in pytree.tree_leaves((args, kwargs))]
        found = func(*args, **(kwargs or {}))
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        follows = drawn or any(number in self._following for kind, number in leaves if kind == "tensor")
        number = self._number((str(func), *leaves), follows)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    self._writes[_storage(tensor)] = number
        for at, tensor in enumerate(_tensors(found)):
            self._of[id(tensor)] = self._number(("output", at, number), follows)
            self._kept.append(tensor)
        return found

    def expression(self, tensor: torch.Tensor) -> int:
        """Return the number of what a tensor's values are now."""
        own, write = self._of.get(id(tensor)), self._writes.get(_storage(tensor))
        if own is None:
            self._kept.append(tensor)
            own = self._of[id(tensor)] = self._number(("constant", _constant(tensor)))
        if write is None:
            return own
        return self._number(("written", own, write), own in self._following or write in self._following)

    def follows(self, value: Any) -> bool:
        """Return whether a value was computed from inputs or parameters, was drawn, or is not a tensor."""
        tensors = _tensors(value)
        return not tensors or any(self.expression(tensor) in self._following for tensor in tensors)

    def _described(self, leaf: Any, by_shape: bool) -> tuple[str, Any]:
        if not isinstance(leaf, torch.Tensor):
            is_plain = isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))
            return "value", repr(leaf) if is_plain else type(leaf).__name__
        return ("shape", (tuple(leaf.shape), leaf.dtype)) if by_shape else ("tensor", self.expression(leaf))

    def _number(self, key: tuple[Any, ...], follows: bool = False) -> int:
        number = self._numbers.setdefault(key, len(self._numbers))
        if follows:
            self._following.add(number)
        return number


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    """Return what a tensor and its views have in common."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse one has none
        return id(tensor)


def _constant(tensor: torch.Tensor) -> Any:
    """Return what tells a tensor from others that no operator has made: its values, unless it has none."""
    told: tuple[Any, ...] = tuple(tensor.shape), tensor.dtype
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return *told, id(tensor)
    with no_dispatch():
        return *told, hashlib.sha256(bits_of(tensor).numpy().data).digest()


class Passes:
    """Runs the forward of a module on tensors without memory, as often as wanted.

    Parameters
    ----------
    inputs : fake tensors
    """

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self._module, self._inputs = module, inputs
        self._mode, self.recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder()
        self._fakes: dict[str, Any] = {}  # real ones could be written to
        of: dict[torch.Tensor, Any] = {}
        for path, part in module.named_modules():  # each place once: functional_call restores them in the same order
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    of[tensor] = of[tensor] if tensor in of else self._mode.from_tensor(tensor)
                    self._fakes[f"{path}.{name}".removeprefix(".")] = of[tensor]

    def run(self) -> list[Any]:
        """Return descriptions of what a pass returns, and of what it writes to parameters and buffers."""
        with self._mode, torch.compiler.set_stance("force_eager"):
            given = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self._inputs]
            self.recorder.begin([*given, *self._fakes.values()])
            with self.recorder, known_values(self._module):
                found = torch.func.functional_call(self._module, self._fakes, tuple(given), tie_weights=False)
        return [self.recorder.expression(tensor) for tensor in (*_tensors(found), *self._fakes.values())]
