"""Modules that are made in a scope, and calls of them that are distributed while a function runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree

from ..comm import ProcessGrid
from ..errors import ConfigError
from .distributing import distribute
from .errors import defined_at
from .module import REMEMBERED, DistributedModule
from .tiled_output import ScatteredInput, TiledOutput


class ModuleScope:
    """The modules that this thread makes while `collect` is open, whose calls are distributed while `distribute` is.

    Parameters
    ----------
    grid : ProcessGrid
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid
        self._is_part: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._distributed: dict[Any, DistributedModule] = {}
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._thread, self._running, self._replaced = threading.get_ident(), False, False

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Take note of each module that gets a parameter or a submodule meanwhile."""

        def note(module: nn.Module, name: str, value: Any) -> None:
            if threading.get_ident() == self._thread and not self._running:  # virtual ranks make theirs as well
                self._is_part.setdefault(module, False)
                if isinstance(value, nn.Module):
                    self._is_part[value] = True

        with ExitStack() as registered:
            for register in (
                hooks.register_module_parameter_registration_hook,
                hooks.register_module_module_registration_hook,
            ):
                registered.callback(register(note).remove)
            yield

    @property
    def models(self) -> list[nn.Module]:
        """Modules with parameters that are part of no other, in the order in which they were made."""
        return [module for module, part in self._is_part.items() if not part and list(module.parameters())]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the models that require gradients, by name; of several models, after their number."""
        models, found = self.models, dict[str, nn.Parameter]()
        for number, model in enumerate(models):
            start = f"{number}." if len(models) > 1 else ""
            found |= {start + name: one for name, one in model.named_parameters() if one.requires_grad}
        once = {id(one): name for name, one in reversed(found.items())}  # what models share has its first name
        return {name: one for name, one in found.items() if once[id(one)] == name}

    @contextmanager
    def distribute(self, function: Callable[..., Any]) -> Iterator[None]:
        """Distribute the calls of these modules meanwhile; refuse those of trained modules made elsewhere."""

        def check(module: nn.Module, inputs: Any) -> None:
            if not self._replaced or threading.get_ident() != self._thread or module in self._is_part:
                return
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                raise ConfigError(
                    f"{defined_at(function)}: {function.__name__} calls a {type(module).__name__} created outside"
                    " the scope; create models inside `with d.scope():`"
                ).on_all_ranks()

        handle, self._running = hooks.register_module_forward_pre_hook(check), True
        try:
            with self._calls_replaced(True):
                yield
        finally:
            self._running = False
            handle.remove()

    @contextmanager
    def _calls_replaced(self, replaced: bool) -> Iterator[None]:
        """Let the modules be of classes whose calls are distributed, or of their own.

        `torch.distributed.fsdp.fully_shard` gives a module such a class, too; here it has it within the function alone.
        """
        before, self._replaced = self._replaced, replaced
        modules = list(self._is_part) if before != replaced else []
        for module in modules:
            self._change_class(module, replaced)
        try:
            yield
        finally:
            self._replaced = before
            for module in modules:
                self._change_class(module, before)

    def _change_class(self, module: nn.Module, replaced: bool) -> None:
        kind = type(module)
        if isinstance(module, _Replaced) != replaced:
            if kind not in self._classes:
                names = {"scope": self, "__module__": kind.__module__}
                made = type(kind.__name__, (_Replaced, kind), names)
                self._classes |= {kind: made, made: kind}
            module.__class__ = self._classes[kind]

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a module for whole inputs: as tensors that are cut, if there are several ranks."""
        with self._calls_replaced(False):
            leaves, spec = pytree.tree_flatten((args, kwargs))
            leaves = [leaf.whole() if isinstance(leaf, TiledOutput) else leaf for leaf in leaves]
            at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            if not at:
                return module(*args, **kwargs)
            plain = not kwargs and len(at) == len(args) == len(leaves)
            model = self._distributed_module(module, leaves, at, None if plain else spec)
            model.training = module.training
            outputs = model(*(_tile(model, leaves[i], index) for index, i in enumerate(at)))
        if self.grid.size == 1:
            return outputs
        return pytree.tree_map(lambda output: _tiled(model, output), outputs)

    def _distributed_module(
        self, module: nn.Module, leaves: Sequence[Any], at: Sequence[int], spec: Any
    ) -> DistributedModule:
        """Return what runs for a module and arguments of these shapes; without `spec`, for tensors alone."""
        others = tuple(repr(leaf) for i, leaf in enumerate(leaves) if i not in at)
        shapes, dtypes = [tuple(leaves[i].shape) for i in at], [leaves[i].dtype for i in at]
        key = id(module), spec, others, tuple(shapes), tuple(dtypes)
        if key not in self._distributed:
            if len(self._distributed) >= REMEMBERED:
                del self._distributed[next(iter(self._distributed))]
            called = module if spec is None else _Call(module, leaves, at, spec)
            made = distribute(called, shapes, self.grid, dtype=dtypes)
            made.capture_within(partial(self._calls_replaced, False))  # a loss may find that the module has changed
            self._distributed[key] = made
        return self._distributed[key]


def whole(result: Any) -> Any:
    """Return what a function has returned with whole tensors, the same on every rank; collective."""
    return pytree.tree_map(lambda one: one.whole() if isinstance(one, TiledOutput) else one, result)


class _Replaced(nn.Module):
    """A module whose calls are distributed."""

    scope: ModuleScope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.scope.call(self, args, kwargs)


class _Call(nn.Module):
    """A module as a function of the tensors among its arguments."""

    def __init__(self, module: nn.Module, leaves: Sequence[Any], at: Sequence[int], spec: Any) -> None:
        super().__init__()
        self.module, self.at, self.spec = module, list(at), spec
        self.leaves = [None if i in at else leaf for i, leaf in enumerate(leaves)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return what the module returns."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.at, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.module(*args, **kwargs)


def _tile(model: DistributedModule, whole: torch.Tensor, index: int) -> torch.Tensor:
    if whole.requires_grad and torch.is_grad_enabled() and model.grid.size > 1:
        return ScatteredInput.apply(whole, model.tiling, model.tiling.inputs[index])
    return model.scatter(whole, index)


def _tiled(model: DistributedModule, output: Any) -> Any:
    layout = model.tiling.noted(output) if isinstance(output, torch.Tensor) else None
    return output if layout is None else TiledOutput(model, output, layout)
