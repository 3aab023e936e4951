"""Modules created in a scope; their calls are distributed while a function runs."""

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

from ...comm import ProcessGrid
from ...errors import ConfigError
from ..ir.errors import definition_site
from .distributing import distribute
from .module import DistributedModule
from .programs import MAX_CACHED_PROGRAMS
from .tiled_output import ScatteredInput, TiledOutput, gather_outputs


class ModuleScope:
    """Modules that this thread creates inside `collect_modules`, whose calls are distributed inside `distribute`."""

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid
        self._is_submodule: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._distributed_modules: dict[Any, DistributedModule] = {}
        self._class_replacements: dict[type[nn.Module], type[nn.Module]] = {}
        self._thread_id = threading.get_ident()
        self._is_distributing = self._calls_distributed = False

    @contextmanager
    def collect_modules(self) -> Iterator[None]:
        """Context that records each module to which a parameter or a submodule is added."""

        def record_module(module: nn.Module, name: str, value: Any) -> None:
            is_this_rank = threading.get_ident() == self._thread_id  # other virtual ranks are other threads
            if is_this_rank and not self._is_distributing:
                self._is_submodule.setdefault(module, False)
                if isinstance(value, nn.Module):
                    self._is_submodule[value] = True

        with ExitStack() as registered:
            for register in (
                hooks.register_module_parameter_registration_hook,
                hooks.register_module_module_registration_hook,
            ):
                registered.callback(register(record_module).remove)
            yield

    @property
    def models(self) -> list[nn.Module]:
        """Modules that have parameters and are not submodules of another module, in order of creation."""
        return [module for module, part in self._is_submodule.items() if not part and list(module.parameters())]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the models that require gradients, by name; with several models, names begin with 'NUMBER.'."""
        models = self.models
        parameters = dict[str, nn.Parameter]()
        for number, model in enumerate(models):
            name_prefix = f"{number}." if len(models) > 1 else ""
            parameters |= {name_prefix + name: p for name, p in model.named_parameters() if p.requires_grad}
        # shared parameters have several names
        first_name_by_id = {id(p): name for name, p in reversed(parameters.items())}
        return {name: p for name, p in parameters.items() if first_name_by_id[id(p)] == name}

    @contextmanager
    def distribute(self, function: Callable[..., Any]) -> Iterator[None]:
        """Context that distributes calls of these modules, and rejects calls of trainable modules created elsewhere."""

        def reject_module_outside_scope(module: nn.Module, inputs: Any) -> None:
            if not self._calls_distributed or threading.get_ident() != self._thread_id or module in self._is_submodule:
                return
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                raise ConfigError(
                    f"{definition_site(function)}: {function.__name__} calls a {type(module).__name__} created outside"
                    " the scope; create models inside `with d.scope():`"
                ).mark_raised_on_all_ranks()

        handle = hooks.register_module_forward_pre_hook(reject_module_outside_scope)
        self._is_distributing = True
        try:
            with self._distribute_calls(True):
                yield
        finally:
            self._is_distributing = False
            handle.remove()

    @contextmanager
    def _distribute_calls(self, enabled: bool) -> Iterator[None]:
        """Replace the modules' classes with classes whose calls are distributed, or restore the original classes.

        `torch.distributed.fsdp.fully_shard` also replaces classes; here, this lasts only while the function runs.
        """
        was_enabled = self._calls_distributed
        self._calls_distributed = enabled
        modules = list(self._is_submodule) if was_enabled != enabled else []
        for module in modules:
            self._change_class(module, enabled)
        try:
            yield
        finally:
            self._calls_distributed = was_enabled
            for module in modules:
                self._change_class(module, was_enabled)

    def _change_class(self, module: nn.Module, to_distributed: bool) -> None:
        cls = type(module)
        if isinstance(module, _DistributedCall) != to_distributed:
            if cls not in self._class_replacements:
                class_attributes = {"scope": self, "__module__": cls.__module__}
                replacement = type(cls.__name__, (_DistributedCall, cls), class_attributes)
                self._class_replacements |= {cls: replacement, replacement: cls}
            module.__class__ = self._class_replacements[cls]

    def call_distributed(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a module for whole inputs; on several ranks, outputs are tiled."""
        with self._distribute_calls(False):
            leaves, spec = pytree.tree_flatten(gather_outputs((args, kwargs)))
            tensor_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            if not tensor_indices:
                return module(*args, **kwargs)
            takes_only_tensors = not kwargs and len(tensor_indices) == len(args) == len(leaves)
            model = self._distributed_module(module, leaves, tensor_indices, None if takes_only_tensors else spec)
            model.training = module.training
            outputs = model(*(_scatter_input(model, leaves[i], index) for index, i in enumerate(tensor_indices)))
        if self.grid.size == 1:
            return outputs
        return pytree.tree_map(lambda output: _as_tiled_output(model, output), outputs)

    def _distributed_module(
        self, module: nn.Module, leaves: Sequence[Any], tensor_indices: Sequence[int], spec: Any
    ) -> DistributedModule:
        """Return the distributed module for arguments of these shapes; `spec` None: all arguments are tensors."""
        constant_reprs = tuple(repr(leaf) for i, leaf in enumerate(leaves) if i not in tensor_indices)
        shapes = [tuple(leaves[i].shape) for i in tensor_indices]
        dtypes = [leaves[i].dtype for i in tensor_indices]
        key = id(module), spec, constant_reprs, tuple(shapes), tuple(dtypes)
        if key not in self._distributed_modules:
            if len(self._distributed_modules) >= MAX_CACHED_PROGRAMS:
                del self._distributed_modules[next(iter(self._distributed_modules))]
            wrapped_module = module if spec is None else _TensorOnlyModule(module, leaves, tensor_indices, spec)
            model = distribute(wrapped_module, shapes, self.grid, dtype=dtypes)
            model.set_export_context(partial(self._distribute_calls, False))  # a loss may recapture a changed module
            self._distributed_modules[key] = model
        return self._distributed_modules[key]


class _DistributedCall(nn.Module):
    scope: ModuleScope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.scope.call_distributed(self, args, kwargs)


class _TensorOnlyModule(nn.Module):
    """A module as a function of the tensors among its arguments."""

    def __init__(self, module: nn.Module, leaves: Sequence[Any], tensor_indices: Sequence[int], spec: Any) -> None:
        super().__init__()
        self.module, self.tensor_indices, self.spec = module, list(tensor_indices), spec
        self.constant_leaves = [None if i in tensor_indices else leaf for i, leaf in enumerate(leaves)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        all_leaves = list(self.constant_leaves)
        for i, tensor in zip(self.tensor_indices, tensors, strict=True):
            all_leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(all_leaves, self.spec)
        return self.module(*args, **kwargs)


def _scatter_input(model: DistributedModule, whole: torch.Tensor, index: int) -> torch.Tensor:
    if whole.requires_grad and torch.is_grad_enabled() and model.grid.size > 1:
        return ScatteredInput.apply(whole, model.tiling, model.tiling.input_layouts[index])
    return model.scatter(whole, index)


def _as_tiled_output(model: DistributedModule, output: Any) -> Any:
    layout = model.tiling.layout_of(output) if isinstance(output, torch.Tensor) else None
    return output if layout is None else TiledOutput(model, output, layout)
